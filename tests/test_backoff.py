"""What a manager does after failures and refusals, and the words for it."""

from __future__ import annotations

import math

import pytest
from fleets import Cluster

from dask_cml.manager import backoff as module
from dask_cml.keeper.backoff import Backoff, Backoffs
from dask_cml.options import setting
from dask_cml.sessions.causes import Cause, Loss


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def told():
    return []


@pytest.fixture
def backoff(clock, told):
    return Backoff("cluster mine", told.append, setting("failure-limit"), setting("quota-retry"))


def test_the_pause_after_the_second_failure_in_a_row_doubles_with_each_further_one(backoff, clock):
    pauses = []
    for _ in range(4):
        backoff.failed("it ended", 1)
        pauses.append(backoff.pause)
    assert pauses == [0, 2, 4, 8]
    clock.now += 7.5
    assert backoff.pause == 0.5
    clock.now += 1
    assert backoff.pause == 0


def test_a_failure_is_a_problem_until_a_worker_connects(backoff, told, clock):
    backoff.failed("it ended", 3)
    assert told == ["Worker failed: it ended (and 2 more)"]
    assert backoff.words == "it ended (and 2 more)"
    backoff.arrived(clock.now)
    assert backoff.words is None


def test_after_too_many_failures_in_a_row_nothing_is_launched_until_the_next_wish(backoff, told):
    while not backoff.gave_up:
        backoff.failed("it ended", 1)
    n = len(told) - 1
    assert backoff.pause == math.inf
    assert backoff.words == f"no new workers after {n} failures in a row: it ended"
    assert told[-1] == f"Cluster mine launches {backoff.words}. To try again, call cluster.scale(n)"


def test_a_refusal_is_logged_once_and_retried_later(backoff, told, clock):
    for _ in range(2):
        backoff.refused(3, 5, "quota")
    assert told == ["Cluster mine launched 3 of 5 workers: quota"]
    assert backoff.affordable(9, 3, []) == 3
    clock.now += 3600
    assert backoff.affordable(9, 3, []) == 4
    backoff.granted(3)
    assert backoff.words == "3 of 5 workers launched: quota"
    backoff.granted(4)
    assert backoff.words is None


def test_nothing_more_is_launched_while_sessions_have_waited_long_for_room(backoff):
    assert backoff.affordable(9, 4, [1.0]) == 9
    assert backoff.affordable(9, 4, [1.0, 3600.0]) == 4


def test_a_connection_forgets_earlier_failures_only_after_a_while(backoff, clock):
    """Otherwise a group whose workers connect and fail at once would never give up."""
    for _ in range(3):
        backoff.failed("it ended", 1)
        backoff.arrived(clock.now)
    assert backoff.pause == 4
    clock.now += 31
    backoff.failed("it ended", 1)
    assert backoff.pause == 0


# -- by the causes of losses


def test_workers_that_connect_and_are_killed_at_once_are_not_replaced_for_ever(backoff, clock):
    pauses = []
    while not backoff.gave_up:
        clock.now += 1
        backoff.arrived(clock.now)
        backoff.lost({"mine-0": Loss(Cause.KILLED, "evicted or killed by the platform")})
        pauses.append(backoff.pause)
        assert len(pauses) < 20
    assert pauses == [0, 2, 4, 8, float("inf")]


def test_sessions_that_end_by_a_task_wait_longer_and_longer_but_are_always_replaced(backoff, clock):
    pauses = []
    for _ in range(20):
        backoff.arrived(clock.now)
        backoff.lost({"mine-0": Loss(Cause.OUT_OF_MEMORY, "out of memory", of_task=True)})
        pauses.append(backoff.pause)
    assert pauses[:5] == [0, 2, 4, 8, 16]
    assert max(pauses) == 60
    assert not backoff.gave_up


@pytest.mark.parametrize("kind", [Cause.EVICTED, Cause.CLOSED])
def test_a_session_that_the_platform_lists_as_stopped_is_replaced_at_once(backoff, told, kind):
    for _ in range(20):
        backoff.lost({"mine-0": Loss(kind, kind.value)})
    assert (backoff.pause, backoff.words) == (0, None)
    assert told[0] == f"Worker mine-0 {kind.value}; launching a replacement"


def test_a_replacement_is_announced_only_if_it_is_launched(backoff, told):
    while not backoff.gave_up:
        assert all("; launching a replacement" in line for line in told)
        backoff.lost({"mine-0": Loss(Cause.KILLED, "killed"), "mine-1": Loss(Cause.EVICTED, "evicted")})
    assert told[-3:-1] == ["Worker mine-0 lost: killed", "Worker mine-1 evicted"]
    assert told[-1].startswith("Cluster mine launches no new workers after ")
    backoff.lost({"mine-2": Loss(Cause.EVICTED, "evicted")})
    assert told[-1] == "Worker mine-2 evicted"


def test_one_loss_by_another_cause_counts_among_those_of_tasks(backoff, told):
    while not backoff.gave_up:
        backoff.lost(
            {
                "mine-0": Loss(Cause.OUT_OF_MEMORY, "out of memory", of_task=True),
                "mine-1": Loss(Cause.KILLED, "evicted or killed by the platform"),
            }
        )
        assert len(told) < 40
    assert told[:2] == [
        "Worker mine-0 lost: out of memory; launching a replacement",
        "Worker mine-1 lost: evicted or killed by the platform; launching a replacement",
    ]


# -- of all groups


@pytest.fixture
def mine():
    return Cluster(2, gpu={"target": 1})


def test_failures_in_one_group_do_not_affect_the_others(mine, clock, told):
    backoffs = Backoffs(mine.fleet, told.append)
    backoffs.of("gpu").failed("it ended", 1)
    backoffs.of("gpu").failed("it ended", 1)
    assert (backoffs.of().pause, backoffs.of("gpu").pause, backoffs.shortest_pause) == (0, 2, 2)
    assert backoffs.words == "gpu: it ended"
    backoffs.of("gpu").refused(1, 3, "quota")
    assert told[-1] == "Group gpu of cluster mine launched 1 of 3 workers: quota"
    assert (backoffs.affordable(9), backoffs.affordable(9, "gpu")) == (9, 1)


def test_a_users_wish_forgets_the_failures_of_its_group(mine, clock, told):
    backoffs = Backoffs(mine.fleet, told.append)
    for group in "default", "gpu":
        backoffs.of(group).failed("it ended", 1)
    mine.want("scale", "gpu", 1)
    assert backoffs.words == "it ended"
    mine.want("adapt", "default", 0, 3, "k1", {})
    assert backoffs.words is None
    backoffs.of().failed("it ended", 1)
    mine.want("resize", "default", 3, "k1")  # adaptive scaling is no user's wish
    assert backoffs.words == "it ended"
    assert backoffs.shortest_pause is None


def test_the_problems_of_a_deleted_group_are_forgotten(mine, clock, told):
    backoffs = Backoffs(mine.fleet, told.append)
    backoffs.of("gpu").failed("it ended", 2)
    mine.want("delete_group", "gpu")
    assert backoffs.words is None
