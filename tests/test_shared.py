from __future__ import annotations

import pytest

from dask_cml.scheduler.shared_state import SharedState


@pytest.fixture
def here():
    return {"a", "b"}


@pytest.fixture
def state(here):
    return SharedState(here.__contains__)


def test_the_first_manager_leads(state):
    expected = {"leader": "a", "asked": "a", "wanted": 2, "sessions": {"w0": "sess0"}, "owners": {}}
    assert state.sync("a", wanted=2, launched={"w0": "sess0"}) == expected
    assert state.sync("b")["leader"] == "a"


def test_who_scales_leads(state):
    state.sync("a", wanted=2)
    state.sync("b", wanted=5)
    assert state.sync("a") == {"leader": "b", "asked": "b", "wanted": 5, "sessions": {}, "owners": {}}


def test_sessions_of_all_managers_are_kept(state):
    state.sync("a", wanted=2, launched={"w0": "sess0"})
    state.sync("b", wanted=1, gone=["w0"])
    assert state.sync("a", launched={"w1": "sess1"})["sessions"] == {"w1": "sess1"}


def test_the_owner_of_a_session_is_known_as_long_as_the_session(state):
    state.sync("a", launched={"w0": "sess0", "w1": "sess1"}, owners={"w0": "first"})
    assert state.sync("b")["owners"] == {"w0": "first"}
    assert state.sync("a", gone=["w0"])["owners"] == {}


def test_a_follower_takes_over_from_a_leader_that_is_gone(state, here):
    state.sync("a", wanted=2)
    assert state.sync("b")["leader"] == "a"
    here.remove("a")
    assert state.sync("b") == {"leader": "b", "asked": "a", "wanted": 2, "sessions": {}, "owners": {}}


def test_a_leader_that_was_away_follows_when_it_comes_back(state, here):
    state.sync("a", wanted=2)
    here.remove("a")
    state.sync("b")
    here.add("a")
    assert state.sync("a")["leader"] == "b"


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        ("c", {}),
        (3, {}),
        ("", {}),
        ("b", {"wanted": "many"}),
        ("b", {"wanted": -1}),
        ("b", {"wanted": True}),
        ("b", {"wanted": 10**9}),
        ("b", {"launched": ["w1"]}),
        ("b", {"launched": {"w1": ""}}),
        ("b", {"owners": ["w1"]}),
        ("b", {"owners": {"w1": 3}}),
        ("b", {"launched": {"w1": "../etc"}}),
        ("b", {"launched": {"w1": None}}),
        ("b", {"launched": {"": "sess1"}}),
        ("b", {"launched": {"x" * 1000: "sess1"}}),
        ("b", {"gone": "w0"}),
        ("b", {"gone": [0]}),
    ],
)
def test_what_no_manager_sends_changes_nothing(state, manager, message):
    before = state.sync("a", wanted=2, launched={"w0": "sess0"})
    with pytest.raises(ValueError, match=r"invalid .*: expected"):
        state.sync(manager, **{"wanted": 5, "gone": ["w0"], **message})
    assert state.sync("a") == before
