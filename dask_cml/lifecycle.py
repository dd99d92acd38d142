"""What is done to clusters by their records: take a name, describe, end, prune."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from dask_cml import registry
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.registry import Record
from dask_cml.workers_api import WorkersAPI, load_platform


async def take_name(record: Record, api: WorkersAPI) -> None:
    """Make the folder and the record of a new cluster; what is left of a dead one of this name is ended.

    Raises
    ------
    ClusterExists
        If there is a live cluster of this name.
    """
    try:
        await asyncio.to_thread(registry.claim, record)
        return
    except ClusterExists:
        old = await asyncio.to_thread(_read, record.name)
        if old is None or not is_abandoned(old) or await registry.is_alive(old):
            raise
    if old.sessions:
        await api.stop(*old.sessions)
    await asyncio.to_thread(registry.claim, record, stale=old)


def _read(name: str) -> Record | None:
    try:
        return registry.read(name)
    except NoSuchCluster:
        return None


def is_abandoned(record: Record) -> bool:
    """Whether nobody is there to go on with a cluster whose scheduler does not answer."""
    lives = record.maker.lives()
    # From another session nobody can see whether the maker lives; but it has got as far as a scheduler.
    return lives is False or (lives is None and record.scheduler_address is not None)


async def describe(records: Iterable[Record], timeout: float = 2.0) -> list[dict[str, Any]]:
    """Describe clusters, all in bounded time.

    Parameters
    ----------
    records : iterable of Record
        The clusters'.
    timeout : float
        Seconds for all schedulers to answer.

    Returns
    -------
    list of dict
        Name, status, workers, threads, memory in bytes, age in seconds, dashboard and scheduler address.
    """
    records = [*records]
    answers = await registry.identities(records, timeout=timeout)
    now = datetime.now(timezone.utc)
    rows = []
    for record in records:
        answer = answers.get(record.name)
        workers = [*answer["workers"].values()] if answer else None
        status = "running" if answer else "stale" if is_abandoned(record) else "starting"
        rows.append(
            {
                "name": record.name,
                "status": status,
                "workers": len(workers) if workers is not None else None,
                "threads": sum(w["nthreads"] for w in workers) if workers is not None else None,
                "memory": sum(w["memory_limit"] or 0 for w in workers) if workers is not None else None,
                "age": (now - datetime.fromisoformat(record.created)).total_seconds(),
                "dashboard": f"{record.app_url.rstrip('/')}/status" if record.app_url else None,
                "scheduler": record.scheduler_address,
            }
        )
    return rows


async def end(record: Record) -> None:
    """End a cluster, alive or not: stop every session in its record, and remove the record.

    Raises
    ------
    CMLError
        If sessions could not be stopped. The record stays, then.
    """
    api = WorkersAPI(load_platform(record.options.get("platform", "auto")))
    for session, key in record.sessions.items():
        api.adopt(session, key)
    await api.close()
    await asyncio.to_thread(registry.remove, record.name, id=record.id)


async def prune(timeout: float = 2.0) -> dict[str, CMLError | None]:
    """End what is left of clusters whose maker and scheduler are both gone.

    Returns
    -------
    dict
        The names of these clusters, each with the error if it could not be ended.
    """
    records = await asyncio.to_thread(registry.records)
    alive = await registry.identities(records, timeout=timeout)
    gone = [record for record in records if record.name not in alive and is_abandoned(record)]

    async def attempt(record: Record) -> CMLError | None:
        try:
            await end(record)
        except CMLError as error:
            return error
        return None

    results = await asyncio.gather(*map(attempt, gone))
    return {record.name: result for record, result in zip(gone, results, strict=True)}
