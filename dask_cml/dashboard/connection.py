"""Connections to a scheduler's dashboard, through the scheduler's own comm port.

The dashboard listens on the loopback of the scheduler's session, which only the platform's https entry
reaches. The scheduler's plugin also serves it on a comm.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from tornado.iostream import IOStream

from dask_cml.cancellation import cancel
from dask_cml.msgpack_comm import MsgpackComm
from dask_cml.protocol import FORWARD

#: Opens a comm on which a scheduler serves its dashboard. Raises OSError.
OpenComm = Callable[[], Awaitable[MsgpackComm]]
#: Reads some bytes. Raises OSError at their end.
Read = Callable[[], Awaitable[bytes]]
#: Writes bytes, and waits until the other side takes more. Raises OSError if it takes none.
Write = Callable[[bytes], Awaitable[None]]
#: Bytes that are read at once, bytes that a stream reads ahead, and characters of a scheduler's error.
_CHUNK, _MOST_BYTES, _MOST_CHARACTERS = 2**16, 2**22, 1000


async def open_comm(
    address: str, connection_args: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> MsgpackComm:
    """Open a comm on which a scheduler serves its dashboard.

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
        # Tornado's HTTP client needs a stream of its own.
        ours, theirs = [IOStream(each, max_buffer_size=_MOST_BYTES) for each in socket.socketpair()]
        stack.callback(theirs.close)
        carrying = asyncio.create_task(carry((comm.receive, ours.write), (reading(ours), comm.send)))
        carrying.add_done_callback(lambda _: ours.close())
        stack.push_async_callback(cancel, carrying)
        yield theirs


async def carry(*directions: tuple[Read, Write]) -> None:
    """Carry bytes in each direction until one of them ends: then, a connection is closed."""
    copies = [asyncio.create_task(_copy(*each)) for each in directions]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*copies)


def reading(stream: IOStream) -> Read:
    """Return the function that reads the bytes of a stream as they come."""
    return functools.partial(stream.read_bytes, _CHUNK, partial=True)


async def _copy(read: Read, write: Write) -> None:
    with contextlib.suppress(OSError):
        while True:
            await write(await read())
