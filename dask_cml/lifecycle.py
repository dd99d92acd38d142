"""What is done to clusters by their records: take a name, describe, end, prune."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from distributed.core import rpc
from distributed.security import Security

from dask_cml import registry
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.registry import Record
from dask_cml.workers_api import WorkersAPI, load_platform

_GOODBYE_TIMEOUT = 3.0
_AT_ONCE = 8


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
        starting = record.scheduler_address is None and not is_abandoned(record)
        status = "running" if answer else "starting" if starting else "stale"
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

    A scheduler that answers tells its workers, clients and managers first.

    Raises
    ------
    CMLError
        If sessions could not be stopped. The record stays, then.
    """
    api = WorkersAPI(load_platform(record.options.get("platform", "auto")))
    await _say_goodbye(record)
    stopped: set[str] = set()
    current: Record | None = record
    # A manager may have launched sessions meanwhile.
    while current is not None and current.id == record.id and current.sessions.keys() - stopped:
        for session in current.sessions.keys() - stopped:
            api.adopt(session, current.sessions[session])
        await api.close()
        stopped |= current.sessions.keys()
        current = await asyncio.to_thread(_read, record.name)
    await asyncio.to_thread(registry.remove, record.name, id=record.id)


async def _say_goodbye(record: Record) -> None:
    # Another scheduler may have its address by now.
    if record.scheduler_address is None or not await registry.is_alive(record, timeout=_GOODBYE_TIMEOUT):
        return
    arguments = (record.get_security() or Security()).get_connection_args("client")
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        async with rpc(record.scheduler_address, connection_args=arguments) as scheduler:
            await asyncio.wait_for(scheduler.terminate(), _GOODBYE_TIMEOUT)


async def end_all(records: Iterable[Record]) -> dict[str, CMLError | None]:
    """End clusters, some at the same time.

    Returns
    -------
    dict
        Their names, each with the error if it could not be ended.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def attempt(record: Record) -> CMLError | None:
        async with at_once:
            try:
                await end(record)
            except CMLError as error:
                return error
            return None

    records = [*records]
    results = await asyncio.gather(*map(attempt, records))
    return {record.name: result for record, result in zip(records, results, strict=True)}


async def prune(timeout: float = 10.0) -> dict[str, CMLError | None]:
    """End what is left of clusters whose maker and scheduler are both gone.

    Parameters
    ----------
    timeout : float
        Seconds after which a scheduler that does not answer counts as gone: one may be busy for a while.

    Returns
    -------
    dict
        The names of these clusters, each with the error if it could not be ended.
    """
    records = await asyncio.to_thread(registry.records)
    alive = await registry.identities(records, timeout=timeout)
    return await end_all(r for r in records if r.name not in alive and is_abandoned(r))
