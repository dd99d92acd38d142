"""Which workers to stop, and their retirement: they move their data to others first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
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
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._since: dict[str, float] = {}
        self._over: set[str] = set()
        #: The kept sessions, and for each the Dask workers that were there when none could take its data.
        self._stay: dict[str, frozenset[str]] = {}
        #: What moves the data of kept sessions that are wanted all the same.
        self._retries: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def names(self) -> Collection[str]:
        """The names of the worker sessions that are being retired.

        Dask cannot reverse a retirement, so these sessions are no longer wanted.
        """
        return self._tasks.keys()

    def is_complete(self, member: Member) -> bool:
        """Return whether all Dask workers of a session are connected. For a kept session, one is enough."""
        return member.is_whole or (member.name in self._stay and bool(member.connected))

    @property
    def words(self) -> str | None:
        """The workers whose retirement takes long. None if there are none."""
        now = time.monotonic()
        late = [name for name in self._present(self._tasks) if now - self._since.get(name, now) > _LONG]
        return f"waiting for the data of {', '.join(late)}" if late else None

    async def carry_on(self, unwanted: Collection[str]) -> set[str]:
        """Start to retire unwanted workers, and return those whose sessions can be stopped.

        Parameters
        ----------
        unwanted : collection of str
            The names of all worker sessions that are not wanted.
        """
        self._over &= set(unwanted)
        begin = {
            name for name in self._present(unwanted) if name not in self._over and name not in self._tasks
        }
        if begin and not self._closed:
            await cancel(*(self._retries[name] for name in begin & self._retries.keys()))
            task = asyncio.create_task(self._carry_out(begin, self._tasks, self._retire))
            self._tasks.update(dict.fromkeys(begin, task))
            self._since.update(dict.fromkeys(begin, time.monotonic()))
            await asyncio.wait([task], timeout=_USUAL)
        if (again := self._incomplete() - set(unwanted)) and not self._closed:
            task = asyncio.create_task(self._carry_out(again, self._retries, self._retry))
            self._retries.update(dict.fromkeys(again, task))
        connected = self._present(unwanted)
        return {name for name in unwanted if name in self._over or name not in connected}

    def _incomplete(self) -> set[str]:
        """Return the kept sessions that lack a Dask worker, if other workers have connected since."""
        if not self._stay:
            return set()
        observed = self._state.fleet.observed
        return {
            name
            for name in self._present(self._stay)
            if not (name in self._tasks or name in self._retries or observed <= self._stay[name])
            and (member := self._state.fleet.member(name)) is not None
            and not member.is_whole
        }

    async def close(self) -> None:
        """Stop waiting for workers."""
        self._closed = True
        await cancel(*self._tasks.values(), *self._retries.values())

    def _present(self, names: Collection[str]) -> list[str]:
        """Return the names of sessions with a Dask worker that is connected to the scheduler."""
        members = ((name, self._state.fleet.member(name)) for name in names)
        return sorted(name for name, member in members if member is not None and member.connected)

    async def _carry_out(
        self,
        names: set[str],
        tasks: dict[str, asyncio.Task[None]],
        work: Callable[[set[str]], Awaitable[None]],
    ) -> None:
        try:
            await work(names)
        except (OSError, asyncio.TimeoutError) as error:
            # The next step tries again, because the data may still be in these workers.
            logger.info("Workers %s not retired yet: %r", sorted(names), error)
        except Exception:
            logger.exception("Workers %s not retired yet", sorted(names))
        finally:
            for name in names:
                tasks.pop(name, None)
                self._since.pop(name, None)

    async def _retire(self, names: set[str]) -> None:
        wishes = {group.name: group.wanted.wishes for group in self._state.fleet.states}
        left = await self._hand_over(names)
        # With scale(0), the last worker stops even if its data is lost. If others are wanted, one of
        # them may connect later and take the data.
        left = left if self._state.fleet.names else set()
        stays: set[str] = set()
        if left:
            stays = {*await self._state.client.decide("keep", names=sorted(left), wishes=wishes)}
        self._note(names, stays)
        for name in sorted(stays):
            self._state.log(f"Worker {name} kept: no other worker can take its data")
        self._over |= names - left  # after another wish, the next step asks again whether to keep the others
        self._poke()

    async def _retry(self, names: set[str]) -> None:
        """Move the data of incomplete sessions, so that whole ones replace them."""
        self._note(names, await self._hand_over(names))
        self._poke()

    def _note(self, names: set[str], stays: set[str]) -> None:
        """Note which of these sessions hold data that no worker can take now."""
        for name in names - stays:
            self._stay.pop(name, None)
        self._stay.update(dict.fromkeys(stays, frozenset(self._state.fleet.observed)))

    async def _hand_over(self, sessions: set[str]) -> set[str]:
        """Move the data of sessions to others. Return the names of those whose data no other can take."""
        members = [member for name in sessions if (member := self._state.fleet.member(name)) is not None]
        names = {worker: member.name for member in members for worker in member.connected}
        asking = asyncio.ensure_future(self._state.client.retire(names))
        try:
            before = await self._seen(names)
            if not await _is_done(asking, min(_LONG, self._limit)):
                late = ", ".join(self._present({*names.values()}))
                self._state.log(
                    f"Cluster {self._state.fleet.name} waiting for other workers to copy the data of {late}"
                )
            while not await _is_done(asking, self._limit):
                held = await self._seen(names)
                # Wait for a slow worker as long as it answers. The data of a frozen worker is out of reach,
                # and its session uses quota: two minutes of silence are enough, also of the scheduler. Dask
                # itself would wait for five.
                silent = {name for name in held if _is_silent(name, before, held)}
                before = held
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await self._state.client.drop(silent)
                    for name in sorted({names[each] for each in silent}):
                        self._state.log(f"Worker {name} abandoned: no answer for {self._limit:g} s")
            retired = asking.result()
        finally:
            await cancel(asking)
        left = names.keys() - retired
        held = await self._state.client.held(left) if left else {}
        holding = {names[name] for name in left & held.keys() if held[name]["nbytes"]}
        return holding - await self._ended(holding)

    async def _seen(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what Dask workers hold, and when they were seen last. Empty without an answer."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            return await self._state.client.held(names)
        return {}

    async def _ended(self, sessions: set[str]) -> set[str]:
        """Return the sessions that the platform lists as ended. The scheduler may notice it later."""
        if not sessions:
            return set()
        try:
            listing = await self._state.api.sessions()
        except CMLError:
            return set()
        workers = {name: self._state.fleet.workers.get(name) for name in sessions}
        return {name for name, worker in workers.items() if worker is not None and worker.update(listing)}


def _is_silent(name: str, before: dict[str, dict[str, float]], held: dict[str, dict[str, float]]) -> bool:
    return name in before and held[name]["last_seen"] == before[name]["last_seen"]


async def _is_done(future: asyncio.Future[Any], timeout: float) -> bool:
    done, _ = await asyncio.wait([future], timeout=timeout)
    return bool(done)


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
    wanted, waits = fleet.group(group).wanted.names, fleet.waits
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
        named = await state.client.ask("workers_to_close", n=among, key=key, attribute="name", **more)
    costs = {worker: cost for cost, worker in enumerate(named)}
    # The Dask worker of a session that costs most counts.
    cost = {each: max(costs.get(worker, math.inf) for worker in workers[each]) for each in arrived}
    order = sorted(arrived, key=cost.__getitem__)
    return chosen + [name for name in order if not (worker_key and math.isinf(cost[name]))][:n]
