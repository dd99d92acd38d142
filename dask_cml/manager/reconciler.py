"""Keeps a cluster at the requested number of workers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import NoReturn

from dask_cml.cancellation import wait_until_set
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.losses import LossFinder, SchedulerLost
from dask_cml.manager.policy import Snapshot, unrunnable
from dask_cml.manager.retirement import Retirements, choose
from dask_cml.manager.state import ClusterState
from dask_cml.manager.strays import Strays
from dask_cml.protocol import SET
from dask_cml.scheduler.lifetime import NOTICE
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.sessions.process import CMLWorker

logger = logging.getLogger(__name__)

_LOOK_INTERVAL, _STARTING_INTERVAL = 3.0, 0.1
#: Seconds between two looks of an observer. A process may observe many clusters.
_OBSERVER_INTERVAL = 7.5
#: Seconds between two looks for each session, because a look considers them all, and the most.
_REST, _LONGEST_REST = 0.0025, 3.0
#: Characters of a cause that the scheduler logs.
_LONGEST_CAUSE = 300


class Reconciler:
    """Compares what is wanted with the sessions and with the scheduler's workers, and acts.

    :meth:`run` looks whenever something changes. All managers attach and detach sessions. Only the leader
    replaces, stops and launches them, and each of its decisions is an operation of the scheduler.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        #: Set at the end of the next look that begins without unanswered wishes.
        self._settled = asyncio.Event()
        #: What the last lines were about, which are still true.
        self._told: set[str] = set()
        self._changed, self._urgent = asyncio.Event(), asyncio.Event()
        self._told_url: str | None = None
        self._strays = Strays(state)
        self._losses = LossFinder(state)
        self._retirements = Retirements(state, self.poke)

    def poke(self, urgent: bool = False) -> None:
        """Look again soon or, if urgent, now. Call this in the event loop."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> NoReturn:
        """Keep the cluster until its scheduler ends. Call this again for another scheduler.

        Raises
        ------
        SchedulerLost
            If the scheduler cannot be managed any more.
        """
        await self._retirements.close()  # those of a scheduler that was lost
        self._told_url = self._state.end = None
        while True:
            await self._look()
            rest = min(len(self._state.fleet.members) * _REST, _LONGEST_REST)
            await wait_until_set(self._urgent, rest)
            # While sessions start, look as often as the platform may be asked.
            interval = _OBSERVER_INTERVAL if self._state.observes else _LOOK_INTERVAL
            interval = _STARTING_INTERVAL if self._state.fleet.starting else interval
            pause = min(interval, self._state.backoffs.shortest_pause or interval)
            await wait_until_set(self._changed, pause)

    async def settle(self) -> None:
        """Wait until sessions were launched and stopped for all wishes, as far as the platform allows it."""
        if not self._state.fleet.wishes and not self._state.fleet.differs:
            return
        self.poke()
        await self._settled.wait()

    async def close(self) -> None:
        """Stop waiting for what the looks have started."""
        self._settled.set()
        await self._retirements.close()
        await self._state.launcher.close()

    async def _look(self) -> None:
        """Act if this manager leads, and find lost sessions."""
        self._changed.clear()
        self._urgent.clear()
        settled = asyncio.Event()
        if not self._state.fleet.wishes:  # the scheduler has answered them, so this look knows them
            settled, self._settled = self._settled, settled
        try:
            await self._strays.look()
            await self.report()
            await self._tell_states()
            if self._state.client.leads:
                await self._shrink()
                await self._close_unwanted()
                await self._launch_missing()
            settled.set()
            losses = await self._losses.look()
            if self._state.client.leads:
                await self._replace(losses)
            await self._strays.stop_unanswered()
            await self._tell()
        except SchedulerLost as lost:
            self._state.end = str(lost)
            raise
        except CallFailed:
            pass  # _tell_outage logs it once
        except (CMLError, OSError, asyncio.TimeoutError, ValueError) as error:
            logger.warning("Cannot manage cluster %s: %s", self._state.fleet.name, str(error) or repr(error))
        except Exception:
            logger.exception("Cannot manage cluster %s", self._state.fleet.name)
        finally:
            settled.set()
        self._tell_outage()
        self._state.retiring = self._retirements.words

    def _tell_outage(self) -> None:
        before, outage = self._state.outage, self._state.api.problem
        self._state.outage = outage
        if outage and not before:
            logger.warning("Cannot manage cluster %s: %s", self._state.fleet.name, outage)
        elif before and not outage:
            logger.warning("Managing cluster %s again", self._state.fleet.name)

    # -- what all managers do

    async def report(self) -> None:
        """Tell the scheduler which sessions were launched here, and the URL of its own."""
        await self._tell_launched()
        await self._tell_url()

    async def _tell_launched(self) -> None:
        """Tell the scheduler which sessions were launched here. Others attach them by the record."""
        new = [
            each
            for each in self._state.fleet.members
            if not (each.launched or each.gone) and each.worker and each.worker.session_id
        ]
        if not (new and self._state.client.connected):
            return
        await self._state.record_keeper.write()
        written = [
            each.name
            for each in new
            if each.worker and each.worker.session_id in self._state.record_keeper.written
        ]
        if written:
            await self._state.client.decide("launched", names=written)

    async def _tell_url(self) -> None:
        """Tell the scheduler the URL of its session, for processes to which the platform does not list it."""
        scheduler = self._state.launcher.scheduler
        url = None if scheduler is None or scheduler.adopted else scheduler.info.get("app_url")
        if url and url != self._told_url and self._state.client.connected:
            await self._state.client.call(SET, app_url=url)
            self._told_url = url

    async def _tell_states(self) -> None:
        """Tell the scheduler which sessions wait for room and which run, for its log of events."""
        if not self._state.client.leads:
            return
        states = {each: _state_of(each.worker) for each in self._state.fleet.members if each.worker}
        if new := {each: state for each, state in states.items() if state not in (None, each.told_state)}:
            await self._state.client.decide("found", states={each.name: new[each] for each in new})
            for each, state in new.items():
                each.told_state = state

    async def _tell(self) -> None:
        """Log each line about the cluster when it becomes true."""
        fleet, age = self._state.fleet, self._state.age
        waits, full, left = len(fleet.waits()), fleet.full, fleet.most_age - fleet.age
        lines = {}
        if waits:
            lines["room"] = f" waiting for room for {waits} of {len(fleet.names)} worker sessions"
        if full:
            lines["memory"] = f": {full}"
        if age and left <= NOTICE:
            lines["end"] = f" shuts down in {math.ceil(left / 60)} min: its age is {age}"
        found = await self._find_unrunnable() if self._state.client.leads else {}
        self._state.unrunnable = "; ".join(found.values()) or None
        # The numbers of tasks change often, so each reason is logged once.
        lines |= {reason: f" cannot run all tasks: {each}" for reason, each in found.items()}
        for what, line in lines.items():
            if what not in self._told:
                self._state.log(f"Cluster {fleet.name}{line}")
        self._told = {*lines}

    async def _find_unrunnable(self) -> dict[str, str]:
        """Return descriptions of the tasks that no worker can run, now or later, by their reasons."""
        fleet = self._state.fleet
        answer = await self._state.client.demand(max_age=_LOOK_INTERVAL)
        # Usually, no task is restricted, and a cluster may have thousands of workers.
        known, wanted = (fleet.workers_info, fleet.wanted_members()) if answer["restricted"] else ({}, [])
        expected = {*known, *(str(info.get(each)) for info in known.values() for each in ("name", "host"))}
        expected.update(name for each in wanted for name in (each.name, *each.dask_names))
        return unrunnable(Snapshot.of(answer, fleet.states), expected)

    # -- what the leader does

    async def _replace(self, losses: Mapping[str, Loss]) -> None:
        """Replace lost sessions. Those that another manager has stopped meanwhile are not wanted any more."""
        if not losses:
            return
        causes = {name: loss.words[:_LONGEST_CAUSE] for name, loss in losses.items()}
        gone = await self._state.client.decide("replace", names=[*losses], causes=causes)
        lost = [member for name in gone if (member := self._state.fleet.member(name)) is not None]
        for group in {each.group for each in lost}:
            found = {each.name: losses[each.name] for each in lost if each.group == group}
            self._state.backoffs.of(group).lost(found)
        for member in lost:
            loss = losses[member.name]
            if member.worker is not None and loss.cause is not Cause.CLOSED:
                await member.worker.note_loss(loss)

    async def _shrink(self) -> None:
        """Remove excess sessions from the wanted ones."""
        for group in self._state.fleet.states:
            if group.excess > 0:
                names = await choose(self._state, group.excess, group=group.name)
                await self._state.client.decide("trim", group=group.name, names=names)

    async def _close_unwanted(self) -> None:
        """Stop the sessions of unwanted workers that hold no data any more."""
        fleet, api = self._state.fleet, self._state.api
        closing = await self._retirements.carry_on()
        ids = {each.worker.session_id for each in closing if each.worker}
        # Also sessions without a worker, such as the engine of a refused launch that could not be stopped
        # before.
        used = self._state.launcher.used_sessions()
        if stopping := {each for each in api.live if each in ids or each not in used}:
            await self._state.launcher.stop(stopping)
        over = [each for each in closing if each.worker and each.worker.session_id not in api.live]
        for each in over:
            if (worker := fleet.detach(each.name)) is not None:
                await worker.close()
        if over:
            self._state.record_keeper.poke()
            # With scale(0), the last worker is connected until its session has ended.
            await self._state.client.drop([worker for each in over for worker in each.connected])
            await self._state.client.decide("stopped", names=[each.name for each in over])

    async def _launch_missing(self) -> None:
        fleet = self._state.fleet
        wishes = {group.name: group.wanted.wishes for group in fleet.states}
        mine = [each for each in fleet.unlaunched if each.manager == fleet.manager]
        names = [each.name for each in mine if not self._state.backoffs.of(each.group).pause]
        if not names:
            return
        errors = await self._state.launcher.launch_workers(names, lambda: self._state.client.leads)
        await self.report()
        for group in {fleet.group_of(name) for name in names}:
            await self._count_launches(group, names, errors, wishes[group])
        if not errors:
            self.poke()

    async def _count_launches(
        self, group: str, names: list[str], errors: Mapping[str, CMLError], wishes: int
    ) -> None:
        """Let failed or refused launches of a group delay the next ones."""
        backoff = self._state.backoffs.of(group)
        found = [error for name, error in errors.items() if self._state.fleet.group_of(name) == group]
        refusal = next((error for error in found if isinstance(error, LaunchRefused)), None)
        if refusal is not None:
            left = [each.name for each in self._state.fleet.unlaunched if each.name in names]
            numbers = await self._state.client.decide("refuse", group=group, names=left, wishes=wishes)
            if numbers:
                granted, asked = numbers
                backoff.refused(granted, asked, refusal.reason)
        elif found and not isinstance(found[0], CallFailed):
            backoff.failed(str(found[0]), len(found))
        elif not found:
            members = self._state.fleet.members
            backoff.granted(sum(each.group == group and each.worker is not None for each in members))


def _state_of(worker: CMLWorker) -> str | None:
    """Return what the scheduler logs of a session. None: it starts, and has not waited long."""
    if worker.waits_for is not None:
        return "waiting"
    return "running" if worker.is_known_to_run else None
