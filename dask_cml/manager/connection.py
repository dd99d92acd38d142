"""Requests to a scheduler, each with a time limit, over connections that unpickle nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.core import rpc

from dask_cml.errors import CMLError
from dask_cml.msgpack_comm import HandlerFailed, MsgpackComm

#: Seconds for a connection, and for an answer.
ANSWER_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 2.0
_PAUSE = 0.5


class Connection:
    """Requests to one scheduler. As many run at once as are made.

    Attributes
    ----------
    address : str or None
        The scheduler's address. None: it is not known yet, and requests fail.
    connection_args : dict
        The result of ``Security.get_connection_args("client")``.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.connection_args: dict[str, Any] = {}
        self._rpc: Any = None

    async def open(self, timeout: float = ANSWER_TIMEOUT) -> MsgpackComm:
        """Connect to the scheduler.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not accept the connection.
        """
        if self.address is None:
            raise OSError("the scheduler has no address yet")
        return await MsgpackComm.connect(self.address, self.connection_args, timeout)

    async def call(self, op: str, limit: float = ANSWER_TIMEOUT, **arguments: Any) -> Any:
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
        comm = await self.open(min(limit, ANSWER_TIMEOUT))
        try:
            return await comm.ask(op, limit, **arguments)
        except HandlerFailed as error:
            raise CMLError(f"the scheduler refused {op}: {error}") from None
        finally:
            comm.abort()

    async def insist(self, cluster: str, timeout: float, request: Callable[[], Awaitable[Any]]) -> None:
        """Repeat a request until the scheduler answers, which may be busy.

        Raises
        ------
        CMLError
            If it does not answer within so many seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                await request()
                return
            except (OSError, asyncio.TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise CMLError(
                        f"the scheduler of cluster {cluster!r} at {self.address} did not answer within "
                        f"{timeout:g} s: {error!r}"
                    ) from error
            await asyncio.sleep(_PAUSE)

    @property
    def rpc(self) -> Any:
        """Dask's own connection to the scheduler, for Dask's classes."""
        if self._rpc is None and self.address is not None:
            self._rpc = rpc(self.address, connection_args=self.connection_args)
        return self._rpc

    async def close(self) -> None:
        """Close all connections."""
        if self._rpc is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._rpc.close_rpc(), _CLOSE_TIMEOUT)
        self._rpc = None
