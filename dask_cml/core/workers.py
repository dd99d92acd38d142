"""A worker's life: it is wanted, launched, connected, retired and stopped. This module launches and stops.

Calls of the platform run in tasks: a call that hangs blocks nothing else. A worker's session is the session
that took the worker's name, whoever launched it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Collection, Coroutine, Iterable, Mapping
from statistics import fmean
from typing import Any
from weakref import ref

from distributed.core import Status

from dask_cml.cancellation import cancel, gather_or_cancel, within
from dask_cml.checks import is_session_id
from dask_cml.core.backoff import Backoff
from dask_cml.core.view import waits
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import setting
from dask_cml.options.limits import describe, room
from dask_cml.output import get_logger
from dask_cml.sessions.answers import CallFailed, SessionInfo, has_ended
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import CMLWorker, class_of
from dask_cml.sessions.session import CMLProcess, Phase
from dask_cml.timing import timing
from dask_cml.words import command

logger = get_logger(__name__)

#: How many sessions of a group say how long its sessions take to start.
_LAST_STARTS = 20


def connected_names(cluster: Any) -> set[str]:
    """Return the names of all Dask workers that are connected to a cluster's scheduler."""
    return {str(info["name"]) for info in [*cluster.scheduler_info["workers"].values()]}


def said_by(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a Dask worker says of itself, see :mod:`dask_cml.worker.process`."""
    return worker.get("cml") or {}


class Workers:
    """The sessions of a cluster that this process keeps: which exist, which are launched, which are stopped.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster. ``worker_spec`` says which workers are wanted, and ``workers`` which are launched.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        limit, pause = setting("failure-limit"), setting("quota-retry")
        self._backoffs = defaultdict[str, Backoff](lambda: Backoff(limit, pause))
        #: How long the last sessions of each group took from their launch until they connected, in seconds.
        self._starts: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STARTS))
        #: The tasks that launch, with the names of workers, and those that stop, with the ids of sessions.
        self._launching: dict[asyncio.Task[None], set[str]] = {}
        self._stopping: dict[asyncio.Task[None], set[str]] = {}

    # -- which exist

    @property
    def launched(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        scheduler = self._cluster.scheduler
        processes: list[CMLProcess] = [scheduler] if isinstance(scheduler, CMLProcess) else []
        processes += self.workers()
        return [process for process in processes if process.session_id is not None]

    def workers(self) -> list[CMLWorker]:
        """Return the workers on sessions of the platform, wanted or not."""
        return [worker for worker in [*self._cluster.workers.values()] if isinstance(worker, CMLWorker)]

    def wanted(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that were launched, of one group or of all."""
        spec = self._cluster.worker_spec
        names = spec if group is None else {*self._cluster.groups.workers(group)}
        return [worker for worker in self.workers() if worker.name in names]

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        connected, wanted = connected_names(self._cluster), self._cluster.groups.dask_workers(group)
        return {name for name, dask_names in wanted.items() if not connected.isdisjoint(dask_names)}

    def absent(self, group: str) -> list[str]:
        """Return the wanted workers that are not connected: queued workers first, then the newest."""
        arrived, queued = self.arrived(group), {worker.name for worker in self.queued(group)}
        absent = [name for name in reversed(self._cluster.groups.workers(group)) if name not in arrived]
        return sorted(absent, key=lambda name: name not in queued)

    def queued(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that are queued."""
        return [worker for worker in self.wanted(group) if worker.phase is Phase.QUEUED]

    @property
    def unused(self) -> dict[str, str]:
        """The sessions without a process, such as the engines of refused launches, and their names."""
        used = {process.session_id for process in self.launched}
        live, launching = [*self._cluster.api.live.items()], self.launching
        # A session that was just launched has no worker yet.
        return {id: name for id, name in live if id not in used and name not in launching}

    def drop(self, names: Iterable[str]) -> None:
        """Want fewer workers, without these names of sessions or Dask workers."""
        sessions = {name: worker.name for worker in self.workers() for name in worker.dask_names}
        self._cluster.groups.drop(sessions.get(name, name) for name in names)

    # -- failures, refusals and start times of groups

    def backoff(self, group: str = DEFAULT_GROUP) -> Backoff:
        """Return the backoff of a group."""
        return self._backoffs[group]

    @property
    def backoffs(self) -> dict[str, Backoff]:
        """The backoffs of all groups, by name."""
        return {group: self.backoff(group) for group in self._cluster.groups.names}

    def begin_anew(self, group: str) -> None:
        """Forget the failures of a group, because a user has changed it."""
        self._backoffs.pop(group, None)

    def take_over(
        self, failures: Mapping[str, int], gave_up: Mapping[str, str], start_times: Mapping[str, float]
    ) -> None:
        """Begin with what the last keeper has reported, instead of what this process knew before."""
        self._backoffs.clear()
        for group, n in failures.items():
            self.backoff(group).begin_after(n, gave_up.get(group))
        self._starts.clear()
        for group, seconds in start_times.items():
            self._starts[group].append(seconds)

    @property
    def failures(self) -> dict[str, int]:
        """The failures in a row of the groups that have had some."""
        return {group: backoff.failures for group, backoff in self.backoffs.items() if backoff.failures}

    @property
    def problem(self) -> str | None:
        """The failures and refusals of all groups, as a clause. None if there are none."""
        words = {group: backoff.words for group, backoff in self.backoffs.items() if backoff.words}
        failures = [text if group == DEFAULT_GROUP else f"{group}: {text}" for group, text in words.items()]
        return "; ".join(failures) or None

    @property
    def pause(self) -> float:
        """Seconds until the next launch of a group that pauses. Infinite if none pauses."""
        return min([backoff.pause or float("inf") for backoff in self.backoffs.values()])

    @property
    def start_times(self) -> dict[str, float]:
        """How long sessions of the groups take to start, as far as this is known, in tenths of a second."""
        times = {group: round(self.start_time(group), 1) for group in self._cluster.groups.names}
        return {group: seconds for group, seconds in times.items() if seconds}

    def start_time(self, group: str) -> float:
        """Return how long a session of a group takes from its launch until its Dask worker connects.

        Before the first one has connected, this is the time that the scheduler's session took. 0: unknown.
        """
        if starts := self._starts.get(group):
            return fmean(starts)
        return getattr(self._cluster.scheduler, "start_time", None) or 0.0

    def note_arrival(self, worker: CMLWorker) -> None:
        """Note that all Dask workers of a session have connected."""
        group = self._cluster.groups.group_of(worker.name)
        self.backoff(group).arrived(time.monotonic())
        if not worker.adopted:
            self._starts[group].append(worker.launched_for)

    def affordable(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group to ask for, by the site's limits and what was refused."""
        groups, backoff = self._cluster.groups, self.backoff(group)
        fit, limit = room(groups.options(group).worker, groups.others(group))
        if n > fit and not backoff.is_limited:
            backoff.is_limited = True
            because = f"because {describe(limit)}"
            self._cluster._tell(f"{self._subject(group)} adapts to {int(fit)} of {n} workers, {because}")
        return backoff.affordable(int(min(n, fit)), len(groups.workers(group)), waits(self._cluster, group))

    def _subject(self, group: str) -> str:
        """Return a group as the subject of a line for the user."""
        name = self._cluster.options.name
        return f"Cluster {name}" if group == DEFAULT_GROUP else f"Group {group} of cluster {name}"

    def tell_giving_up(self, group: str) -> None:
        """Tell the user that no more workers of a group are launched."""
        again = f"To try again, run {command('scale', self._cluster.options.name, 'N', group=group)}"
        self._cluster._tell(f"{self._subject(group)} launches {self.backoff(group).words}. {again}")

    # -- launch

    @property
    def launching(self) -> set[str]:
        """The names of the workers that are being launched."""
        return set().union(*self._launching.values())

    @property
    def ready(self) -> dict[str, list[str]]:
        """The wanted workers without a session, by groups, unless these pause after failures or refusals."""
        ready, known = {}, self._cluster.workers.keys() | self.launching
        for group, backoff in self.backoffs.items():
            names = self._cluster.groups.workers(group)
            missing = [name for name in names if name not in known]
            left = max(0, min(backoff.ceiling - len(names) + len(missing), len(missing)))
            if left and not backoff.pause:
                ready[group] = missing[: int(left)]
        return ready

    async def launch(self, names: Mapping[str, Collection[str]], *, unasked: bool = False) -> None:
        """Launch workers of groups in tasks. Wait some seconds for them.

        With `unasked`, no scheduler says yet whether this process keeps the cluster: it launches one.
        """
        launches = {self._launch_together(group, names[group], unasked): {*names[group]} for group in names}
        await self._begin(self._launching, launches, timing.launch)

    async def _begin(
        self,
        under_way: dict[asyncio.Task[None], set[str]],
        calls: Mapping[Coroutine[Any, Any, None], set[str]],
        seconds: float,
    ) -> None:
        """Make calls in tasks, and wait some seconds for them. Look at the sessions when a late one ends."""
        tasks = {asyncio.create_task(call): names for call, names in calls.items()}
        under_way |= tasks
        for task in tasks:
            task.add_done_callback(under_way.pop)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            if not task.done():
                task.add_done_callback(lambda _: self._cluster.woken.set())

    async def _launch_together(self, group: str, names: Collection[str], unasked: bool) -> None:
        """Launch workers of a group, as many at once as the API allows, and count all failures as one.

        After a refusal, no further workers are tried: so an exhausted quota refuses only a few of a hundred
        launches. After an error of the platform that may pass, none either.
        """
        began, cluster, backoff = time.monotonic(), self._cluster, self.backoff(group)
        errors: list[CMLError] = []
        queue = iter(names)

        async def launch() -> None:
            for name in queue:
                if any(isinstance(error, (CallFailed, LaunchRefused)) for error in errors):
                    return
                if not (unasked or (cluster.sharing.keeps and cluster.status == Status.running)):
                    return
                try:
                    await self.launch_one(name)
                except CMLError as error:
                    errors.append(error)
                except Exception as error:  # of a subclass's worker, or of the platform's library
                    logger.exception("Session %s not launched", name)
                    errors.append(CMLError(f"{name} not launched: {error!r}"))

        await gather_or_cancel(*[launch() for _ in range(cluster.api.threads)])
        if self._backoffs.get(group) is backoff:  # else a user has changed the group meanwhile
            self._count(group, names, errors, began)

    def _count(self, group: str, names: Collection[str], errors: list[CMLError], began: float) -> None:
        """Let failed or refused launches delay a group's next ones."""
        cluster, backoff = self._cluster, self.backoff(group)
        refusal = next((error for error in errors if isinstance(error, LaunchRefused)), None)
        if refusal is not None:
            wanted = cluster.groups.workers(group)
            launched = [name for name in wanted if name in cluster.workers]
            if cluster.groups.adapts(group):  # it decides again how many to ask for
                cluster.groups.drop(name for name in names if name not in cluster.workers)
            shortage = f"{len(launched)} of {len(wanted)} workers"
            if backoff.refused(len(launched), f"{shortage} launched: {refusal.reason}"):
                cluster._tell(f"{self._subject(group)} launched {shortage}: {refusal.reason}")
        elif not errors:
            backoff.granted(len(self.wanted(group)))
        elif not isinstance(errors[0], CallFailed):
            gives_up = backoff.failed(str(errors[0]), len(errors), began)
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            cluster._tell(f"Worker failed: {errors[0]}{more}")
            if gives_up:
                self.tell_giving_up(group)

    async def launch_one(self, name: str, worker: Any = None) -> None:
        """Launch the session of a wanted worker, as its spec says: :meth:`CMLWorker.start` does.

        Parameters
        ----------
        name : str
            Its name in ``worker_spec``.
        worker : ProcessInterface, optional
            The worker. Default: a new one.

        Raises
        ------
        CMLError
            If the platform refuses the launch, or does not answer.
        """
        if name not in self._cluster.worker_spec:  # a user has scaled down
            return
        worker = worker or self.make(name)
        await worker
        if name not in self._cluster.workers:  # else its session was found meanwhile
            await self.enter(name, worker)
            self._cluster.sharing.keeper.event("launched", name)

    def make(self, name: str, spec: Mapping[str, Any] | None = None) -> Any:
        """Return a worker that is not launched yet. A subclass may use any class.

        Parameters
        ----------
        name : str
            Its name.
        spec : mapping, optional
            Its spec, in the form of SpecCluster. Default: by ``worker_spec``.
        """
        self._cluster.groups.given([name])
        spec = spec or self._cluster.worker_spec[name]
        scheduler = self._cluster.scheduler
        cls, arguments = class_of(spec), {"name": name, **spec.get("options", {})}
        if isinstance(cls, type) and issubclass(cls, CMLWorker):
            of_cluster = {"api": self._cluster.api, "place": self._cluster.place}
            arguments |= {**of_cluster, "worker_group": spec.get("worker_group", DEFAULT_GROUP)}
        return cls(None if scheduler is None else scheduler.address, **arguments)

    async def enter(self, name: str, worker: Any) -> None:
        """Enter a launched worker into the cluster."""
        self._cluster.workers[name] = worker
        self._cluster._created.add(worker)
        worker._cluster = ref(self._cluster)  # as SpecCluster does
        if isinstance(worker, CMLProcess):  # a subclass may use any class
            await self._cluster.sharing.keeper.journal.enter(worker)

    # -- adopt

    async def find_sessions(self) -> None:
        """Let every wanted worker be the session that took its name, also if its launch was not answered."""
        connected = await self.take_connected()
        for session, name in self.unused.items():
            if name not in connected:
                await self.claim(session, name)

    async def claim(self, session: str, name: str, launch: Launch | None = None) -> bool:
        """Let a wanted worker be the session that took its name, or that the record names. Else: False."""
        known = self._cluster.workers.get(name)
        if name not in self._cluster.worker_spec:
            return False
        if not isinstance(worker := known or self.make(name), CMLWorker):
            return False
        started = await worker.read_started()
        if started != session and (started or known or launch is None):
            return False
        await self.adopt(worker, session, launch)
        return True

    async def take_connected(self) -> set[str]:
        """Let every wanted worker be the session in which its Dask worker runs. Return their names.

        If the answer to a launch is lost, the launch is repeated. The first session may take the name, and
        the worker be that of the second answer.
        """
        said = [said_by(info) for info in [*self._cluster.scheduler_info["workers"].values()]]
        sessions = {about.get("name"): str(about.get("session") or "") for about in said}
        taken = {name for name, session in sessions.items() if name and is_session_id(session)}
        for name in taken & self._cluster.worker_spec.keys():
            worker = self._cluster.workers.get(name)
            if worker is None and name in self._cluster.worker_spec.keys() - self.launching:
                worker = self.make(name)
            if isinstance(worker, CMLWorker) and worker.session_id != sessions[name]:
                await self.adopt(worker, sessions[name])
        return taken

    async def take_started(self, workers: Iterable[CMLWorker], listing: Mapping[str, SessionInfo]) -> None:
        """Let workers whose sessions have exited be the sessions that took their names, if these run."""
        for worker in workers:
            if worker.has_ended and not worker.seen:
                session = await worker.read_started() or ""
                if session in listing and not has_ended(listing[session]):
                    await self.adopt(worker, session)

    async def adopt(self, worker: Any, session: str, launch: Launch | None = None) -> None:
        """Let a wanted worker be a session that was launched before."""
        if self._cluster.workers.get(worker.name, worker) is worker and isinstance(worker, CMLWorker):
            logger.info("Session %s used as %s", session, worker.name)
            worker.adopt(session, launch)
            await self.enter(worker.name, worker)

    def adopt_unwanted(self, session: str, name: str, group: str, launch: Launch | None) -> None:
        """Let the next step retire a worker that nobody wants, and then stop its session."""
        # Its options are unknown.
        worker: CMLWorker = self.make(name, self._cluster.groups.spec(DEFAULT_GROUP))
        infos = [*self._cluster.scheduler_info["workers"].values()]
        worker.dask_names = [str(info["name"]) for info in infos if said_by(info).get("session") == session]
        worker.group = group
        worker.adopt(session, launch)
        self._cluster.workers[name] = worker

    # -- stop

    @property
    def stopping(self) -> set[str]:
        """The sessions that are being stopped."""
        return set().union(*self._stopping.values())

    async def stop(self, ids: Collection[str]) -> None:
        """Stop sessions in a task. Wait some seconds for it."""
        if new := {*ids} - self.stopping:
            await self._begin(self._stopping, {self._stop(new): new}, timing.stop)

    async def _stop(self, ids: Collection[str]) -> None:
        try:
            await self._cluster.api.stop(*sorted(ids))
        except Exception as error:  # of the platform's library, too: the next step tries again
            logger.info("Sessions not stopped yet: %s", error)

    async def close_others(self, kept: Collection[str] = ()) -> None:
        """Close a subclass's workers that are no sessions of the platform, but those that are kept."""

        async def close(name: str) -> None:
            try:
                await within(timing.stop, workers.pop(name).close())
            except Exception as error:  # of its class
                logger.warning("Worker %s not closed: %r", name, error)

        workers = self._cluster.workers
        others = [name for name, worker in workers.items() if not isinstance(worker, CMLWorker)]
        await asyncio.gather(*[close(name) for name in others if name not in kept])

    # -- the end

    async def stop_launching(self, patience: float = 0.0) -> None:
        """Wait for launches some seconds at most. A session that is launched later is stopped by its id."""
        if self._launching and patience:
            await asyncio.wait({*self._launching}, timeout=patience)
        await cancel(*self._launching)

    async def close(self) -> None:
        """Wait for no launch and no stop any more."""
        await self.stop_launching()
        await self.take_connected()  # other processes are to find the sessions of the workers
        await cancel(*self._stopping)
