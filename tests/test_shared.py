from __future__ import annotations

from dask_cml.shared import SharedState


def test_the_first_manager_leads():
    state = SharedState()
    assert state.sync("a", wanted=2, launched={"w0": "s0"}) == {
        "leader": "a",
        "wanted": 2,
        "sessions": {"w0": "s0"},
    }
    assert state.sync("b")["leader"] == "a"


def test_who_scales_leads():
    state = SharedState()
    state.sync("a", wanted=2)
    state.sync("b", wanted=5)
    assert state.sync("a") == {"leader": "b", "wanted": 5, "sessions": {}}


def test_sessions_of_all_managers_are_kept():
    state = SharedState()
    state.sync("a", wanted=2, launched={"w0": "s0"})
    state.sync("b", wanted=1, gone=["w0"])
    assert state.sync("a", launched={"w1": "s1"})["sessions"] == {"w1": "s1"}


def test_a_follower_takes_over_from_a_leader_that_leaves():
    state = SharedState()
    state.sync("a", wanted=2)
    state.sync("b")
    state.leave("a")
    assert state.sync("b") == {"leader": "b", "wanted": 2, "sessions": {}}


def test_a_follower_takes_over_from_a_leader_that_is_silent(monkeypatch):
    now = 0.0
    monkeypatch.setattr("dask_cml.shared.time.monotonic", lambda: now)
    state = SharedState(silence=10)
    state.sync("a", wanted=2)
    now = 9.0
    assert state.sync("b")["leader"] == "a"
    now = 11.0
    assert state.sync("b")["leader"] == "b"
    assert state.managers == ["b"]


def test_a_leader_that_was_silent_follows_when_it_comes_back(monkeypatch):
    now = 0.0
    monkeypatch.setattr("dask_cml.shared.time.monotonic", lambda: now)
    state = SharedState(silence=10)
    state.sync("a", wanted=2)
    now = 11.0
    state.sync("b")
    assert state.sync("a")["leader"] == "b"
