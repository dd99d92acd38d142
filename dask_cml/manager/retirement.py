"""Which workers to stop, and their retirement: they move their data to others first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.protocol import pickle

from dask_cml.cancellation import cancel
from dask_cml.errors import CMLError
from dask_cml.manager.members import Member
from dask_cml.manager.state import ClusterState
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import setting

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

logger = logging.getLogger(__name__)

#: Seconds. Most workers move their data in less. Until then nothing is launched, to free their quota first.
_USUAL = 2.0
#: Seconds after which the user is informed of the wait.
_LONG = 10.0


class Retirements:
    """Retires workers in tasks, so that a worker that does not answer blocks nothing else.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    poke : callable
        Called after workers are retired.
    """

    def __init__(self, state: ClusterState, poke: Callable[[], None]) -> None:
        self._state = state
        self._poke = poke
        self._limit: float = setting("retire-timeout")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def words(self) -> str | None:
        """The workers whose retirement takes long. None if there are none."""
        now = time.monotonic()
        retiring = [each for each in self._state.fleet.members if each.connected and not each.wanted]
        late = sorted(each.name for each in retiring if now - (each.retiring_since or now) > _LONG)
        return f"waiting for the data of {', '.join(late)}" if late else None

    async def carry_on(self) -> list[Member]:
        """Start to retire unwanted workers, and return those whose sessions can be stopped."""
        members = self._state.fleet.members
        unwanted = [each for each in members if not each.wanted and (each.worker or each.connected)]
        await self._start([each for each in unwanted if each.connected and not each.retired], _USUAL)
        # Kept sessions that lack a Dask worker, so that whole ones replace them.
        await self._start([each for each in members if each.wanted and self._may_move(each)], 0)
        # Some may be wanted again because of their data.
        over = [each for each in unwanted if each.worker and not each.wanted]
        return [each for each in over if each.retired or not each.connected]

    def _may_move(self, member: Member) -> bool:
        """Return whether a kept session lacks a Dask worker, and others have connected since."""
        if member.stays is None or member.is_whole or not member.connected:
            return False
        return not self._state.fleet.observed <= member.stays

    async def close(self) -> None:
        """Stop waiting for workers."""
        await cancel(*self._tasks)

    async def _start(self, members: list[Member], timeout: float) -> None:
        """Retire sessions in a task, and wait for it for some seconds."""
        if new := [each for each in members if each.retiring_since is None]:
            for each in new:
                each.retiring_since = time.monotonic()
            task = asyncio.create_task(self._retire(new))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.wait([task], timeout=timeout)

    async def _retire(self, members: list[Member]) -> None:
        """Retire sessions. Keep those that hold data that no other worker can take."""
        wishes = {group.name: group.wanted.wishes for group in self._state.fleet.states}
        try:
            left = await self._hand_over(members)
            # With scale(0), the last worker stops even if its data is lost. If others are wanted, one of
            # them may connect later and take the data.
            left = left if self._state.fleet.names else set()
            if left:
                await self._state.client.decide("keep", names=sorted(left), wishes=wishes)
        except (OSError, asyncio.TimeoutError) as error:
            # The next look tries again, because the data may still be in these workers.
            logger.info("Workers %s not retired yet: %r", [each.name for each in members], error)
        except Exception:
            logger.exception("Workers %s not retired yet", [each.name for each in members])
        else:
            for each in members:
                stays = each.wanted and each.name in left  # the others are tried again
                if stays and each.stays is None:
                    self._state.log(f"Worker {each.name} kept: no other worker can take its data")
                each.stays = frozenset(self._state.fleet.observed) if stays else None
                each.retired = each.name not in left
            self._poke()
        finally:
            for each in members:
                each.retiring_since = None

    async def _hand_over(self, members: list[Member]) -> set[str]:
        """Move the data of sessions to others. Return the names of those whose data no other can take."""
        names = {worker: each.name for each in members for worker in each.connected}
        watching = asyncio.create_task(self._watch(members, names))
        try:
            left = names.keys() - await self._state.client.retire(names)
        finally:
            await cancel(watching)
        held = await self._state.client.held(left) if left else {}
        holding = {names[name] for name in left & held.keys() if held[name]["nbytes"]}
        if holding:
            # The platform may list a session as ended before the scheduler notices it.
            with contextlib.suppress(CMLError):
                listing = await self._state.api.sessions()
                holding -= {each.name for each in members if each.worker and each.worker.update(listing)}
        return holding

    async def _watch(self, members: list[Member], names: Mapping[str, str]) -> None:
        """Tell of workers that move their data slowly, and abandon those that fall silent.

        Wait for a slow worker as long as it answers. The data of a frozen worker is out of reach, and its
        session uses quota: two minutes of silence are enough, also of the scheduler. Dask itself would wait
        for five.
        """
        await asyncio.sleep(min(_LONG, self._limit))
        late = ", ".join(sorted(each.name for each in members if each.connected))
        cluster = self._state.fleet.name
        self._state.log(f"Cluster {cluster} waiting for other workers to copy the data of {late}")
        heard: dict[str, float] = {}
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                held = await self._state.client.held(names)
                before, heard = heard, {worker: each["last_seen"] for worker, each in held.items()}
                silent = {worker for worker in heard if heard[worker] == before.get(worker)}
                for name in sorted({names[worker] for worker in silent}):
                    self._state.log(f"Worker {name} abandoned: no answer for {self._limit:g} s")
                await self._state.client.drop(silent)
            await asyncio.sleep(self._limit)


async def choose(
    state: ClusterState,
    n: int,
    worker_key: Callable[[WorkerState], Hashable] | None = None,
    group: str = DEFAULT_GROUP,
    **more: Any,
) -> list[str]:
    """Choose the `n` sessions of a worker group that cost least to stop.

    Sessions that wait for room come first, then those that are not connected yet.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    n : int
        Number of sessions.
    worker_key : callable, optional
        Groups workers that are closed together or not at all. Then the result may be fewer than `n`.
    group : str
        The worker group.
    **more
        Arguments of ``Scheduler.workers_to_close``.
    """
    fleet = state.fleet
    wanted, waits = fleet.group(group).names, fleet.waits(group)
    present = fleet.arrived(group)
    arrived = [name for name in reversed(wanted) if name in present]
    absent = [name for name in reversed(wanted) if name not in present]
    chosen = sorted(absent, key=lambda name: name not in waits)[:n]
    n -= len(chosen)
    if not n:
        return chosen

    # Include workers of other groups and retiring ones, because the scheduler may name these first.
    workers = {each.name: each.connected for each in fleet.members}
    among = n * fleet.group(group).options.processes if worker_key else len(fleet.observed)
    key = pickle.dumps(worker_key) if worker_key else None
    named: Iterable[str] = ()  # without an answer
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        named = await state.client.call("workers_to_close", n=among, key=key, attribute="name", **more)
    costs = {worker: cost for cost, worker in enumerate(named)}
    # The Dask worker of a session that costs most counts.
    cost = {each: max(costs.get(worker, math.inf) for worker in workers[each]) for each in arrived}
    order = sorted(arrived, key=cost.__getitem__)
    return chosen + [name for name in order if not (worker_key and math.isinf(cost[name]))][:n]
