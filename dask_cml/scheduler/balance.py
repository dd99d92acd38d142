"""Moves waiting tasks to other workers: if they need resources, or their worker's memory and disk are full.

Dask gives all tasks that wait for a resource to the first worker that offers it. Its work stealing moves
tasks only to idle workers, and no worker is idle while other tasks are queued.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import dask.config
from distributed.scheduler import Scheduler, TaskState, WorkerState

from dask_cml.core.policy import slots
from dask_cml.scheduler.demand import Needs, duration_of, needs_of, restriction_of
from dask_cml.scheduler.health import is_full

#: Maximum number of tasks to look at, of all workers together, and minimum for each worker.
_MOST, _LEAST = 5000, 10


def balance(scheduler: Scheduler) -> None:
    """Move waiting tasks that need resources to workers where these resources are free.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler. Its work stealing moves the tasks, except running tasks.
    """
    stealing = scheduler.extensions.get("stealing")
    offering = [worker for worker in scheduler.running if worker.resources]
    if len(offering) < 2 or stealing is None or not dask.config.get("distributed.scheduler.work-stealing"):
        return
    if all(len(worker.processing) < 2 for worker in offering):
        return  # no task waits
    most = max(_LEAST, _MOST // len(offering))
    by_needs: dict[Needs, dict[WorkerState, list[TaskState]]] = {}
    for worker in offering:
        for task in islice(worker.processing, most):
            if task.resource_restrictions and not restriction_of(task) and not task.actor:
                by_needs.setdefault(needs_of(task), {}).setdefault(worker, []).append(task)
    for needs, by_worker in by_needs.items():
        offers = {worker: slots(worker.nthreads, worker.resources, needs) for worker in offering}
        offers = {worker: n for worker, n in offers.items() if n}
        share = sum(map(len, by_worker.values())) / (sum(offers.values()) or 1)
        surplus: list[tuple[float, TaskState, WorkerState]] = []
        for worker, tasks in by_worker.items():
            if worker in offers:
                backlog = len(tasks) / offers[worker]
                last = _last(worker, tasks, math.ceil(share * offers[worker]))
                surplus += [(backlog, task, worker) for task in last if task not in stealing.in_flight]
        surplus.sort(key=lambda entry: entry[0])
        for thief, n in offers.items():
            n_tasks = len(by_worker.get(thief, ()))
            for _ in range(math.ceil(share * n) - n_tasks if n_tasks < n else 0):
                if not surplus:
                    break
                backlog, task, victim = surplus.pop()
                if scheduler.get_comm_cost(task, thief) < backlog * duration_of(scheduler, task):
                    stealing.move_task_request(task, victim, thief)


def unload_full_workers(scheduler: Scheduler) -> None:
    """Move waiting tasks away from workers whose memory and disk are full. Dask leaves the last tasks there.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler. Its work stealing moves the tasks, except running tasks.
    """
    stealing = scheduler.extensions.get("stealing")
    if stealing is None:
        return
    moved = Counter[WorkerState]()
    for worker in filter(is_full, scheduler.workers.values()):
        for task in _last(worker, [*islice(worker.processing, _MOST)], 0):
            valid = scheduler.valid_workers(task)
            thieves = scheduler.running if valid is None else valid & scheduler.running
            if thieves and not task.actor and task not in stealing.in_flight:
                thief = min(thieves, key=lambda other: (moved[other], other.occupancy))
                moved[thief] += 1
                stealing.move_task_request(task, worker, thief)


def _last(worker: WorkerState, tasks: list[TaskState], n: int) -> list[TaskState]:
    """Return the tasks that a worker runs last: all but the first `n`, without running tasks."""
    running = {task.key for task in worker.executing}
    last = sorted(tasks, key=lambda task: task.priority or ())[n:]
    return [task for task in last if task.key not in running]
