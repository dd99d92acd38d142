"""The sessions of a cluster: the start of a new cluster, the takeover of a running one, and new workers."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.security import Security

from dask_cml.aio import cancel
from dask_cml.errors import CMLError
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.start_display import StartDisplay
from dask_cml.options import Options
from dask_cml.records import probe
from dask_cml.records.record import Record
from dask_cml.records.session_files import SCHEDULER
from dask_cml.sessions import tls
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI


class Launcher:
    """Creates the sessions of one cluster, with the cluster's options, folder and keys.

    Parameters
    ----------
    api : WorkersAPI
        Launches and stops sessions.
    options : Options
        The cluster's options.
    folder : Path
        The cluster's folder on the project file system.
    fleet : Fleet
        The cluster's workers.

    Attributes
    ----------
    security : distributed.Security or None
        The cluster's keys, in files.
    scheduler : CMLScheduler or None
        The scheduler. None before the start.
    display : StartDisplay or None
        The display of the start.
    """

    def __init__(self, api: WorkersAPI, options: Options, folder: Path, fleet: Fleet[CMLWorker]) -> None:
        self.api = api
        self.options = options
        self.folder = folder
        self.security: Security | None = None
        self.scheduler: CMLScheduler | None = None
        self.display: StartDisplay | None = None
        self._fleet = fleet

    async def launch(self, take_name: Callable[[], Awaitable[None]], show: bool) -> None:
        """Launch a new cluster, and wait until its scheduler answers.

        Parameters
        ----------
        take_name : coroutine function
            Creates the cluster's folder. Raises ClusterExists if another cluster has the name.
        show : bool
            Whether to show the progress.

        Raises
        ------
        ClusterExists, LaunchRefused, SessionFailed, SchedulerTimeout
            As in :class:`dask_cml.CMLCluster`.
        """
        self.security, files = await asyncio.to_thread(tls.as_files, self.options.security, self.folder)
        await take_name()
        self.scheduler = self.make_scheduler()
        await asyncio.to_thread(self._write, files)
        workers = {key: self.make_worker(key) for key in self._fleet.missing}
        for key, worker in workers.items():
            self._fleet.launched(key, worker)
        if show:
            self.display = StartDisplay(self._fleet.name, [self.scheduler, *workers.values()])
        showing = asyncio.create_task(self.display.run()) if self.display else None
        following: asyncio.Task[None] | None = None
        tasks: list[asyncio.Future[Any]] = []
        has_started = False
        try:
            # The scheduler's session first: where sessions wait for room, workers could take its room.
            await self.scheduler.launch()
            following = asyncio.create_task(self._follow(workers.values()))
            # Then the workers at once, because sessions start slowly. They wait for the scheduler file.
            tasks += [asyncio.ensure_future(p) for p in (self.scheduler, *workers.values())]
            await asyncio.gather(*tasks)
            has_started = True
        finally:
            await cancel(*tasks, following, showing)
            if self.display is not None:
                await self.display.end(has_started)

    async def _follow(self, workers: Collection[CMLWorker]) -> None:
        """Update the workers from the platform's list, until cancelled or the platform fails."""
        while True:
            listing = await self.api.sessions()
            for worker in workers:
                worker.update(listing)

    async def rebuild(self, record: Record) -> None:
        """Take over the sessions of a running cluster.

        Parameters
        ----------
        record : Record
            The cluster's record.

        Raises
        ------
        CMLError
            If its scheduler does not answer.
        """
        # As long as Dask's clients wait: a busy scheduler may need it. Without a scheduler this fails at
        # once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if not await probe.is_alive(record, timeout=patience):
            address = record.scheduler_address or "an unknown address"
            raise CMLError(
                f"the scheduler of cluster {record.name!r} does not answer at {address}: to stop its "
                f"sessions, run `dask cml delete {shlex.quote(record.name)}`"
            )
        self.security = record.get_security()
        self.scheduler = self.make_scheduler()
        self.scheduler.address = record.scheduler_address
        session = record.scheduler_session or ""
        self.scheduler.adopt(session, record.app_url, record.owners.get(session))
        for session_id, key in record.sessions.items():
            if key != SCHEDULER:
                self.attach(key, session_id, record.owners.get(session_id))
        for group in self._fleet.states:
            self._fleet.follow(len(group.keys), group=group.name)

    def make_scheduler(self) -> CMLScheduler:
        """Return a scheduler that is not launched yet."""
        return CMLScheduler(self.api, self.options, self.folder, self.security)

    def make_worker(self, key: str) -> CMLWorker:
        """Return a worker that is not launched yet.

        Parameters
        ----------
        key : str
            The worker's name.
        """
        address = None if self.scheduler is None else self.scheduler.address
        options = self._fleet.options_of(key)
        return CMLWorker(
            address, key, api=self.api, options=options, folder=self.folder, security=self.security
        )

    def attach(self, key: str, session_id: str, owner: str | None = None) -> None:
        """Take over a worker that another manager launched.

        Parameters
        ----------
        key : str
            The worker's name.
        session_id : str
            The id of its session.
        owner : str, optional
            The id of the session with which it ends.
        """
        worker = self.make_worker(key)
        worker.adopt(session_id, owner=owner)
        self._fleet.attach(key, worker)

    def detach(self, key: str) -> None:
        """Forget a worker that another manager stopped."""
        worker = self._fleet.drop(key)
        if worker is not None and worker.session_id is not None:
            self.api.forget(worker.session_id)

    def plans(self) -> str:
        """Return the plans of the scheduler's session and of the next session of each worker group."""
        if self.security is None:  # plans need only the paths, so no file is written
            self.security, _ = tls.as_files(self.options.security, self.folder)
        scheduler = self.scheduler or self.make_scheduler()
        new = [self.make_worker(group.new_key) for group in self._fleet.states]
        return "\n".join(str(each.plan) for each in (scheduler, *new))

    def _write(self, files: Mapping[Path, str]) -> None:
        tls.write(files)
        if self.options.log_directory is not None:
            Path(self.options.log_directory).mkdir(parents=True, exist_ok=True)
