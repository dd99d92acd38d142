"""The sums over a cluster's life."""

from __future__ import annotations

from dataclasses import asdict

from dask_cml.scheduler.activity import Activity


def test_the_next_scheduler_continues_the_sums_of_this_one():
    before = Activity()
    for workers in 1, 5, 3:
        before.note(workers, tasks_done=7, tasks_failed=1)
    activity = Activity(**asdict(before))
    activity.note(4, tasks_done=2, tasks_failed=1)
    assert asdict(activity) == {"most_workers": 5, "tasks_done": 9, "tasks_failed": 2, "failures": []}
