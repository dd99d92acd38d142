"""What keeps a cluster's record true."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dask_cml import keys, registry
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.lifecycle import take_name
from dask_cml.record import Record
from dask_cml.tasks import cancel

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)

#: In a record, what the scheduler's session is; the others have their workers' names.
SCHEDULER = "scheduler"
_LOOK_INTERVAL = 0.2
#: How long to rest after the record is written, in times of what that took, and in seconds at most.
_REST, _LONGEST_REST = 9, 1.0


class RecordKeeper:
    """Write every session's id into the cluster's record as soon as it is known.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    record : Record, optional
        The record of a cluster that another process has made.
    """

    def __init__(self, cluster: CMLCluster, record: Record | None) -> None:
        self.record = record
        self._cluster = cluster
        self._written: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take_name(self) -> None:
        """Make the record of a new cluster.

        Raises
        ------
        ClusterExists
            If there is a live cluster of this name.
        """
        cluster = self._cluster
        options, security = cluster.options.arguments(), keys.paths(cluster.tls)
        record = Record(cluster.options.name, options=options, security=security)
        await take_name(record, cluster.api)
        self.record = record

    def start(self) -> None:
        """Keep the record from now on."""
        self._writing = asyncio.Lock()
        self._cluster.api.on_change = self.poke
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        """Write the record, because something has changed. To be called in the event loop."""
        self._changed.set()

    async def close(self) -> None:
        """Write it for the last time, if the cluster has got as far."""
        if self._task is not None:
            await cancel(self._task)
            await self.write()

    async def is_removed(self, timeout: float) -> bool:
        """Wait until another process has removed the record, as the end of a cluster does.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Returns
        -------
        bool
            Whether it is gone.
        """
        deadline = time.monotonic() + timeout
        while await asyncio.to_thread(self._read) is not None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_INTERVAL)
        return True

    def sessions(self) -> Mapping[str, str]:
        """Return what each session was launched as, by its id, whoever did so; by plain calls."""
        record = self._read()
        return {} if record is None else record.sessions

    def _read(self) -> Record | None:
        """Return the record as it is now; None if there is none, or another cluster's under this name."""
        if self.record is None:
            return None
        try:
            record = registry.read(self.record.name)
        except NoSuchCluster:
            return None
        return record if record.id == self.record.id else None

    def remove(self) -> None:
        """Remove the record, with all that is in the cluster's folder, by plain calls."""
        if self._task is not None and self.record is not None:
            registry.remove(self.record.name, id=self.record.id)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            begin = time.monotonic()
            await self.write()
            # While thousands of sessions are launched one after the other, most is not to write their record.
            await asyncio.sleep(min(_REST * (time.monotonic() - begin), _LONGEST_REST))

    async def write(self) -> None:
        """Write it now. What hinders that is logged."""
        try:
            async with self._writing:
                processes = (self._cluster.scheduler, *self._cluster.workers.values())
                owners = {p.session_id: p.owner for p in processes if p.session_id and p.owner}
                await asyncio.to_thread(self._write, owners)
        except NoSuchCluster:
            logger.info("The record of the cluster %s is gone: another process ends it", self._cluster.name)
        except (OSError, CMLError) as error:
            logger.warning("The record of the cluster %s cannot be written: %s", self._cluster.name, error)

    def _write(self, owners: Mapping[str, str]) -> None:
        cluster, own = self._cluster, self.record
        assert own is not None
        sessions = cluster.api.named_sessions()
        scheduler = cluster.scheduler.session
        gone = self._written - sessions.keys()

        def change(record: Record) -> Record:
            kept = {each: key for each, key in record.sessions.items() if each not in gone}
            roles = {
                each: SCHEDULER if key == cluster.scheduler.name else key for each, key in sessions.items()
            }
            present = {**kept, **roles}
            return replace(
                record,
                sessions=present,
                owners={key: each for key, each in {**record.owners, **owners}.items() if key in present},
                scheduler_session=scheduler.id if scheduler else record.scheduler_session,
                app_url=scheduler.app_url if scheduler else record.app_url,
                scheduler_address=cluster.scheduler.address or record.scheduler_address,
                scheduler_id=str(cluster.scheduler_info.get("id") or "") or record.scheduler_id,
            )

        registry.update(own.name, change, id=own.id)
        self._written = set(sessions)
