"""The questions of the process that keeps a cluster: about the Dask workers of a scheduler, and its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from distributed.comm.core import Comm
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, WorkerState, WorkerStatusPlugin

from dask_cml import protocol
from dask_cml.cancellation import within
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.demand import known_demand
from dask_cml.scheduler.health import Health, last_state
from dask_cml.timing import timing


class WorkerQuestions(SchedulerPlugin):
    """Knows the Dask workers of one scheduler. The plugin, which starts later, adds the handlers.

    Attributes
    ----------
    health : Health
        What is wrong with the workers.
    leaving : list of str
        The names of Dask workers whose session the platform is about to stop.
    moves : int
        Counts the Dask workers that have connected or left.
    """

    _scheduler: Scheduler
    #: The cluster's name.
    _cluster: str

    def __init__(self) -> None:
        self.health = Health()
        self.leaving: list[str] = []
        self.moves = 0
        #: The number of calls of `Client.scatter` under way, to any worker.
        self._scatters = 0
        self._states: dict[str, WorkerState] = {}

    async def scatter(self, **arguments: Any) -> Any:
        """Send data of a client to workers, and count the call: Scheduler.scatter may wait for a worker."""
        is_to_any = arguments.get("workers") is None
        self._scatters += is_to_any
        try:
            return await self._scheduler.scatter(**arguments)
        finally:
            self._scatters -= is_to_any

    # -- questions

    def demand(self) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the cluster's sessions, from ``known_demand``."""
        return known_demand(self._scheduler, self._cluster, self._scatters)

    def held(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return when the scheduler heard of Dask workers, and the bytes they hold, by their names."""
        workers, addresses = self._scheduler.workers, self._scheduler.aliases
        connected = {name: workers[addresses[name]] for name in names if name in addresses}
        return {
            name: {"last_seen": worker.last_seen, "nbytes": worker.nbytes}
            for name, worker in connected.items()
        }

    def last(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return what was known last of Dask workers that have left, by their names; see ``last_state``."""
        known = {name: self.health.last(name) for name in names}
        return {name: last for name, last in known.items() if last is not None}

    async def abandoned(self, names: Collection[str]) -> list[str]:
        """Return the Dask workers that are not connected, and that no nanny is about to start again."""
        aliases = self._scheduler.aliases  # of the connected workers
        absent = [name for name in names if name not in aliases]
        have_nannies = await asyncio.gather(*map(self._has_nanny, absent))
        return [name for name, has in zip(absent, have_nannies, strict=True) if not (has or name in aliases)]

    async def _has_nanny(self, name: str) -> bool:
        """Return whether the nanny of a Dask worker that has left answers."""
        nanny = (self.health.last(name) or {}).get("nanny")
        if nanny is None:
            return False
        try:
            await within(timing.answer / 2, self._scheduler.rpc(nanny).identity())
        except NO_ANSWER:
            return False
        return True

    def subscribe_worker_status(self, comm: Comm) -> dict[str, Any]:
        """Describe the workers to the keeper instead of the last one. Dask's plugin warns of another one."""
        last = self._scheduler.plugins.pop(WorkerStatusPlugin.name, None)
        if isinstance(last, WorkerStatusPlugin):
            last.bcomm.abort()
        return self._scheduler.subscribe_worker_status(comm)

    # -- Dask workers that leave

    def leave(self, names: Collection[str]) -> None:
        """Move the data of Dask workers, and close them.

        Parameters
        ----------
        names : collection of str
            Their names. Some may have left.
        """
        # The keeper retires a worker before it stops the session, which then gives notice, too.
        connected = [name for name in names if name in self._scheduler.aliases]
        self.leaving += [name for name in connected if name not in self.leaving]
        for name in connected:
            self._scheduler.log_event(protocol.TOPIC, {"action": "evicted", "session": name})
        self._scheduler.loop.add_callback(self._scheduler.retire_workers, names=connected, close_workers=True)

    # -- for Dask

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a Dask worker that has connected."""
        self.moves += 1
        state = self._states[worker] = scheduler.workers[worker]
        self.health.note_connected(str(state.name), time.monotonic())
        scheduler.log_event(protocol.TOPIC, {"action": "connected", "session": str(state.name)})

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Note what was known last of a Dask worker that has left."""
        self.moves += 1
        state = self._states.pop(worker, None)
        if state is None:
            return
        name = str(state.name)
        noticed = name in self.leaving
        if noticed:
            self.leaving.remove(name)
        self.health.note_left(name, worker, {**last_state(scheduler, state), "noticed": noticed})

    def log_event(self, topic: str, msg: Any) -> None:
        """Note what nannies say of their workers."""
        self.health.note_event(topic, msg)
