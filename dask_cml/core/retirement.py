"""Which workers to close, and their retirement: first they move their data to other workers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.protocol import pickle

from dask_cml import protocol
from dask_cml.cancellation import cancel
from dask_cml.core.workers import Workers, connected_names
from dask_cml.errors import CMLError
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER
from dask_cml.sessions.process import CMLWorker
from dask_cml.timing import timing

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

logger = get_logger(__name__)

#: Maximum time for workers to move their data, in seconds. Their keeper watches them meanwhile.
_NO_LIMIT = 7 * 24 * 3600.0
#: Dask workers that leave at once. The scheduler tells all others of every one, and is held meanwhile.
_AT_ONCE = 100


class Retirements:
    """Retires workers in tasks, so that a worker that does not answer blocks nothing else.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._processes: Workers = cluster.processes
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
            answer = await self._cluster._ask_scheduler("workers_to_close", attribute="name", **arguments)
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
        held = await self._cluster._ask_scheduler(protocol.HELD, names=sorted(left)) if left else {}
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
        retired = await self._cluster._ask_scheduler("retire_workers", _NO_LIMIT, **arguments)
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
        self._cluster._tell(
            f"Cluster {self._cluster.options.name} waiting for other workers to copy the data of "
            f"{', '.join(late)}"
        )
        heard: dict[str, float] = {}
        while True:
            with contextlib.suppress(*NO_ANSWER, CMLError):
                held = await self._cluster._ask_scheduler(protocol.HELD, names=sorted(sessions))
                before, heard = heard, {name: state["last_seen"] for name, state in held.items()}
                silent = {name for name in heard if heard[name] == before.get(name)}
                for session in sorted({sessions[name] for name in silent}):
                    self._cluster._tell(f"Worker {session} abandoned: no answer for {self._limit:g} s")
                await self._processes.unregister(silent)
            await asyncio.sleep(self._limit)
