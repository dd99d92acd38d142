"""The work that a scheduler knows, by the resources it needs, and the sessions that can do it.

Dask's ``Scheduler.adaptive_target`` ignores resources, so it does not know which sessions the work needs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from heapq import nsmallest
from itertools import count, islice
from math import isqrt
from typing import Any

from distributed.scheduler import Scheduler, TaskState, WorkerState

from dask_cml.core.policy import Work
from dask_cml.naming import session_of
from dask_cml.scheduler.health import is_full

#: Maximum numbers of tasks to look at. Of more tasks, an even sample is enough. Queued tasks need fewer,
#: because they differ in their durations only: the scheduler queues no tasks that need resources.
_MOST_QUEUED, _MOST_OTHERS = 100, 2000
#: Minimum number of tasks to look at for each worker.
_LEAST = 3
#: Maximum numbers of different needs, and of different restrictions to workers, in one answer.
_MOST_NEEDS, _MOST_RESTRICTIONS = 100, 20
#: Maximum number of workers and hosts to name for one restriction.
_MOST_NAMES = 3
#: A session is borrowed if it processes at most this many tasks, which need none of its resources, for less
#: than this many seconds.
_MOST_BORROWED, _BORROWED_SECONDS = 100, 10.0
#: Resources and amounts.
Needs = tuple[tuple[str, float], ...]


def known_demand(scheduler: Scheduler, cluster: str, scatters: int = 0) -> dict[str, Any]:
    """Return the work that a scheduler knows, and the sessions of a cluster.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler.
    cluster : str
        The cluster's name.
    scatters : int
        The number of calls of ``Client.scatter`` under way. While no worker runs, each waits like a task.

    Returns
    -------
    dict
        ``work`` lists the :class:`Work` by the resources that it needs.
        ``restricted`` lists unrunnable tasks that only certain workers may run, which are not in ``work``:
        ``names`` of some of these workers or hosts, and the number of ``tasks``.
        ``groups`` describes the worker groups with sessions: the number of ``sessions``; the number of
        ``busy`` sessions, which process tasks or take part in a shuffle; the names of ``borrowed``
        sessions, which only process a few short tasks without needs; the number of ``full``
        sessions, which run nothing because their memory and their disk are full; the ``managed`` bytes and
        the memory ``limit`` in bytes.
    """
    work: dict[Needs, Work] = {}
    restricted: dict[tuple[str, ...], float] = {}
    if scatters and not scheduler.running:
        _add(work, (), scatters, scatters * scheduler.UNKNOWN_TASK_DURATION)
    tasks, weight = _sample(scheduler.queued, _MOST_QUEUED)
    for task in tasks:
        _add(work, needs_of(task), weight, weight * duration_of(scheduler, task))
    tasks, weight = _sample(scheduler.unrunnable, _MOST_OTHERS)
    for task in tasks:
        if names := restriction_of(task):
            if names in restricted or len(restricted) < _MOST_RESTRICTIONS:
                restricted[names] = restricted.get(names, 0) + weight
        else:
            _add(work, needs_of(task), weight, weight * duration_of(scheduler, task), weight)
    sessions: dict[str, dict[str, list[WorkerState]]] = {}
    for worker in scheduler.workers.values():
        session = session_of(cluster, str(worker.name), worker.extra.get("cml"))
        if session is not None:
            group, name = session
            sessions.setdefault(group, {}).setdefault(name, []).append(worker)
            _add_processing(work, scheduler, worker)
    closable = [*scheduler.workers.values()]
    for plugin in [*scheduler.plugins.values()]:
        closable = plugin.valid_workers_downscaling(scheduler, closable)
    addresses = {worker.address for worker in closable}
    for entry in work.values():
        entry.tasks, entry.unrunnable = round(entry.tasks), round(entry.unrunnable)
    return {
        "work": [asdict(entry) for entry in work.values()],
        "restricted": [{"names": [*names], "tasks": round(n)} for names, n in restricted.items()],
        "groups": {group: _describe(by_name, addresses) for group, by_name in sessions.items()},
    }


def _add(work: dict[Needs, Work], needs: Needs, tasks: float, seconds: float, unrunnable: float = 0) -> None:
    """Add tasks to the work with equal needs. Of too many needs, needs of equal resources count as equal."""
    if needs not in work and len(work) >= _MOST_NEEDS:
        names = [name for name, _ in needs]
        needs = next((other for other in work if [name for name, _ in other] == names), needs)
    entry = work.setdefault(needs, Work(dict(needs)))
    entry.tasks += tasks
    entry.seconds += seconds
    entry.unrunnable += unrunnable


def _add_processing(work: dict[Needs, Work], scheduler: Scheduler, worker: WorkerState) -> None:
    running = len(worker.processing) - len(worker.long_running)
    most = max(_LEAST, _MOST_OTHERS // len(scheduler.workers))
    tasks, _ = _sample(worker.processing, most)
    # As in Dask's occupancy, tasks that have left their thread by secede() count nothing.
    durations = {task: duration_of(scheduler, task) for task in tasks if task not in worker.long_running}
    total = sum(durations.values())
    for task, duration in durations.items():
        # The occupancy includes the time of transfers.
        seconds = worker.occupancy * duration / total if total else 0.0
        if not restriction_of(task):
            _add(work, needs_of(task), running / len(durations), seconds)


def _describe(sessions: dict[str, list[WorkerState]], closable: set[str]) -> dict[str, Any]:
    busy, borrowed = [], []
    for name in sorted(sessions, key=lambda name: (len(name), name)):
        workers = sessions[name]
        if any(worker.processing or worker.address not in closable for worker in workers):
            busy.append(name)
            if all(_is_borrowed(worker, closable) for worker in workers):
                borrowed.append(name)
    all_workers = [worker for workers in sessions.values() for worker in workers]
    return {
        "sessions": len(sessions),
        "busy": len(busy),
        "borrowed": borrowed,
        "full": sum(any(map(is_full, workers)) for workers in sessions.values()),
        "managed": sum(worker.nbytes for worker in all_workers),
        "limit": sum(worker.memory_limit for worker in all_workers),
    }


def _is_borrowed(worker: WorkerState, closable: set[str]) -> bool:
    return bool(
        worker.resources
        and worker.address in closable
        and not worker.long_running
        and not worker.actors
        and len(worker.processing) <= _MOST_BORROWED
        and not any(task.resource_restrictions or restriction_of(task) for task in worker.processing)
        and all(seconds <= _BORROWED_SECONDS for seconds in worker.executing.values())
    )


def _sample(tasks: Collection[TaskState], most: int) -> tuple[list[TaskState], float]:
    """Return a sample of about `most` tasks, or all, and how many tasks a task of the sample represents."""
    # A prime step includes all kinds of tasks that alternate.
    step = next(n for n in count(-(-len(tasks) // most) or 1) if all(n % d for d in range(2, isqrt(n) + 1)))
    sample = [*islice(tasks, 0, None, step)]
    return sample, len(tasks) / len(sample) if sample else 0.0


def needs_of(task: TaskState) -> Needs:
    """Return the resources that a task needs, with the amounts."""
    return tuple(sorted(task.resource_restrictions.items())) if task.resource_restrictions else ()


def restriction_of(task: TaskState) -> tuple[str, ...]:
    """Return some of the workers and hosts that a task is restricted to. Return none if any may run it."""
    if task.loose_restrictions or not (task.worker_restrictions or task.host_restrictions):
        return ()
    names = {*(task.worker_restrictions or ()), *(task.host_restrictions or ())}
    return (*nsmallest(_MOST_NAMES, map(str, names)),)


def duration_of(scheduler: Scheduler, task: TaskState) -> float:
    """Return the duration of a task, as in the scheduler's occupancy, in seconds."""
    prefix = task.prefix
    if prefix.duration_average >= 0:
        return float(prefix.duration_average)
    # Some tasks with this prefix are running, but no task has finished yet.
    return float(2 * prefix.max_exec_time if prefix.max_exec_time > 0 else scheduler.UNKNOWN_TASK_DURATION)
