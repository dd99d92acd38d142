"""Describe clusters by their files as JSON, for the web UI and its API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from distributed.core import Status

from dask_cml.cluster import CMLCluster
from dask_cml.display import status_of
from dask_cml.errors import reason_of
from dask_cml.layout import SCHEDULER
from dask_cml.options import SessionSize
from dask_cml.records import operations
from dask_cml.records.liveness import Finding, State
from dask_cml.records.record import Record
from dask_cml.records.usage import usage_of
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.session import Session
from dask_cml.sharing.report import Report
from dask_cml.timing import timing
from dask_cml.words import format_duration, idle, waiting, waiting_workers


def described(record: Record, finding: Finding) -> dict[str, Any]:
    """Describe a cluster.

    Parameters
    ----------
    record : Record
        Its record.
    finding : Finding
        Whether its scheduler lives.
    """
    row = operations.description(record, finding)
    status = row["status"]
    runs = status in ("running", "starting")
    groups = _groups(record, row["adapts"]) if runs else []
    words = _words(record, groups, row["idle"]) if groups else []
    n_launched = sum(key != SCHEDULER for key in record.sessions.values())
    return row | {
        "created": record.created.isoformat(),
        "most_age": record.scheduler.hours and record.scheduler.hours * 3600,
        "session_hours": usage_of(record, time.time()).total.hours if runs else None,
        "words": ", ".join([status, *words]),
        "problem": None if status == "starting" else row["problem"],
        "groups": groups,
        "n_workers": sum(group["n_workers"] for group in groups) if groups else n_launched,
        "n_arrived": sum(group["n_arrived"] for group in groups),
        "kept": False,
        "tasks_done": record.scheduler.activity.get("tasks_done") if status == "running" else None,
    }


def kept(cluster: CMLCluster, failure: Exception | None) -> dict[str, Any]:
    """Describe what the files do not say of a cluster that the web UI keeps."""
    if failure is not None:
        return {"status": "failed", "words": "failed", "problem": reason_of(failure), "groups": []}
    if cluster.status in (Status.closing, Status.failed):
        problem = "CML did not stop some sessions; delete the cluster again"
        failed = {"problem": cluster.problem or problem} if cluster.status == Status.failed else {}
        return {"status": "closing", "words": "closing", "kept": True, **failed}
    return {"kept": True}


def _groups(record: Record, adapts: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = operations.worker_groups(record)
    queued = [launch.worker_group(record.name) for launch in operations.queued(record)]
    for group in groups:
        group |= group.pop("size")
        bounds = adapts.get(group["name"])
        group["n_waiting"] = queued.count(group["name"])
        group["adapts"] = bounds and dict(zip(("minimum", "maximum"), bounds, strict=True))
    return groups


def _words(record: Record, groups: list[dict[str, Any]], idle_for: float | None) -> list[str]:
    """Return what is special about a cluster that starts or runs, in words."""
    words = [idle(idle_for)] if idle_for is not None and idle_for >= timing.idle else []
    queued = operations.queued(record)
    scheduler = [launch for launch in record.launches.values() if launch.key == SCHEDULER]
    for launch in scheduler:
        if launch in queued:
            words.append(f"scheduler {waiting(queued[launch])}")
        elif record.scheduler.number and record.scheduler.address is not None:
            words.append(f"scheduler restarted {format_duration(time.time() - launch.launched)} ago")
    waits = [seconds for launch, seconds in queued.items() if launch not in scheduler]
    pending = sum(group["n_workers"] - group["n_arrived"] for group in groups) - len(waits)
    words += [f"{pending} pending"] if pending > 0 else []
    return words + ([waiting_workers(waits)] if waits else [])


def sessions_of(record: Record, finding: Finding) -> list[dict[str, Any]]:
    """Describe a cluster's sessions, the scheduler's first, by the keeper's report or else by their files."""
    sessions = Report.read(record.scheduler.report).known_sessions() if finding.state is State.ALIVE else []
    arrived = record.scheduler.workers.sessions
    if not sessions:
        launches = sorted(record.launches.values(), key=lambda launch: (launch.key != SCHEDULER, launch.key))
        sessions, arrived = [_launched(record, launch) for launch in launches], ()
    return [
        {
            "role": session.role,
            "name": session.name,
            "id": session.id,
            "status": status_of(session, arrived),
            "age": session.age,
            **asdict(session.size),
            "link": session.link,
        }
        for session in sessions
    ]


def _launched(record: Record, launch: Launch) -> Session:
    """Return a session that no manager reports."""
    role, name, url = "worker", launch.key, None
    if launch.key == SCHEDULER:
        role, name, url = "scheduler", f"{record.name}-scheduler", record.scheduler.app_url
    since = datetime.fromtimestamp(launch.launched, timezone.utc)
    return Session(launch.id, role, name, "unknown", None, url, since, launch.size or SessionSize(0, 0))
