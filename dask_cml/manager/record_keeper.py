"""What keeps a cluster's record true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from dask_cml.aio import cancel
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.manager.fleet import Fleet
from dask_cml.records import store
from dask_cml.records.operations import take_name
from dask_cml.records.record import Record
from dask_cml.sessions.process import CMLProcess, CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI

logger = logging.getLogger(__name__)

#: In a record, what the scheduler's session is; the others have their workers' names.
SCHEDULER = "scheduler"
_LOOK_INTERVAL = 0.2
#: How long to rest after the record is written, in times of what that took, and in seconds at most.
_REST, _LONGEST_REST = 9, 1.0
#: Seconds between two looks at which sessions wait for room.
_WAITING_INTERVAL = 2.0


class RecordKeeper:
    """Write every session's id into the cluster's record as soon as it is known.

    Parameters
    ----------
    name : str
        The cluster's name.
    api : WorkersAPI
        Knows every session that this manager has launched or taken over.
    fleet : Fleet
        Has the workers.
    scheduler : callable
        Returns the scheduler's process; None if there is none yet.
    record : Record, optional
        The record of a cluster that another process has made.
    """

    def __init__(
        self,
        name: str,
        api: WorkersAPI,
        fleet: Fleet[CMLWorker],
        scheduler: Callable[[], CMLScheduler | None],
        record: Record | None = None,
    ) -> None:
        self.record = record
        self._name, self._api, self._fleet, self._scheduler = name, api, fleet, scheduler
        self._scheduler_id: str | None = None
        self._written: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take_name(self, options: Mapping[str, Any], security: Mapping[str, str] | None) -> None:
        """Make the record of a new cluster.

        Parameters
        ----------
        options : mapping
            The cluster's, as JSON can hold them.
        security : mapping of str to str, or None
            Where its keys are.

        Raises
        ------
        ClusterExists
            If there is a live cluster of this name.
        """
        record = Record(self._name, options=options, security=security)
        await take_name(record, self._api)
        self.record = record

    def start(self) -> None:
        """Keep the record from now on."""
        self._writing = asyncio.Lock()
        self._api.on_change = self.poke
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
            record = store.read(self.record.name)
        except NoSuchCluster:
            return None
        return record if record.id == self.record.id else None

    def remove(self) -> None:
        """Remove the record, with all that is in the cluster's folder, by plain calls."""
        if self._task is not None and self.record is not None:
            store.remove(self.record.name, id=self.record.id)

    async def _run(self) -> None:
        while True:
            # Nobody tells that a session waits for room any more, or does not.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _WAITING_INTERVAL)
            if not self._changed.is_set() and self._waiting_sessions() == self._waiting:
                continue
            self._changed.clear()
            begin = time.monotonic()
            await self.write()
            # While thousands of sessions are launched one after the other, most is not to write their record.
            await asyncio.sleep(min(_REST * (time.monotonic() - begin), _LONGEST_REST))

    def _waiting_sessions(self) -> dict[str, float]:
        waiting = {each: p for each, p in self._processes().items() if p.waits_for is not None}
        return {each: process.since.timestamp() for each, process in waiting.items()}

    def _processes(self) -> dict[str, CMLProcess]:
        """Return those of the cluster that are launched, by their sessions."""
        processes = (self._scheduler(), *self._fleet.workers.values())
        return {p.session_id: p for p in processes if p is not None and p.session_id}

    async def write(self, scheduler_id: str | None = None) -> None:
        """Write it now. What hinders that is logged.

        Parameters
        ----------
        scheduler_id : str, optional
            What the scheduler calls itself, as soon as it has answered.
        """
        self._scheduler_id = scheduler_id or self._scheduler_id
        try:
            async with self._writing:
                processes = self._processes()
                waiting = self._waiting_sessions()
                listed = {each for each, process in processes.items() if process.is_listed}
                owners = {each: process.owner for each, process in processes.items() if process.owner}
                self._waiting = waiting
                await asyncio.to_thread(self._write, owners, waiting, listed)
        except NoSuchCluster:
            logger.info("The record of the cluster %s is gone: another process ends it", self._name)
        except (OSError, CMLError) as error:
            logger.warning("The record of the cluster %s cannot be written: %s", self._name, error)

    def _write(
        self, owners: Mapping[str, str], waiting: Mapping[str, float], listed: Collection[str]
    ) -> None:
        own, process = self.record, self._scheduler()
        assert own is not None
        assert process is not None
        sessions, scheduler = self._api.named_sessions(), process.session
        gone = self._written - sessions.keys()

        def change(record: Record) -> Record:
            kept = {each: key for each, key in record.sessions.items() if each not in gone}
            roles = {each: SCHEDULER if key == process.name else key for each, key in sessions.items()}
            present = {**kept, **roles}
            # What another session has launched, that one knows.
            others = {each: since for each, since in record.waiting.items() if each not in listed}
            all_waiting = {**others, **waiting}
            return replace(
                record,
                more={
                    **record.more,
                    "waiting": {key: all_waiting[key] for key in all_waiting if key in present},
                },
                sessions=present,
                owners={key: each for key, each in {**record.owners, **owners}.items() if key in present},
                scheduler_session=scheduler.id if scheduler else record.scheduler_session,
                app_url=scheduler.app_url if scheduler else record.app_url,
                scheduler_address=process.address or record.scheduler_address,
                scheduler_id=self._scheduler_id or record.scheduler_id,
            )

        store.update(own.name, change, id=own.id)
        self._written = set(sessions)
