from __future__ import annotations

import pytest

from dask_cml.shared import SharedState


@pytest.fixture
def here():
    return {"a", "b"}


@pytest.fixture
def state(here):
    return SharedState(here.__contains__)


def test_the_first_manager_leads(state):
    expected = {"leader": "a", "asked": "a", "wanted": 2, "sessions": {"w0": "s0"}}
    assert state.sync("a", wanted=2, launched={"w0": "s0"}) == expected
    assert state.sync("b")["leader"] == "a"


def test_who_scales_leads(state):
    state.sync("a", wanted=2)
    state.sync("b", wanted=5)
    assert state.sync("a") == {"leader": "b", "asked": "b", "wanted": 5, "sessions": {}}


def test_sessions_of_all_managers_are_kept(state):
    state.sync("a", wanted=2, launched={"w0": "s0"})
    state.sync("b", wanted=1, gone=["w0"])
    assert state.sync("a", launched={"w1": "s1"})["sessions"] == {"w1": "s1"}


def test_a_follower_takes_over_from_a_leader_that_is_gone(state, here):
    state.sync("a", wanted=2)
    assert state.sync("b")["leader"] == "a"
    here.remove("a")
    assert state.sync("b") == {"leader": "b", "asked": "a", "wanted": 2, "sessions": {}}


def test_a_leader_that_was_away_follows_when_it_comes_back(state, here):
    state.sync("a", wanted=2)
    here.remove("a")
    state.sync("b")
    here.add("a")
    assert state.sync("a")["leader"] == "b"
