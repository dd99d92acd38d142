"""Operations on clusters by their records: claim a name, describe, delete, prune."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dask_cml.cancellation import to_the_end
from dask_cml.errors import ClusterExists, CMLError
from dask_cml.layout import SCHEDULER
from dask_cml.records import history, store
from dask_cml.records.store import Finding, Record, State, cluster_address
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import this_user
from dask_cml.sessions.process import WAITS_AFTER
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.words import command

_GOODBYE_TIMEOUT = 3.0
#: Seconds for the platform to list its sessions, where a cluster is deleted if one has ended.
_LONG_LISTING = 5.0
_AT_ONCE = 8


async def take_name(record: Record, board: Mapping[str, Any], api: WorkersAPI) -> None:
    """Create the folder and the record of a new cluster. First delete a dead cluster with its name.

    Parameters
    ----------
    record : Record
        The record.
    board : mapping
        What the scheduler begins with, for JSON.
    api : WorkersAPI
        Lists the sessions of a dead cluster.

    Raises
    ------
    ClusterExists
        If a cluster with this name exists, and is not known to be dead; see :func:`store.seen`.
    CMLError
        If the sessions of a dead cluster could not be stopped.
    asyncio.CancelledError
        If the task is cancelled. The record may exist.
    """
    try:
        await to_the_end(asyncio.to_thread(store.claim, record, board))  # then it can be removed
        return
    except ClusterExists:
        old = await asyncio.to_thread(store.find, record.name)
        if old is None:
            raise
        finding = (await store.judge([old], timeout=_LONG_LISTING, api=api))[old.name]
        if finding.state is not State.DEAD:
            if old.scheduler.address is None and old.launcher.lives() is not False:
                purpose = f"to see it, run {command('info', old.name)}; if this persists"
                raise ClusterExists(old.name, "another process creates it right now", purpose) from None
            raise ClusterExists(old.name, finding.why) from None
    if (error := (await end_all([old], findings={old.name: finding}))[old.name]) is not None:
        raise error
    await to_the_end(asyncio.to_thread(store.claim, record, board))


async def describe(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Describe clusters by their files and the platform's list of sessions. Nothing is sent to schedulers.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.

    Returns
    -------
    list of dict
        Name, address for clients, status, problem, workers, Dask workers by worker group, threads, memory in
        bytes, idle time in seconds (None: there are tasks), bounds of the groups that adapt, the process that
        manages it (None: none does, or that is unknown), the user who created it, age in seconds, when it
        ends, dashboard, the scheduler's own address, the number of queued sessions, and the longest wait in
        seconds, or None. The status is "running",
        "starting", "not answering" or "stale"; see :func:`store.seen`.
    """
    records = [*records]
    findings = await store.judge(records)
    return [description(record, findings[record.name]) for record in records]


def description(record: Record, finding: Finding) -> dict[str, Any]:
    """Describe a cluster by its record, see :func:`describe`."""
    present, waits = record.scheduler.workers, queued(record).values()
    alive, over = finding.state is State.ALIVE, finding.state is State.DEAD
    numbers = {
        "workers": present.workers,
        "groups": {group: present.groups.get(group, 0) for group in record.groups},
        "threads": present.threads,
        "memory": present.memory,
        "idle": present.idle,
    }
    return {
        "name": record.name,
        "address": cluster_address(record.name),
        "status": status_of(record, finding),
        "problem": present.problem if alive else finding.why,
        **(numbers if alive else dict.fromkeys(numbers)),
        "adapts": record.bounds,
        "manager": record.manager if alive else None,
        "by": record.maker.user,
        "age": record.age,
        "ends": [] if over else record.ends,
        "dashboard": None if over else record.dashboard_link,
        "scheduler": record.scheduler.address,
        "waiting": len(waits),
        "waiting_for": max(waits, default=None),
    }


def worker_groups(record: Record) -> list[dict[str, Any]]:
    """Describe the worker groups of a cluster by its record, as ``CMLCluster.worker_groups`` does."""
    described, report, connected = [], record.scheduler.report, record.scheduler.workers.sessions
    # Until a keeper reports its sessions, if one ever does, all are wanted.
    launched = {launch.key: launch.worker_group(record.name) for launch in record.launches.values()}
    groups = report["wanted"] if report.get("sessions") else launched
    arrived = Counter(groups[session] for session in connected if session in groups)
    waiting = Counter(launched[launch.key] for launch in queued(record) if launch.key != SCHEDULER)
    for name, options in record.groups.items():
        options = {**record.options, **options}  # a group takes what it does not set from the cluster
        wanted, bounds = record.scheduler.groups.get(name), record.bounds.get(name)
        described.append(
            {
                "name": name,
                "n_workers": 0 if wanted is None else wanted.target,
                "n_arrived": arrived[name],
                "n_waiting": waiting[name],
                "adapts": bounds and dict(zip(("minimum", "maximum"), bounds, strict=True)),
                "size": {amount: options.get(amount) for amount in ("cpu", "memory", "nvidia_gpu")},
                **{option: options.get(option) for option in ("nthreads", "processes")},
                "resources": options.get("resources") or {},
            }
        )
    return described


def status_of(record: Record, finding: Finding) -> str:
    """Return a cluster's status in a word or two."""
    if finding.state is State.UNKNOWN:
        return "starting" if record.scheduler.address is None else "not answering"
    return "running" if finding.state is State.ALIVE else "stale"


def queued(record: Record) -> dict[Launch, float]:
    """Return the queued sessions, and how long they have waited: for some time, they have not started."""
    now = time.time()
    waits = {launch: now - launch.launched for launch in record.launches.values() if launch.started is None}
    return {launch: seconds for launch, seconds in waits.items() if seconds > WAITS_AFTER}


async def ended_clusters() -> list[history.EndedCluster]:
    """Return the clusters that have ended, the last one first, also dead ones that nobody has removed."""
    records = await asyncio.to_thread(store.records)
    findings = await store.judge(records)
    dead = [record for record in records if findings[record.name].state is State.DEAD]
    return await asyncio.to_thread(history.ended_clusters, dead)


async def end_all(
    records: Iterable[Record], reason: str | None = None, findings: Mapping[str, Finding] | None = None
) -> dict[str, CMLError | None]:
    """Delete clusters, running or not: stop all sessions in their records, and remove the records.

    A scheduler that is alive first informs its workers and clients. If sessions of a cluster cannot
    be stopped, its record remains.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    reason : str, optional
        Why they end, for their history. Of one that has ended before, the history says both reasons.
        Default: that the user of this process deletes them.
    findings : mapping of str to Finding, optional
        What is known of them, see :func:`store.seen`. Default: find it out.

    Returns
    -------
    dict of str to CMLError or None
        The errors by the names of the clusters. None if the cluster was deleted.
    """
    records = [*records]
    known = findings or await store.judge(records)
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def attempt(record: Record) -> CMLError | None:
        state = known[record.name].state
        why = reason or deleted_by()
        if state is State.DEAD:
            why = "; ".join(filter(None, [record.scheduler.closed or history.UNSEEN, reason]))
        async with at_once:
            try:
                if state is State.ALIVE and record.security is not None:  # else anybody may answer
                    with contextlib.suppress(Exception):  # of Dask, which varies: its workers may be frozen
                        await record.ask_scheduler("terminate", _GOODBYE_TIMEOUT, reason=why)
                api = WorkersAPI(load_platform(record.options.get("platform", "auto")))
                await api.close(lambda: history.stop_and_remove(record, api, why))
            except CMLError as error:
                return error
            except Exception as error:  # of the platform's library: the others are deleted
                return CMLError(str(error) or repr(error))
            return None

    results = await asyncio.gather(*map(attempt, records))
    return {record.name: result for record, result in zip(records, results, strict=True)}


def deleted_by(user: str | None = None) -> str:
    """Return the reason for the end of a cluster that a user deletes. Default: the user of this process."""
    return f"deleted by {user or this_user() or 'an unknown user'}"


async def prune() -> tuple[dict[str, CMLError | None], dict[str, str]]:
    """Delete dead clusters; see :func:`store.seen`. Remove what crashed processes left behind.

    Returns
    -------
    ended : dict of str to CMLError or None
        The errors by the names of the dead clusters. None if the cluster was deleted.
    skipped : dict of str to str
        The reasons by the names of the clusters that do not answer but may still run.
    """
    records = await asyncio.to_thread(store.records)
    findings = await store.judge(records, timeout=_LONG_LISTING)
    dead = [record for record in records if findings[record.name].state is State.DEAD]
    skipped = {name: finding.why for name, finding in findings.items() if finding.state is State.UNKNOWN}
    ended = await end_all(dead, findings=findings)
    await asyncio.to_thread(store.sweep)
    return ended, skipped
