"""Describe clusters as JSON, for the web UI and its API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distributed.core import Status

from dask_cml.checks import web_link
from dask_cml.cluster import CMLCluster, WorkerGroup
from dask_cml.display import describe, status_of
from dask_cml.layout import SCHEDULER
from dask_cml.options import SessionSize
from dask_cml.records.record import Record, cluster_address
from dask_cml.records.usage import Usage

_NO_SIZE = {"cpu": None, "memory": None, "nvidia_gpu": None}


def connected(record: Record, cluster: CMLCluster, usage: Usage | None) -> dict[str, Any]:
    """Describe a cluster that is connected.

    Parameters
    ----------
    record : Record
        Its record.
    cluster : CMLCluster
        The cluster.
    usage : Usage or None
        Its usage, if known.
    """
    description, board = describe(cluster), cluster.sharing.board
    status, problem = cluster.status.name, description.problem
    workers = [*cluster.scheduler_info["workers"].values()]
    if cluster.status == Status.running and not cluster.sharing.is_connected:
        status = "not answering"
    elif cluster.status == Status.failed:
        status, problem = "closing", problem or "CML did not stop some sessions; delete the cluster again"
    elif cluster.status not in (Status.running, Status.closing, Status.closed):
        status = "starting"
    words = [status, description.idle, description.scheduler, description.pending]
    groups = [*cluster.worker_groups.values()]
    return {
        **unconnected(record, status, problem, usage),
        "words": ", ".join(filter(None, words)),
        "groups": [
            _group(group, cluster.groups.limits(group.name), len(cluster._view.waits(group.name)))
            for group in groups
        ],
        "n_workers": sum(group.n_workers for group in groups),
        "n_arrived": sum(group.n_arrived for group in groups),
        "threads": sum(worker["nthreads"] for worker in workers),
        "memory": sum(worker["memory_limit"] for worker in workers),
        "kept": cluster.shutdown_on_close,
        "tasks_done": board.tasks_done,
        "most_age": board.most_age or None,
    }


def unconnected(
    record: Record, status: str, problem: str | None, usage: Usage | None = None
) -> dict[str, Any]:
    """Describe a cluster from its record, because it failed or its scheduler does not respond."""
    return {
        "name": record.name,
        "address": cluster_address(record.name),
        "created": record.created.isoformat(),
        "most_age": None,
        "age": record.age,
        "by": record.maker.user,
        "ends": record.ends,
        "session_hours": None if usage is None else usage.total.hours,
        "status": status,
        "words": status,
        "problem": problem,
        "groups": [],
        "n_workers": sum(key != SCHEDULER for key in record.sessions.values()),
        "n_arrived": 0,
        "threads": None,
        "memory": None,
        "kept": False,
        "tasks_done": None,
    }


def _group(group: WorkerGroup, adapting: Mapping[str, Any] | None, waiting: int) -> dict[str, Any]:
    adapts = {limit: adapting[limit] for limit in ("minimum", "maximum")} if adapting else None
    described = asdict(group)
    size = described.pop("size")
    return {**described, **size, "n_waiting": waiting, "adapts": adapts}


def sessions_of(cluster: CMLCluster) -> list[dict[str, Any]]:
    """Describe the sessions of a cluster that is connected."""
    arrived = cluster._view.arrived()
    return [
        _session(one.role, one.name, one.id, status_of(one, arrived), one.age, one.size, one.link)
        for one in cluster.sessions
    ]


def recorded_sessions(record: Record) -> list[dict[str, Any]]:
    """Describe a cluster's sessions from its record, the scheduler's first."""
    now, described = time.time(), []
    launches = sorted(record.launches.values(), key=lambda launch: (launch.key != SCHEDULER, launch.key))
    for launch in launches:
        role, name, link = "worker", launch.key, None
        if launch.key == SCHEDULER:
            role, name, link = "scheduler", f"{record.name}-scheduler", web_link(record.scheduler.app_url)
        age = now - launch.launched
        described.append(_session(role, name, launch.id, "unknown", age, launch.size, link))
    return described


def _session(
    role: str, name: str, id: str, status: str, age: float, size: SessionSize | None, link: str | None
) -> dict[str, Any]:
    """Describe a session."""
    amounts = asdict(size) if size else _NO_SIZE
    return {
        "role": role,
        "name": name,
        "id": id,
        "status": status,
        "age": age,
        **amounts,
        "link": link,
    }
