"""Finds the worker sessions that were lost, and why, and notices the end of the scheduler's session."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import dask.config
from dask.utils import parse_timedelta

from dask_cml.manager.members import Member
from dask_cml.manager.state import ClusterState
from dask_cml.options import setting
from dask_cml.protocol import LONGEST_SILENCE
from dask_cml.records import liveness
from dask_cml.sessions.answers import SessionInfo
from dask_cml.sessions.causes import Cause, Loss, find_cause

logger = logging.getLogger(__name__)

#: Seconds without an answer from the scheduler, after which the manager gives up if the platform does not
#: list the scheduler's session here, and nothing shows that it has ended. The platform lists a session only
#: to the session that launched it. The last sign of life may be younger than the last answer.
_SILENCE = LONGEST_SILENCE + 10.0
#: Seconds more for observers, within which a manager of the cluster's user replaces a dead scheduler.
_OBSERVER_PATIENCE = 60.0
#: Seconds within which the record disappears of a cluster that another process deletes, after its scheduler.
_DELETED_WITHIN = 3.0


class SchedulerLost(Exception):
    """The scheduler cannot be managed any more. The message says why.

    Parameters
    ----------
    why : str
        The reason, as a clause.
    ended : bool
        Whether its session has ended. Otherwise, nothing says whether it still runs.
    """

    def __init__(self, why: str, ended: bool = True) -> None:
        super().__init__(why)
        self.ended = ended


class LossFinder:
    """Compares the wanted sessions with the scheduler's workers and with the platform's list.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._watch_interval: float = setting("api.watch-interval")
        self._listed = time.monotonic()

    async def look(self) -> Mapping[str, Loss]:
        """Find the sessions to replace, by name, and the causes.

        Raises
        ------
        SchedulerLost
            If the scheduler cannot be managed any more.
        CMLError
            If the platform does not answer.
        """
        now, connected = time.monotonic(), self._state.client.connected
        # Nobody here can say how many workers a session has whose group only newer releases can read.
        known = self._state.fleet.groups
        wanted = [each for each in self._state.fleet.wanted_members() if each.worker and each.group in known]
        for each in wanted:
            if each.is_complete and not each.has_arrived:
                self._state.backoffs.of(each.group).arrived(now)
            each.has_arrived = each.has_arrived or each.is_complete
            is_gone = each.has_registered and not each.is_complete
            each.gone_since = (each.gone_since or now) if is_gone else None
        leaving = [each.name for each in wanted if each.leaving]
        if leaving and connected:
            return dict.fromkeys(leaving, Loss(Cause.EVICTED, "evicted, with notice"))
        missing = [each for each in wanted if not each.is_complete]
        starting = missing or any(each.worker and not each.worker.is_known_to_run for each in wanted)
        # A node that fails closes no connections: the scheduler notices it only after
        # ``distributed.comm.timeouts.tcp``, the platform within a second.
        watches = not self._state.observes and now - self._listed >= self._watch_interval
        if not starting and not watches and connected:
            return {}
        listing = await self._state.api.sessions()
        if not self._state.client.connected:
            await self._judge_scheduler(listing)
            return {}
        self._listed = now
        ended = {each.name for each in self._state.launcher.processes if each.update(listing)}
        over = [each for each in self._state.fleet.members if each.name in ended]
        if names := {name for each in over for name in each.connected}:
            logger.info("Workers %s dropped from the scheduler: their sessions have ended", sorted(names))
            await self._state.client.drop(names)
        return {each.name: loss for each in missing if (loss := await self._loss(each, each.name in ended))}

    async def _loss(self, member: Member, ended: bool) -> Loss | None:
        """Return why a session is lost. Return None if it may still connect."""
        worker, gone = member.worker, None
        assert worker is not None
        if not (ended or worker.was_closed):
            if not member.has_registered:
                limit = worker.options.worker_timeout
                words = f"it did not connect within {limit:g} s"
                return Loss(Cause.NEVER_CONNECTED, words) if worker.runs_for > limit else None
            patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            # It may have registered since the look began.
            if member.gone_since is None or time.monotonic() - member.gone_since <= patience:
                return None
            gone = f"a Dask worker has been gone for {patience:g} s, but its session runs"
        # A session that succeeds after it was connected was closed on purpose, for example by a client.
        closed = worker.was_closed or (bool(member.seen) and worker.info.get("status") == "succeeded")
        return find_cause(
            member.last,
            await worker.last_lines() if gone is None else [],
            connected=bool(member.seen),
            noticed=member.leaving,
            closed=closed,
            said=worker.reported if gone is None else "running",
            gone=gone,
        )

    async def _judge_scheduler(self, listing: Mapping[str, SessionInfo]) -> None:
        """Find out whether a scheduler that does not answer has ended."""
        scheduler = self._state.launcher.scheduler
        assert scheduler is not None
        silent = time.monotonic() - self._state.client.heard
        patience = _SILENCE + _OBSERVER_PATIENCE * self._state.observes
        lost = None
        if scheduler.update(listing):
            lost = SchedulerLost(await self._why_it_ended())
        elif (why := await self._recorded_end()) is not None:
            lost = SchedulerLost(why)
        elif scheduler.session_id not in listing and silent > patience:
            unseen = (
                f"the scheduler at {scheduler.address} has not answered for {patience:g} s, and CML does not "
                f"list its session {scheduler.session_id} here; to check it, run `dask cml list`"
            )
            why = await self._why_dead()
            lost = SchedulerLost(why or unseen, ended=why is not None)
        if lost is not None and not self._state.client.connected:  # it may have answered meanwhile
            raise lost

    async def _recorded_end(self) -> str | None:
        """Return why the scheduler has ended, by the record, which also other sessions can read."""
        record = await asyncio.to_thread(self._state.record_keeper.read)
        if record is None:  # the cluster was deleted, or its record cannot be read now
            exists = await asyncio.to_thread(self._state.launcher.place.folder.is_dir)
            return None if exists else "another process shut it down"
        if record.scheduler.number > self._state.launcher.place.number:
            return "another manager replaces it"
        return record.scheduler.closed

    async def _why_dead(self) -> str | None:
        """Return why the scheduler counts as dead for all commands, too. None: it may run."""
        record = await asyncio.to_thread(self._state.record_keeper.read)
        # Its user may have ended the session that launched it. Then, only the user's own managers go on.
        if record is None or self._state.observes:
            return None
        finding = (await liveness.judge([record], api=self._state.api))[record.name]
        return finding.why if finding.state is liveness.State.DEAD else None

    async def _why_it_ended(self) -> str:
        scheduler = self._state.launcher.scheduler
        assert scheduler is not None
        if scheduler.info.get("status") in ("succeeded", "stopped"):
            for _ in range(10):
                if await asyncio.to_thread(self._state.record_keeper.read) is None:
                    return "another process shut it down"
                await asyncio.sleep(_DELETED_WITHIN / 10)
        return await scheduler.failure("ended")
