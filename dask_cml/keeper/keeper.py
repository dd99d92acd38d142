"""Keeps a cluster: SpecCluster's step on CML sessions, and a look at them once a second."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from dask_cml import protocol
from dask_cml.cancellation import cancel, gather_or_cancel, wait_until_set
from dask_cml.display import StartDisplay
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.keeper.adaptive import CMLAdaptive
from dask_cml.keeper.backoff import Backoff
from dask_cml.keeper.groups import Groups
from dask_cml.keeper.journal import Journal
from dask_cml.keeper.losses import find_losses, missing, noticed
from dask_cml.keeper.policy import Snapshot, Supply, unrunnable
from dask_cml.keeper.report import Report
from dask_cml.keeper.retirement import Retirements, choose, connected_names, drop
from dask_cml.naming import DEFAULT_GROUP, read_name, session_name
from dask_cml.options import setting
from dask_cml.options.limits import room
from dask_cml.output import Logger
from dask_cml.records import store
from dask_cml.records.operations import left_for_user
from dask_cml.records.record import Record
from dask_cml.remote import BoardState, Remote
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.board import BoardGroup
from dask_cml.scheduler.lifetime import NOTICE
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.sessions.plan import Place
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


class Keeper:
    """Makes the sessions of a cluster what its ``worker_spec`` says.

    :meth:`step` is the body of SpecCluster's ``_correct_state_internal``. :meth:`run` looks once a second for
    what was lost, replaces it in the spec, and lets the cluster take a step.

    Parameters
    ----------
    cluster : SpecCluster
        The cluster, whose ``worker_spec`` is what is wanted, and whose ``workers`` are what exists.
    groups : Groups
        The worker groups in that spec.
    remote : Remote
        Talks to the scheduler.
    api : WorkersAPI
        Launches, lists and stops sessions.
    record : Record
        The cluster's record.
    place : Place
        The cluster's folder and keys, and the number of its scheduler.
    log : callable
        Gets each line for the user.

    Attributes
    ----------
    place : Place
        The same, of the present scheduler.
    requests : dict of str to int
        How many changes of each worker group users have asked for, as far as they are carried out here.
    woken : asyncio.Event
        Set to look again at once.
    """

    def __init__(
        self,
        cluster: SpecCluster,
        groups: Groups,
        remote: Remote,
        api: WorkersAPI,
        record: Record,
        place: Place,
        log: Callable[[str], None],
    ) -> None:
        self.place = place
        self.requests: dict[str, int] = dict.fromkeys(groups.names, 0)
        self.woken = asyncio.Event()
        self._cluster, self._groups, self._remote, self._api = cluster, groups, remote, api
        self._record, self._log = record, log
        self._name = record.name
        self._journal = Journal(api, record)
        self._retirements = Retirements(cluster, remote, api, log, self.woken)
        self._backoffs: dict[str, Backoff] = {}
        self._stops: dict[asyncio.Task[None], set[str]] = {}
        self._listed = -math.inf
        self._strays: dict[str, float] = {}
        self._next_strays = 0.0
        #: Changes of groups that users of this process have made, and that the board does not know yet.
        self._asked: dict[str, dict[str, Any]] = {}
        self._closed: set[str] = set()
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] | None = None
        #: What has become of sessions, which the scheduler does not know yet.
        self._events: deque[dict[str, str]] = deque(maxlen=_MOST_EVENTS)
        self._demand: asyncio.Task[dict[str, Any]] | None = None
        self._demanded = 0.0
        #: What the last lines were about, which are still true.
        self._logged: set[str] = set()
        self._outage: str | None = None
        self._unrunnable: str | None = None
        self._told_url: str | None = None

    # -- what is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return [session for process in self.processes if (session := process.session) is not None]

    @property
    def processes(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        scheduler = self._cluster.scheduler
        processes = ([scheduler] if isinstance(scheduler, CMLProcess) else []) + self.workers()
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
        connected = connected_names(self._cluster)
        return {worker.name for worker in self.wanted(group) if not connected.isdisjoint(worker.dask_names)}

    def target(self, group: str) -> int:
        """Return how many worker sessions of a group are requested."""
        return self._groups.target(group)

    def limits(self, group: str) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling. None: it has a fixed size."""
        return self._groups.limits(group)

    def absent(self, group: str) -> list[str]:
        """Return the wanted workers that are not connected: queued ones first, then the newest."""
        arrived = self.arrived(group)
        workers = self._cluster.workers
        absent = [name for name in reversed(self._groups.workers(group)) if name not in arrived]
        queued = [name for name in absent if getattr(workers.get(name), "waits_for", None) is not None]
        return queued + [name for name in absent if name not in queued]

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the wanted workers that are queued have waited for room, in seconds."""
        waits = [worker.waits_for for worker in self.wanted(group) if not worker.seen]
        return [seconds for seconds in waits if seconds is not None]

    def backoff(self, group: str = DEFAULT_GROUP) -> Backoff:
        """Return the backoff of a group."""
        if group not in self._backoffs:
            of_group = "" if group == DEFAULT_GROUP else f"group {group} of "
            self._backoffs[group] = Backoff(f"{of_group}cluster {self._name}", self._log)
        return self._backoffs[group]

    @property
    def staying(self) -> list[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        unwanted = [worker for worker in self.workers() if worker.name not in self._cluster.worker_spec]
        return [worker.name for worker in unwanted if worker.stays is not None and not worker.retired]

    @property
    def gave_up(self) -> dict[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        found = {group: backoff for group, backoff in self._backoffs.items() if backoff.gave_up}
        return {group: backoff.words or "" for group, backoff in found.items() if group in self._groups}

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        return next(
            filter(None, (self._outage, self._failures, self._retirements.words, self._unrunnable)),
            None,
        )

    @property
    def _failures(self) -> str | None:
        failures = {group: self.backoff(group).words for group in self._groups.names}
        words = [
            words if group == DEFAULT_GROUP else f"{group}: {words}"
            for group, words in failures.items()
            if words
        ]
        return "; ".join(words) or None

    def within_limits(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group fit into the limits of the site, beside other groups."""
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

        Return when the scheduler answers. SpecCluster launches them one after the other (spec.py:304).

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
        scheduler = self._cluster.scheduler = CMLScheduler(self._api, self._groups.options(), self.place)
        names = self._groups.workers()
        left, why = await asyncio.to_thread(left_for_user, self._record.id, 0)
        if strict and left < 1 + len(names):
            raise LaunchRefused(scheduler.name, why, by="dask-cml")
        workers = [self._make(name) for name in names]
        shown = StartDisplay(self._name, [scheduler, *workers], self.arrived) if display else None
        showing = asyncio.create_task(shown.run()) if shown else None
        following: asyncio.Task[None] | None = None
        has_started = False
        try:
            # The scheduler's session first: where sessions wait for room, workers could take its room.
            await scheduler.launch()
            await self._journal.write(self.processes)
            following = asyncio.create_task(self._follow(workers))
            launching = self._launch_strictly(workers) if strict else self._launch_missing(lambda: True)
            # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
            await gather_or_cancel(self._meet(scheduler, join), launching)
            has_started = True
        finally:
            await cancel(following, showing)
            if shown is not None:
                await shown.end(has_started)

    async def _meet(self, scheduler: CMLScheduler, join: Callable[[str], Any]) -> None:
        await scheduler
        await join(str(scheduler.address))

    async def _follow(self, workers: Collection[CMLWorker]) -> None:
        """Update workers from the platform's list, until cancelled or the platform fails."""
        while True:
            listing = await self._api.sessions()
            for worker in workers:
                worker.update(listing)
            await self._journal.write(self.processes)

    async def _launch_strictly(self, workers: Iterable[CMLWorker]) -> None:
        async def launch(worker: CMLWorker) -> None:
            await worker
            await self._attach(worker)

        await gather_or_cancel(*map(launch, workers))

    def _make(self, name: str) -> CMLWorker:
        """Return a worker of the spec that is not launched yet."""
        spec = self._cluster.worker_spec[name]
        address = None if self._cluster.scheduler is None else self._cluster.scheduler.address
        worker: CMLWorker = spec["cls"](address, **{"name": name, **spec.get("options", {})})
        return worker

    async def _attach(self, worker: CMLWorker) -> None:
        """Enter a launched worker into the cluster."""
        self._groups.given(worker.name)
        self._cluster.workers[worker.name] = worker
        self._cluster._created.add(worker)
        worker._cluster = ref(self._cluster)  # type: ignore[attr-defined]  # as SpecCluster does
        await self._journal.write(self.processes)

    async def succeed(self, record: Record) -> None:
        """Take over the recorded sessions from a keeper that has vanished, and want what the board says."""
        self._cluster.workers.clear()
        self._groups.drop(self._groups.workers())
        recorded = [
            read_name(self._name, launch.key)
            for launch in (*record.launches.values(), *record.ended.values())
        ]
        for group, number in filter(None, recorded):
            self._groups.given(session_name(self._name, group, number))
        for launch in record.launches.values():
            found = read_name(self._name, launch.key)
            if found is None or found[0] not in self._groups:
                if launch.id != record.scheduler.session:
                    self._api.adopt(launch.id, launch.key)  # of a deleted group, so it is stopped
                continue
            self._cluster.worker_spec[launch.key] = self._groups.spec(found[0])
            worker = self._make(launch.key)
            worker.adopt(launch.id, launch)
            self._cluster.workers[launch.key] = worker
        names = [name for worker in self.workers() for name in worker.dask_names]
        last = await self._remote.ask(protocol.LAST, names=names)
        for worker in self.workers():
            worker.seen.update(name for name in worker.dask_names if name in last)
        for group, about in self._remote.board.groups.items():
            self.requests[group] = about.request
            self._groups.resize(group, about.target, ())
            self._adapt(group, about.adapt)
        self._journal = Journal(self._api, record)

    # -- requests of users

    async def take(self, board: BoardState) -> None:
        """Want what others have written on the board.

        A group is left alone that users of this process have changed meanwhile: the last one to reach the
        board wins.
        """
        changed = False
        for group in self._groups.take(board.groups):
            self._backoffs.pop(group, None)
            self.requests.pop(group, None)
            changed = True
        for group, about in board.groups.items():
            if group in self._asked or self.requests.get(group) == about.request:
                continue
            self.requests[group] = about.request
            self._backoffs.pop(group, None)  # it begins anew
            self._groups.resize(group, about.target, self.absent(group))
            self._adapt(group, about.adapt)
            self._groups.begin_adapting()
            changed = True
        if names := [name for name in board.closing if name not in self._closed]:
            self.close_workers(names)
        if changed or names or board.leaving:
            self.woken.set()

    def _adapt(self, group: str, limits: Mapping[str, Any] | None) -> None:
        """Let a group adapt between the limits on the board. None: nothing scales it."""
        adaptive = None if limits is None else CMLAdaptive.of(self._cluster, group, limits)
        self._groups.adapt(group, adaptive)

    def close_workers(self, names: Iterable[str]) -> None:
        """Want workers no longer that a user has closed, by the names of sessions or Dask workers."""
        sessions = {name: worker.name for worker in self.workers() for name in worker.dask_names}
        self._groups.drop(sessions.get(name, name) for name in names)
        self._closed.update(names)

    def ask(self, group: str, **change: Any) -> None:
        """Note for the board what a user of this process has changed, see ``GroupChange``."""
        self._asked[group] = {**self._asked.get(group, {}), **change}
        self._backoffs.pop(group, None)  # it begins anew

    # -- the step

    async def step(self) -> None:
        """Make the sessions what the spec says, as far as the platform allows it at once."""
        if not self._remote.keeps:
            return
        for group in self._groups.names:
            if excess := self._groups.excess(group):
                self._groups.close(group, await self.choose(group, excess))
        await self._close_unwanted()
        await self._launch_missing(lambda: self._remote.keeps)
        await self.publish()

    async def choose(self, group: str, n: int, **more: Any) -> list[str]:
        """Choose the `n` workers of a group that cost least to close, first those that are not connected."""
        absent = self.absent(group)[:n]
        workers = {worker.name: worker.dask_names for worker in self.wanted(group)}
        arrived = [name for name in reversed(self._groups.workers(group)) if name in self.arrived(group)]
        among = {name: workers[name] for name in arrived if name in workers}
        processes = self._groups.options(group).processes
        return absent + await choose(self._remote, n - len(absent), among, processes, **more)

    async def _close_unwanted(self) -> None:
        """Retire the workers that are not in the spec, and stop the sessions that hold no data any more."""
        cluster, connected = self._cluster, connected_names(self._cluster)
        for name in [name for name in [*cluster.workers] if name not in cluster.worker_spec]:
            if not isinstance(cluster.workers[name], CMLWorker):  # of a subclass, which closes as it likes
                await cluster.workers.pop(name).close()
        unwanted = [worker for worker in self.workers() if worker.name not in cluster.worker_spec]
        there = [worker for worker in unwanted if not connected.isdisjoint(worker.dask_names)]
        await self._retirements.retire([worker for worker in there if self._retirements.may_retire(worker)])
        over = [worker for worker in unwanted if worker.retired or worker not in there]
        ids = {str(worker.session_id) for worker in over}
        # Also sessions without a worker, such as the engine of a refused launch that was not stopped before.
        used = {str(process.session_id) for process in self.processes}
        await self._stop({session for session in {*self._api.live} if session in ids or session not in used})
        await self._journal.write(self.processes)
        for worker in [worker for worker in over if worker.session_id not in self._api.live]:
            # With scale(0), the last worker is connected until its session has ended.
            with contextlib.suppress(*NO_ANSWER, CMLError):
                await drop(cluster, self._remote, worker.dask_names)
            cluster.workers.pop(worker.name, None)
            await worker.close()
            self._log_event("stopped", worker.name)

    async def _stop(self, ids: Collection[str]) -> None:
        """Stop sessions in a task, so that a call that hangs blocks no other. Wait some seconds for it."""
        left = {*ids}.difference(*self._stops.values())
        if not left:
            return
        task = asyncio.create_task(self._api.stop(*sorted(left)))
        self._stops[task] = left
        task.add_done_callback(self._stopped)
        await asyncio.wait([task], timeout=timing.stop)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        del self._stops[task]
        if not task.cancelled() and (error := task.exception()) is not None:  # the next look tries again
            logger.info("Sessions not stopped yet: %s", error)
        else:
            self.woken.set()

    async def _launch_missing(self, may_launch: Callable[[], bool]) -> None:
        """Launch the wanted workers that have no session, unless their group pauses after failures."""
        cluster = self._cluster
        names = [name for name in self._groups.workers() if name not in cluster.workers]
        ready = [name for name in names if not self.backoff(self._groups.group_of(name)).pause]
        if not ready:
            return
        groups = {name: self._groups.group_of(name) for name in ready}
        backoffs = {group: self.backoff(group) for group in {*groups.values()}}
        left, why = await asyncio.to_thread(left_for_user, self._record.id, len(self.processes))
        errors: dict[str, CMLError] = {name: LaunchRefused(name, why, by="dask-cml") for name in ready[left:]}
        errors |= await self._launch_some(ready[:left], groups, may_launch)
        for group, backoff in backoffs.items():
            if self._backoffs.get(group) is backoff:  # else a user has changed the group meanwhile
                own = [name for name in ready if groups[name] == group]
                self._count_launches(group, own, {name: errors[name] for name in own if name in errors})

    async def _launch_some(
        self, names: Sequence[str], groups: Mapping[str, str], may_launch: Callable[[], bool]
    ) -> dict[str, CMLError]:
        """Launch workers, as many at once as the API allows. Return the errors of those that failed.

        After a refusal, no further ones of the worker group are tried: so an exhausted quota refuses only a
        few of a hundred launches. After an error of the platform that may pass, no further ones at all.
        """
        errors: dict[str, CMLError] = {}
        refused: set[str] = set()
        queue = iter(names)

        async def launch() -> None:
            for name in queue:
                if not may_launch() or any(isinstance(error, CallFailed) for error in errors.values()):
                    return
                if groups[name] in refused or name not in self._cluster.worker_spec:
                    continue
                worker = self._make(name)
                try:
                    await worker
                except CMLError as error:
                    errors[name] = error
                    if isinstance(error, LaunchRefused):
                        refused.add(groups[name])
                except Exception as error:  # the platform's library may raise anything
                    logger.exception("Session %s not launched", name)
                    errors[name] = CMLError(f"{name} not launched: {error!r}")
                else:
                    await self._attach(worker)
                    self._log_event("launched", name)

        await gather_or_cancel(*[launch() for _ in range(self._api.threads)])
        return errors

    def _count_launches(self, group: str, names: Sequence[str], errors: Mapping[str, CMLError]) -> None:
        """Let failed or refused launches of a group delay the next ones."""
        backoff, found = self.backoff(group), [*errors.values()]
        refusal = next((error for error in found if isinstance(error, LaunchRefused)), None)
        if refusal is not None:
            asked = len(self._groups.workers(group))
            # SpecCluster keeps what was refused as if it ran (spec.py:390).
            self._groups.drop(name for name in names if name not in self._cluster.workers)
            backoff.refused(len(self._groups.workers(group)), asked, refusal.reason)
        elif found and not isinstance(found[0], CallFailed):
            backoff.failed(str(found[0]), len(found))
        elif not found:
            backoff.granted(len(self.wanted(group)))

    # -- the look

    def note_connected(self, names: Iterable[str]) -> None:
        """Note Dask workers that have connected. Some may be gone before the next look."""
        workers = self._cluster.workers
        for name in names:
            worker = workers.get(name) or workers.get(name.rpartition("-")[0])
            if isinstance(worker, CMLWorker) and name in worker.dask_names:
                worker.seen.add(name)

    async def run(self) -> NoReturn:
        """Look at the sessions until the scheduler is lost.

        Raises
        ------
        asyncio.CancelledError
            When nobody waits for it any more.
        """
        while True:
            await self._look()
            starting = any(worker.waits_for is None and not worker.has_arrived for worker in self.wanted())
            pauses = [pause for group in self._groups.names if (pause := self.backoff(group).pause)]
            interval = timing.starting_look if starting else timing.look
            await wait_until_set(self.woken, min([interval, *pauses]))

    async def _look(self) -> None:
        self.woken.clear()
        if not self._remote.connected:
            return
        try:
            await self._replace(await self._find_losses())
            await self._find_strays()
            await self._cluster._correct_state()
            self._log_states()
            await self._log_lines()
            await self._tell_url()
            await self.publish()
        except CallFailed:
            pass  # _log_outage does it once
        except (*NO_ANSWER, CMLError, ValueError) as error:
            logger.warning("Cannot manage cluster %s: %s", self._name, str(error) or repr(error))
        except Exception:
            logger.exception("Cannot manage cluster %s", self._name)
        self._log_outage()

    def _log_outage(self) -> None:
        before, outage = self._outage, self._api.problem
        self._outage = outage
        if outage and not before:
            logger.warning("Cannot manage cluster %s: %s", self._name, outage)
        elif before and not outage:
            logger.warning("Managing cluster %s again", self._name)

    async def _find_losses(self) -> dict[str, Loss]:
        now, connected = time.monotonic(), connected_names(self._cluster)
        wanted = self.wanted()
        lacking = missing(wanted, connected)
        for worker in wanted:
            if not worker.has_arrived and worker not in lacking:
                worker.has_arrived = True
                self.backoff(self._groups.group_of(worker.name)).arrived(now)
        if losses := noticed(wanted, self._remote.board.leaving):
            return losses
        # A node that fails closes no connections: the scheduler notices it only after
        # ``distributed.comm.timeouts.tcp``, the platform within a second.
        is_due = now - self._listed >= setting("api.watch-interval")
        if not (lacking or is_due or any(not worker.is_known_to_run for worker in wanted)):
            return {}
        listing = await self._api.sessions()
        self._listed = time.monotonic()
        ended = [process for process in self.processes if process.update(listing)]
        dead = {name for worker in ended if isinstance(worker, CMLWorker) for name in worker.dask_names}
        if dead := dead & connected_names(self._cluster):
            logger.info("Workers %s dropped from the scheduler: their sessions have ended", sorted(dead))
            await drop(self._cluster, self._remote, dead)
        lacking = missing(self.wanted(), connected_names(self._cluster) - dead)
        return await find_losses(lacking, listing, self._remote)

    async def _replace(self, losses: Mapping[str, Loss]) -> None:
        """Want other workers instead of lost ones. Their sessions are stopped by the next step."""
        workers = {worker.name: worker for worker in self.workers()}
        groups = {name: self._groups.group_of(name) for name in losses}
        lost = {name: loss for name, loss in losses.items() if self._groups.replace(name)}
        for group in {groups[name] for name in lost}:
            self.backoff(group).lost({name: loss for name, loss in lost.items() if groups[name] == group})
        for name, loss in lost.items():
            self._log_event("lost", name, cause=loss.words[:_LONGEST_CAUSE])
            if name in workers and loss.cause is not Cause.CLOSED:
                await workers[name].note_loss(loss)

    async def _find_strays(self) -> None:
        """Take over or stop sessions of the cluster that are in no part of it, as after a crash.

        A session enters itself into the record, and a Dask worker says in which session it runs.
        """
        now = time.monotonic()
        if now < self._next_strays:
            return
        self._next_strays = now + timing.strays
        record = await asyncio.to_thread(store.find, self._name, id=self._record.id)
        if record is None:
            return
        used = {str(process.session_id) for process in self.processes}.union(*self._stops.values())
        strays = {session: key for session, key in record.sessions.items() if session not in used}
        for info in [*self._cluster.scheduler_info["workers"].values()]:
            session = (info.get("cml") or {}).get("session")
            found = read_name(self._name, str(info["name"]))
            if session and found and session not in used:
                strays[session] = session_name(self._name, *found)
        self._strays = {session: self._strays.get(session, now) for session in strays}
        wall = time.time()
        for session, key in strays.items():
            launch = record.launches.get(session)
            # One that was launched long ago is late at once: a command that looks may leave soon.
            age = (
                now - self._strays[session]
                if launch is None
                else max(now - self._strays[session], wall - launch.launched)
            )
            if age < timing.stray:
                continue
            if key in self._cluster.worker_spec and key not in self._cluster.workers:
                worker = self._make(key)
                worker.adopt(session, launch)
                await self._attach(worker)
            else:
                logger.warning("Session %s of %s stopped: no process has launched it", session, key)
                self._api.adopt(session, key)  # the step stops what it knows and does not use

    def _log_event(self, action: str, session: str, **more: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        self._events.append({"action": action, "session": session, **more})

    def _log_states(self) -> None:
        """Note which sessions wait for room, and which run."""
        for worker in self.wanted():
            state = (
                "waiting" if worker.waits_for is not None else "running" if worker.is_known_to_run else None
            )
            if state is not None and state != worker.logged:
                worker.logged = state
                self._log_event(state, worker.name)

    async def _log_lines(self) -> None:
        """Log each line about the cluster when it becomes true."""
        board, waits = self._remote.board, self.waits()
        lines = {}
        if waits:
            lines["room"] = (
                f" waiting for room for {len(waits)} of {len(self._groups.workers())} worker sessions"
            )
        if board.full:
            lines["memory"] = f": {board.full}"
        left = board.most_age - board.age
        if board.most_age and left <= NOTICE:
            age = f"{board.age / 3600:.1f} of {board.most_age / 3600:g} h"
            lines["end"] = f" shuts down in {math.ceil(left / 60)} min: its age is {age}"
        found = await self._find_unrunnable()
        self._unrunnable = "; ".join(found.values()) or None
        # The numbers of tasks change often, so each reason is logged once.
        lines |= {reason: f" cannot run all tasks: {words}" for reason, words in found.items()}
        for what, line in lines.items():
            if what not in self._logged:
                self._log(f"Cluster {self._name}{line}")
        self._logged = {*lines}

    async def snapshot(self, max_age: float = 0.0) -> Snapshot:
        """Return what the scheduler knows of the work, and what the groups can do.

        Those who ask at the same time share one question.

        Parameters
        ----------
        max_age : float
            Maximum age of a question whose answer is used again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        asked = self._demand
        if asked is not None and asked.done():
            failed = asked.cancelled() or asked.exception() is not None
            if failed or time.monotonic() - self._demanded >= max_age:
                asked = None
        if asked is None:
            self._demanded = time.monotonic()
            asked = self._demand = asyncio.create_task(self._remote.ask(protocol.DEMAND))
        answer = await asyncio.shield(asked)
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
            for name in self._groups.workers():
                expected |= {
                    name,
                    *(f"{name}{suffix}" for suffix in self._cluster.worker_spec[name].get("group", ())),
                }
        return unrunnable(snapshot, expected)

    async def _tell_url(self) -> None:
        """Tell the scheduler the URL of its session, for processes to which the platform does not list it."""
        scheduler = self._cluster.scheduler
        url = None if scheduler is None or scheduler.adopted else scheduler.info.get("app_url")
        if url and url != self._told_url:
            await self._remote.set(app_url=url)
            self._told_url = url

    # -- the board

    async def publish(self) -> None:
        """Write on the board what this process knows and wants, as far as it has changed. Log errors."""
        async with self._publishing:
            if not self._remote.connected:
                return
            asked, board = dict(self._asked), self._remote.board
            changes = dict(asked)
            for group in self._groups.names:
                if group not in asked and group in board.groups and self.requests.get(group) is not None:
                    target = self._groups.target(group)
                    if target != board.groups[group].target:
                        changes[group] = {"target": target, "request": self.requests[group]}
            closed = [name for name in board.closing if name in self._closed]
            report = Report.of(
                self.sessions,
                wanted=self._groups.workers(),
                problem=self.problem,
                gave_up=self.gave_up,
                staying=self.staying,
            ).to_json()
            events = [*self._events]
            if not (changes or closed or events) and report == self._published:
                return
            try:
                answer = await self._remote.report(report, closed, changes, events)
            except CMLError as error:
                logger.info("Board of cluster %s not written: %s", self._name, error)
                return
            self._published = report
            for _ in events:
                self._events.popleft()
            self._closed.intersection_update(answer.closing)
            for group, change in asked.items():
                if self._asked.get(group) is change:  # a user may have changed it again meanwhile
                    del self._asked[group]
                if group in answer.groups:
                    self.requests[group] = answer.groups[group].request

    # -- the end

    async def close(self, *, writes: bool = True) -> None:
        """Stop waiting for workers and sessions.

        Parameters
        ----------
        writes : bool
            Whether to write the record for the last time.
        """
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
        self, groups: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return what the next scheduler begins with, see :mod:`dask_cml.scheduler.plugin`.

        Parameters
        ----------
        groups : mapping of str to mapping, optional
            The worker groups, see :class:`dask_cml.scheduler.board.BoardGroup`. Default: those here.
        **more
            What else it is to know.
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
            **more,
        }

    def want(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Want what the last scheduler has written of the groups, because its keeper has vanished."""
        self._cluster.worker_spec.clear()
        known = {name: BoardGroup(**group) for name, group in groups.items()}
        self._groups.take(known)
        for name, group in known.items():
            self.requests[name] = group.request
            self._groups.resize(name, group.target, ())
            self._adapt(name, group.adapt)

    async def stop_all(self, record: Record) -> None:
        """Stop the sessions of a lost scheduler, and of earlier attempts to replace it."""
        await self._retirements.close()
        await self._journal.write(self.processes)
        now = await asyncio.to_thread(store.find, self._name, id=self._record.id) or record
        for session, key in now.sessions.items():
            self._api.adopt(session, key)
        try:
            await self._stop({*self._api.live})
        except CMLError as error:  # the step tries again
            logger.warning("Old sessions of cluster %s not stopped yet: %s", self._name, error)
        await self._journal.write(self.processes)

    def renew(self, place: Place) -> None:
        """Begin anew for another scheduler at this place: no session is left, and all names are new."""
        self.place = place
        self._cluster.workers.clear()
        self._groups.renew()
        self._published = None
        self._told_url = None
