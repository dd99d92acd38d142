"""Keeps a cluster: SpecCluster's step on CML sessions, and a check of them once a second."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from distributed.utils import import_term

from dask_cml import protocol
from dask_cml.cancellation import cancel, gather_or_cancel, wait_until_set, within
from dask_cml.checks import is_session_id
from dask_cml.display import StartDisplay
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.keeper.adaptive import CMLAdaptive
from dask_cml.keeper.backoff import Backoff
from dask_cml.keeper.groups import Groups
from dask_cml.keeper.journal import Journal
from dask_cml.keeper.losses import find_losses, missing, noticed
from dask_cml.keeper.outbox import Outbox
from dask_cml.keeper.policy import Snapshot, Supply, unrunnable
from dask_cml.keeper.report import Report
from dask_cml.keeper.retirement import Retirements, choose, connected_names, drop
from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import setting
from dask_cml.options.limits import room
from dask_cml.output import Logger
from dask_cml.records import store
from dask_cml.records.operations import left_for_user
from dask_cml.records.record import Record
from dask_cml.remote import BoardState, Remote
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.board import BoardGroup, are_equal
from dask_cml.scheduler.lifetime import NOTICE
from dask_cml.sessions import api_v2
from dask_cml.sessions.answers import CallFailed, SessionInfo, has_ended
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.session import CMLProcess, Session
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.timing import timing

if TYPE_CHECKING:
    from distributed.deploy.spec import SpecCluster

logger = Logger(__name__)

#: Seconds for which a scheduler waits for its first watcher, if it is never an orphan later.
_FIRST_PATIENCE = 300.0
#: Characters of a cause that the scheduler logs.
_LONGEST_CAUSE = 300
#: Maximum number of events that the scheduler does not know yet.
_MOST_EVENTS = 10_000


def _class_of(spec: Mapping[str, Any]) -> Any:
    """Return the class of a worker or a scheduler, which SpecCluster allows to be a name."""
    cls = spec["cls"]
    return import_term(cls) if isinstance(cls, str) else cls


def _about(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a Dask worker says of itself, see :mod:`dask_cml.worker.process`."""
    return worker.get("cml") or {}


class Keeper:
    """Makes the sessions of a cluster what its ``worker_spec`` says.

    :meth:`step` is the body of SpecCluster's ``_correct_state``. Once a second, :meth:`run` finds
    lost workers, replaces them in the spec, and lets the cluster take a step.

    Parameters
    ----------
    cluster : SpecCluster
        The cluster, whose ``worker_spec`` is what is wanted, and whose ``workers`` are what exists.
    groups : Groups
        The worker groups in that spec.
    remote : Remote
        Talks to the scheduler.
    outbox : Outbox
        Writes on the board what users of this process ask for.
    api : WorkersAPI
        Launches, lists and stops sessions.
    record : Record
        The cluster's record.
    log : callable
        Called with every line for the user.

    Attributes
    ----------
    requests : dict of str to int
        How many changes of a worker group users have asked for, as far as they are carried out here.
    woken : asyncio.Event
        Set to check the sessions again at once.
    """

    def __init__(
        self,
        cluster: SpecCluster,
        groups: Groups,
        remote: Remote,
        outbox: Outbox,
        api: WorkersAPI,
        record: Record,
        log: Callable[[str], None],
    ) -> None:
        self.requests: dict[str, int] = dict.fromkeys(groups.names, 0)
        self.woken = asyncio.Event()
        self._cluster, self._groups, self._remote, self._api = cluster, groups, remote, api
        self._outbox, self._record, self._log = outbox, record, log
        self._name = record.name
        self._journal = Journal(api, record)
        self._retirements = Retirements(cluster, remote.ask, api, log, self.woken)
        self._backoffs: dict[str, Backoff] = {}
        self._failure_limit: int = setting("failure-limit")
        self._quota_pause: float = setting("quota-retry")
        self._watch_interval: float = setting("api.watch-interval")
        #: The tasks that launch workers, by the workers' names, and those that stop sessions.
        self._launches: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[asyncio.Task[None], set[str]] = {}
        self._listed = -math.inf
        #: Since when the scheduler has answered. None: it does not.
        self._heard_since: float | None = None
        self._strays: dict[str, float] = {}
        self._next_strays = 0.0
        #: The numbers of the last changes that users of this process have asked for, by their groups. They
        #: are carried out here, and the board may not have them yet.
        self._own_changes: dict[str, int] = {}
        self._closed: set[str] = set()
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] | None = None
        #: What has become of sessions, which the scheduler does not know yet.
        self._events: deque[dict[str, str]] = deque(maxlen=_MOST_EVENTS)
        self._demand: asyncio.Task[dict[str, Any]] | None = None
        self._demanded = 0.0
        #: The subjects of logged lines that are still true.
        self._logged: set[str] = set()
        #: The number of the last restart of a Dask worker that is logged.
        self._last_restart = 0
        self._outage: str | None = None
        self._key_refused = False
        self._unrunnable: str | None = None
        self._sent_url: str | None = None

    # -- what is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        sessions = [process.session for process in self.processes]
        return [session for session in sessions if session is not None]

    @property
    def processes(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        scheduler = self._cluster.scheduler
        processes: list[CMLProcess] = [scheduler] if isinstance(scheduler, CMLProcess) else []
        processes += self.workers()
        return [process for process in processes if process.session_id]

    def workers(self) -> list[CMLWorker]:
        """Return the workers on sessions of the platform, wanted or not."""
        return [worker for worker in [*self._cluster.workers.values()] if isinstance(worker, CMLWorker)]

    def wanted(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that were launched, of one group or of all."""
        names = {*self._groups.workers(group)}
        return [worker for worker in self.workers() if worker.name in names]

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        return self._groups.arrived(connected_names(self._cluster), group)

    def target(self, group: str) -> int:
        """Return how many worker sessions of a group are requested."""
        return self._groups.target(group)

    def limits(self, group: str) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling. None: it has a fixed size."""
        return self._groups.limits(group)

    def absent(self, group: str) -> list[str]:
        """Return the wanted workers that are not connected: queued workers first, then the newest."""
        arrived = self.arrived(group)
        workers = self._cluster.workers
        absent = [name for name in reversed(self._groups.workers(group)) if name not in arrived]
        queued = [name for name in absent if getattr(workers.get(name), "waits_for", None) is not None]
        return queued + [name for name in absent if name not in queued]

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the wanted workers that are queued have waited, in seconds."""
        return [worker.waits_for for worker in self._waiting(group) if worker.waits_for is not None]

    def _waiting(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that are queued."""
        workers = self.wanted(group)
        return [worker for worker in workers if worker.waits_for is not None and not worker.seen]

    def backoff(self, group: str = DEFAULT_GROUP) -> Backoff:
        """Return the backoff of a group."""
        if group not in self._backoffs:
            of_group = "" if group == DEFAULT_GROUP else f"group {group} of "
            name = f"{of_group}cluster {self._name}"
            self._backoffs[group] = Backoff(name, self._log, self._failure_limit, self._quota_pause)
        return self._backoffs[group]

    @property
    def staying(self) -> list[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        staying = []
        for worker in self.workers():
            is_unwanted = worker.name not in self._cluster.worker_spec
            if is_unwanted and worker.cannot_move_to is not None and not worker.retired:
                staying.append(worker.name)
        return staying

    @property
    def not_stopped(self) -> str | None:
        """Why the platform does not stop sessions, as a sentence. None if it does."""
        return self._api.failure("stop")

    @property
    def to_stop(self) -> list[str]:
        """The sessions that the next steps are to stop, by their names."""
        cluster = self._cluster
        launching = self._launches.keys()
        ended = {worker.name for worker in self.workers() if worker.has_ended}
        names = ({*cluster.workers} | launching) - ended - cluster.worker_spec.keys()
        # Sessions without a worker, such as the engine of a refused launch.
        names |= {*self._unused().values()}
        for group in self._groups.names:
            if excess := self._groups.excess(group):  # the scheduler has not chosen yet
                names |= {*self._groups.workers(group)[-excess:]}
        return sorted(names)

    @property
    def to_launch(self) -> list[str]:
        """The wanted workers that are being launched, or that the next step launches."""
        return [name for name in self._launches if name in self._cluster.worker_spec] + self._ready_to_launch

    @property
    def _ready_to_launch(self) -> list[str]:
        """The wanted workers without a session, unless their group pauses after failures or refusals."""
        known = self._cluster.workers.keys() | self._launches.keys()
        ready: list[str] = []
        for group in self._groups.names:
            backoff, names = self.backoff(group), self._groups.workers(group)
            missing = [name for name in names if name not in known]
            if missing and not backoff.pause:
                room = backoff.ceiling - (len(names) - len(missing))
                ready += missing[: int(max(0, min(room, len(missing))))]
        return ready

    @property
    def gave_up(self) -> dict[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        reasons = {}
        for group, backoff in [*self._backoffs.items()]:  # a user's thread may scale a group
            if backoff.gave_up and group in self._groups:
                reasons[group] = backoff.words or ""
        return reasons

    @property
    def shortages(self) -> dict[str, str]:
        """Why the platform has launched only some workers of some groups."""
        backoffs = {group: self.backoff(group) for group in self._groups.names}
        return {group: backoff.shortage for group, backoff in backoffs.items() if backoff.shortage}

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        return self._outage or self._failures or self._retirements.words or self._unrunnable or None

    @property
    def _failures(self) -> str | None:
        failures = []
        for group in self._groups.names:
            words = self.backoff(group).words
            if words:
                failures.append(words if group == DEFAULT_GROUP else f"{group}: {words}")
        return "; ".join(failures) or None

    def within_limits(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group fit into the site's limits, with the other groups."""
        fit, limit = room(self._groups.options(group).worker, self._groups.others(group))
        if n > fit:
            self.backoff(group).limited(n, int(fit), limit)
        return int(min(n, fit))

    def affordable(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group to ask for; see :meth:`Backoff.affordable`."""
        n = self.within_limits(n, group)
        return self.backoff(group).affordable(n, len(self._groups.workers(group)), self.waits(group))

    # -- all sessions at once

    async def launch(self, join: Callable[[str], Any], *, strict: bool, display: bool = False) -> None:
        """Launch the scheduler and, as soon as the platform has accepted it, all wanted workers.

        Return when the scheduler answers. SpecCluster._start (spec.py:304) waits for it before.

        Parameters
        ----------
        join : callable
            Coroutine function that connects to the scheduler at an address.
        strict : bool
            Whether a worker that is not launched is an error. Otherwise it is launched later.
        display : bool
            Whether to show the progress.

        Raises
        ------
        LaunchRefused, SessionFailed, SchedulerTimeout
            As in :class:`dask_cml.CMLCluster`.
        """
        spec = self._cluster.scheduler_spec
        scheduler: CMLScheduler = _class_of(spec)(**spec["options"])
        self._cluster.scheduler = scheduler
        left, why = await asyncio.to_thread(left_for_user, self._record, 0)
        specs = dict(self._cluster.worker_spec)  # a user may scale meanwhile
        if strict and left < 1 + len(specs):
            raise LaunchRefused(scheduler.name, why, by="dask-cml")
        by_name = {name: self._make(name, spec) for name, spec in specs.items()}
        workers = [worker for worker in by_name.values() if isinstance(worker, CMLWorker)]
        shown = StartDisplay(self._name, [scheduler, *workers], self.arrived) if display else None
        showing = asyncio.create_task(shown.run()) if shown else None
        following: asyncio.Task[None] | None = None
        asking = asyncio.create_task(api_v2.quota_left()) if strict else None
        shortage: str | None = None
        has_started = False
        try:
            # The scheduler's session first: in a queue, workers could take its place.
            await scheduler.launch()
            # Only now: as soon as the workers are launched, the platform counts them as used.
            if asking is not None and asking.done():
                shortage = api_v2.shortage(self._groups.others()[1:], asking.result())
            if shown is not None and shortage is not None:
                shown.notice = shortage
            await self._journal.write(self.processes)
            following = asyncio.create_task(self._follow(workers))
            launching = self._launch_strictly(by_name) if strict else self._launch_missing(lambda: True)
            # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
            await gather_or_cancel(self._wait_and_join(scheduler, join), launching)
            has_started = True
        finally:
            await cancel(following, showing, asking)
            if not has_started:
                await self.stop_launching()
            if shown is not None:
                await shown.end(has_started)
        if shortage is not None:
            self._log(f"Cluster {self._name}: {shortage}")

    async def _wait_and_join(self, scheduler: CMLScheduler, join: Callable[[str], Any]) -> None:
        await scheduler
        await join(str(scheduler.address))

    async def _follow(self, workers: Collection[CMLWorker]) -> None:
        """Update workers from the platform's list, until cancelled."""
        while True:
            try:
                listing = await self._api.sessions()
            except CallFailed:  # the scheduler may still connect
                continue
            for worker in workers:
                worker.update(listing)
            await self._journal.write(self.processes)

    async def _launch_strictly(self, workers: Mapping[str, Any]) -> None:
        async def launch(name: str) -> None:
            if name not in self._cluster.worker_spec:
                return
            try:
                await workers[name]
            except CMLError:
                if name in self._cluster.worker_spec:
                    raise
            else:
                await self._attach(name, workers[name])

        await gather_or_cancel(*map(launch, workers))

    def _make(self, name: str, spec: Mapping[str, Any]) -> Any:
        """Return a worker of a spec that is not launched yet. A subclass may use any class."""
        self._groups.given([name])
        address = None if self._cluster.scheduler is None else self._cluster.scheduler.address
        cls, arguments = _class_of(spec), {"name": name, **spec.get("options", {})}
        if isinstance(cls, type) and issubclass(cls, CMLWorker):
            arguments["worker_group"] = spec.get("worker_group", DEFAULT_GROUP)
        return cls(address, **arguments)

    async def _attach(self, name: str, worker: Any) -> None:
        """Enter a launched worker into the cluster."""
        self._cluster.workers[name] = worker
        self._cluster._created.add(worker)
        worker._cluster = ref(self._cluster)  # as SpecCluster does
        if isinstance(worker, CMLProcess):  # a subclass may use any class
            await self._journal.enter(worker)

    async def succeed(self, record: Record) -> None:
        """Take over the recorded sessions from a keeper that has vanished, and want what the board says."""
        self._cluster.workers.clear()
        self._groups.drop(self._groups.workers())
        for launch in record.launches.values():
            if launch.key == SCHEDULER:
                if launch.id != record.scheduler.session:
                    self._api.adopt(launch.id, launch.key)  # of a lost scheduler, so the step stops it
                continue
            group = launch.worker_group(self._name)
            if group not in self._groups:
                self._adopt_unwanted(launch.id, launch.key, group, launch)
                continue
            board_group = self._remote.board.groups.get(group, BoardGroup())
            spec = self._groups.spec(group, board_group.own.get(launch.key))
            with self._groups.changing():
                self._cluster.worker_spec[launch.key] = spec
            worker = self._make(launch.key, spec)
            worker.adopt(launch.id, launch)
            self._cluster.workers[launch.key] = worker
        names = [name for worker in self.workers() for name in worker.dask_names]
        last = await self._remote.ask(protocol.LAST, names=names)
        for worker in self.workers():
            worker.seen.update(name for name in worker.dask_names if name in last)
        self._last_restart = max([0, *(restart.number for restart in self._remote.board.restarts)])
        self._want_all(self._remote.board.groups)
        self._journal = Journal(self._api, record)

    def _adopt_unwanted(self, session: str, name: str, group: str, launch: Launch | None) -> None:
        """Let the next step retire a worker that nobody wants, and then stop its session."""
        worker: CMLWorker = self._make(name, self._groups.spec(DEFAULT_GROUP))  # its own options are unknown
        infos = [*self._cluster.scheduler_info["workers"].values()]
        worker.dask_names = [str(info["name"]) for info in infos if _about(info).get("session") == session]
        worker.group = group
        worker.adopt(session, launch)
        self._cluster.workers[name] = worker

    # -- requests of users

    async def take(self, board: BoardState) -> None:
        """Want what other processes have written on the board.

        A group that users of this process have changed meanwhile is left alone: the last change to reach the
        board wins.
        """
        changed = False
        with self._groups.changing():
            for name in self._groups.take(board.groups):
                self._backoffs.pop(name, None)
                self.requests.pop(name, None)
                self._own_changes.pop(name, None)
                changed = True
            for name, group in board.groups.items():
                if self._has_own(name, group) or self.requests.get(name) == group.request:
                    continue
                self.requests[name] = group.request
                self._backoffs.pop(name, None)  # it begins anew
                self._groups.add_own(name, group.own)
                self._groups.resize(name, group.target, self.absent(name))
                self._adapt(name, group)
                self._groups.begin_adapting()
                changed = True
        closing = [name for name in board.closing if name not in self._closed]
        if closing:
            self.close_workers(closing)
        if changed or closing or board.leaving:
            self.woken.set()
        if changed or closing:  # a process that leaves waits until its change is taken
            await self.publish()

    def _has_own(self, name: str, group: BoardGroup) -> bool:
        """Whether the last change of a group was made here, or one made here is on its way to the board."""
        number = self._own_changes.get(name)
        if number is None:
            return False
        if self._outbox.has(number):
            return True
        del self._own_changes[name]
        if (group.writer, group.number) != (self._remote.id, number):  # somebody else was later
            return False
        self.requests[name] = group.request
        return True

    def _adapt(self, name: str, group: BoardGroup) -> None:
        """Let a group adapt between the limits on the board, or keep its size."""
        if group.adapt is not None:
            self._groups.adapt(name, CMLAdaptive.of(self._cluster, name, group.adapt))
        elif group.writer != self._remote.id:  # else an Adaptive of another class may scale it here
            self._groups.adapt(name, None)

    def close_workers(self, names: Iterable[str]) -> None:
        """Drop workers that a user has closed, by the names of sessions or Dask workers."""
        sessions = {name: worker.name for worker in self.workers() for name in worker.dask_names}
        self._groups.drop(sessions.get(name, name) for name in names)
        self._closed.update(names)

    def ask(self, group: str, **change: Any) -> None:
        """Ask the board for what a user of this process wants and is carried out here, see ``GroupChange``.

        The caller holds the lock of the groups.
        """
        self._own_changes[group] = self._outbox.add(groups={group: change}).number
        self._backoffs.pop(group, None)  # it begins anew

    def note_own_changes(self) -> None:
        """Note that the changes in the outbox, which were made during the start, are carried out here."""
        for change in self._outbox.changes:
            for group in change.content.get("groups", ()):
                self._own_changes[group] = change.number

    def note_changes_by_hand(self) -> None:
        """Ask the board for what a user has changed in ``worker_spec``, as a subclass of SpecCluster may."""
        with self._groups.changing():
            closed, new = self._groups.take_changes_by_hand()
            for group in {*closed.values(), *new.values()}:
                if group in self._groups:
                    self.ask(group, target=self._groups.target(group), own=self._groups.own(group))
            self._groups.given(new)

    # -- the step

    async def step(self) -> None:
        """Make the sessions what the spec says, as far as the platform allows it at once."""
        self.note_changes_by_hand()
        if not self._remote.keeps:
            return
        for group in self._groups.names:
            if excess := self._groups.excess(group):
                self._groups.close(group, await self.choose(group, excess))
        await self._close_unwanted()
        await self._launch_missing(lambda: self._remote.keeps)
        await self.publish()

    async def choose(self, group: str, n: int, **arguments: Any) -> list[str]:
        """Choose the `n` workers of a group that cost least to close. Workers that are absent come first."""
        absent = self.absent(group)[:n]
        workers, arrived = self._groups.dask_workers(group), self.arrived(group)
        candidates = {name: workers[name] for name in reversed(workers) if name in arrived}
        processes = self._groups.options(group).processes
        return absent + await choose(self._remote.ask, n - len(absent), candidates, processes, **arguments)

    def _unused(self) -> dict[str, str]:
        """Return the sessions without a process, such as the engines of refused launches, and their names."""
        used = {str(process.session_id) for process in self.processes}
        return {
            session: name
            for session, name in [*self._api.live.items()]
            # A session that was just launched has no worker yet.
            if session not in used and name not in self._launches
        }

    async def _find_sessions(self) -> None:
        """Let every wanted worker be the session that took its name, also if its launch was not answered."""
        workers, connected = self._cluster.workers, self._take_connected()
        for name, session in connected.items():
            spec = self._cluster.worker_spec.get(name)
            if spec is not None and name not in workers and name not in self._launches:
                await self._adopt(self._make(name, spec), session)
        for session, name in self._unused().items():
            spec = self._cluster.worker_spec.get(name)
            if spec is not None and name not in connected:
                worker = workers.get(name) or self._make(name, spec)
                if isinstance(worker, CMLWorker) and await worker.started_session() == session:
                    await self._adopt(worker, session)

    def _take_connected(self) -> dict[str, str]:
        """Let every wanted worker be the session in which its Dask worker runs. Return the sessions by name.

        If the answer to a launch is lost, the launch is repeated. The first session may take the name, and
        the worker be that of the second answer.
        """
        sessions: dict[str, str] = {}
        for info in [*self._cluster.scheduler_info["workers"].values()]:
            about = _about(info)
            if is_session_id(about.get("session")) and about.get("name") in self._cluster.worker_spec:
                sessions[about["name"]] = about["session"]
        for worker in self.wanted():
            session = sessions.get(worker.name)
            if session is not None and session != worker.session_id:
                logger.info("Session %s of %s used instead of %s", session, worker.name, worker.session_id)
                worker.adopt(session, None)
        return sessions

    async def _take_started(self, workers: Iterable[CMLWorker], listing: Mapping[str, SessionInfo]) -> None:
        """Let workers whose sessions have exited be the sessions that took their names, if these run."""
        for worker in workers:
            if worker.has_ended and not worker.seen:
                session = await worker.started_session()
                if session is None or session == worker.session_id:
                    continue
                if session in listing and not has_ended(listing[session]):
                    await self._adopt(worker, session)

    async def _adopt(self, worker: Any, session: str, launch: Launch | None = None) -> None:
        """Let a wanted worker be a session that was launched before."""
        if self._cluster.workers.get(worker.name, worker) is worker and isinstance(worker, CMLWorker):
            logger.info("Session %s used as %s", session, worker.name)
            worker.adopt(session, launch)
            await self._attach(worker.name, worker)

    async def _close_unwanted(self) -> None:
        """Retire the workers that are not in the spec, and stop the sessions that hold no data any more."""
        cluster, connected = self._cluster, connected_names(self._cluster)
        await self.close_others()
        unwanted = [worker for worker in self.workers() if worker.name not in cluster.worker_spec]
        holding = [worker for worker in unwanted if not connected.isdisjoint(worker.dask_names)]
        await self._retirements.retire([worker for worker in holding if self._retirements.may_retire(worker)])
        held = {worker.name for worker in holding}
        done = [worker for worker in unwanted if worker.retired or worker.name not in held]
        done_ids = {str(worker.session_id) for worker in done}
        await self._find_sessions()
        if not self._remote.keeps:  # another process may use these workers by now
            return
        to_stop = self._unused().keys() | (done_ids & {*self._api.live})
        if not to_stop:
            self._api.settle("stop")
        await self._stop(to_stop)
        await self._journal.write(self.processes)
        for worker in [worker for worker in done if worker.session_id not in self._api.live]:
            # With scale(0), the last worker is connected until its session has ended.
            with contextlib.suppress(*NO_ANSWER, CMLError):
                await drop(cluster, self._remote.ask, worker.dask_names)
            cluster.workers.pop(worker.name, None)
            await worker.close()
            self._log_event("stopped", worker.name)

    async def close_others(self) -> None:
        """Close a subclass's workers that are no sessions of the platform, and not in the spec."""
        await self._close_others([name for name in self._others() if name not in self._cluster.worker_spec])

    def _others(self) -> list[str]:
        """Return the names of a subclass's workers that are no sessions of the platform."""
        workers = [*self._cluster.workers.items()]
        return [name for name, worker in workers if not isinstance(worker, CMLWorker)]

    async def _close_others(self, names: Sequence[str]) -> None:
        if not names:
            return
        workers = self._cluster.workers
        closing = asyncio.gather(*(workers.pop(name).close() for name in names), return_exceptions=True)
        try:
            results = await within(timing.stop, closing)
        except asyncio.TimeoutError as error:
            results = [error] * len(names)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("Worker %s not closed: %r", name, result)

    async def _stop(self, ids: Collection[str]) -> None:
        """Stop sessions in a task, so that a call that hangs blocks no other. Wait some seconds for it."""
        new = {*ids}.difference(*self._stops.values())
        if not new:
            return
        task = asyncio.create_task(self._api.stop(*sorted(new)))
        self._stops[task] = new
        task.add_done_callback(self._stopped)
        await asyncio.wait([task], timeout=timing.stop)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        del self._stops[task]
        if not task.cancelled() and (error := task.exception()) is not None:  # the next step tries again
            logger.info("Sessions not stopped yet: %s", error)
        else:
            self.woken.set()

    async def _launch_missing(self, may_launch: Callable[[], bool]) -> None:
        """Launch the wanted workers that have no session, as far as their groups' backoffs allow it.

        A task launches them, so that a call that hangs blocks nothing else. Wait some seconds for it.
        """
        ready = self._ready_to_launch
        if not ready and not self._launches:
            self._api.settle("launch")
        if not ready:
            return
        task = asyncio.create_task(self._launch_together(ready, may_launch))
        self._launches |= dict.fromkeys(ready, task)
        task.add_done_callback(self._launched)
        await asyncio.wait([task], timeout=timing.launch)
        if not task.done():
            task.add_done_callback(lambda _: self.woken.set())

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._launches = {name: other for name, other in self._launches.items() if other is not task}
        if not task.cancelled() and (error := task.exception()) is not None:  # the next step tries again
            logger.warning("Workers of cluster %s not launched yet: %r", self._name, error)

    async def _launch_together(self, names: Sequence[str], may_launch: Callable[[], bool]) -> None:
        """Launch workers, and count all their failures as one."""
        began = time.monotonic()
        groups = {name: self._groups.group_of(name) for name in names}
        backoffs = {group: self.backoff(group) for group in {*groups.values()}}
        under_way = self._launches.keys() - self._cluster.workers.keys() - {*names}
        used = len(self.processes) + len(under_way)
        left, why = await asyncio.to_thread(left_for_user, self._record, used)
        errors: dict[str, CMLError] = {name: LaunchRefused(name, why, by="dask-cml") for name in names[left:]}
        errors |= await self._launch_some(names[:left], groups, may_launch)
        for group, backoff in backoffs.items():
            if self._backoffs.get(group) is backoff:  # else a user has changed the group meanwhile
                in_group = [name for name in names if groups[name] == group]
                of_group = {name: errors[name] for name in in_group if name in errors}
                self._count_launches(group, in_group, of_group, began)

    async def stop_launching(self) -> None:
        """Wait for no launch any more. A session that is launched nevertheless stays in ``live``."""
        await cancel(*{*self._launches.values()})

    async def _launch_some(
        self, names: Sequence[str], groups: Mapping[str, str], may_launch: Callable[[], bool]
    ) -> dict[str, CMLError]:
        """Launch workers, as many at once as the API allows. Return the errors by the workers' names.

        After a refusal, no further workers of the group are tried: so an exhausted quota refuses only a few
        of a hundred launches. After an error of the platform that may pass, no further workers at all.
        """
        errors: dict[str, CMLError] = {}
        refused: set[str] = set()
        queue = iter(names)

        async def launch() -> None:
            for name in queue:
                if not may_launch() or any(isinstance(error, CallFailed) for error in errors.values()):
                    return
                spec = self._cluster.worker_spec.get(name)
                if groups[name] in refused or spec is None:
                    continue
                try:
                    worker = self._make(name, spec)
                    await worker
                except CMLError as error:
                    errors[name] = error
                    if isinstance(error, LaunchRefused):
                        refused.add(groups[name])
                except Exception as error:  # the platform's library may raise anything
                    logger.exception("Session %s not launched", name)
                    errors[name] = CMLError(f"{name} not launched: {error!r}")
                else:
                    if name not in self._cluster.workers:  # else its session was found meanwhile
                        await self._attach(name, worker)
                        self._log_event("launched", name)

        await gather_or_cancel(*[launch() for _ in range(self._api.threads)])
        return errors

    def _count_launches(
        self, group: str, names: Sequence[str], errors: Mapping[str, CMLError], began: float
    ) -> None:
        """Let failed or refused launches of a group delay its next launches."""
        backoff, failures = self.backoff(group), [*errors.values()]
        refusal = next((error for error in failures if isinstance(error, LaunchRefused)), None)
        if refusal is not None:
            workers = self._groups.workers(group)
            launched = [name for name in workers if name in self._cluster.workers]
            if self._groups.adapts(group):  # it decides again how many to ask for
                self._groups.drop(name for name in names if name not in self._cluster.workers)
            backoff.refused(len(launched), len(workers), refusal.reason)
        elif failures and not isinstance(failures[0], CallFailed):
            backoff.failed(str(failures[0]), len(failures), began)
        elif not failures:
            backoff.granted(len(self.wanted(group)))

    # -- the check

    def note_connected(self, names: Iterable[str]) -> None:
        """Note Dask workers that have connected. Some may be gone before the next check."""
        workers = self._cluster.workers
        for name in names:
            worker = workers.get(name) or workers.get(name.rpartition("-")[0])
            if isinstance(worker, CMLWorker) and name in worker.dask_names:
                worker.seen.add(name)

    async def run(self) -> NoReturn:
        """Check the sessions until the scheduler is lost.

        Raises
        ------
        asyncio.CancelledError
            When nobody waits for it any more.
        """
        while True:
            await self._check()
            starting = any(
                worker.waits_for is None and not worker.is_known_to_run for worker in self.wanted()
            )
            interval = timing.starting_look if starting else timing.look
            pauses = [self.backoff(group).pause for group in self._groups.names]
            await wait_until_set(self.woken, min([interval, *filter(None, pauses)]))

    async def _check(self) -> None:
        self.woken.clear()
        if not self._remote.connected:
            self._heard_since = None
            return
        self._heard_since = self._heard_since or time.monotonic()
        try:
            # While the platform lists no sessions, no loss is known. Everything else goes on.
            with contextlib.suppress(CallFailed):  # _log_outage says it once
                await self._replace(await self._find_losses(self._heard_since))
            await self._find_strays()
            await self._cluster._correct_state()
            self._log_states()
            await self._log_lines()
            await self.publish()
        except CallFailed:
            pass  # _log_outage does it once
        except asyncio.TimeoutError as error:  # it may be busy for a moment: if that lasts, Failover says so
            logger.info("Scheduler of cluster %s not asked: %s", self._name, error)
        except (*NO_ANSWER, CMLError, ValueError) as error:
            logger.warning("Cannot manage cluster %s: %s", self._name, str(error) or repr(error))
        except Exception:
            logger.exception("Cannot manage cluster %s", self._name)
        await self._log_outage()

    async def _log_outage(self) -> None:
        before, outage = self._outage, self._api.problem
        refused_before, self._key_refused = self._key_refused, self._api.key_refused
        self._outage = outage
        if outage and self._key_refused:
            if not refused_before:
                self._log(f"Cannot manage cluster {self._name}: {outage}. {await self._what_runs()}")
        elif outage and not before:
            logger.warning("Cannot manage cluster %s: %s", self._name, outage)
        elif before and not outage:
            logger.warning("Managing cluster %s again", self._name)

    async def _what_runs(self) -> str:
        """Return sentences on what runs on, and when it ends, although nothing can be launched or stopped."""
        record = await asyncio.to_thread(store.refreshed, self._record)
        n = len([process for process in self.processes if not process.has_ended])
        noun = "session" if n == 1 else "sessions"
        ends = f" They end {', or '.join(record.ends)}." if record.ends else ""
        return (
            f"Until then, this process launches and stops no session. The cluster's {n} {noun} and its tasks "
            f"run on.{ends} To end them now, call cluster.close(): the scheduler tells their programs to exit"
        )

    async def _find_losses(self, heard_since: float) -> dict[str, Loss]:
        now, connected = time.monotonic(), connected_names(self._cluster)
        wanted = self.wanted()
        incomplete = missing(wanted, connected)
        incomplete_names = {worker.name for worker in incomplete}
        for worker in wanted:
            if not worker.has_arrived and worker.name not in incomplete_names:
                worker.has_arrived = True
                self.backoff(self._groups.group_of(worker.name)).arrived(now)
        if losses := noticed(wanted, self._remote.board.leaving):
            return losses
        # A node that fails closes no connections: the scheduler notices it only after
        # ``distributed.comm.timeouts.tcp``, the platform within a second.
        is_due = now - self._listed >= self._watch_interval
        if not (incomplete or is_due or any(not worker.is_known_to_run for worker in wanted)):
            return {}
        listing = await self._api.sessions()
        self._listed = time.monotonic()
        self._take_connected()
        dead: set[str] = set()
        for process in self.processes:
            if process.update(listing) and isinstance(process, CMLWorker):
                dead.update(process.dask_names)
        dead &= connected_names(self._cluster)
        if dead:
            logger.info("Workers %s dropped from the scheduler: their sessions have ended", sorted(dead))
            await drop(self._cluster, self._remote.ask, dead)
        incomplete = missing(self.wanted(), connected_names(self._cluster) - dead)
        await self._take_started(incomplete, listing)
        return await find_losses(incomplete, self._remote.ask, time.monotonic() - heard_since)

    async def _replace(self, losses: Mapping[str, Loss]) -> None:
        """Want other workers instead of lost ones. Their sessions are stopped by the next step."""
        workers = {worker.name: worker for worker in self.workers()}
        groups = {name: self._groups.group_of(name) for name in losses}
        lost = {name: loss for name, loss in losses.items() if self._groups.replace(name)}
        for group in {groups[name] for name in lost}:
            self.backoff(group).lost({name: loss for name, loss in lost.items() if groups[name] == group})
        for name, loss in lost.items():
            self._log_event("lost", name, cause=loss.words[:_LONGEST_CAUSE])
            # The log of a session that had no name is that of the session which had it first.
            if name in workers and loss.cause not in (Cause.CLOSED, Cause.NAME_TAKEN):
                await workers[name].note_loss(loss)

    async def _find_strays(self) -> None:
        """Take over or stop sessions of the cluster that no process of it uses, as after a crash.

        A session enters itself into the record, and a Dask worker says in which session it runs.
        """
        now = time.monotonic()
        if now < self._next_strays:
            return
        self._next_strays = now + timing.strays
        try:
            record = await asyncio.to_thread(store.read_again, self._record)
        except CMLError as error:
            logger.info("Sessions of cluster %s not compared with its record: %s", self._name, error)
            return
        used = {str(process.session_id) for process in self.processes}.union(*self._stops.values())
        strays = {session: key for session, key in record.sessions.items() if session not in used}
        groups = {session: record.launches[session].worker_group(self._name) for session in strays}
        for info in [*self._cluster.scheduler_info["workers"].values()]:
            about = _about(info)
            session, name = about.get("session"), about.get("name")
            if session and name and session not in used:
                strays[session] = name
                groups[session] = about.get("group") or DEFAULT_GROUP
        self._strays = {session: self._strays.get(session, now) for session in strays}
        date = time.time()
        for session, key in strays.items():
            launch = record.launches.get(session)
            age = now - self._strays[session]
            # A session that was launched long ago is late at once: a command may keep the cluster shortly.
            if launch is not None:
                age = max(age, date - launch.launched)
            if age < timing.stray:
                continue
            if key in self._launches:  # it may be the session of this launch
                continue
            if await self._adopt_stray(session, key, launch):
                continue
            logger.warning("Session %s of %s stopped: no process has launched it", session, key)
            if key == SCHEDULER or key in self._cluster.workers or key in self._cluster.worker_spec:
                self._api.adopt(session, key)  # the step stops what it knows and does not use
            else:
                self._adopt_unwanted(session, key, groups[session], launch)

    async def _adopt_stray(self, session: str, name: str, launch: Launch | None) -> bool:
        """Let a wanted worker be a session that no process uses, unless another session is the worker."""
        spec = self._cluster.worker_spec.get(name)
        if spec is None:
            return False
        known = self._cluster.workers.get(name)
        worker = self._make(name, spec) if known is None else known
        if not isinstance(worker, CMLWorker):
            return False
        started = await worker.started_session()
        if started != session and not (started is None and known is None):
            return False
        await self._adopt(worker, session, launch)
        return True

    def _log_event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        self._events.append({"action": action, "session": session, **fields})

    def _log_states(self) -> None:
        """Note which sessions are queued, and which run."""
        for worker in self.wanted():
            state = "running" if worker.is_known_to_run else None
            if worker.waits_for is not None:
                state = "waiting"
            if state is not None and state != worker.logged:
                worker.logged = state
                self._log_event(state, worker.name)

    async def _log_lines(self) -> None:
        """Log lines about the cluster when they become true."""
        board, waiting = self._remote.board, self._waiting()
        lines = {}
        if waiting:
            n_wanted = len(self._groups.workers())
            reason = next(filter(None, (worker.reason for worker in waiting)), "")
            line = f" has {len(waiting)} of {n_wanted} worker sessions queued"
            if reason:  # the platform may tell it later, and in words that change
                lines["queued, with a reason"] = f"{line}: {reason}"
            else:
                lines["queued"] = line
        restarts = {restart.number: str(restart) for restart in board.restarts}
        if board.problem and board.problem not in restarts.values():
            lines["memory"] = f": {board.problem}"
        for number, restart in restarts.items():
            if number > self._last_restart:
                self._log(f"Cluster {self._name}: {restart}")
                self._last_restart = number
        left = board.most_age - board.age
        if board.most_age and left <= NOTICE:
            age = f"{board.age / 3600:.1f} of {board.most_age / 3600:g} h"
            lines["end"] = f" shuts down in {math.ceil(left / 60)} min: its age is {age}"
        unrunnable_tasks = await self._find_unrunnable()
        self._unrunnable = "; ".join(unrunnable_tasks.values()) or None
        # The numbers of tasks change often, so a reason is logged once.
        lines |= {reason: f" cannot run all tasks: {text}" for reason, text in unrunnable_tasks.items()}
        for subject, line in lines.items():
            if subject not in self._logged:
                self._log(f"Cluster {self._name}{line}")
        self._logged = {*lines}

    async def snapshot(self, max_age: float = 0.0) -> Snapshot:
        """Return what the scheduler knows of the work, and what the groups can do.

        Callers that wait for each other share one question.

        Parameters
        ----------
        max_age : float
            Maximum age of a question whose answer is used again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        question = self._demand
        if question is not None and question.done():
            failed = question.cancelled() or question.exception() is not None
            if failed or time.monotonic() - self._demanded >= max_age:
                question = None
        if question is None:
            self._demanded = time.monotonic()
            question = self._demand = asyncio.create_task(self._remote.ask(protocol.DEMAND))
        answer = await asyncio.shield(question)
        return Snapshot.of(answer, [self._supply(group) for group in self._groups.names])

    def _supply(self, group: str) -> Supply:
        options = self._groups.options(group)
        return Supply(
            name=group,
            processes=options.processes,
            nthreads=options.nthreads,
            resources=options.resources,
            adapts=self._groups.adapts(group),
            target=self._groups.target(group),
        )

    async def _find_unrunnable(self) -> dict[str, str]:
        """Return descriptions of the tasks that no worker can run, now or later, by their reasons."""
        snapshot = await self.snapshot(max_age=timing.look)
        expected: set[str] = set()
        # Usually, no task is restricted, and a cluster may have thousands of workers.
        if snapshot.restricted:
            for address, info in [*self._cluster.scheduler_info["workers"].items()]:
                expected |= {address, str(info["name"]), str(info.get("host"))}
            for name, dask_names in self._groups.dask_workers().items():
                expected |= {name, *dask_names}
        return unrunnable(snapshot, expected)

    async def _send_url(self) -> None:
        """Send the scheduler the URL of its session, for processes to which the platform does not list it."""
        url = self._url
        if url != self._sent_url:
            await self._remote.set(app_url=url)
            self._sent_url = url

    @property
    def _url(self) -> str | None:
        """The URL of the scheduler's session. As long as the platform does not list it, the last URL sent."""
        scheduler = self._cluster.scheduler
        url = None if scheduler is None or scheduler.adopted else scheduler.info.get("app_url")
        return url or self._sent_url

    # -- the board

    async def publish(self) -> None:
        """Write on the board what this process knows and wants, as far as it has changed. Log errors."""
        async with self._publishing:
            if not self._remote.connected:
                return
            board, changes = self._remote.board, {}
            for group in self._groups.names:
                request = self.requests.get(group)
                if group in self._own_changes or group not in board.groups or request is None:
                    continue
                target, own, known = self._groups.target(group), self._groups.own(group), board.groups[group]
                if target != known.target or not are_equal(own, known.own):
                    changes[group] = {"target": target, "own": own, "request": request}
            closed = [name for name in board.closing if name in self._closed]
            report = Report.of(
                self.sessions,
                wanted={name: self._groups.group_of(name) for name in self._groups.workers()},
                problem=self.problem,
                gave_up=self.gave_up,
                shortages=self.shortages,
                requests={**self.requests},
                staying=self.staying,
                not_stopped=self.not_stopped,
            ).to_json()
            events = [*self._events]
            is_known = report == self._published and self._url == self._sent_url
            if is_known and not (changes or closed or events):
                return
            try:
                await self._send_url()
                answer = await self._remote.report(report, closed, changes, events)
            except CMLError as error:
                logger.info("Board of cluster %s not written: %s", self._name, error)
                return
            if answer.keeper != self._remote.id:  # it has lost the lease, and the board has taken nothing
                return
            self._published = report
            for _ in events:
                self._events.popleft()
            self._closed.intersection_update(answer.closing)

    # -- the end

    async def close(self, *, writes: bool = True) -> None:
        """Stop waiting for workers and sessions.

        Parameters
        ----------
        writes : bool
            Whether to write the record for the last time.
        """
        await self.stop_launching()
        self._take_connected()  # other processes are to find the sessions of the workers
        await self._retirements.close()
        await cancel(*self._stops, self._demand)
        if writes:
            await self._journal.write(self.processes)

    @property
    def gone(self) -> bool:
        """Whether another process has removed the record."""
        return self._journal.gone

    # -- another scheduler

    def first_board(
        self, groups: Mapping[str, Mapping[str, Any]] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return what the next scheduler begins with, see :mod:`dask_cml.scheduler.plugin`.

        Parameters
        ----------
        groups : mapping of str to mapping, optional
            The worker groups, see :class:`dask_cml.scheduler.board.BoardGroup`. Default: the groups here.
        **fields
            Other fields of the scheduler's file.
        """
        options = self._groups.options()
        return {
            "cluster": self._record.name,
            "record": self._record.id,
            "keeper": self._remote.id,
            "created": self._record.created.isoformat(),
            # The keeper connects after it has launched all workers.
            "patience": max(options.orphan_timeout or _FIRST_PATIENCE, options.scheduler_timeout),
            "groups": self._groups.to_json(self.requests) if groups is None else groups,
            **fields,
        }

    def want(self, board: BoardState) -> None:
        """Want what the last scheduler has written, because its keeper has vanished."""
        with self._groups.changing():
            self._groups.drop(self._groups.workers())
            self._groups.take(board.groups)
            self._want_all(self._without_closing(board))

    def _without_closing(self, board: BoardState) -> dict[str, BoardGroup]:
        """Return the groups of a board without the workers that its keeper was still to close."""
        launches = (*self._record.launches.values(), *self._record.ended.values())
        by_name = {launch.key: launch.worker_group(self._name) for launch in launches}
        # A name may be that of one of several Dask workers.
        closing = {name if name in by_name else name.rpartition("-")[0] for name in board.closing}
        groups = {}
        for name, group in board.groups.items():
            n = sum(by_name.get(worker) == name for worker in closing)
            own = {worker: options for worker, options in group.own.items() if worker not in closing}
            groups[name] = replace(group, target=max(0, group.target - n), own=own)
        return groups

    def _want_all(self, groups: Mapping[str, BoardGroup]) -> None:
        """Want what another keeper has left of all groups."""
        for name, group in groups.items():
            self.requests[name] = group.request
            self._groups.add_own(name, group.own, again=True)
            self._groups.resize(name, group.target, ())
            self._adapt(name, group)

    async def stop_all(self, record: Record) -> None:
        """Stop the sessions of a lost scheduler, and of earlier attempts to replace it."""
        await self._close_others(self._others())
        await self._retirements.close()
        await self._journal.write(self.processes)
        latest = await asyncio.to_thread(store.refreshed, record)
        for session, key in latest.sessions.items():
            self._api.adopt(session, key)
        await self._stop({*self._api.live})  # the next step stops those that fail
        await self._journal.write(self.processes)

    def renew(self) -> None:
        """Begin anew for another scheduler: no session is left, and all names are new."""
        self._cluster.workers.clear()
        self._groups.renew()
        self._published = None
        self._sent_url = None
        self._heard_since = None
        self._last_restart = 0
