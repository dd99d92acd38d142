"""What keeps a cluster's record true."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dask_cml.aio import cancel
from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.role import ManagerRole
from dask_cml.records import store
from dask_cml.records.operations import stop_and_remove, stop_and_remove_now, take_name, usage
from dask_cml.records.record import Maker, Record
from dask_cml.records.session_files import SCHEDULER, Changes, Launch
from dask_cml.records.usage import Usage
from dask_cml.sessions.answers import moment
from dask_cml.sessions.owner import this_owner
from dask_cml.sessions.process import CMLProcess, CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 0.2
#: How long to rest after the record is written, in times of what that took, and in seconds at most.
_REST, _LONGEST_REST = 9, 1.0
#: Seconds between two looks at which sessions wait for room.
_WAITING_INTERVAL = 2.0


class RecordKeeper:
    """Write every session that this manager launches into the cluster's record as soon as its id is known.

    The maker of the cluster also writes who and where the scheduler is. What another manager has launched,
    that one writes; whoever stops a session writes that it has ended.

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
    role : ManagerRole, optional
        Why this process manages the cluster.
    """

    def __init__(
        self,
        name: str,
        api: WorkersAPI,
        fleet: Fleet[CMLWorker],
        scheduler: Callable[[], CMLScheduler | None],
        record: Record | None = None,
        role: ManagerRole | None = None,
    ) -> None:
        self.record = record
        self._role = role or ManagerRole()
        #: Whether another process had ended the cluster when this one wrote last.
        self.gone = False
        self._makes = record is None
        self._name, self._api, self._fleet, self._scheduler = name, api, fleet, scheduler
        self._scheduler_id: str | None = None
        self._usage: Usage | None = None
        self._seen: dict[str, CMLProcess] = {}
        self._launches: dict[str, Launch] = {}
        self._written: set[str] = set()
        self._waiting = set() if record is None else {*record.waiting}
        self._storing = threading.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take_name(
        self,
        options: Mapping[str, Any],
        security: Mapping[str, str] | None,
        groups: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Make the record of a new cluster.

        Parameters
        ----------
        options : mapping
            The cluster's, as JSON can hold them.
        security : mapping of str to str, or None
            Where its keys are.
        groups : mapping of str to mapping
            The options of its worker groups beside the default one, by name.

        Raises
        ------
        ClusterExists
            If there is a live cluster of this name.
        """
        maker = Maker.this_process(self._role.user, self._role.serves)
        record = Record(self._name, maker=maker, options=options, security=security, groups=groups)
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

    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the options of each worker group by its name, whichever manager added it; by plain calls."""
        record = self._read()
        return {} if record is None else record.groups

    async def add_group(self, name: str, options: Mapping[str, Any]) -> None:
        """Write a new worker group.

        Raises
        ------
        NoSuchCluster
            If another process has ended the cluster.
        ValueError
            If there is a group of this name.
        """
        assert self.record is not None
        await asyncio.to_thread(store.add_group, name, options, self._name, id=self.record.id)

    async def remove_group(self, name: str) -> None:
        """Take a worker group out; the errors are those of :meth:`add_group`."""
        assert self.record is not None
        await asyncio.to_thread(store.remove_group, name, self._name, id=self.record.id)

    def _read(self) -> Record | None:
        """Return the record as it is now; None if there is none, or another cluster's under this name."""
        if self.record is None:
            return None
        try:
            record = store.read(self.record.name)
        except NoSuchCluster:
            return None
        return record if record.id == self.record.id else None

    def usage(self) -> Usage:
        """Return what the cluster has used so far, or until its end; by plain calls.

        Raises
        ------
        NoSuchCluster
            If there is no record yet, or another process has removed it.
        """
        return self._usage or usage(self._name, "" if self.record is None else self.record.id)

    async def end(self) -> None:
        """Stop every session of the cluster, whoever launched it, and then remove the record.

        Raises
        ------
        CMLError
            If sessions could not be stopped.
        """
        if self._task is None or self.record is None:
            await self._api.close()
        else:
            with contextlib.suppress(OSError, CMLError):  # it goes with the record
                self._usage = await asyncio.to_thread(self.usage)
            await stop_and_remove(replace(self.record, sessions={}), self._api)

    def end_now(self) -> None:
        """Do the same by plain calls."""
        if self._task is None or self.record is None:
            self._api.end()
        else:
            stop_and_remove_now(replace(self.record, sessions={}), self._api)

    async def _run(self) -> None:
        while True:
            # Nobody tells that a session waits for room any more, or does not.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _WAITING_INTERVAL)
            self._changed.clear()
            begin = time.monotonic()
            await self.write()
            # While thousands of sessions are launched one after the other, most is not to write their record.
            await asyncio.sleep(min(_REST * (time.monotonic() - begin), _LONGEST_REST))

    async def write(self, scheduler_id: str | None = None) -> None:
        """Write what has changed, now. What hinders that is logged.

        Parameters
        ----------
        scheduler_id : str, optional
            What the scheduler calls itself, as soon as it has answered.
        """
        self._scheduler_id = scheduler_id or self._scheduler_id
        try:
            async with self._writing:
                await self._write()
            self.gone = False
        except NoSuchCluster:
            self.gone = True
            logger.info("The record of the cluster %s is gone: another process ends it", self._name)
        except (OSError, CMLError) as error:
            logger.warning("The record of the cluster %s cannot be written: %s", self._name, error)

    async def _write(self) -> None:
        assert self.record is not None
        processes, sessions = self._processes(), self._api.named_sessions()
        if changes := self._changes(processes, sessions):
            name, id = self.record.name, self.record.id
            await asyncio.to_thread(self._store, lambda: store.write_sessions(changes, name, id=id))
            self._launches.clear()
            self._waiting = (self._waiting | {*changes.waiting}) - {*changes.began, *changes.ended}
        self._written = {*sessions}
        record = self._as_it_is(self.record)
        if self._makes and record != self.record:
            await asyncio.to_thread(self._store, lambda: store.write(record))
            self.record = record

    def _store(self, write: Callable[[], None]) -> None:
        with self._storing:  # what was cancelled may go on in its thread, and is older
            write()

    def _processes(self) -> dict[str, CMLProcess]:
        """Return those of the cluster that are launched, by their sessions."""
        processes = (self._scheduler(), *self._fleet.workers.values())
        return {p.session_id: p for p in processes if p is not None and p.session_id}

    def _changes(self, processes: Mapping[str, CMLProcess], sessions: Mapping[str, str]) -> Changes:
        new = [each for each in sessions.keys() - self._written if not _is_adopted(processes.get(each))]
        for each in new:
            # A name says the same at each try.
            self._launches.setdefault(each, self._launch(each, sessions[each], processes.get(each)))
        waiting = {each for each, process in processes.items() if process.waits_for is not None}
        scheduling = {each for each, process in processes.items() if process.is_scheduling}
        # What another session has launched, and the platform does not list here, that one knows.
        known = {
            each
            for each, process in processes.items()
            if process.is_listed or not process.adopted or self._fleet.has_registered(str(process.name))
        }
        now = int(time.time())
        ended = (self._written | self._launches.keys()) - sessions.keys()
        changes = Changes(
            launched=[self._launches[each] for each in new],
            ended={each: _end_of(self._seen.get(each), now) for each in ended},
            waiting=(waiting & sessions.keys()) - self._waiting,
            began=dict.fromkeys((self._waiting & known) - scheduling, now),
        )
        # A process is forgotten when its session is stopped, and may know when that had ended by itself.
        self._seen = {**self._seen, **processes}
        self._seen = {each: process for each, process in self._seen.items() if each not in ended}
        return changes

    def _launch(self, session_id: str, name: str, process: CMLProcess | None) -> Launch:
        scheduler = self._scheduler()
        is_scheduler = scheduler is not None and name == scheduler.name
        owner = this_owner()
        launched = time.time() if process is None else process.since.timestamp()
        return Launch(
            id=session_id,
            key=SCHEDULER if is_scheduler else name,
            owner=owner if is_session_id(owner) else None,
            launched=int(launched),
            size=self._api.sizes.get(session_id) if process is None else process.plan.size,
        )

    def _as_it_is(self, record: Record) -> Record:
        """Return the record with what is known of the scheduler."""
        scheduler = self._scheduler()
        session = None if scheduler is None else scheduler.session
        return replace(
            record,
            scheduler_session=session.id if session else record.scheduler_session,
            app_url=session.app_url if session else record.app_url,
            scheduler_address=(scheduler.address if scheduler else None) or record.scheduler_address,
            scheduler_id=self._scheduler_id or record.scheduler_id,
        )


def _end_of(process: CMLProcess | None, now: int) -> int:
    """Return when a session ended: when the platform says, or now."""
    finished = None if process is None else moment(process.info, "finished_at")
    return now if finished is None else min(now, int(finished.timestamp()))


def _is_adopted(process: CMLProcess | None) -> bool:
    return process is not None and process.adopted
