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
    expected = {
        "leader": "a",
        "asked": {"default": "a"},
        "wanted": {"default": 2},
        "sessions": {"w0": "sess0"},
        "owners": {},
        "adapts": {},
    }
    assert state.sync("a", wanted={"default": 2}, launched={"w0": "sess0"}) == expected
    assert state.sync("b")["leader"] == "a"


def test_who_scales_leads(state):
    state.sync("a", wanted={"default": 2})
    state.sync("b", wanted={"default": 5})
    assert state.sync("a") == {
        "leader": "b",
        "asked": {"default": "b"},
        "wanted": {"default": 5},
        "sessions": {},
        "owners": {},
        "adapts": {},
    }


def test_each_group_has_the_number_that_was_asked_for_last(state):
    state.sync("a", wanted={"default": 2, "gpu": 1})
    told = state.sync("b", wanted={"gpu": 4})
    assert told["wanted"] == {"default": 2, "gpu": 4}
    assert told["asked"] == {"default": "a", "gpu": "b"}
    assert told["leader"] == "b"


def test_limits_of_adaptive_scaling_are_known_beyond_the_manager_that_scales(state, here):
    limits = {"minimum": 1, "maximum": float("inf")}
    state.sync("a", wanted={"default": 2, "gpu": 1}, adapts={"gpu": limits})
    assert state.sync("b")["adapts"] == {"gpu": {**limits, "attended": True}}
    here.remove("a")
    assert state.sync("b")["adapts"] == {"gpu": {**limits, "attended": False}}


@pytest.mark.parametrize("n", [3, None])
def test_limits_of_adaptive_scaling_hold_until_somebody_scales(state, n):
    state.sync("a", wanted={"default": 2, "gpu": 1}, adapts={"gpu": {"minimum": 1, "maximum": 4}})
    assert state.sync("b", wanted={"default": 1})["adapts"].keys() == {"gpu"}
    assert state.sync("b", wanted={"gpu": n})["adapts"] == {}


def test_a_group_that_is_gone_is_forgotten(state):
    state.sync("a", wanted={"default": 2, "gpu": 1})
    told = state.sync("b", wanted={"gpu": None})
    assert (told["wanted"], told["asked"]) == ({"default": 2}, {"default": "a"})


def test_sessions_of_all_managers_are_kept(state):
    state.sync("a", wanted={"default": 2}, launched={"w0": "sess0"})
    state.sync("b", wanted={"default": 1}, gone=["w0"])
    assert state.sync("a", launched={"w1": "sess1"})["sessions"] == {"w1": "sess1"}


def test_the_owner_of_a_session_is_known_as_long_as_the_session(state):
    state.sync("a", launched={"w0": "sess0", "w1": "sess1"}, owners={"w0": "first"})
    assert state.sync("b")["owners"] == {"w0": "first"}
    assert state.sync("a", gone=["w0"])["owners"] == {}


def test_a_follower_takes_over_from_a_leader_that_is_gone(state, here):
    state.sync("a", wanted={"default": 2})
    assert state.sync("b")["leader"] == "a"
    here.remove("a")
    assert state.sync("b") == {
        "leader": "b",
        "asked": {"default": "a"},
        "wanted": {"default": 2},
        "sessions": {},
        "owners": {},
        "adapts": {},
    }


def test_a_leader_that_was_away_follows_when_it_comes_back(state, here):
    state.sync("a", wanted={"default": 2})
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
        ("b", {"wanted": 5}),
        ("b", {"wanted": {"default": -1}}),
        ("b", {"wanted": {"default": True}}),
        ("b", {"wanted": {"default": 10**9}}),
        ("b", {"wanted": {"default": None}}),
        ("b", {"wanted": {"": 1}}),
        ("b", {"wanted": {"0": 1}}),
        ("b", {"wanted": {3: 1}}),
        ("b", {"wanted": {f"g{i}": 1 for i in range(2000)}}),
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
        ("b", {"adapts": [1, 4]}),
        ("b", {"adapts": {"0": {"minimum": 1, "maximum": 4}}}),
        ("b", {"adapts": {"default": {"minimum": 1}}}),
        ("b", {"adapts": {"default": {"minimum": 4, "maximum": 1}}}),
        ("b", {"adapts": {"default": {"minimum": -1, "maximum": 1}}}),
        ("b", {"adapts": {"default": {"minimum": 0, "maximum": float("nan")}}}),
        ("b", {"adapts": {"default": {"minimum": "0", "maximum": 1}}}),
    ],
)
def test_what_no_manager_sends_changes_nothing(state, manager, message):
    before = state.sync("a", wanted={"default": 2}, launched={"w0": "sess0"})
    with pytest.raises(ValueError, match=r"invalid .*: expected"):
        state.sync(manager, **{"wanted": {"default": 5}, "gone": ["w0"], **message})
    assert state.sync("a") == before
