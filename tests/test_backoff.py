"""What a manager does after failures and refusals, and the words for it."""

from __future__ import annotations

import math

import pytest

from dask_cml.manager import backoff as module
from dask_cml.manager.backoff import Backoff


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
    return Backoff("cluster mine", told.append)


def test_the_first_failure_costs_no_time_and_each_further_one_twice_as_much(backoff, clock):
    pauses = []
    for _ in range(4):
        backoff.failed("it ended", 1)
        pauses.append(backoff.pause)
    assert pauses == [0, 2, 4, 8]
    clock.now += 7.5
    assert backoff.pause == 0.5
    clock.now += 1
    assert backoff.pause == 0


def test_failures_are_told_until_a_worker_arrives(backoff, told):
    backoff.failed("it ended", 3)
    assert told == ["Worker failed: it ended (and 2 more)"]
    assert backoff.words == "it ended (and 2 more)"
    backoff.arrived()
    assert backoff.words is None


def test_after_too_many_failures_in_a_row_nothing_is_launched_until_the_next_wish(backoff, told):
    while not backoff.gave_up:
        backoff.failed("it ended", 1)
    n = len(told) - 1
    assert backoff.pause == math.inf
    assert backoff.words == f"no new workers after {n} failures in a row: it ended"
    assert told[-1] == f"Cluster mine launches {backoff.words}. To try again, call cluster.scale(n)"
    backoff.reset()
    assert (backoff.pause, backoff.words, backoff.gave_up) == (0, None, False)


def test_a_quota_is_told_once_and_tried_again_later(backoff, told, clock):
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


def test_nothing_more_is_asked_for_while_sessions_have_waited_long_for_room(backoff):
    assert backoff.affordable(9, 4, [1.0]) == 9
    assert backoff.affordable(9, 4, [1.0, 3600.0]) == 4
