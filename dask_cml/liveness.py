"""Which clusters are alive: the answers of their schedulers, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.core import rpc
from distributed.security import Security

from dask_cml.record import Record
from dask_cml.tasks import cancel

_reached: set[str] = set()


async def identities(
    records: Iterable[Record], security: Security | None = None, timeout: float = 2.5
) -> dict[str, dict[str, Any]]:
    """Ask the schedulers of clusters who they are, all at the same time.

    Parameters
    ----------
    records : iterable of Record
        The clusters'.
    security : Security, optional
        For those whose records name no keys. Default: as Dask's configuration says.
    timeout : float
        Seconds, for all of them together. One that needs longer, or half of it to accept a connection, counts
        as gone.

    Returns
    -------
    dict
        What each scheduler that answered said of itself (``Scheduler.identity()``), by the cluster's name.
    """
    tasks = {record.name: asyncio.create_task(_identity(record, security, timeout)) for record in records}
    if not tasks:
        return {}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout)
    finally:
        answered = {name: task for name, task in tasks.items() if task.done() and not task.cancelled()}
        await cancel(*tasks.values())
    answers = {name: task.result() for name, task in answered.items() if task.exception() is None}
    return {name: answer for name, answer in answers.items() if answer is not None}


async def is_alive(record: Record, security: Security | None = None, timeout: float = 5.0) -> bool:
    """Return whether a cluster's scheduler answers, and as the scheduler of this cluster.

    Parameters
    ----------
    record : Record
        The cluster's.
    security : Security, optional
        Default: as the record says, or else Dask's configuration.
    timeout : float
        Seconds. A scheduler that needs longer counts as gone.
    """
    return bool(await identities([record], security, timeout))


async def _identity(record: Record, security: Security | None, timeout: float) -> dict[str, Any] | None:
    address = record.scheduler_address
    if address is None:
        return None
    security = record.get_security() or security or Security()
    # It reads the files of the keys.
    arguments = await asyncio.to_thread(security.get_connection_args, "client")
    if address not in _reached:
        await asyncio.wait_for(_reach(address, arguments.get("ssl_context")), timeout / 2)
    try:
        async with rpc(address, connection_args=arguments) as scheduler:
            identity: dict[str, Any] = await scheduler.identity()
            if record.scheduler_id is None:
                info = await scheduler.get_metadata(keys=["cluster-manager-info"], default={})
                same = info.get("name") == record.name
            else:
                same = identity.get("id") == record.scheduler_id
    except BaseException:
        _reached.discard(address)
        raise
    _reached.add(address)
    return identity if same else None


async def _reach(address: str, ssl_context: Any) -> None:
    """Connect once, and raise OSError or wait if that is not possible.

    Dask's connections, when cancelled, keep their sockets until the system gives up on them, which takes
    minutes where nobody is at the address any more. These do not.
    """
    scheme, _ = parse_address(address)
    if scheme in ("tcp", "tls"):
        host, port = get_address_host_port(address)
        context = ssl_context if scheme == "tls" else None
        _, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
