"""The sessions of a cluster: the start of a new cluster, the takeover of a running one, and new workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from distributed.security import Security

from dask_cml.cancellation import cancel, gather_or_cancel
from dask_cml.display import StartDisplay
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.fleet import Fleet
from dask_cml.naming import session_name
from dask_cml.options import Options, state_directory
from dask_cml.records.operations import left_for_user
from dask_cml.records.record import Record
from dask_cml.sessions import tls
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.session import CMLProcess
from dask_cml.sessions.session_logs import log_path
from dask_cml.sessions.workers_api import WorkersAPI

logger = logging.getLogger(__name__)

#: Connects to the scheduler that answers at an address, with the cluster's keys.
Join = Callable[[str | None, Security | None], Awaitable[None]]

#: Seconds within which the platform usually stops sessions. Until then nothing is launched, to free quota.
_STOPS_WITHIN = 5.0


class Launcher:
    """Creates the sessions of one cluster, with the cluster's options, folder and keys.

    Parameters
    ----------
    api : WorkersAPI
        Launches and stops sessions.
    options : Options
        The cluster's options.
    fleet : Fleet
        The cluster's workers.
    stopped : callable
        Called when the platform has stopped sessions.

    Attributes
    ----------
    place : Place
        The cluster's folder and keys, and the number of its scheduler.
    scheduler : CMLScheduler or None
        The scheduler. None before the start.
    display : StartDisplay or None
        The display of the start.
    """

    def __init__(self, api: WorkersAPI, options: Options, fleet: Fleet, stopped: Callable[[], None]) -> None:
        self.api = api
        self.options = options
        self.place = Place(state_directory() / options.name)
        self.scheduler: CMLScheduler | None = None
        self.display: StartDisplay | None = None
        self._fleet = fleet
        self._notify_stopped = stopped
        self._stops: dict[asyncio.Task[None], set[str]] = {}

    # -- a new cluster

    def prepare(self) -> Mapping[Path, str]:
        """Create the cluster's keys, and return the files to write. Blocks."""
        security, files = tls.as_files(self.options.security, self.place.folder)
        self.place = replace(self.place, security=security)
        return files

    async def launch(self, record: str, files: Mapping[Path, str], show: bool, join: Join) -> None:
        """Launch a new cluster, wait until its scheduler answers, and connect to it.

        Parameters
        ----------
        record : str
            The id of the cluster's record.
        files : mapping of Path to str
            The result of :meth:`prepare`.
        show : bool
            Whether to show the progress.
        join : callable
            Connects to the scheduler when it answers.

        Raises
        ------
        LaunchRefused, SessionFailed, SchedulerTimeout
            As in :class:`dask_cml.CMLCluster`.
        """
        self.place = replace(self.place, record=record)
        self.scheduler = self.make_scheduler()
        await asyncio.to_thread(self._write, files)
        left, why = await asyncio.to_thread(left_for_user, self.place.record, len(self.processes))
        if left <= len(self._fleet.names):
            raise LaunchRefused(self.scheduler.name, why, by="dask-cml")
        workers = [self.make_worker(name) for name in self._fleet.names]
        for worker in workers:
            self._fleet.attach(worker.name, worker)
        if show:
            self.display = StartDisplay(self._fleet.name, [self.scheduler, *workers], self._fleet.arrived)
        showing = asyncio.create_task(self.display.run()) if self.display else None
        following: asyncio.Task[None] | None = None
        has_started = False
        try:
            # The scheduler's session first: where sessions wait for room, workers could take its room.
            await self.scheduler.launch()
            following = asyncio.create_task(self._follow(workers))
            # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
            await gather_or_cancel(self._connect(self.scheduler, join), *workers)
            has_started = True
        finally:
            await cancel(following, showing)
            if self.display is not None:
                await self.display.end(has_started)

    async def relaunch(self, join: Join) -> None:
        """Launch another scheduler at the place, and all workers.

        Workers that the platform refuses are launched later.

        Parameters
        ----------
        join : callable
            Connects to the scheduler when it answers. A scheduler that waits for its manager would close.

        Raises
        ------
        LaunchRefused, SessionFailed, SchedulerTimeout
            As in :meth:`launch`.
        """
        self.scheduler = self.make_scheduler()
        await self.scheduler.launch()
        launching = self.launch_workers(self._fleet.names, lambda: True)
        await gather_or_cancel(self._connect(self.scheduler, join), launching)

    async def _connect(self, scheduler: CMLScheduler, join: Join) -> None:
        await scheduler
        await join(scheduler.address, self.place.security)

    async def _follow(self, workers: Collection[CMLWorker]) -> None:
        """Update the workers from the platform's list, until cancelled or the platform fails."""
        while True:
            listing = await self.api.sessions()
            for worker in workers:
                worker.update(listing)

    def _write(self, files: Mapping[Path, str]) -> None:
        tls.write(files)
        if self.options.log_directory is not None:
            log = log_path(self.options.name, self.place.folder, self.options.log_directory)
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    # -- a running cluster

    def take_over(self, record: Record) -> None:
        """Take over the scheduler of a running cluster. Its workers follow by :meth:`attach_launched`."""
        number, security = record.scheduler.number, record.get_security()
        self.place = Place(self.place.folder, number, record.id, security)
        self.scheduler = self.make_scheduler()
        self.scheduler.address = record.scheduler.address
        session = record.scheduler.session or ""
        self.scheduler.adopt(session, record.launches.get(session), record.scheduler.app_url)

    def attach_launched(self, record: Record) -> list[str]:
        """Attach the sessions that other managers have launched, as far as they are in the record.

        Return the names of those that are not.
        """
        launches = {each.key: each for each in record.launches.values()}
        unknown = [each for each in self._fleet.members if each.launched and each.worker is None]
        for launch in [launches[each.name] for each in unknown if each.name in launches]:
            worker = self.make_worker(launch.key)
            worker.adopt(launch.id, launch)
            self._fleet.attach(launch.key, worker)
        return [each.name for each in unknown if each.worker is None]

    def detach(self, names: Iterable[str]) -> None:
        """Forget workers that another manager has stopped."""
        for name in names:
            worker = self._fleet.detach(name)
            if worker is not None and worker.session_id is not None:
                self.api.forget(worker.session_id)

    # -- processes and plans

    def make_scheduler(self) -> CMLScheduler:
        """Return a scheduler that is not launched yet."""
        return CMLScheduler(self.api, self.options, self.place)

    def make_worker(self, name: str) -> CMLWorker:
        """Return a worker with this name that is not launched yet."""
        address = None if self.scheduler is None else self.scheduler.address
        options = self._fleet.options_of(self._fleet.group_of(name))
        return CMLWorker(address, name, api=self.api, options=options, place=self.place)

    def plans(self) -> str:
        """Return the plans of the scheduler's session and of the next session of each worker group."""
        if self.scheduler is None:  # plans need only the paths of the keys, so no file is written
            self.prepare()
        plans = [str((self.scheduler or self.make_scheduler()).plan)]
        for group in self._fleet.states:
            worker = self.make_worker(session_name(self._fleet.name, group.name, group.wanted.number))
            plans.append(str(worker.plan))
        return "\n".join(plans)

    # -- more workers

    async def launch_workers(self, names: Iterable[str], leads: Callable[[], bool]) -> dict[str, CMLError]:
        """Launch workers that are still wanted, as many at once as the API allows.

        Parameters
        ----------
        names : iterable of str
            The names of the sessions.
        leads : callable
            Returns whether this manager still leads, which is asked immediately before each launch.

        Returns
        -------
        dict
            For the names of sessions whose launch failed, the error. After a refusal, no further ones of the
            worker group were tried. After an error of the platform that may pass, no further ones at all.
        """
        left, why = await asyncio.to_thread(left_for_user, self.place.record, len(self.processes))
        names = [*names]
        failed: dict[str, CMLError] = {name: LaunchRefused(name, why, by="dask-cml") for name in names[left:]}
        refused: set[str] = set()
        queue = iter(names[:left])

        async def launch() -> None:
            for name in queue:
                if not leads() or any(isinstance(error, CallFailed) for error in failed.values()):
                    return
                member = self._fleet.member(name)
                if member is None or member.group in refused or not member.wanted:
                    continue
                worker = self.make_worker(name)
                try:
                    await worker
                except CMLError as error:
                    failed[name] = error
                    if isinstance(error, LaunchRefused):
                        refused.add(member.group)
                except Exception as error:  # the platform's library may raise anything
                    logger.exception("Session %s not launched", name)
                    failed[name] = CMLError(f"{name} not launched: {error!r}")
                else:
                    self._fleet.attach(name, worker)

        # So an exhausted quota refuses only a few of a hundred launches.
        await gather_or_cancel(*[launch() for _ in range(self.api.threads)])
        return failed

    # -- the end of sessions

    @property
    def processes(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        processes = (self.scheduler, *self._fleet.workers.values())
        return [each for each in processes if each is not None and each.session_id]

    def used_sessions(self) -> set[str]:
        """Return the ids of the sessions that are the scheduler's or a worker's, or are being stopped."""
        used = {str(each.session_id) for each in self.processes}
        return used.union(*self._stops.values())

    async def stop(self, ids: Collection[str]) -> None:
        """Stop sessions in a task, so that a call that hangs blocks no other. Wait for it for some seconds.

        Sessions that an earlier call is stopping are left to that call. Those that the platform does not stop
        stay in ``api.live``, and ``api.problem`` says why.
        """
        if not (left := {*ids}.difference(*self._stops.values())):
            return
        task = asyncio.create_task(self.api.stop(*sorted(left)))
        self._stops[task] = left
        task.add_done_callback(self._stopped)
        await asyncio.wait([task], timeout=_STOPS_WITHIN)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        del self._stops[task]
        if not task.cancelled() and (error := task.exception()) is not None:  # the next look tries again
            logger.info("Sessions not stopped yet: %s", error)
        else:
            self._notify_stopped()

    async def close(self) -> None:
        """Stop waiting for sessions that are being stopped."""
        await cancel(*self._stops)
