"""Writes into a cluster's record which sessions its keeper has launched, and what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from dask_cml.cancellation import to_the_end
from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.layout import SCHEDULER
from dask_cml.output import get_logger
from dask_cml.records import store
from dask_cml.records.entries import end_file
from dask_cml.records.record import Record
from dask_cml.sessions.answers import time_of
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import this_owner
from dask_cml.sessions.plan import SessionPlan
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session import CMLProcess
from dask_cml.sessions.workers_api import WorkersAPI

logger = get_logger(__name__)


class Journal:
    """Enters the sessions of a keeper into the cluster's record as soon as their ids are known.

    Parameters
    ----------
    api : WorkersAPI
        Knows all sessions that this process has launched or adopted, and has stopped.
    record : Record
        The cluster's record.

    Attributes
    ----------
    gone : bool
        Whether the record did not exist any more at the last write, because another process deleted the
        cluster.
    """

    def __init__(self, api: WorkersAPI, record: Record) -> None:
        self.gone = False
        self._api = api
        self._record = record
        self._written = {*record.launches}
        #: Launched processes that are not in the record yet.
        self._entering: list[CMLProcess] = []
        #: Sessions of no process at the last write.
        self._unused: set[str] = set()
        #: Why and when sessions ended by themselves, by their ids.
        self._ends: dict[str, tuple[int, str]] = {}
        #: Why the last write failed. The next one tries again, and only another reason is logged.
        self._failure: str | None = None
        self._lock = asyncio.Lock()

    async def enter(self, process: CMLProcess) -> None:
        """Write that a session was launched. Callers that wait for each other share one write."""
        self._entering.append(process)
        await self._locked(self._enter)

    async def write(self, processes: Iterable[CMLProcess]) -> None:
        """Write what has changed. Log an error once; the next call tries again.

        Parameters
        ----------
        processes : iterable of CMLProcess
            The scheduler and the workers.
        """
        await self._locked(self._write, {str(process.session_id): process for process in processes})

    async def _locked(self, write: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            async with self._lock:
                await write(*arguments)
            self.gone, self._failure = False, None
        except NoSuchCluster:
            self.gone = True
            logger.info(
                "Record of cluster %s removed: another process deletes the cluster", self._record.name
            )
        except (OSError, CMLError) as error:
            before, self._failure = self._failure, str(error)
            if self._failure != before:
                logger.warning("Record of cluster %s not written: %s", self._record.name, error)

    async def _enter(self) -> None:
        entering, self._entering = self._entering, []
        if not entering:
            return
        launches = [self._launch(str(process.session_id), process.name, process) for process in entering]
        await to_the_end(store.write_sessions, self._record, launches)
        self._written.update(launch.id for launch in launches)

    async def _write(self, processes: dict[str, CMLProcess]) -> None:
        sessions, now = self._api.live.copy(), int(time.time())
        new = {session: name for session, name in sessions.items() if session not in self._written}
        # The process of a session may not know of it yet. An engine of a refused launch has no process.
        unused = new.keys() - processes.keys()
        for session in unused - self._unused:
            del new[session]
        self._unused = unused
        launched = [self._launch(session, name, processes.get(session)) for session, name in new.items()]
        for session, process in processes.items():
            if process.loss is not None or time_of(process.info, "finished_at") is not None:
                self._ends[session] = _end_of(process)
        stopped = {*self._api.stopped}
        ends = []
        for session in stopped:
            ended, cause = self._ends.get(session, (now, ""))
            ends.append(end_file(session, min(now, ended), cause))
        if launched or ends:
            # A cancellation waits: ends must not be written before these launches.
            await to_the_end(store.write_sessions, self._record, launched, ends)
        self._written = (self._written | new.keys()) - stopped
        # A late answer of the platform may enter a stopped session once more. Then it is stopped again.
        self._api.stopped.difference_update(stopped)
        for session in stopped:
            self._ends.pop(session, None)

    def _launch(self, session: str, name: str, process: CMLProcess | None) -> Launch:
        """Return how a session was launched. Without a process, it is the engine of a refused launch."""
        owner = this_owner() if process is None else process.owner
        launched = time.time() if process is None else process.since.timestamp()
        plan: SessionPlan | None = None if process is None else process.plan
        return Launch(
            id=session,
            key=SCHEDULER if isinstance(process, CMLScheduler) else name,
            owner=owner if is_session_id(owner) else None,
            launched=int(launched),
            size=None if plan is None else plan.size,
            group=None if process is None else process.group,
        )


def _end_of(process: CMLProcess) -> tuple[int, str]:
    """Return when a session ended, by the platform, and the cause if nobody asked for it."""
    finished = time_of(process.info, "finished_at")
    return int(time.time() if finished is None else finished.timestamp()), process.loss or ""
