"""Finds the workers that were lost, and why."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import dask.config
from dask.utils import parse_timedelta

from dask_cml import protocol
from dask_cml.core.workers import Workers, connected_names
from dask_cml.errors import CMLError
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER, Ask
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.sessions.process import CMLWorker, Phase
from dask_cml.timing import timing

logger = get_logger(__name__)

#: Characters of a cause that the scheduler logs.
_LONGEST_CAUSE = 300
#: The causes of a session's end that are no failures.
_NO_FAILURES = (Cause.CLOSED, Cause.NAME_TAKEN)
#: The names of the events of which other processes learn.
_EVENTS = {Phase.QUEUED: "waiting", Phase.RUNNING: "running"}


class Losses:
    """Finds the workers of a cluster that are lost, and replaces them in its ``worker_spec``.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._processes: Workers = cluster.processes
        self._watch_interval: float = setting("api.watch-interval")
        #: When the platform has listed the sessions last.
        self._listed = -math.inf

    async def find(self) -> dict[str, Loss]:
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
        if evicted := [worker for worker in wanted if not leaving.isdisjoint(worker.dask_names)]:
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
        losses = await find_losses(incomplete, self._cluster._ask_scheduler)
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
            # The log of a session that had no name is that of the session which had it first.
            if name in workers and loss.cause not in _NO_FAILURES:
                await workers[name].note_loss(loss)

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

    def note_states(self) -> None:
        """Tell other processes which sessions have been queued, and which run, since the last call."""
        for worker in self._processes.wanted():
            phase = worker.phase
            if phase in _EVENTS and phase is not worker.told:
                worker.told = phase
                self._cluster.sharing.keeper.event(_EVENTS[phase], worker.name)

    def note_seen(self, names: Iterable[str]) -> None:
        """Note Dask workers that have connected. Some may be gone before the next look."""
        for name in names:
            worker = self._cluster.workers.get(name) or self._cluster.workers.get(name.rpartition("-")[0])
            if isinstance(worker, CMLWorker) and name in worker.dask_names:
                worker.seen.add(name)


async def find_losses(workers: Collection[CMLWorker], ask: Ask) -> dict[str, Loss]:
    """Return why workers that lack a Dask worker are lost, by their names. Other workers may still connect.

    Parameters
    ----------
    workers : collection of CMLWorker
        Workers that lack a Dask worker. Their states are those of the platform's last list.
    ask : callable
        Asks the scheduler what it knew last of them.
    """
    over = {worker for worker in workers if _is_over(worker)}
    running = [worker for worker in workers if worker not in over]
    late = await _find_late(running, ask)
    lost = [worker for worker in workers if worker in over or worker.name in late]
    # Of a session that the platform does not list here, the notice is the only sign of its end.
    unseen = [worker for worker in running if worker.gone_for is not None and not worker.is_listed]
    last: dict[str, Any] = {}
    if lost or unseen:
        names = [name for worker in {*lost, *unseen} for name in worker.dask_names]
        with contextlib.suppress(*NO_ANSWER, CMLError):
            last = await ask(protocol.LAST, names=names)
    for worker in unseen:
        if worker not in lost and any(last[name]["noticed"] for name in worker.dask_names if name in last):
            lost.append(worker)
    causes = await asyncio.gather(*(worker.why_lost(last, late.get(worker.name)) for worker in lost))
    return {worker.name: cause for worker, cause in zip(lost, causes, strict=True)}


def _is_over(worker: CMLWorker) -> bool:
    """Return whether a session has ended, or the platform and the scheduler have lost sight of it.

    A list that lacks a session proves nothing, and a Dask worker may be away for a moment.
    """
    if worker.has_ended or worker.was_closed:
        return True
    gone_for = worker.gone_for
    return worker.phase is Phase.MISSING and (gone_for is None or gone_for > timing.unlisted)


async def _find_late(workers: Collection[CMLWorker], ask: Ask) -> dict[str, float]:
    """Return the time limits of the sessions whose Dask workers have been absent for longer, by their names.

    A process may take long to import its packages, also when its nanny starts it again. If its nanny does not
    answer either, the node may have failed.
    """
    late = {}
    without_nanny = float(parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout")))
    gone = [worker for worker in workers if (worker.gone_for or 0.0) > without_nanny]
    abandoned: set[str] = set()
    if gone:
        with contextlib.suppress(*NO_ANSWER, CMLError):
            names = [name for worker in gone for name in worker.dask_names]
            abandoned.update(await ask(protocol.ABANDONED, names=names))
    for worker in workers:
        is_abandoned = not abandoned.isdisjoint(worker.dask_names)
        limit = without_nanny if is_abandoned else worker.options.worker_timeout
        absent_for = worker.runs_for if worker.gone_for is None else worker.gone_for
        if absent_for > limit:
            late[worker.name] = limit
    return late
