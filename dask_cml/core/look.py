"""The look: again and again, the lost workers are found and replaced, and the user is told what is new."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta

from dask_cml import protocol
from dask_cml.cancellation import wait_until_set
from dask_cml.core.workers import Workers, connected_names
from dask_cml.errors import CallFailed, CMLError
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER, View
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.sessions.process import CMLWorker, Phase
from dask_cml.timing import timing
from dask_cml.words import command, counted

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

#: A look at so many workers lets the next one come a second later.
_LOOKED_AT = 300
#: Characters of a cause that the scheduler logs.
_LONGEST_CAUSE = 300
#: The causes of a session's end that are no failures.
_NO_FAILURES = (Cause.CLOSED, Cause.NAME_TAKEN)
#: The names of the events of which other processes learn.
_EVENTS = {Phase.QUEUED: "waiting", Phase.RUNNING: "running"}


class Look:
    """Looks at the sessions of a cluster: what is lost, what is to be told, and what is wrong.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.

    Attributes
    ----------
    told : set of str
        The subjects of lines that are told, here or by the last keeper, and still true.
    woken : asyncio.Event
        Whether the next look is to come at once.
    """

    def __init__(self, cluster: CMLCluster) -> None:
        self._cluster = cluster
        self._processes: Workers = cluster.processes
        self._watch_interval: float = setting("api.watch-interval")
        #: When the platform has listed the sessions last.
        self._listed = -math.inf
        #: Since when the scheduler has not answered. None: it does.
        self._unheard_since: float | None = None
        #: A programming error of the last look, as a clause.
        self._failure: str | None = None
        #: Why the platform does not answer, as a clause, and whether it refuses this process's key.
        self._outage: str | None = None
        self._key_refused = False
        #: Why no worker can run some tasks, as a clause.
        self._unrunnable: str | None = None
        self.told: set[str] = set()
        self.woken = asyncio.Event()

    async def for_ever(self, unheard_since: float | None) -> None:
        """Look again and again, until cancelled.

        Parameters
        ----------
        unheard_since : float or None
            The monotonic time since which the scheduler has not answered. None: it did.
        """
        self._unheard_since = unheard_since
        while True:
            self.woken.clear()
            interval = timing.look
            try:
                await self._look()
                if any(worker.phase is Phase.LAUNCHED for worker in self._processes.wanted()):
                    interval = timing.starting_look
                interval += min(len(self._cluster.workers) / _LOOKED_AT, timing.rest)
                interval = min(interval, self._processes.pause)
                self._failure = None
            except Exception as error:  # a programming error, or of a subclass
                if self._failure is None:
                    logger.exception("Cannot manage cluster %s", self._cluster.options.name)
                self._failure = f"cannot manage the cluster: {error!r}"
            await wait_until_set(self.woken, interval)

    async def _look(self) -> None:
        """Find lost workers and replace them in ``worker_spec``. Then take a step."""
        cluster = self._cluster
        if not cluster.keeps:  # another process may have stopped sessions
            self._unheard_since = self._unheard_since or time.monotonic()
            return
        if self._unheard_since is not None:
            for worker in self._processes.workers():
                worker.excuse(self._unheard_since)
            self._unheard_since = None
        try:
            # While the platform lists no sessions, no loss is known. Everything else goes on.
            with contextlib.suppress(CallFailed):  # _tell_outage says it once
                await self.replace(await self.find_losses())
            await cluster.sharing.keeper.find_strays()
            step = cluster._correct_state_internal()  # which begins after this, and takes place in any case
            self._note_states()
            self.tell()
            await step  # the report that it ends with takes long for 1,000 sessions
        except asyncio.TimeoutError as error:  # it may be busy for a moment: if that lasts, Failover says so
            logger.info("Scheduler of cluster %s not asked: %s", cluster.options.name, error)
        except (*NO_ANSWER, CMLError, ValueError) as error:
            logger.warning("Cannot manage cluster %s: %s", cluster.options.name, str(error) or repr(error))
        await self._tell_outage()

    # -- lost workers

    async def find_losses(self) -> dict[str, Loss]:
        """Return why wanted workers are lost, by their names.

        Raises
        ------
        CallFailed
            If the platform does not list the sessions. Then no loss is known.
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        wanted = self._processes.wanted()
        incomplete = self._note_connected(wanted)
        leaving = {*self._cluster.sharing.link.board.leaving}  # the platform is about to stop their sessions
        if leaving and (evicted := [worker for worker in wanted if leaving.intersection(worker.dask_names)]):
            return {worker.name: Loss(Cause.EVICTED, "evicted, with notice") for worker in evicted}
        # A node that fails closes no connections: the scheduler notices it only after
        # ``distributed.comm.timeouts.tcp``, the platform within a second.
        is_due = time.monotonic() - self._listed >= self._watch_interval
        if not (incomplete or is_due or any(worker.phase is not Phase.RUNNING for worker in wanted)):
            return {}
        listing = await self._cluster.api.sessions_within(timing.listing)
        if listing is None:
            return {}
        self._listed = time.monotonic()
        self._processes.take_connected()
        dead: set[str] = set()
        for process in self._processes.launched:
            if process.update(listing) and isinstance(process, CMLWorker):
                dead.update(process.dask_names)
        dead &= connected_names(self._cluster)
        if dead:
            logger.info("Workers %s dropped from the scheduler: their sessions have ended", sorted(dead))
            await self._processes.unregister(dead)
        incomplete = self._note_connected(self._processes.wanted(), dead)
        await self._processes.take_started(incomplete, listing)
        losses = await self._losses_of(incomplete)
        connected = connected_names(self._cluster)  # a worker may have come back before the answers
        running = [worker for worker in incomplete if not (worker.has_ended or worker.was_closed)]
        back = {worker.name for worker in running if connected.issuperset(worker.dask_names)}
        return {name: loss for name, loss in losses.items() if name not in back}

    def _note_connected(
        self, workers: Collection[CMLWorker], dead: Set[str] = frozenset()
    ) -> list[CMLWorker]:
        """Note which Dask workers are connected, but for dead ones. Return the workers that lack one."""
        connected = connected_names(self._cluster) - dead
        for worker in workers:
            if worker.note_connected(connected):
                self._processes.note_arrival(worker)
        return [worker for worker in workers if worker.arrived_at is None or worker.gone_for is not None]

    async def _losses_of(self, workers: Collection[CMLWorker]) -> dict[str, Loss]:
        """Return why workers that lack a Dask worker are lost, by their names. Others may still connect."""
        over = {worker for worker in workers if _is_over(worker)}
        running = [worker for worker in workers if worker not in over]
        late = await self._find_late(running)
        lost = [worker for worker in workers if worker in over or worker.name in late]
        # Of a session that the platform does not list here, the notice is the only sign of its end.
        unseen = [worker for worker in running if worker.gone_for is not None and not worker.is_listed]
        last: dict[str, Any] = {}
        if lost or unseen:
            names = [name for worker in {*lost, *unseen} for name in worker.dask_names]
            with contextlib.suppress(*NO_ANSWER, CMLError):
                last = await self._cluster.sharing.link.ask(protocol.LAST, names=names)
        noticed = {name for name, state in last.items() if state["noticed"]}
        lost += [
            worker for worker in unseen if worker not in lost and not noticed.isdisjoint(worker.dask_names)
        ]
        causes = await asyncio.gather(*(worker.why_lost(last, late.get(worker.name)) for worker in lost))
        return {worker.name: cause for worker, cause in zip(lost, causes, strict=True)}

    async def _find_late(self, workers: Collection[CMLWorker]) -> dict[str, float]:
        """Return the time limits of the sessions whose Dask workers have been absent for longer, by names.

        A process may take long to import its packages, also when its nanny starts it again. If its nanny does
        not answer either, the node may have failed.
        """
        late = {}
        without_nanny = float(parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout")))
        gone = [worker for worker in workers if (worker.gone_for or 0.0) > without_nanny]
        abandoned: set[str] = set()
        if gone:
            with contextlib.suppress(*NO_ANSWER, CMLError):
                names = [name for worker in gone for name in worker.dask_names]
                abandoned.update(await self._cluster.sharing.link.ask(protocol.ABANDONED, names=names))
        for worker in workers:
            is_abandoned = not abandoned.isdisjoint(worker.dask_names)
            limit = without_nanny if is_abandoned else worker.options.worker_timeout
            absent_for = worker.runs_for if worker.gone_for is None else worker.gone_for
            if absent_for > limit:
                late[worker.name] = limit
        return late

    async def replace(self, losses: Mapping[str, Loss]) -> None:
        """Want other workers instead of lost ones. Their sessions are stopped by the next step."""
        workers = {worker.name: worker for worker in self._processes.workers()}
        groups = {name: self._cluster.groups.group_of(name) for name in losses}
        others = {name: self._cluster.groups.replace(name) for name in losses}
        lost = {name: losses[name] for name, other in others.items() if other is not None}
        for group in {groups[name] for name in lost}:
            of_group = {name: loss for name, loss in lost.items() if groups[name] == group}
            gives_up = self._count(group, of_group, [workers[name] for name in of_group if name in workers])
            gave_up = self._processes.backoff(group).gave_up
            for name, loss in of_group.items():
                replacement = "; launching a replacement" if others[name] and not gave_up else ""
                verb = "" if loss.cause in (*_NO_FAILURES, Cause.EVICTED) else "lost: "
                self._cluster._tell(f"Worker {name} {verb}{loss.words}{replacement}")
            if gives_up:
                self._processes.tell_giving_up(group)
        for name, loss in lost.items():
            self._cluster.sharing.keeper.event("lost", name, cause=loss.words[:_LONGEST_CAUSE])
        # A session that got no name has no log: the log of that name is that of the session which has it.
        noted = [name for name, loss in lost.items() if name in workers and loss.cause not in _NO_FAILURES]
        await asyncio.gather(*(workers[name].note_loss(lost[name]) for name in noted))

    def _count(self, group: str, losses: Mapping[str, Loss], workers: Collection[CMLWorker]) -> bool:
        """Count workers of a group that were lost together as one failure. Return whether it gives up now."""
        failures = {name: loss for name, loss in losses.items() if loss.cause not in _NO_FAILURES}
        if not failures:
            return False
        name, loss = next(iter(failures.items()))
        return self._processes.backoff(group).failed(
            f"worker {name} lost: {loss.words}",
            len(failures),
            max((worker.launched_at or math.inf for worker in workers), default=math.inf),
            lasted=max((worker.connected_for for worker in workers), default=0.0),
            counts=not all(loss.of_task for loss in failures.values()),
        )

    def note_seen(self, names: Iterable[str]) -> None:
        """Note Dask workers that have connected. Some may be gone before the next look."""
        for name in names:
            worker = self._cluster.workers.get(name) or self._cluster.workers.get(name.rpartition("-")[0])
            if isinstance(worker, CMLWorker) and name in worker.dask_names:
                worker.seen.add(name)

    # -- what is told

    def _note_states(self) -> None:
        """Tell other processes which sessions have been queued, and which run, since the last call."""
        for worker in self._processes.wanted():
            if worker.seen and worker.told is Phase.RUNNING:  # it never waits again
                continue
            phase = worker.phase
            if phase in _EVENTS and phase is not worker.told:
                worker.told = phase
                self._cluster.sharing.keeper.event(_EVENTS[phase], worker.name)

    def tell(self) -> None:
        """Tell lines about the cluster when they become true."""
        cluster, found = self._cluster, self._cluster.groups.demand.unrunnable
        lines = {**self._queued(), **cluster.sharing.keeper.news}
        if found is not None:
            self._unrunnable = "; ".join(found.values()) or None
            # The numbers of tasks change often, so a reason is logged once.
            lines |= {reason: f" cannot run all tasks: {tasks}" for reason, tasks in found.items()}
        for subject, line in lines.items():
            if subject not in self.told:
                cluster._tell(f"Cluster {cluster.options.name}{line}")
        # Until tasks are known, it is not known which lines of the last keeper are still true.
        self.told = self.told | lines.keys() if found is None else {*lines}

    def _queued(self) -> dict[str, str]:
        waiting = self._processes.queued()
        if not waiting:
            return {}
        n_wanted = len(self._cluster.groups.workers())
        reason = next(filter(None, (worker.reason for worker in waiting)), "")
        line = f": {len(waiting)} of {n_wanted} worker sessions queued"
        # The platform may tell the reason later, and in words that change.
        return {"queued, with a reason": f"{line}: {reason}"} if reason else {"queued": line}

    async def _tell_outage(self) -> None:
        """Log once that the platform does not answer, and once that it does again."""
        cluster, name = self._cluster, self._cluster.options.name
        before, self._outage = self._outage, cluster.api.problem
        refused_before, self._key_refused = self._key_refused, cluster.api.key_refused
        if self._outage and self._key_refused:
            if not refused_before:
                cluster._tell(f"Cannot manage cluster {name}: {self._outage}. {await self._what_runs()}")
        elif self._outage and not before:
            logger.warning("Cannot manage cluster %s: %s", name, self._outage)
        elif before and not self._outage:
            logger.warning("Managing cluster %s again", name)

    async def _what_runs(self) -> str:
        """Return sentences on what runs on, and when it ends, although nothing can be launched or stopped."""
        ends = await self._cluster.sharing.ends()
        n = len([process for process in self._processes.launched if not process.has_ended])
        they_end = f" They end {', or '.join(ends)}." if ends else ""
        return (
            "Until then, this process launches and stops no session. The cluster's "
            f"{counted(n, 'session')} and its tasks continue.{they_end} The scheduler can tell their "
            f"programs to exit. To end them now, run {command('delete', self._cluster.options.name)}"
        )

    @property
    def view(self) -> View:
        """What the process knows that launches and stops the sessions."""
        processes, retirements = self._processes, self._processes.retirements
        problems = self._failure, self._outage, processes.problem, retirements.words, self._unrunnable
        backoffs = processes.backoffs.items()
        return View(
            problem=next(filter(None, problems), None),
            gave_up={group: backoff.words or "" for group, backoff in backoffs if backoff.gave_up},
            shortages={group: backoff.shortage for group, backoff in backoffs if backoff.shortage},
            staying=retirements.staying,
            not_stopped=self._cluster.api.failures.get("stop"),
        )


def _is_over(worker: CMLWorker) -> bool:
    """Return whether a session has ended, or the platform and the scheduler have lost sight of it.

    A list that lacks a session proves nothing, and a Dask worker may be away for a moment.
    """
    if worker.has_ended or worker.was_closed:
        return True
    gone_for = worker.gone_for
    return worker.phase is Phase.MISSING and (gone_for is None or gone_for > timing.unlisted)
