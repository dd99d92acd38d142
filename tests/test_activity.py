"""The sums and samples over a cluster's life."""

from __future__ import annotations

from dataclasses import asdict

from dask_cml.scheduler.activity import Activity, Work

BEGIN = 1_790_000_000


def watched(activity, seconds, step=5, **now):
    for second in range(0, seconds + 1, step):
        activity.note(BEGIN + second, Work(**{"wanted": 2, "connected": 2, "busy": 1, **now}))
    return asdict(activity)


def test_the_samples_of_a_year_are_few_and_reach_from_its_begin_to_its_end():
    year = 365 * 24 * 3600
    samples = watched(Activity(), year, step=600)["samples"]
    assert 100 < len(samples) <= 240
    assert samples[0][0] == BEGIN
    assert samples[-1][0] > BEGIN + 0.98 * year


def test_the_sums_count_connected_and_busy_sessions():
    found = watched(Activity(), 100, connected=4, busy=3)
    assert (found["session_seconds"], found["busy_seconds"]) == (400, 300)


def test_the_next_scheduler_continues_the_sums_of_this_one():
    before = watched(Activity(), 100, connected=5, tasks_done=7)
    found = watched(Activity(**before), 50, connected=3, tasks_done=2)
    assert found["tasks_done"] == 9
    assert found["most_workers"] == 5
    assert found["session_seconds"] == 500 + 150


def test_a_clock_that_is_set_back_does_not_reduce_the_sums():
    activity = Activity()
    activity.note(BEGIN + 100, Work(1, 1, 1))
    activity.note(BEGIN, Work(1, 1, 1))
    assert activity.session_seconds == 0


def test_tasks_that_come_and_go_between_two_looks_count_as_work():
    activity = Activity()
    for second, computed in (0, 0.0), (5, 2.0), (10, 100.0):
        activity.note(BEGIN + second, Work(wanted=2, connected=2, threads=4, computed=computed))
    # Two sessions with four threads: 2 s of tasks are 1 s of a session, and 98 s more than there was time.
    assert (activity.session_seconds, activity.busy_seconds) == (20, 1 + 10)
