"""Tasks that need resources are spread among the workers that offer these."""

from __future__ import annotations

from types import SimpleNamespace

import dask
import pytest

from dask_cml.scheduler.balance import balance


class Task:
    """As much of a TaskState as is looked at."""

    worker_restrictions = host_restrictions = None
    loose_restrictions = actor = False

    def __init__(self, key, duration=1.0, **resources):
        self.key, self.priority, self.resource_restrictions = key, (key,), resources
        self.prefix = SimpleNamespace(duration_average=duration)


class Scheduling:
    """A scheduler with workers that offer resources; it moves tasks at once."""

    def __init__(self, *workers, cost=0.0):
        self.running = [Offering(**worker) for worker in workers]
        self.extensions = {"stealing": self}
        self.in_flight = {}
        self.moved = []
        self.cost = cost

    def get_comm_cost(self, task, worker):
        return self.cost

    def move_task_request(self, task, victim, thief):
        victim.processing.remove(task)
        thief.processing.append(task)
        self.moved.append(task.key)

    def balance(self):
        """Return how many tasks each worker has then."""
        balance(self)
        return [len(worker.processing) for worker in self.running]


class Offering:
    def __init__(self, n=0, nthreads=4, needs=None, **resources):
        self.resources, self.nthreads = resources, nthreads
        self.processing = [Task(i, **(needs or {"GPU": 1})) for i in range(n)]
        self.executing = {}


@pytest.mark.parametrize(
    ("workers", "after"),
    [
        ([{"n": 12, "GPU": 1}, {"GPU": 1}, {"GPU": 1}], [4, 4, 4]),
        ([{"n": 12, "GPU": 1}, {"GPU": 2}, {"GPU": 3}], [2, 4, 6]),
        ([{"n": 12, "GPU": 1}, {"GPU": 8, "nthreads": 2}], [4, 8]),
        ([{"n": 2, "GPU": 1}, {"GPU": 1}, {"GPU": 1}], [1, 1, 0]),
        ([{"n": 1, "GPU": 1}, {"GPU": 1}], [1, 0]),
        ([{"n": 5, "GPU": 4}, {"n": 1, "GPU": 4}], [3, 3]),
        ([{"n": 9, "GPU": 1}, {"n": 1, "GPU": 1}], [9, 1]),  # work stealing evens out what is busy
        ([{"n": 9, "GPU": 1}, {"FPGA": 1}, {"GPU": 0.5}], [9, 0, 0]),
        ([{"n": 9, "GPU": 1}, {}], [9, 0]),
        ([{"n": 4, "GPU": 2, "needs": {"GPU": 2}}, {"GPU": 1}, {"GPU": 4}], [2, 0, 2]),
    ],
)
def test_tasks_go_where_their_resources_are_free(workers, after):
    assert Scheduling(*workers).balance() == after


def test_those_that_would_run_last_go_and_none_that_runs():
    scheduling = Scheduling({"n": 6, "GPU": 1}, {"GPU": 1})
    victim = scheduling.running[0]
    victim.executing = {victim.processing[5]: 1.0}
    scheduling.in_flight = {victim.processing[4]: "to another"}
    scheduling.balance()
    assert scheduling.moved == [3]


def test_tasks_for_certain_workers_and_plain_ones_stay():
    scheduling = Scheduling({"n": 6, "GPU": 1}, {"GPU": 1})
    for i, task in enumerate(scheduling.running[0].processing):
        task.worker_restrictions = {"tcp://10.0.0.7:1"} if i < 3 else None
        task.resource_restrictions = {"GPU": 1} if i < 3 else None
    assert scheduling.balance() == [6, 0]


def test_a_task_whose_move_costs_more_than_its_wait_stays_and_all_do_without_work_stealing():
    two = {"n": 6, "GPU": 1}, {"GPU": 1}
    assert Scheduling(*two, cost=7.0).balance() == [6, 0]
    assert Scheduling(*two, cost=5.0).balance() == [3, 3]
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        assert Scheduling(*two).balance() == [6, 0]
    scheduling = Scheduling(*two)
    scheduling.extensions = {}
    assert scheduling.balance() == [6, 0]
