"""Describe clusters as JSON, for the page and its API."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from distributed.core import Status

from dask_cml.cluster import CMLCluster
from dask_cml.display.group import WorkerGroup
from dask_cml.display.words import waiting
from dask_cml.identity import read_workers
from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.records.liveness import Finding, State
from dask_cml.records.operations import status_of
from dask_cml.records.record import Record, cluster_address
from dask_cml.records.usage import Usage

#: The rate counts the tasks that finished within this many seconds.
_RATE_SECONDS = 15.0
_SIZES = ("cpu", "memory", "nvidia_gpu", "nthreads", "processes")
#: The workers of a cluster without a manager.
_NO_MANAGER: Mapping[str, Any] = {
    "n_arrived": 0,
    "threads": None,
    "memory": None,
    "kept": False,
    "tasks_per_second": None,
}


class TaskRate:
    """The number of tasks that a scheduler finishes per second.

    Examples
    --------
    >>> rate = TaskRate()
    >>> rate.count(100, now=0.0)
    >>> rate.count(120, now=10.0)
    >>> rate.per_second
    2.0
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def count(self, done: int, now: float) -> None:
        """Record the number of finished tasks."""
        if self._counts and done < self._counts[-1][1]:  # the scheduler restarted
            self._counts.clear()
        self._counts.append((now, done))
        while now - self._counts[0][0] > _RATE_SECONDS:
            self._counts.popleft()

    @property
    def per_second(self) -> float | None:
        """Tasks per second. None if unknown."""
        if len(self._counts) < 2:
            return None
        (began, before), (now, done) = self._counts[0], self._counts[-1]
        return (done - before) / (now - began)


def age_of(created: str) -> float:
    """Return the age of a cluster in seconds. `created` is in ISO 8601."""
    return (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()


def managed(
    cluster: CMLCluster, created: str, user: str | None, kept: bool, rate: TaskRate, usage: Usage | None
) -> dict[str, Any]:
    """Describe a cluster from its manager's state.

    Parameters
    ----------
    cluster : CMLCluster
        The manager.
    created : str
        The time of its creation, in ISO 8601.
    user : str or None
        The user who created it.
    kept : bool
        Whether the cluster shuts down with this process.
    rate : TaskRate
        The rate of its tasks.
    usage : Usage or None
        Its usage, if known.
    """
    status, state = cluster.status.name, cluster.manager.state
    problem = state.problem
    try:
        workers = read_workers(cluster.scheduler_info["workers"])
    except ValueError as error:
        workers, problem = (), str(error)
    if cluster.status == Status.running and not state.connected:
        status = "not answering"
    elif cluster.status not in (Status.running, Status.closing, Status.closed):
        status = "starting"
    groups = [*cluster.worker_groups.values()]
    return {
        **_common(cluster.options.name, created, user, usage),
        "status": status,
        "words": ", ".join(filter(None, [status, state.scheduler_wait, state.pending])),
        "problem": problem,
        "groups": [_group(each, state.limits(each.name)) for each in groups],
        "n_workers": sum(each.n_workers for each in groups),
        "n_arrived": sum(each.n_arrived for each in groups),
        "threads": sum(each.nthreads for each in workers),
        "memory": sum(each.memory_limit for each in workers),
        "kept": kept,
        "tasks_per_second": rate.per_second,
    }


def recorded(record: Record, finding: Finding | None, usage: Usage | None) -> dict[str, Any]:
    """Describe a cluster from its record, because its scheduler does not respond."""
    finding = finding or Finding(State.UNKNOWN, "its scheduler was not contacted yet")
    status = status_of(record, finding)
    options = {DEFAULT_GROUP: {}, **record.groups}
    groups = {group: {**record.options, **own} for group, own in options.items()}
    return {
        **_common(record.name, record.created, record.maker.user, usage),
        "status": status,
        "words": status,
        "problem": None if status in ("running", "starting") else finding.why,
        "groups": [_recorded_group(name, each) for name, each in groups.items()],
        "n_workers": sum(each != SCHEDULER for each in record.sessions.values()),
        **_NO_MANAGER,
    }


def unmanaged(name: str, created: str | None, user: str | None, status: str, problem: str) -> dict[str, Any]:
    """Describe a cluster that has failed or cannot be described otherwise."""
    return {
        **_common(name, created, user, None),
        "status": status,
        "words": status,
        "problem": problem,
        "groups": [],
        "n_workers": 0,
        **_NO_MANAGER,
    }


def _common(name: str, created: str | None, user: str | None, usage: Usage | None) -> dict[str, Any]:
    return {
        "name": name,
        "address": cluster_address(name),
        "created": created,
        "age": None if created is None else age_of(created),
        "owner": user,
        "session_hours": None if usage is None else usage.total.hours,
    }


def _group(group: WorkerGroup, limits: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "name": group.name,
        "n_workers": group.n_workers,
        "n_arrived": group.n_arrived,
        **asdict(group.size),
        "nthreads": group.nthreads,
        "processes": group.processes,
        "resources": group.resources,
        "adapts": limits and {each: _finite(limits[each]) for each in ("minimum", "maximum")},
    }


def _number(value: Any) -> float | None:
    """Return a number from a record, or None. Another process wrote the record."""
    return value if isinstance(value, (int, float)) and abs(value) < math.inf else None


def _finite(n: float) -> int | None:
    return None if math.isinf(n) else int(n)


def _recorded_group(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    resources = options.get("resources")
    resources = resources if isinstance(resources, Mapping) else {}
    return {
        "name": name,
        "n_workers": None,
        "n_arrived": 0,
        **{each: _number(options.get(each)) for each in _SIZES},
        "resources": {name: amount for name, amount in resources.items() if _number(amount) is not None},
        "adapts": None,
    }


def sessions_of(cluster: CMLCluster) -> list[dict[str, Any]]:
    """Describe a cluster's sessions from its manager's state."""
    now = datetime.now(timezone.utc)
    return [
        {
            "role": each.role,
            "name": each.name,
            "id": each.id,
            "status": each.status if each.waits_for is None else waiting(each.waits_for),
            "age": (now - each.since).total_seconds(),
            **asdict(each.size),
            "link": _link(each.app_url),
        }
        for each in cluster.sessions
    ]


def recorded_sessions(record: Record) -> list[dict[str, Any]]:
    """Describe a cluster's sessions from its record."""
    sessions = sorted(record.launches.values(), key=lambda each: (each.key != SCHEDULER, each.key))
    now, described = time.time(), []
    for session in sessions:
        size, is_scheduler = session.size, session.key == SCHEDULER
        described.append(
            {
                "role": "scheduler" if is_scheduler else "worker",
                "name": f"{record.name}-scheduler" if is_scheduler else session.key,
                "id": session.id,
                "status": "unknown",
                "age": now - session.launched,
                "cpu": size and size.cpu,
                "memory": size and size.memory,
                "nvidia_gpu": size and size.nvidia_gpu,
                "link": _link(record.scheduler.app_url) if is_scheduler else None,
            }
        )
    return described


def _link(url: Any) -> str | None:
    return url if isinstance(url, str) and url.startswith(("https://", "http://")) else None


def usage_as_json(usage: Usage) -> dict[str, Any]:
    """Return the usage of a cluster, by worker group and in total."""
    return {"groups": {group: asdict(hours) for group, hours in usage.items()}, "total": asdict(usage.total)}
