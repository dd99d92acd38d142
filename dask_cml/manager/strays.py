"""Finds sessions by the record of a cluster: those of other managers, and those of none, as after a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from dask_cml.manager.state import ClusterState
from dask_cml.records.record import Record

logger = logging.getLogger(__name__)

#: Seconds between two looks, and for which a session must be a stray. Its manager may be about to say that it
#: has launched it.
_INTERVAL, _PATIENCE = 15.0, 20.0


class Strays:
    """Attaches the sessions of other managers. The leader also takes over or stops those of no manager.

    Each manager stops the sessions that it has launched without an answer.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._next = self._next_unanswered = 0.0
        #: Since when sessions are strays by their ids, and since when the record lacks others by their names.
        self._since: dict[str, float] = {}

    async def look(self) -> None:
        """Look into the record, if sessions are unknown here or the last look was some time ago.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler or the file system does not answer.
        """
        fleet, launcher, leads = self._state.fleet, self._state.launcher, self._state.client.leads
        members, now = fleet.members, time.monotonic()
        launcher.detach([each.name for each in members if each.gone])
        others = [each.name for each in fleet.unlaunched if leads and each.manager != fleet.manager]
        is_due = leads and now >= self._next
        if not (is_due or others or any(each.launched and each.worker is None for each in members)):
            return
        record = await asyncio.to_thread(self._state.record_keeper.read)
        if record is None:
            return
        lost = launcher.attach_launched(record)
        if others:
            await self._take_over(others, record)
        if is_due:
            self._next = now + _INTERVAL
            await self._end_strays(record, lost, now)

    async def stop_unanswered(self) -> None:
        """Stop sessions that this manager has launched without an answer, and that nobody waits for any more.

        Raises
        ------
        CMLError
            If the platform does not answer.
        """
        if time.monotonic() < self._next_unanswered:
            return
        self._next_unanswered = time.monotonic() + _INTERVAL
        awaited = {each.name for each in self._state.fleet.members if each.worker is None}
        if found := await self._state.api.adopt_unanswered(awaited):
            await self._state.launcher.stop(found)

    async def _take_over(self, names: Collection[str], record: Record) -> None:
        """Launch what another manager was to launch and did not, under new names: it may still launch it."""
        recorded = {*record.sessions.values()}
        if launched := [name for name in names if name in recorded]:
            await self._state.client.decide("launched", names=launched)
        if unlaunched := [name for name in names if name not in recorded]:
            await self._state.client.decide("replace", names=unlaunched, causes={})

    async def _end_strays(self, record: Record, lost: Collection[str], now: float) -> None:
        strays, wall = self._strays(record), time.time()
        # A session that was launched long ago is late at once: who looks, such as a command, may leave soon.
        since = {each: now - max(0.0, wall - record.launches[each].launched) for each in strays}
        since = {**dict.fromkeys(lost, now), **since}
        self._since = {each: self._since.get(each, begin) for each, begin in since.items()}
        late = {each for each, begin in self._since.items() if now - begin >= _PATIENCE}
        unknown = [member for each in late.intersection(lost) if (member := self._state.fleet.member(each))]
        if gone := sorted(each.name for each in unknown if not each.connected):
            logger.info("Sessions of %s forgotten: they are not in the record", gone)
            await self._state.client.decide("stopped", names=gone)
        if connected := sorted(each.name for each in unknown if each.connected and each.wanted):
            logger.warning("Workers %s replaced: their sessions are not in the record", connected)
            await self._state.client.decide("replace", names=connected, causes={})
        for session in late.intersection(strays):
            name = strays[session]
            logger.warning("Session %s of %s stopped: no manager has launched it", session, name)
            self._state.api.adopt(session, name)  # the leader stops what it knows and does not use

    def _strays(self, record: Record) -> dict[str, str]:
        """Return the names of the sessions in the record that no part of this cluster uses, by their ids."""
        used = self._state.launcher.used_sessions()
        strays = {}
        for session, key in record.sessions.items():
            member = self._state.fleet.member(key)
            # One that another manager has launched is attached by its name.
            awaited = member is not None and member.worker is None and (member.launched or member.wanted)
            if session not in used and not awaited:
                strays[session] = key
        return strays
