"""A manager's connections to the scheduler, which unpickle nothing, with a time limit for every answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from distributed.core import rpc

from dask_cml import protocol
from dask_cml.cancellation import cancel
from dask_cml.errors import CMLError
from dask_cml.identity import Identity
from dask_cml.manager.fleet import Fleet
from dask_cml.msgpack_comm import HandlerFailed, MsgpackComm

logger = logging.getLogger(__name__)

#: Seconds for a connection and for an answer, and to close a connection of Dask's.
_ANSWER_TIMEOUT, _CLOSE_TIMEOUT = 10.0, 2.0
#: Seconds until a request is sent again.
_PAUSE = 1.0
#: Seconds. Workers may take long to move their data; their manager watches them meanwhile.
_NO_LIMIT = 7 * 24 * 3600.0


class SchedulerClient:
    """Keeps a fleet up to date with the scheduler, sends this manager's wishes, and asks the scheduler.

    As many requests run at once as are made.

    Parameters
    ----------
    fleet : Fleet
        The cluster's workers.
    observes : bool
        Whether this manager only observes.
    changed : callable
        Called in the event loop after the fleet has changed, with True if the scheduler has answered wishes.

    Attributes
    ----------
    address : str or None
        The scheduler's address. None: it is not known yet, and requests fail.
    connection_args : dict
        The result of ``Security.get_connection_args("client")``.
    connected : bool
        Whether the scheduler answers.
    info : dict
        The scheduler's information on itself, from ``Scheduler.identity``, without its workers.
    heard : float
        The monotonic time of the scheduler's last answer.
    """

    def __init__(self, fleet: Fleet, observes: bool, changed: Callable[[bool], None]) -> None:
        self.address: str | None = None
        self.connection_args: dict[str, Any] = {}
        self.info: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.connected = False
        self._fleet = fleet
        self._observes = observes
        self._changed = changed
        self._rpc: Any = None
        self._watched: MsgpackComm | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wished = asyncio.Event()
        self._asked: asyncio.Task[dict[str, Any]] | None = None
        self._asked_at = 0.0

    # -- the connection

    async def join(self, address: str, connection_args: Mapping[str, Any], record: str) -> None:
        """Connect to the scheduler at this address, and follow it until :meth:`close`.

        Parameters
        ----------
        address : str
            The scheduler's address.
        connection_args : mapping
            The result of ``Security.get_connection_args("client")``.
        record : str
            The id of the cluster's record.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        CMLError
            If the scheduler belongs to another cluster, or has another protocol.
        """
        self.address, self.connection_args = address, dict(connection_args)
        self._check(await self.call(protocol.HELLO), record)
        identity = await self.call("identity")
        Identity.read(identity)
        self.info = {name: each for name, each in identity.items() if name != "workers"}
        await self._watch()
        self._loop = asyncio.get_running_loop()
        self._wished.set()
        self._tasks = [asyncio.create_task(self._keep_watching()), asyncio.create_task(self._send_wishes())]

    def _check(self, hello: Mapping[str, Any], record: str) -> None:
        if hello.get("record") != record:
            raise CMLError(
                f"the scheduler at {self.address} belongs to another cluster, {hello.get('cluster')!r}"
            )
        if hello.get("protocol") != protocol.PROTOCOL:
            raise CMLError(
                f"cluster {self._fleet.name!r} speaks protocol {hello.get('protocol')} of dask-cml, this "
                f"process {protocol.PROTOCOL}: install the dask-cml with which it was created, or delete it"
            )

    async def _watch(self) -> None:
        """Announce this manager, and take the next changes or, from a scheduler that answers again, all."""
        heartbeat, lease = protocol.HEARTBEAT, protocol.LEASE
        if self._observes:
            heartbeat, lease = protocol.OBSERVER_HEARTBEAT, protocol.OBSERVER_LEASE
        if self._watched is None:
            self._watched = await self.open()  # its end marks the manager's end
        try:
            answer = await self._watched.ask(
                protocol.WATCH,
                heartbeat + _ANSWER_TIMEOUT,
                manager=self._fleet.manager,
                observes=self._observes,
                lease=lease,
                since=self._fleet.revision if self.connected else 0,
                wait=heartbeat,
            )
        except BaseException:
            self._watched.abort()
            self._watched = None
            raise
        self._take(answer)

    def _take(self, answer: Mapping[str, Any]) -> None:
        self.connected, self.heard = True, time.monotonic()
        before = self._fleet.revision
        self._fleet.update(answer)
        if self._fleet.revision != before:
            self._changed(False)

    async def _keep_watching(self) -> None:
        while self._tasks:  # asyncio before Python 3.12 may lose a cancellation if the connection breaks
            try:
                await self._watch()
            except Exception as error:
                if self.connected:
                    logger.info("Scheduler of cluster %s not reached: %r", self._fleet.name, error)
                self.connected = False
                self._changed(False)
                await asyncio.sleep(_PAUSE if self._tasks else 0)

    async def close(self) -> None:
        """Close the connections, by which the scheduler notices that this manager has left."""
        tasks, self._tasks = self._tasks, []
        await cancel(*tasks, self._asked)
        self.connected = False
        if self._watched is not None:
            self._watched.abort()
        self._watched = None
        if self._rpc is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._rpc.close_rpc(), _CLOSE_TIMEOUT)
        self._rpc = None

    @property
    def leads(self) -> bool:
        """Whether this manager leads, by an answer that is recent enough."""
        recent = time.monotonic() - self.heard < protocol.LEASE
        return self.connected and recent and self._fleet.leader == self._fleet.manager

    # -- wishes and operations

    def send_wishes(self) -> None:
        """Send new wishes now. Any thread may call this."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._wished.set)

    async def _send_wishes(self) -> None:
        while True:
            await self._wished.wait()
            self._wished.clear()
            wishes = self._fleet.wishes
            if not wishes:
                continue
            try:
                results = await self.apply(*wishes)
            except Exception as error:
                logger.info("Wishes for cluster %s not answered: %r", self._fleet.name, error)
                self._wished.set()
                await asyncio.sleep(_PAUSE)
                continue
            self._fleet.answered(each["wish"] for each in wishes)
            for result in results:
                if isinstance(result, dict) and "error" in result:
                    logger.warning("Cluster %s not changed: %s", self._fleet.name, result["error"])
            self._changed(True)

    async def apply(self, *operations: Mapping[str, Any]) -> list[Any]:
        """Let the scheduler carry out operations, and return their results.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        CMLError
            If the scheduler refuses all of them.
        """
        manager, since = self._fleet.manager, self._fleet.revision
        answer = await self.call(protocol.APPLY, manager=manager, operations=[*operations], since=since)
        self._take(answer)
        return [*answer["results"]]

    async def decide(self, op: str, **arguments: Any) -> Any:
        """Let the scheduler carry out one operation after this manager's wishes, and return its result.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            As in :meth:`apply`.
        ValueError
            If the scheduler refuses the operation.
        """
        [*_, result] = await self.apply(*self._fleet.wishes, {"op": op, **arguments})
        if isinstance(result, dict) and "error" in result:
            raise ValueError(result["error"])
        return result

    # -- requests

    async def open(self, timeout: float = _ANSWER_TIMEOUT) -> MsgpackComm:
        """Connect to the scheduler.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not accept the connection.
        """
        if self.address is None:
            raise OSError("the scheduler has no address yet")
        return await MsgpackComm.connect(self.address, self.connection_args, timeout)

    async def call(self, op: str, limit: float = _ANSWER_TIMEOUT, **arguments: Any) -> Any:
        """Return the scheduler's answer.

        Parameters
        ----------
        op : str
            The name of the handler.
        limit : float
            Time limit in seconds.
        **arguments
            The handler's arguments, plain data.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer in time.
        CMLError
            If the handler fails.
        """
        with await self.open(min(limit, _ANSWER_TIMEOUT)) as comm:
            try:
                return await comm.ask(op, limit, **arguments)
            except HandlerFailed as error:
                raise CMLError(f"the scheduler refused {op}: {error}") from None

    @property
    def rpc(self) -> Any:
        """Dask's own connection to the scheduler, for Dask's classes."""
        if self._rpc is None and self.address is not None:
            self._rpc = rpc(self.address, connection_args=self.connection_args)
        return self._rpc

    async def terminate(self, timeout: float, reason: str) -> None:
        """Ask the scheduler to inform its workers and clients of its end, whatever it answers."""
        if self.address is not None:
            try:
                await self.call("terminate", timeout, reason=reason)
            except Exception as error:  # its workers may be frozen, and Dask's errors vary
                logger.debug("Scheduler of cluster %s gave no answer to its end: %r", self._fleet.name, error)

    async def demand(self, max_age: float = 0.0) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the cluster's sessions; see ``known_demand``.

        Concurrent callers share one question and its answer, or its error.

        Parameters
        ----------
        max_age : float
            Maximum age of a question whose answer is used again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        asked = self._asked
        if asked is None or (
            asked.done()
            and (asked.cancelled() or asked.exception() or time.monotonic() - self._asked_at >= max_age)
        ):
            self._asked_at = time.monotonic()
            asked = self._asked = asyncio.create_task(self.call(protocol.DEMAND))
        return await asyncio.shield(asked)

    async def retire(self, names: Collection[str]) -> set[str]:
        """Move the data of Dask workers to others and close them, without a time limit.

        Returns
        -------
        set of str
            The names of the closed workers.
        """
        # SpecCluster passes names instead of addresses (`retire_workers(workers=...)`), so its workers are
        # closed with their data.
        retired = await self.call("retire_workers", _NO_LIMIT, names=sorted(names))
        return {str(info["name"]) for info in retired.values()}

    async def held(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return what Dask workers hold, see ``CMLSchedulerPlugin.held``.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        held: dict[str, dict[str, float]] = await self.call(protocol.HELD, names=sorted(names))
        return held

    async def drop(self, names: Collection[str]) -> None:
        """Make the scheduler count Dask workers as lost, so that their tasks run elsewhere.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        for address, worker in self._fleet.workers_info.items():
            if worker["name"] in names:
                stimulus = f"cml-drop-{time.time()}"
                await self.call("unregister", address=address, stimulus_id=stimulus)
