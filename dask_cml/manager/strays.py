"""Finds what runs for a cluster and that no manager has launched, as after a crash at the wrong moment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from dask_cml.layout import SCHEDULER
from dask_cml.manager.state import ClusterState
from dask_cml.naming import read_name, session_name
from dask_cml.records.record import Record

logger = logging.getLogger(__name__)

#: Seconds between two looks, and for which a session must be a stray. Its manager may be about to say that it
#: has launched it.
_INTERVAL, _PATIENCE = 15.0, 20.0


class Strays:
    """Takes over or stops sessions and Dask workers of the cluster that the scheduler's list lacks.

    Only the leader looks. Each manager stops the sessions that it has launched without an answer.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._next = self._next_unanswered = 0.0
        self._since: dict[str, float] = {}

    async def look(self) -> None:
        """Look, if the last look was some time ago or Dask workers are unknown.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler or the file system does not answer.
        CMLError
            If the platform does not answer.
        """
        now = time.monotonic()
        unknown = self._unknown_workers()
        if now < self._next and not unknown.keys() - self._since.keys():
            return
        self._next = now + _INTERVAL
        record = await asyncio.to_thread(self._state.record_keeper.read)
        if record is None:
            return
        lost = {f"{name} (lost)" for name in self._state.launcher.attach_launched(record)}
        found = {**dict.fromkeys(unknown), **dict.fromkeys(lost), **self._unknown_sessions(record)}
        # A session that was launched long ago is late at once: who looks, such as a command, may leave soon.
        wall = time.time()
        launches = {name: record.launches.get(str(id)) for name, id in found.items()}
        ages = {name: max(0.0, wall - each.launched) if each else 0.0 for name, each in launches.items()}
        self._since = {name: self._since.get(name, now - ages[name]) for name in found}
        late = [name for name, since in self._since.items() if now - since >= _PATIENCE]
        if gone := [name.removesuffix(" (lost)") for name in late if name in lost]:
            logger.info("Sessions of %s forgotten: they are not in the record", gone)
            await self._state.client.decide("stopped", names=gone)
        for name in late:
            if name not in lost:
                await self._end(name, found[name], unknown.get(name, []))

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

    def _unknown_workers(self) -> Mapping[str, list[str]]:
        """Return the Dask workers of sessions that are not in the scheduler's list, by the session's name."""
        unknown: dict[str, list[str]] = {}
        for worker in self._state.fleet.observed:
            found = read_name(self._state.fleet.name, str(worker))
            name = session_name(self._state.fleet.name, *found) if found else None
            if name is not None and self._state.fleet.member(name) is None:
                unknown.setdefault(name, []).append(worker)
        return unknown

    def _unknown_sessions(self, record: Record) -> dict[str, str]:
        """Return the sessions in the record that no part of this cluster uses: their ids by name."""
        used = self._state.launcher.used_sessions()
        unknown = {}
        for session, key in record.sessions.items():
            member = self._state.fleet.member(key)
            # One that another manager has launched is attached by its name.
            awaited = member is not None and member.worker is None and (member.launched or member.wanted)
            if session not in used and not awaited:
                unknown[f"{key} ({session})" if key == SCHEDULER or member is not None else key] = session
        return unknown

    async def _end(self, name: str, session: str | None, workers: list[str]) -> None:
        if session is not None and not workers:
            logger.warning("Session %s of %s stopped: no manager has launched it", session, name)
            await self._state.launcher.stop_stray(session, name)
        elif session is not None:
            logger.warning("Session %s of %s taken over: no manager knew it", session, name)
            self._state.launcher.attach(name, session)
        elif workers:
            logger.warning("Workers %s retired: their session is unknown", workers)
            try:
                await asyncio.wait_for(self._state.client.retire(workers), _PATIENCE)
            except asyncio.TimeoutError:
                await self._state.client.drop(workers)
        self._since.pop(name, None)
