"""A worker's life: it is wanted, launched, connected, retired and stopped.

:class:`Workers` launches, adopts and stops sessions. A :class:`Backoff` pauses after failures and refusals.
:class:`Retirements` chooses the workers to close, which first move their data to other workers.

Calls of the platform and of the scheduler run in tasks: a call that hangs blocks nothing else.

A worker's session is the session that took the worker's name, whoever launched it. An answer of the platform
may be lost, and several sessions be launched under one name. These say which one it is, the surest first:

- the Dask worker that is connected, which names its session: :meth:`Workers.take_connected`;
- the file with which a session takes the name, so that others exit: :meth:`Workers.claim`, ``take_started``;
- the record, into which keepers and sessions enter launches: ``Keeper.succeed``, ``Keeper.find_strays``;
- the platform's answer to the launch: ``Workers.launch_one``. Sessions that no worker uses then are stopped:
  ``Workers.find_unused``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.protocol import pickle

from dask_cml import protocol
from dask_cml.cancellation import cancel, gather_or_cancel, start_call, within
from dask_cml.checks import is_session_id
from dask_cml.display import StartDisplay
from dask_cml.errors import CallFailed, CMLError, LaunchRefused
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import describe, room, setting
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER, Report
from dask_cml.sessions import api_v2
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import CMLProcess, CMLScheduler, CMLWorker, Session, class_of
from dask_cml.sessions.workers_api import SessionInfo, has_ended
from dask_cml.timing import timing
from dask_cml.words import command

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: More doublings of a pause change nothing, and a float has room for a thousand.
_MOST_DOUBLINGS = 10
#: Seconds for which a connection has to hold, so that earlier failures do not count any more, and so that the
#: pauses begin anew. Connections that break every minute are to be repaired by pauses, not by full speed.
_SETTLED, _LASTING = 30.0, 600.0
#: How many sessions of a group say how long its sessions take to start.
_LAST_STARTS = 20
#: Maximum time for workers to move their data, in seconds. Their keeper watches them meanwhile.
_NO_LIMIT = 7 * 24 * 3600.0
#: Dask workers that leave at once. The scheduler tells all others of every one, and is held meanwhile.
_AT_ONCE = 100


class Backoff:
    """Counts failures in a row of one worker group, and keeps how many sessions the platform launched for it.

    When a user scales the group, a new Backoff replaces this one.

    Parameters
    ----------
    limit : int
        Number of failures in a row after which no workers are launched (``cml.failure-limit``).
    quota_pause : float
        Pause after a refused launch, in seconds (``cml.quota-retry``).

    Attributes
    ----------
    is_limited : bool
        Whether the user knows that the site's limits allow fewer sessions than adaptive scaling wants.

    Examples
    --------
    >>> backoff = Backoff(limit=5, quota_pause=60.0)
    >>> backoff.failed("the worker's session 1 ended", 2)
    False
    >>> backoff.words
    "the worker's session 1 ended (and 1 more)"
    >>> backoff.arrived(0.0)
    >>> backoff.words
    """

    def __init__(self, limit: int, quota_pause: float) -> None:
        self._limit, self._quota_pause = limit, quota_pause
        self._failures, self._pauses, self._not_before = 0, 0, 0.0
        self._arrived: float | None = None
        #: When a launch or a worker failed last.
        self._failed_at = -math.inf
        #: How many sessions the platform launched when it refused one last, and when.
        self._ceiling: tuple[int, float] | None = None
        self._failure: str | None = None
        self._shortage: str | None = None
        #: Whether more sessions are wanted than the platform launched when it refused one last.
        self._is_short = False
        self.is_limited = False

    @property
    def words(self) -> str | None:
        """The problem: failures until a worker connects, or a refusal until more sessions are launched."""
        return self._failure or self.shortage

    @property
    def shortage(self) -> str | None:
        """Why the platform has launched only some of the wanted sessions. None: it has launched all."""
        return self._shortage if self._is_short else None

    # -- failures

    @property
    def failures(self) -> int:
        """The number of failures in a row. It is 0 if none has followed the last connection for a while."""
        return 0 if self._settled_for > _SETTLED else self._failures

    @property
    def gave_up(self) -> bool:
        """Whether no workers are launched until the group is scaled, after too many failures."""
        return self.failures >= self._limit

    @property
    def pause(self) -> float:
        """Seconds until the next launch. Infinite after too many failures."""
        return math.inf if self.gave_up else max(0.0, self._not_before - time.monotonic())

    @property
    def _settled_for(self) -> float:
        """Seconds since the last connection, if no failure has followed it."""
        return 0.0 if self._arrived is None else time.monotonic() - self._arrived

    def begin_after(self, failures: int, why_gave_up: str | None) -> None:
        """Begin after the failures in a row that another process has counted."""
        self._failures = self._pauses = failures
        if why_gave_up is not None:  # its limit may be lower than the limit here
            self._failures, self._failure = max(failures, self._limit), why_gave_up
        self._pause()

    def arrived(self, now: float) -> None:
        """Record that a worker connected."""
        self._failure = None
        self._arrived = now

    def failed(
        self, reason: str, n: int, began: float = math.inf, *, lasted: float = 0.0, counts: bool = True
    ) -> bool:
        """Record that `n` launches or workers failed together, which counts as one failure.

        Workers that were launched before others failed do not count again, as when the nodes of a cluster are
        drained one by one.

        Parameters
        ----------
        reason : str
            Why the first of them failed.
        n : int
            Their number.
        began : float
            When the last of them was launched.
        lasted : float
            For how long the first of them was connected, in seconds.
        counts : bool
            Whether too many such failures stop further launches. Those of tasks make the next launches wait,
            but never stop them: the scheduler gives a task up that ends several workers.

        Returns
        -------
        bool
            Whether this was the last failure, after which no workers are launched.
        """
        if began < self._failed_at:
            return False
        lasted = max(lasted, self._settled_for)
        if lasted > _SETTLED:
            self._failures = 0
        if lasted > _LASTING:
            self._pauses = 0
        self._failures += counts
        self._pauses += 1
        self._arrived, self._failed_at = None, time.monotonic()
        self._pause()
        self._failure = f"{reason} (and {n - 1} more)" if n > 1 else reason
        gives_up = counts and self.gave_up
        if gives_up:
            self._failure = f"no new workers after {self._failures} failures in a row: {reason}"
        return gives_up

    def _pause(self) -> None:
        doublings = min(self._pauses - 1, _MOST_DOUBLINGS)
        pause = min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE)
        self._not_before = time.monotonic() + (pause if self._pauses > 1 else 0)

    # -- refusals

    def refused(self, granted: int, shortage: str) -> bool:
        """Record that the platform launched only `granted` sessions. Return whether that is new."""
        is_new = self.refused_at != granted
        self._ceiling = (granted, time.monotonic())
        self._is_short, self._shortage = True, shortage
        if not self.gave_up:  # the refusal is newer than the failure
            self._failure = None
        return is_new

    def begin_with_ceiling(self, granted: int, shortage: str | None) -> None:
        """Begin after a refusal of another process, and ask for one more session at once."""
        self._ceiling, self._shortage, self._is_short = (granted, -math.inf), shortage, shortage is not None

    @property
    def refused_at(self) -> int | None:
        """How many sessions the platform had launched when it refused one last. None: it has not since."""
        return None if self._ceiling is None else self._ceiling[0]

    def granted(self, n: int) -> None:
        """Record that the platform has launched `n` sessions in total."""
        if self._ceiling is None or n > self._ceiling[0]:
            self._shortage = self._ceiling = None

    @property
    def ceiling(self) -> float:
        """How many sessions to have at most: as many as the platform launched when it refused one last.

        After ``cml.quota-retry``, it is one more. Infinite if the platform has not refused any since.
        """
        if self._ceiling is None:
            return math.inf
        granted, since = self._ceiling
        return granted + 1 if time.monotonic() - since > self._quota_pause else granted

    def affordable(self, n: int, wanted: int, waits: Collection[float]) -> int:
        """Return how many of `n` sessions to ask for: no more than :attr:`ceiling`.

        If sessions have been queued for longer than ``cml.quota-retry``, ask for no more than exist.

        Parameters
        ----------
        n : int
            Number of sessions to launch.
        wanted : int
            Number of sessions that are wanted already.
        waits : collection of float
            How long queued sessions have waited, in seconds.
        """
        if any(waited > self._quota_pause for waited in waits):
            n = min(n, wanted)
        self._is_short = self._ceiling is not None and n > self._ceiling[0]
        return int(min(n, self.ceiling))


def startup_information(cluster: CMLCluster) -> dict[str, Mapping[str, Any]]:
    """Return what the connected Dask workers report of themselves, see :mod:`dask_cml.worker.process`."""
    infos = [*cluster.scheduler_info["workers"].values()]
    return {str(info["name"]): info.get("cml") or {} for info in infos}


def connected_names(cluster: CMLCluster) -> set[str]:
    """Return the names of all Dask workers that are connected to a cluster's scheduler."""
    return {str(info["name"]) for info in [*cluster.scheduler_info["workers"].values()]}


class Workers:
    """The sessions of a cluster that this process keeps: which exist, which are launched, which are stopped.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster. ``worker_spec`` says which workers are wanted, and ``workers`` which are launched.
    """

    def __init__(self, cluster: CMLCluster) -> None:
        self._cluster = cluster
        self.retirements = Retirements(cluster, self)
        limit, pause = setting("failure-limit"), setting("quota-retry")
        self._backoffs = defaultdict[str, Backoff](lambda: Backoff(limit, pause))
        #: How long the last sessions of each group took from their launch until they connected, in seconds.
        self._starts: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STARTS))
        #: The tasks that "launch" or "retire" workers, with their names, and that "stop" sessions, with ids.
        self._under_way = defaultdict[str, dict[asyncio.Task[None], set[str]]](dict)

    # -- which exist

    @property
    def launched(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        found = [self._cluster.scheduler, *self.workers()]  # None: the scheduler is not launched
        return [process for process in found if isinstance(process, CMLProcess) and process.session_id]

    def workers(self) -> list[CMLWorker]:
        """Return the workers on sessions of the platform, wanted or not."""
        return [worker for worker in [*self._cluster.workers.values()] if isinstance(worker, CMLWorker)]

    def wanted(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that were launched, of one group or of all."""
        names = {*(self._cluster.groups.workers(group) if group else self._cluster.worker_spec)}
        return [worker for worker in self.workers() if worker.name in names]

    @property
    def unwanted(self) -> list[CMLWorker]:
        """The workers that were launched, and are not wanted any more."""
        wanted = {*self._cluster.worker_spec}
        return [worker for worker in self.workers() if worker.name not in wanted]

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
        return [worker for worker in self.wanted(group) if worker.waits_for is not None]

    @property
    def sessions(self) -> Iterator[Session]:
        """The sessions that this process launches and stops, the scheduler's first."""
        return (session for process in self.launched if (session := process.session) is not None)

    def known(self, group: str) -> list[str]:
        """Return the names of a group's sessions, wanted or not, whichever process launches them."""
        return [session.name for session in self._cluster.sessions if session.group == group]

    def waits(self, sessions: Iterable[Session], group: str | None = None) -> list[float]:
        """Return for how long those of these sessions that are wanted and queued have waited, in seconds."""
        absent = {*self._cluster.groups.workers(group)} - self.arrived(group)
        return [session.age for session in sessions if session.waits and session.name in absent]

    @property
    def unused(self) -> dict[str, str]:
        """The sessions without a process, such as the engines of refused launches, and their names."""
        used = {process.session_id for process in self.launched}
        live, launching = [*self._cluster.api.live.items()], self.launching
        # A session that was just launched has no worker yet.
        return {session: name for session, name in live if session not in used and name not in launching}

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

    def take_over(self, last: Report) -> None:
        """Begin with what the last keeper has reported, instead of what this process knew before."""
        self._backoffs.clear()
        for group, n in last.failures.items():
            self.backoff(group).begin_after(n, last.gave_up.get(group))
        for group, granted in last.ceilings.items():
            self.backoff(group).begin_with_ceiling(granted, last.shortages.get(group))
        for group in last.limited:
            self.backoff(group).is_limited = True
        self._starts.clear()
        for group, seconds in last.start_times.items():
            self._starts[group].append(seconds)

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
        groups, sessions, backoff = self._cluster.groups, self.sessions, self.backoff(group)
        fit, limit = room(groups.options(group).worker, groups.others(group))
        if n > fit and not backoff.is_limited:
            backoff.is_limited = True
            because = f"because {describe(limit)}"
            self._cluster._tell(f"{self._subject(group)} adapts to {int(fit)} of {n} workers, {because}")
        return backoff.affordable(int(min(n, fit)), len(groups.workers(group)), self.waits(sessions, group))

    def _subject(self, group: str) -> str:
        """Return a group as the subject of a line for the user."""
        name = self._cluster.options.name
        return f"Cluster {name}" if group == DEFAULT_GROUP else f"Group {group} of cluster {name}"

    def tell_giving_up(self, group: str) -> None:
        """Tell the user that no more workers of a group are launched."""
        again = f"To try again, run {command('scale', self._cluster.options.name, 'N', group=group)}"
        self._cluster._tell(f"{self._subject(group)} launches {self.backoff(group).words}. {again}")

    # -- start

    async def create(self) -> None:
        """Launch the scheduler and all wanted workers, and show the progress.

        Raises
        ------
        LaunchRefused, SessionFailed, SchedulerTimeout
            As in :class:`dask_cml.CMLCluster`, also for a worker.
        """
        cluster, options = self._cluster, self._cluster.options
        names = [*cluster.worker_spec]  # a user may scale meanwhile
        # Before the scheduler's session is launched: a spec or a label may be invalid.
        await cluster.api.find_labels(options.scheduler_launch_options, "scheduler_launch_options")
        for group in (options, *options.groups().values()):
            await cluster.api.find_labels(group.launch_options)
        for name in names:
            self.make(name)
        shown = StartDisplay(cluster, names)
        asking = start_call(api_v2.quota_left)

        async def launch() -> None:
            # Not later: as soon as the workers are launched, the platform counts them as used.
            if asking.done():
                shown.notice = api_v2.shortage(cluster.groups.others()[1:], asking.result()) or ""
            await gather_or_cancel(*[self.launch_one(name) for name in names])

        showing = None if cluster._quiet else asyncio.create_task(shown.run())
        has_started = False
        try:
            await self.start(launch)
            has_started = True
        finally:
            if showing is not None:
                await cancel(showing)
                await shown.end(has_started)
        if shown.notice:
            cluster._tell(f"Cluster {options.name}: {shown.notice}")

    async def start(self, launch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Launch the scheduler and, as soon as the platform has accepted it, the workers.

        Return when the scheduler answers. SpecCluster._start (spec.py:304) waits for it before.

        Parameters
        ----------
        launch : callable
            Launches the workers. What it leaves under way goes on, also after an error.

        Raises
        ------
        LaunchRefused, SessionFailed, SchedulerTimeout
            As in :class:`dask_cml.CMLCluster`.
        """
        cluster = self._cluster
        arguments = {"api": cluster.api, "place": cluster.place, **cluster.scheduler_spec["options"]}
        scheduler: CMLScheduler = class_of(cluster.scheduler_spec)(**arguments)
        # The scheduler's session first: in a queue, workers could take its place.
        await scheduler.launch()
        cluster.scheduler = scheduler  # only now: whoever awaits the cluster would launch it, too
        await cluster.sharing.keeper.journal.write(self.launched)
        watching = asyncio.create_task(self._watch())
        try:
            # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
            await gather_or_cancel(cluster.sharing.join(scheduler), launch())
        finally:
            await cancel(watching)

    async def _watch(self) -> None:
        """Update workers from the platform's list, until cancelled."""
        while True:
            try:
                listing = await self._cluster.api.sessions()
            except CallFailed:  # the scheduler may still connect
                continue
            for worker in self.workers():
                worker.update(listing)
            await self._cluster.sharing.keeper.journal.write(self.launched)

    # -- launch

    @property
    def launching(self) -> set[str]:
        """The names of the workers that are being launched."""
        return set().union(*self._under_way["launch"].values())

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
        await self.run("launch", launches, timing.launch)

    async def run(
        self, verb: str, calls: Mapping[Coroutine[Any, Any, None], set[str]], seconds: float
    ) -> None:
        """Make calls in tasks, and wait some seconds for them. Look at the sessions when a late one ends."""
        under_way = self._under_way[verb]
        tasks = {asyncio.create_task(call): names for call, names in calls.items()}
        under_way |= tasks
        for task in tasks:
            task.add_done_callback(under_way.pop)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            if not task.done():
                task.add_done_callback(lambda _: self._cluster.look.woken.set())
            elif not task.cancelled():
                task.result()

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
                if cluster.status != Status.running or not (unasked or cluster.sharing.keeper.may_launch):
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

    async def launch_one(self, name: str) -> None:
        """Launch the session of a wanted worker, as its spec says: :meth:`CMLWorker.start` does.

        Raises
        ------
        CMLError
            If the platform refuses the launch, or does not answer.
        """
        if name not in self._cluster.worker_spec:  # a user has scaled down
            return
        worker = self.make(name)
        try:
            await worker
        except CMLError:
            if name in self._cluster.worker_spec:
                raise
            return
        if name not in self._cluster.workers:  # else its session was found meanwhile
            self._cluster.workers[name] = worker
            if isinstance(worker, CMLProcess):  # a subclass may use any class
                await self._cluster.sharing.keeper.journal.enter(worker)
            self._cluster.sharing.keeper.event("launched", name)

    def make(self, name: str) -> Any:
        """Return a worker that is not launched yet. A subclass may use any class.

        If it is not wanted, its spec is that of the default group.
        """
        self._cluster.groups.given([name])
        spec = self._cluster.worker_spec.get(name) or self._cluster.groups.spec(DEFAULT_GROUP)
        scheduler = self._cluster.scheduler
        cls, arguments = class_of(spec), {"name": name, **spec.get("options", {})}
        if isinstance(cls, type) and issubclass(cls, CMLWorker):
            of_cluster = {"api": self._cluster.api, "place": self._cluster.place}
            arguments |= {**of_cluster, "worker_group": spec.get("worker_group", DEFAULT_GROUP)}
        return cls(None if scheduler is None else scheduler.address, **arguments)

    # -- adopt

    async def find_unused(self) -> set[str]:
        """Let every wanted worker be the session that took its name, also if its launch was not answered.

        Return the sessions that are no worker's.
        """
        connected, unused = self.take_connected(), self.unused
        claimed = {session: name for session, name in unused.items() if name not in connected}
        answers = await gather_or_cancel(*map(self.claim, claimed, claimed.values()))
        unknown = {session for session, answer in zip(claimed, answers, strict=True) if answer is None}
        return (unused.keys() & self.unused.keys()) - unknown if unused else unknown

    async def claim(self, session: str, name: str, launch: Launch | None = None) -> bool | None:
        """Let a wanted worker be the session that took its name, or that the record names.

        Return whether it is that now. None: nobody can read which session took the name.
        """
        known = self._cluster.workers.get(name)
        if name not in self._cluster.worker_spec:
            return False
        if not isinstance(worker := known or self.make(name), CMLWorker):
            return False
        started = await worker.read_started()
        if started != session and (started or known or launch is None):
            return None if started is None else False
        self.adopt(session, name, launch)
        return True

    def take_connected(self) -> dict[str, str]:
        """Let every wanted worker be the session in which its Dask worker runs. Return all such sessions.

        If the answer to a launch is lost, the launch is repeated. The first session may take the name, and
        the worker be that of the second answer.
        """
        sessions = {}
        for info in startup_information(self._cluster).values():
            if info.get("name") and is_session_id(info.get("session")):
                sessions[info["name"]] = info["session"]
        unanswered = self.launching - self._cluster.workers.keys()
        for name in sessions.keys() & {*self._cluster.worker_spec} - unanswered:
            self.adopt(sessions[name], name)
        return sessions

    async def take_started(self, workers: Iterable[CMLWorker], listing: Mapping[str, SessionInfo]) -> None:
        """Let workers whose sessions have exited be the sessions that took their names, if these run."""
        exited = [worker for worker in workers if worker.has_ended and not worker.seen]
        found = await asyncio.gather(*(worker.read_started() for worker in exited))
        for worker, session in zip(exited, found, strict=True):
            if session and session in listing and not has_ended(listing[session]):
                self.adopt(session, worker.name)

    def adopt(self, session: str, name: str, launch: Launch | None = None, waits: bool = False) -> None:
        """Let a worker be a session that was launched before, see :meth:`CMLProcess.adopt`.

        If nobody wants it, the next step retires it, and then stops its session.
        """
        worker = self._cluster.workers.get(name) or self.make(name)
        if not isinstance(worker, CMLWorker) or worker.session_id == session:
            return
        logger.info("Session %s used as %s", session, name)
        if name not in self._cluster.worker_spec:  # its options are unknown
            workers = startup_information(self._cluster)
            worker.dask_names = [name for name, info in workers.items() if info.get("session") == session]
            worker.group = launch.worker_group(self._cluster.options.name) if launch else DEFAULT_GROUP
        worker.adopt(session, launch, waits=waits)
        self._cluster.workers[name] = worker

    # -- stop

    @property
    def stopping(self) -> set[str]:
        """The sessions that are being stopped."""
        return set().union(*self._under_way["stop"].values())

    async def stop(self, ids: Collection[str]) -> None:
        """Stop sessions in a task. Wait some seconds for it."""
        if new := {*ids} - self.stopping:
            await self.run("stop", {self._stop(new): new}, timing.stop)

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

    async def unregister(self, names: Collection[str]) -> None:
        """Make the scheduler count Dask workers as lost, so that their tasks run elsewhere.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        for address, info in [*self._cluster.scheduler_info["workers"].items()]:
            if str(info["name"]) in names:
                stimulus = f"cml-drop-{time.time()}"
                await self._cluster.sharing.link.ask("unregister", address=address, stimulus_id=stimulus)

    # -- the end

    async def stop_launching(self, patience: float = 0.0) -> None:
        """Wait for launches some seconds at most. A session that is launched later is stopped by its id."""
        if patience and (launches := self._under_way["launch"].keys()):
            await asyncio.wait(launches, timeout=patience)
        await self.cancel("launch")

    async def cancel(self, verb: str) -> None:
        """Wait no more for what is under way."""
        await cancel(*self._under_way[verb])

    async def close(self) -> None:
        """Wait for no launch, no stop and no retirement any more."""
        await self.cancel("launch")
        self.take_connected()  # other processes are to find the sessions of the workers
        await self.cancel("stop")
        await self.cancel("retire")


class Retirements:
    """Retires workers in tasks, so that a worker that does not answer blocks nothing else.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    processes : Workers
        Its sessions.
    """

    def __init__(self, cluster: CMLCluster, processes: Workers) -> None:
        self._cluster = cluster
        self._processes = processes
        self._limit: float = setting("retire-timeout")

    @property
    def staying(self) -> Sequence[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        connected = connected_names(self._cluster)  # a dead worker has no data any more
        unwanted = [worker for worker in self._processes.unwanted if not worker.is_retired]
        holding = [worker for worker in unwanted if not connected.isdisjoint(worker.dask_names)]
        return [worker.name for worker in holding if worker.cannot_move_to is not None]

    @property
    def words(self) -> str | None:
        """The workers whose retirement takes long, or is not possible now. None if there are none."""
        limit = time.monotonic() - timing.long_retirement
        unwanted = self._processes.unwanted
        late = [worker.name for worker in unwanted if (worker.retiring_since or math.inf) < limit]
        names = sorted({*late, *self.staying})
        return f"waiting for the data of {', '.join(names)}" if names else None

    async def choose(
        self,
        group: str,
        n: int,
        worker_key: Callable[[WorkerState], Hashable] | None = None,
        **arguments: Any,
    ) -> list[str]:
        """Choose the `n` workers of a group that cost least to close. Workers that are absent come first.

        Parameters
        ----------
        group : str
            The group.
        n : int
            Number of sessions.
        worker_key : callable, optional
            Groups workers that are closed together or not at all. Then the result may be fewer than `n`.
        **arguments
            Arguments of ``Scheduler.workers_to_close``.
        """
        absent = self._processes.absent(group)[:n]
        n -= len(absent)
        if n <= 0:
            return absent
        # All, because the scheduler may name workers of other groups and retiring workers first.
        n_dask_workers = n * self._cluster.groups.options(group).processes if worker_key else 10**6
        arguments |= {"n": n_dask_workers, "key": pickle.dumps(worker_key) if worker_key else None}
        answer: Iterable[str] = ()  # if the scheduler does not answer
        with contextlib.suppress(*NO_ANSWER, CMLError):
            answer = await self._cluster.sharing.link.ask("workers_to_close", attribute="name", **arguments)
        costs = {str(worker): cost for cost, worker in enumerate(answer)}
        # Of the Dask workers of a session, the worker that costs most counts.
        workers, arrived = self._cluster.groups.dask_workers(group), self._processes.arrived(group)
        session_costs = {}
        for name in reversed(workers):  # the newest first
            if name in arrived:
                session_costs[name] = max(costs.get(worker, math.inf) for worker in workers[name])
        chosen = sorted(session_costs, key=session_costs.__getitem__)
        if worker_key:
            chosen = [name for name in chosen if not math.isinf(session_costs[name])]
        return absent + chosen[:n]

    async def retire(self, unwanted: Sequence[CMLWorker]) -> list[CMLWorker]:
        """Let unwanted workers move their data, and wait for some seconds: most do in less.

        Return the workers whose sessions can be stopped.
        """
        connected = connected_names(self._cluster)
        holding = {worker for worker in unwanted if not connected.isdisjoint(worker.dask_names)}
        begun = [worker for worker in unwanted if worker in holding and self._may_retire(worker, connected)]
        if begun:
            for worker in begun:
                worker.retiring_since = time.monotonic()
            names = {worker.name for worker in begun}
            await self._processes.run("retire", {self._retire(begun): names}, timing.usual_retirement)
        return [worker for worker in unwanted if worker.is_retired or worker not in holding]

    def _may_retire(self, worker: CMLWorker, connected: set[str]) -> bool:
        """Return whether to retire a worker now, or again because others have connected since."""
        if worker.is_retired or worker.retiring_since is not None:
            return False
        if worker.cannot_move_to is None or not self._cluster.worker_spec:
            return True
        return not connected.difference(worker.dask_names) <= worker.cannot_move_to

    async def _retire(self, workers: Sequence[CMLWorker]) -> None:
        """Retire workers. A worker stays if it holds data that no other worker can take."""
        connected = connected_names(self._cluster)  # others that connect meanwhile can take it
        try:
            staying = await self._hand_over(workers, connected)
        except NO_ANSWER as error:
            # The next step tries again, because the data may still be in these workers.
            logger.info("Workers %s not retired yet: %r", [worker.name for worker in workers], error)
        except CMLError as error:  # of Dask's handler
            logger.warning("Workers %s not retired yet: %s", [worker.name for worker in workers], error)
        else:
            for worker in workers:
                # With scale(0), the last worker stops even if its data is lost.
                worker.is_retired = worker.name not in staying or not self._cluster.worker_spec
                if worker.is_retired:
                    continue
                if worker.cannot_move_to is None:
                    self._cluster._tell(f"Worker {worker.name} stays until other workers can take its data")
                worker.cannot_move_to = connected.difference(worker.dask_names)
        finally:
            for worker in workers:
                worker.retiring_since = None

    async def _hand_over(self, workers: Sequence[CMLWorker], connected: set[str]) -> set[str]:
        """Move the data of workers to others. Return the workers whose data no other worker can take."""
        sessions = {}
        for worker in workers:
            for name in connected.intersection(worker.dask_names):
                sessions[name] = worker.name
        watching = asyncio.create_task(self._watch(workers, sessions))
        try:
            left = sessions.keys() - await self._retire_from_dask(sorted(sessions))
        finally:
            await cancel(watching)
        held = await self._cluster.sharing.link.ask(protocol.HELD, names=sorted(left)) if left else {}
        holding = {sessions[name] for name in left & held.keys() if held[name]["nbytes"]}
        if holding:
            # The platform may list a session as ended before the scheduler notices it.
            with contextlib.suppress(CMLError):
                listing = await self._cluster.api.sessions_within(timing.listing)
                if listing is not None:
                    holding -= {worker.name for worker in workers if worker.update(listing)}
        return holding

    async def _retire_from_dask(self, names: Sequence[str]) -> set[str]:
        """Let the scheduler move the data of Dask workers, and forget them. Return the forgotten ones."""
        if len(names) <= _AT_ONCE:
            return await self._ask_to_retire(names, remove=True)
        # First no worker that leaves takes new tasks or the data of others. Then they leave a few at a time.
        retired = sorted(await self._ask_to_retire(names, remove=False))
        parts = [retired[i : i + _AT_ONCE] for i in range(0, len(retired), _AT_ONCE)]
        return {name for part in parts for name in await self._ask_to_retire(part, remove=True)}

    async def _ask_to_retire(self, names: Sequence[str], remove: bool) -> set[str]:
        # SpecCluster._correct_state_internal (spec.py:359) passes names as addresses, so its workers are
        # closed with their data.
        # A worker that closes by itself runs its teardowns and exit functions, before its session is stopped.
        arguments = {"names": names, "remove": remove, "close_workers": remove}
        retired = await self._cluster.sharing.link.ask("retire_workers", _NO_LIMIT, **arguments)
        return {str(info["name"]) for info in retired.values()}

    async def _watch(self, workers: Sequence[CMLWorker], sessions: Mapping[str, str]) -> None:
        """Log which workers move their data slowly, and abandon workers that fall silent.

        Wait for a slow worker as long as it answers. The data of a frozen worker is out of reach, and its
        session uses quota: two minutes of silence are enough, also of the scheduler. Dask itself would wait
        for five.
        """
        await asyncio.sleep(min(timing.long_retirement, self._limit))
        connected = connected_names(self._cluster)
        late = sorted(worker.name for worker in workers if connected.intersection(worker.dask_names))
        if late:  # else they have left, and only the scheduler has not answered yet
            waiting = f"Cluster {self._cluster.options.name} waiting for other workers to copy the data of "
            self._cluster._tell(waiting + ", ".join(late))
        heard: dict[str, float] = {}
        while True:
            with contextlib.suppress(*NO_ANSWER, CMLError):
                held = await self._cluster.sharing.link.ask(protocol.HELD, names=sorted(sessions))
                before, heard = heard, {name: state["last_seen"] for name, state in held.items()}
                silent = {name for name in heard if heard[name] == before.get(name)}
                for session in sorted({sessions[name] for name in silent}):
                    self._cluster._tell(f"Worker {session} abandoned: no answer for {self._limit:g} s")
                await self._processes.unregister(silent)
            await asyncio.sleep(self._limit)
