"""Moves waiting tasks: those that need resources, and those of workers whose memory and disk are full.

Dask gives all tasks that wait for a resource to the first worker that offers it. Its work stealing moves
tasks only to idle workers, and no worker is idle while other tasks are queued.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import dask.config
from distributed.scheduler import Scheduler, TaskState, WorkerState

from dask_cml.scheduler.demand import Needs, duration_of, needs_of, restriction_of, slots
from dask_cml.scheduler.full import is_full

#: Maximum number of tasks to look at, of all workers together, and minimum for each worker.
_MOST, _LEAST = 5000, 10


def spread(scheduler: Scheduler) -> None:
    """Move waiting tasks that need resources to workers where these resources are free.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler. Its work stealing moves the tasks, except those that run already.
    """
    stealing = scheduler.extensions.get("stealing")
    offering = [worker for worker in scheduler.running if worker.resources]
    if len(offering) < 2 or stealing is None or not dask.config.get("distributed.scheduler.work-stealing"):
        return
    if all(len(worker.processing) < 2 for worker in offering):
        return  # none waits
    most = max(_LEAST, _MOST // len(offering))
    known: dict[Needs, dict[WorkerState, list[TaskState]]] = {}
    for worker in offering:
        for task in islice(worker.processing, most):
            if task.resource_restrictions and not restriction_of(task) and not task.actor:
                known.setdefault(needs_of(task), {}).setdefault(worker, []).append(task)
    for needs, tasks in known.items():
        offers = {worker: n for worker in offering if (n := slots(worker.nthreads, worker.resources, needs))}
        share = sum(map(len, tasks.values())) / (sum(offers.values()) or 1)
        spare = [
            (len(each) / offers[worker], task, worker)
            for worker, each in tasks.items()
            if worker in offers
            for task in _last(worker, each, math.ceil(share * offers[worker]))
            if task not in stealing.in_flight
        ]
        spare.sort(key=lambda each: each[0])
        for thief, n in offers.items():
            there = len(tasks.get(thief, ()))
            for _ in range(math.ceil(share * n) - there if there < n else 0):
                if not spare:
                    break
                backlog, task, victim = spare.pop()
                if scheduler.get_comm_cost(task, thief) < backlog * duration_of(scheduler, task):
                    stealing.move_task_request(task, victim, thief)


def relieve(scheduler: Scheduler) -> None:
    """Move waiting tasks away from workers whose memory and disk are full. Dask leaves the last ones there.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler. Its work stealing moves the tasks, except those that run already.
    """
    if (stealing := scheduler.extensions.get("stealing")) is None:
        return
    moved = Counter[WorkerState]()
    for worker in filter(is_full, scheduler.workers.values()):
        for task in _last(worker, [*islice(worker.processing, _MOST)], 0):
            valid = scheduler.valid_workers(task)
            thieves = scheduler.running if valid is None else valid & scheduler.running
            if thieves and not task.actor and task not in stealing.in_flight:
                thief = min(thieves, key=lambda each: (moved[each], each.occupancy))
                moved[thief] += 1
                stealing.move_task_request(task, worker, thief)


def _last(worker: WorkerState, tasks: list[TaskState], n: int) -> list[TaskState]:
    """Return the tasks that a worker runs last: all but the first `n`, without running ones."""
    running = {task.key for task in worker.executing}
    return [
        task for task in sorted(tasks, key=lambda task: task.priority or ())[n:] if task.key not in running
    ]
