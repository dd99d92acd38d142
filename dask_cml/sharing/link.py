"""The one client of a cluster's scheduler: it watches the board, writes on it, and asks questions.

The keeper and all other processes use it. An answer has a time limit, which covers Dask's handshake, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distributed.comm.core import Comm, connect
from distributed.security import Security

from dask_cml import protocol
from dask_cml.cancellation import within
from dask_cml.checks import validate
from dask_cml.errors import CMLError, SchedulerTimeout
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER, BoardState, Rank, Request, ask, call
from dask_cml.sessions import tls
from dask_cml.timing import timing

logger = get_logger(__name__)


class Link:
    """Talks to the scheduler of one cluster.

    Parameters
    ----------
    id : str
        The id of this watcher.
    cluster : str
        The cluster's name.
    who : str
        Who it is, for users.

    Attributes
    ----------
    address : str or None
        The scheduler's address. None: it has not answered yet, and questions fail.
    connection_args : dict
        The result of ``Security.get_connection_args("client")``.
    board : BoardState
        The last known board.
    connected : bool
        Whether the scheduler answers.
    rank : Rank
        Whether this process counts as a user, and may keep the cluster.
    heard : float
        The monotonic time of the last question that the scheduler has answered. An answer may lie in the
        socket of a process that is stopped for minutes.
    """

    def __init__(self, id: str, cluster: str, who: str) -> None:
        self.id = id
        self.rank = Rank.OWNER
        self.address: str | None = None
        self.connection_args: dict[str, Any] = {}
        self.board = BoardState()
        self.connected = False
        self.heard = time.monotonic()
        self._cluster, self._who = cluster, who
        #: What this process has carried out for its users, and the scheduler may not have heard of.
        self.unreported: dict[int, Request] = {}
        #: How many requests users of this process have made.
        self._n_asked = 0
        self._posting = asyncio.Lock()
        self._watching: Comm | None = None

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        return None if self.board.idle is None else self.board.idle + time.monotonic() - self.heard

    async def join(self, address: str, security: Security | None, record: str) -> None:
        """Connect to the scheduler at an address, if it is this cluster's, and read the board.

        Parameters
        ----------
        address : str
            The scheduler's address.
        security : Security or None
            The cluster's keys, in files.
        record : str
            The id of the cluster's record.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        CMLError
            If the scheduler belongs to another cluster, or has another protocol.
        """
        self.forget()
        self.connection_args = await asyncio.to_thread(tls.connection_args, security, address)
        hello = await ask(address, self.connection_args, protocol.HELLO, timing.answer)
        self._check(hello if isinstance(hello, Mapping) else {}, record, address)
        self.address = address
        try:
            await self.watch()
        except BaseException:
            self.forget()
            raise

    def _check(self, hello: Mapping[str, Any], record: str, address: str) -> None:
        if hello.get("record") != record:
            raise CMLError(f"the scheduler at {address} belongs to another cluster, {hello.get('cluster')!r}")
        if hello.get("protocol") != protocol.PROTOCOL:
            raise CMLError(
                f"cluster {self._cluster!r} speaks protocol {hello.get('protocol')} of dask-cml, this "
                f"process {protocol.PROTOCOL}: install the dask-cml with which it was created, or delete it"
            )

    async def watch(self) -> BoardState:
        """Wait until the board changes, for a heartbeat at most, and return it.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        wait = timing.observer_heartbeat if self.rank is Rank.OBSERVER else timing.heartbeat
        since, asked = self.board.revision if self.connected else 0, time.monotonic()
        try:
            answer = await within(wait + timing.answer, self._watch(since, wait))
        except BaseException:
            self.close()
            raise
        self._take(answer, asked)
        return self.board

    async def _watch(self, since: int, wait: float) -> Any:
        if self._watching is None:
            # Dask tries to connect to a dead scheduler until its time limit. Only then this process finds out
            # that it is dead, so the first limits are short.
            limit = min(timing.answer, max(timing.listing, time.monotonic() - self.heard))
            # Its end is the watcher's end.
            self._watching = await connect(self._known_address(), timeout=limit, **self.connection_args)
        who = {"watcher": self.id, "rank": int(self.rank), "who": self._who}
        return await call(self._watching, protocol.WATCH, **who, since=since, wait=wait)

    def _take(self, answer: Mapping[str, Any], asked: float) -> BoardState:
        """Take the board of an answer, unless a newer board is known. Return the answer's board."""
        board = validate(dict(answer), BoardState, "board of a cluster")
        self.heard = max(self.heard, asked)
        if not self.connected or board.revision >= self.board.revision:
            self.board = board
        self.connected = True
        return board

    def next_number(self) -> int:
        """Return the number of another request of this process, which the scheduler takes once."""
        self._n_asked += 1
        return self._n_asked

    async def post(self, number: int, request: Request) -> None:
        """Post what a user of this process asks for, unless the scheduler has it.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        async with self._posting:
            await self._post_unreported(number)
            try:
                await self._post(number, request)
            except SchedulerTimeout:
                if not (self.connected and self.board.keeper == self.id):
                    raise
                # In its order. Another scheduler answers by now, or only the answer was lost.
                await self._post(number, request)

    async def post_unreported(self) -> None:
        """Post what this process has carried out in a term that is over, and nobody may have heard of.

        Raises
        ------
        CMLError
            If the scheduler does not answer. What it does not have yet is not forgotten.
        """
        async with self._posting:
            await self._post_unreported()

    async def _post_unreported(self, before: float = math.inf) -> None:
        # In their order: the scheduler takes a late one for a repeat.
        for number, request in [entry for entry in self.unreported.items() if entry[0] < before]:
            try:
                await self._post(number, request)
            except SchedulerTimeout:
                raise
            except CMLError as error:  # it refuses that
                logger.warning("Cluster %s not changed: %s", self._cluster, error)
            self.unreported.pop(number, None)  # the last report may have been taken late

    async def _post(self, number: int, request: Request) -> None:
        await self._write(protocol.POST, sender=self.id, number=number, request=asdict(request))

    async def live_on(self) -> None:
        """Let the cluster run on without a user.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await self._write(protocol.LIVE_ON)

    async def report(self, **values: Any) -> BoardState:
        """Tell what the keeper says, see :meth:`dask_cml.scheduler.plugin.CMLSchedulerPlugin.report`.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        async with self._posting:
            return await self._write(protocol.REPORT, keeper=self.id, **values)

    async def _write(self, op: str, **arguments: Any) -> BoardState:
        """Call a handler that changes the board, and return the board.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it. Another one that has replaced it meanwhile counts
            as no answer.
        """
        began = time.monotonic()
        try:
            try:
                return await self._ask_board(op, arguments)
            except NO_ANSWER:
                if time.monotonic() - began > timing.retry:
                    raise
                # The connection broke. If the scheduler has taken it, the repeat changes nothing.
                return await self._ask_board(op, arguments)
        except NO_ANSWER as error:
            raise SchedulerTimeout(
                f"the scheduler of cluster {self._cluster!r} at {self.address} does not answer: {error!r}"
            ) from error

    async def _ask_board(self, op: str, arguments: Mapping[str, Any]) -> BoardState:
        address, asked = self._known_address(), time.monotonic()
        answer = await self.ask(op, **arguments)
        if self.address != address:
            raise OSError(f"the scheduler at {address} is replaced")
        return self._take(answer, asked)

    async def ask(self, op: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        """Call a handler of the scheduler, see :func:`ask`. Default time limit: ``timing.answer``."""
        limit = timing.answer if timeout is None else timeout
        return await ask(self._known_address(), self.connection_args, op, limit, **arguments)

    def _known_address(self) -> str:
        if self.address is None:
            raise OSError("the scheduler has not answered yet")
        return self.address

    def forget(self) -> None:
        """Forget the scheduler and its board, because another one is to be joined."""
        self.close()
        self.address, self.board = None, BoardState()

    def close(self) -> None:
        """Close the connection, by which the scheduler notices that this watcher has left."""
        self.connected = False
        if self._watching is not None:
            with contextlib.suppress(Exception):  # of Dask's comm, which may be broken in any way
                self._watching.abort()
        self._watching = None
