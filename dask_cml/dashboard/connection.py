"""Connections to a scheduler's dashboard, through the scheduler's own comm port.

The dashboard listens on the loopback of the scheduler's session, which only the platform's https entry
reaches. There the scheduler's plugin connects a comm to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from tornado.iostream import IOStream

from dask_cml.cancellation import cancel
from dask_cml.msgpack_comm import MsgpackComm
from dask_cml.protocol import FORWARD
from dask_cml.tunnel import Tunnel

#: Opens a comm that the scheduler connects to its dashboard. Raises OSError.
OpenComm = Callable[[], Awaitable[MsgpackComm]]
#: Bytes that a stream reads ahead, and characters of a scheduler's error.
_MOST_BYTES, _MOST_CHARACTERS = 2**22, 1000


async def open_comm(
    address: str, connection_args: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> MsgpackComm:
    """Open a comm that a scheduler connects to its dashboard.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping, optional
        The result of ``Security.get_connection_args("client")``.
    timeout : float
        Time limit for the connection, and for the scheduler's answer, in seconds. Default 30.

    Raises
    ------
    OSError
        If the scheduler does not accept the connection, or has no dashboard.
    """
    with contextlib.ExitStack() as stack:
        try:
            comm = await MsgpackComm.connect(address, connection_args, timeout)
            stack.callback(comm.abort)
            answer = await comm.ask(FORWARD, timeout)
            if not isinstance(answer, dict):
                raise OSError("the scheduler has no plugin that forwards its dashboard")
            if answer.get("status") != "OK":
                raise OSError(f"{answer.get('message')}"[:_MOST_CHARACTERS])
        except (OSError, ValueError, RuntimeError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {timeout:g} s"
            raise OSError(f"cannot reach the dashboard of the scheduler at {address}: {why}") from error
        stack.pop_all()
    return comm


@contextlib.asynccontextmanager
async def dashboard_stream(open_comm: OpenComm) -> AsyncIterator[IOStream]:
    """Connect to a dashboard, yield the connection, and close it at the end."""
    async with contextlib.AsyncExitStack() as stack:
        comm = await open_comm()
        stack.callback(comm.abort)
        ours, theirs = socket.socketpair()
        stream = IOStream(theirs, max_buffer_size=_MOST_BYTES)
        stack.callback(stream.close)
        reader, writer = await asyncio.open_connection(sock=ours)
        tunnel = asyncio.create_task(Tunnel(comm, reader, writer).run())
        stack.push_async_callback(cancel, tunnel)
        tunnel.add_done_callback(lambda _: writer.transport.abort())
        yield stream
