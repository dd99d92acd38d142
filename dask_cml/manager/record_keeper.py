"""Keeps a cluster's record up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from dask_cml.cancellation import cancel, to_the_end, wait_until_set
from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.layout import SCHEDULER
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.launcher import Launcher
from dask_cml.records import store
from dask_cml.records.operations import stop_and_remove
from dask_cml.records.record import Record
from dask_cml.records.usage import Usage, usage_of
from dask_cml.sessions.answers import moment
from dask_cml.sessions.entry import Launch, fact
from dask_cml.sessions.here import this_owner
from dask_cml.sessions.session import CMLProcess

logger = logging.getLogger(__name__)

#: Pause after the record is written: a multiple of the time that it took, and its maximum in seconds.
_REST, _LONGEST_REST = 9, 1.0
#: Seconds between two checks which sessions wait for room.
_WAITING_INTERVAL = 2.0


class RecordKeeper:
    """Writes each session that this manager launches into the cluster's record as soon as its id is known.

    A manager that stops a session writes its end.

    Parameters
    ----------
    launcher : Launcher
        Knows all sessions that this manager has launched or taken over, by its API.
    fleet : Fleet
        The cluster's workers.
    record : Record, optional
        The record of a cluster that another process created.
    """

    def __init__(self, launcher: Launcher, fleet: Fleet, record: Record | None = None) -> None:
        self.record = record
        #: Whether the record did not exist any more at the last write, because another process deleted the
        #: cluster.
        self.gone = False
        self._name, self._api, self._fleet, self._launcher = fleet.name, launcher.api, fleet, launcher
        self._usage: Usage | None = None
        #: Seconds from the cluster's creation to its end, which this manager has carried out.
        self.lasted: float | None = None
        self._seen: dict[str, CMLProcess] = {}
        #: The ids of the live sessions when the record was written last.
        self.written: set[str] = set()
        self._waiting = {each.id for each in record.launches.values() if each.waits} if record else set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to keep the record."""
        self._writing = asyncio.Lock()
        self._api.on_change = self.poke
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        """Write the record soon, because something has changed. Call this in the event loop."""
        self._changed.set()

    async def close(self) -> None:
        """Write the record for the last time, if it exists."""
        if self._task is not None:
            await cancel(self._task)
            await self.write()
            self._task = None

    def read(self) -> Record | None:
        """Return the current record. None: it was removed, or another cluster has its name. Blocks."""
        return None if self.record is None else store.find(self.record.name, id=self.record.id)

    def usage(self) -> Usage:
        """Return the cluster's usage so far, or until its end. Blocks.

        Raises
        ------
        NoSuchCluster
            If the record does not exist yet, or another process has removed it.
        """
        id = "" if self.record is None else self.record.id
        return self._usage or usage_of(store.read(self._name, id=id), time.time())

    async def end(self, why: str) -> None:
        """Stop all sessions of the cluster, from all managers, and then remove the record.

        Parameters
        ----------
        why : str
            Why the cluster ends, for its history.

        Raises
        ------
        CMLError
            If sessions could not be stopped.
        """
        if self.record is not None:
            with contextlib.suppress(OSError, CMLError):  # the usage is removed with the record
                self._usage = await asyncio.to_thread(self.usage)
                self.lasted = self.record.age
        await self._api.close(lambda: self.end_now(why))

    def end_now(self, why: str) -> None:
        """Do the same as :meth:`end` by blocking calls."""
        if self.record is None:
            self._api.end()
        else:
            stop_and_remove(replace(self.record, launches={}), self._api, why)

    async def _run(self) -> None:
        while True:
            # No event reports that a session starts or stops waiting for room, so look regularly.
            await wait_until_set(self._changed, _WAITING_INTERVAL)
            self._changed.clear()
            begin = time.monotonic()
            await self.write()
            # While thousands of sessions are launched one by one, spend only a small share of the time on
            # writing.
            await asyncio.sleep(min(_REST * (time.monotonic() - begin), _LONGEST_REST))

    async def write(self) -> None:
        """Write changes now. Log errors."""
        try:
            async with self._writing:
                await self._write()
            self.gone = False
        except NoSuchCluster:
            self.gone = True
            logger.info("Record of cluster %s removed: another process is deleting the cluster", self._name)
        except (OSError, CMLError) as error:
            logger.warning("Record of cluster %s not written: %s", self._name, error)

    async def _write(self) -> None:
        assert self.record is not None
        processes, sessions = self._processes(), self._api.named_sessions()
        new = [each for each in sessions.keys() - self.written if self._may_lack(processes.get(each))]
        launched = [self._launch(each, sessions[each], processes.get(each)) for each in new]
        waits = {each for each, process in processes.items() if process.waits_for is not None}
        waiting = waits & sessions.keys()
        began = {each for each in self._waiting & processes.keys() if self._has_begun(processes[each])}
        # A process is forgotten after its session is stopped, but it may know when the session ended by
        # itself.
        self._seen = {**self._seen, **processes}
        ended, now = {*self._api.stopped}, int(time.time())
        facts = [fact(each, "waits") for each in waiting - self._waiting]
        facts += [fact(each, "began", now) for each in began]
        facts += [fact(each, "ended", *_end_of(self._seen.get(each), now)) for each in ended]
        if launched or facts:
            name, id = self.record.name, self.record.id
            # A cancellation waits: later facts must not be written before these.
            await to_the_end(store.write_sessions, launched, facts, name, id=id)
        self._waiting = (self._waiting | waiting) - began - ended
        self.written = {*sessions}
        self._seen = {each: process for each, process in self._seen.items() if each not in ended}
        # A manager may record its launch later, if the platform answers late. Then it is stopped once more.
        self._api.stopped.difference_update(ended)

    def _processes(self) -> dict[str, CMLProcess]:
        """Return the launched processes of the cluster, by the ids of their sessions."""
        return {str(each.session_id): each for each in self._launcher.processes}

    def _may_lack(self, process: CMLProcess | None) -> bool:
        """Return whether the record may lack a session, because nobody else writes it."""
        if process is None or not process.adopted:
            return True
        # The scheduler's creator may have died before. The scheduler's own file names its session.
        recorded = {} if self.record is None else self.record.launches
        return str(process.session_id) not in recorded and process is self._launcher.scheduler

    def _has_begun(self, process: CMLProcess) -> bool:
        """Return whether a session no longer waits for room, as far as it is known."""
        # Only the manager that launched a session knows it, if the platform does not list it here.
        member = self._fleet.member(process.name)
        known = process.is_listed or not process.adopted or (member is not None and member.has_registered)
        return known and not process.is_scheduling

    def _launch(self, session_id: str, name: str, process: CMLProcess | None) -> Launch:
        scheduler = self._launcher.scheduler
        is_scheduler = scheduler is not None and name == scheduler.name
        options = self._fleet.options_of(self._fleet.group_of(name))
        owner = this_owner() if process is None else process.owner
        launched = time.time() if process is None else process.since.timestamp()
        return Launch(
            id=session_id,
            key=SCHEDULER if is_scheduler else name,
            owner=owner if is_session_id(owner) else None,
            launched=int(launched),
            size=options.scheduler if is_scheduler else options.worker,
        )


def _end_of(process: CMLProcess | None, now: int) -> tuple[int, str]:
    """Return when a session ended, by the platform or else now, and the cause if nobody asked for it."""
    if process is None:
        return now, ""
    finished = moment(process.info, "finished_at")
    ended = now if finished is None else min(now, int(finished.timestamp()))
    return ended, (process.loss or "").replace(" ", "-")
