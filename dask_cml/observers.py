"""Reads the files of all clusters of the project, for a process that shows them and connects to none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from distributed.comm.core import Comm

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.core.ending import unclosed
from dask_cml.dashboard.proxy import open_comm
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.protocol import Rank, connection_args
from dask_cml.records import store
from dask_cml.records.store import Finding, Record, State
from dask_cml.sessions.workers_api import SessionInfo

logger = get_logger(__name__)

#: Seconds between two lists of the platform's sessions.
_LISTING = 15.0
#: Seconds to wait for the file that shows a change.
_SHOWN = 5.0
#: Errors that occur when a cluster ends meanwhile, or its record is invalid.
EXPECTED = (CMLError, OSError, asyncio.TimeoutError, ValueError, TypeError)


class CommandedCluster(CMLCluster):
    """A cluster of another process, which a user of this process changes."""

    _rank = Rank.COMMAND


@contextlib.asynccontextmanager
async def changing(record: Record) -> AsyncIterator[CMLCluster]:
    """Connect to a running cluster to change it, until its files show the change.

    Raises
    ------
    CMLError
        If its scheduler does not answer, or refuses the change.
    """
    async with CommandedCluster.from_name(record.name, asynchronous=True, quiet=True) as cluster:
        yield cluster
        await cluster.sharing.written()
        await until_shown(cluster)


async def until_shown(cluster: CMLCluster) -> None:
    """Wait until a cluster's files show what its scheduler has answered, but not long on a full disk."""
    assert cluster.sharing.record is not None
    record, revision = cluster.sharing.record, cluster.sharing.link.board.revision
    deadline = time.monotonic() + _SHOWN
    while (await asyncio.to_thread(store.refreshed, record)).scheduler.revision < revision:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)


def may_connect(record: Record, finding: Finding) -> bool:
    """Return whether a cluster runs, and has keys. Without them, another program may have its address."""
    return finding.state is State.ALIVE and record.security is not None


def has_dashboard(record: Record, finding: Finding) -> bool:
    """Return whether a cluster's scheduler can be asked for its dashboard."""
    arguments = record.options.get("scheduler_args") or ()
    return may_connect(record, finding) and "--no-dashboard" not in arguments


async def open_dashboard(record: Record) -> Comm:
    """Open a comm on which a cluster's scheduler serves its dashboard.

    Raises
    ------
    OSError
        If the scheduler does not accept the connection, or has no dashboard.
    """
    address = str(record.scheduler.address)
    return await open_comm(address, await asyncio.to_thread(connection_args, record.get_security(), address))


class Observers:
    """Reads the records of all clusters regularly, and judges them. A subclass shows them.

    Parameters
    ----------
    interval : float
        Time between two reads, in seconds.

    Attributes
    ----------
    records : dict of str to Record
        The records, by their ids.
    findings : dict of str to Finding
        What was found out about the clusters, by the ids of their records.
    unread : Exception or None
        Why they could not be read at the last time.
    """

    def __init__(self, interval: float = 2.0) -> None:
        self.records: dict[str, Record] = {}
        self.findings: dict[str, Finding] = {}
        self.unread: Exception | None = None
        self._interval = interval
        self._listing: Mapping[str, SessionInfo] = {}
        self._list_at = 0.0
        self._polling: asyncio.Task[None] | None = None

    async def polled(self) -> None:
        """React after the records were read."""

    def running_elsewhere(self) -> list[Record]:
        """Return the records of the clusters to which others may connect, and this process does not."""
        own = {cluster.options.name for cluster in unclosed() if cluster._rank is None}
        found = [record for record in self.records.values() if may_connect(record, self.findings[record.id])]
        return [record for record in found if record.name not in own]

    def start(self) -> None:
        """Start to read. Call this in the event loop."""
        self._polling = asyncio.create_task(self._poll_for_ever())

    async def close(self) -> None:
        """Stop reading."""
        await cancel(self._polling)

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                await self._poll()
                self.unread = None
            except Exception as error:  # of a subclass, too: the next poll may raise it again
                if repr(error) != repr(self.unread):
                    logger.warning("Clusters not read: %s", error, exc_info=not isinstance(error, EXPECTED))
                self.unread = error
            await asyncio.sleep(self._interval)

    async def _poll(self) -> None:
        if self.records and time.monotonic() >= self._list_at:
            self._list_at = time.monotonic() + _LISTING
            self._listing = await store.listed(self.records.values())
        self.records, self.findings = await asyncio.to_thread(self._read)
        await self.polled()

    def _read(self) -> tuple[dict[str, Record], dict[str, Finding]]:
        records = {record.id: record for record in store.records()}
        for id, record in self.records.items():
            # A record that cannot be read for a moment has not ended its cluster.
            if id not in records and not store.is_removed(record):
                records[id] = record
        return records, {id: store.seen(record, self._listing) for id, record in records.items()}
