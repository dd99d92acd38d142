"""The one client of a cluster's scheduler: it watches the board, writes on it, and asks questions.

The keeper and all other processes use it. An answer has a time limit, which covers Dask's handshake, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from distributed.comm.core import Comm, connect
from distributed.security import Security

from dask_cml import protocol
from dask_cml.cancellation import within
from dask_cml.errors import CMLError, SchedulerTimeout
from dask_cml.output import get_logger
from dask_cml.protocol import Rank
from dask_cml.rpc import NO_ANSWER, ask, call
from dask_cml.scheduler.board import Letter, Request, WantedGroup
from dask_cml.scheduler.health import Restart
from dask_cml.sessions import tls
from dask_cml.timing import timing
from dask_cml.validation import validate

logger = get_logger(__name__)


@dataclass(frozen=True)
class BoardState:
    """The board of a cluster, as a watcher knows it; see :class:`dask_cml.scheduler.board.Board`.

    Parameters
    ----------
    revision : int
        Counts the changes of the board.
    keeper : str or None
        The id of the process that keeps the cluster.
    term : int
        Counts the keepers of the cluster.
    lives_on : bool
        Whether the cluster runs on without a user.
    groups : mapping of str to WantedGroup
        The worker groups by name, as they are after the mail is carried out.
    mail : sequence of Letter
        What users have asked for, and no keeper has carried out yet.
    leaving : sequence of str
        Dask workers whose session the platform is about to stop.
    report : mapping
        What the keeper reports of the sessions, see :class:`dask_cml.sharing.report.Report`.
    moves : int
        Counts the Dask workers that have connected or left.
    problem, without_gpus : str or None
        What is wrong with the Dask workers' memory or processes, and which lack GPUs, as clauses.
    restarts : sequence of Restart
        The Dask workers that their nannies have started again lately.
    idle : float or None
        Time for which no task has waited or run, in seconds. None: some do, or did a moment ago.
    app_url : str or None
        The URL of the scheduler's session. None if another program answers there.
    serves_dashboard : bool
        Whether the scheduler's dashboard has the port to which that URL leads.
    closed : str or None
        Why the cluster has ended. None if it has not.
    age, most_age : int
        The cluster's age and its limit, in seconds. 0: no limit.
    """

    revision: int = 0
    keeper: str | None = None
    term: int = 0
    lives_on: bool = False
    groups: Mapping[str, WantedGroup] = field(default_factory=dict)
    mail: Sequence[Letter] = ()
    leaving: Sequence[str] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    moves: int = 0
    problem: str | None = None
    without_gpus: str | None = None
    restarts: Sequence[Restart] = ()
    idle: float | None = None
    app_url: str | None = None
    serves_dashboard: bool = True
    closed: str | None = None
    age: int = 0
    most_age: int = 0


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
        The scheduler's address. None: it is not known yet, and questions fail.
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
        self.close()
        self.connection_args = await asyncio.to_thread(tls.connection_args, security, address)
        self.address, self.board = address, BoardState()
        self._check(await self.hello(), record)
        await self.watch()

    async def hello(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Ask the scheduler to which cluster it belongs. One without dask-cml says nothing.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If it does not answer.
        """
        answer = await self.ask(protocol.HELLO, timeout)
        return answer if isinstance(answer, Mapping) else {}

    def _check(self, hello: Mapping[str, Any], record: str) -> None:
        if hello.get("record") != record:
            raise CMLError(
                f"the scheduler at {self.address} belongs to another cluster, {hello.get('cluster')!r}"
            )
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
            # Its end is the watcher's end.
            self._watching = await connect(
                self._known_address(), timeout=timing.answer, **self.connection_args
            )
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
        message = {"sender": self.id, "number": number, "request": msgspec.to_builtins(request)}
        began = time.monotonic()
        try:
            await self._ask_board(protocol.POST, **message)
        except NO_ANSWER as error:
            if time.monotonic() - began > timing.retry:
                raise self._no_answer(error) from error
            # The connection broke. If the scheduler has the request, the repeat changes nothing.
            await self._write(protocol.POST, **message)

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
        try:
            return await self._ask_board(op, **arguments)
        except NO_ANSWER as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: BaseException) -> CMLError:
        """Return the error that the scheduler does not answer, from the error of the connection."""
        return SchedulerTimeout(
            f"the scheduler of cluster {self._cluster!r} at {self.address} does not answer: {error!r}"
        )

    async def _ask_board(self, op: str, **arguments: Any) -> BoardState:
        """Call a handler that answers with the board.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer, or another one has replaced it meanwhile, whose board counts.
        """
        address, asked = self._known_address(), time.monotonic()
        answer = await self.ask(op, **arguments)
        if self.address != address:
            raise OSError(f"the scheduler at {address} is replaced")
        return self._take(answer, asked)

    def keeps(self, term: int) -> bool:
        """Return whether this process keeps the cluster in a term, by a question that is recent enough."""
        is_recent = self.connected and time.monotonic() - self.heard < timing.lease
        return is_recent and (self.board.keeper, self.board.term) == (self.id, term)

    async def ask(self, op: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        """Call a handler of the scheduler, see :func:`ask`. Default time limit: ``timing.answer``."""
        limit = timing.answer if timeout is None else timeout
        return await ask(self._known_address(), self.connection_args, op, limit, **arguments)

    def _known_address(self) -> str:
        if self.address is None:
            raise OSError("the scheduler has no address yet")
        return self.address

    def forget(self) -> None:
        """Forget the scheduler, because another one is to be joined."""
        self.close()
        self.address = None

    def close(self) -> None:
        """Close the connection, by which the scheduler notices that this watcher has left."""
        self.connected = False
        if self._watching is not None:
            with contextlib.suppress(Exception):  # of Dask's comm, which may be broken in any way
                self._watching.abort()
        self._watching = None
