"""What the scheduler and its managers agree on: the names of its handlers, and a tunnel for bytes."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from distributed.comm.core import Comm

from dask_cml.aio import cancel

HEARTBEAT = "cml_manager_heartbeat"
SYNC = "cml_sync"
#: Asks the scheduler what work it knows, and what is there to do it.
DEMAND = "cml_demand"
#: In what a manager tells of itself: it is there for whomever may look, and does not keep an orphan alive.
WATCHES = "watches"
#: In what a manager sends of itself: it stays when others leave, and goes on to adapt.
SERVES = "serves"
#: Asks the scheduler for a connection with its dashboard; it answers ``{"status": "OK"}``.
FORWARD = "cml_forward"

CHUNK = 2**16
# A comm's write() does not wait until the other side has read: so much is sent before it says that it has.
_WINDOW = 8 * CHUNK


class Reads(Protocol):
    """Where bytes come from."""

    async def read(self, n: int) -> bytes:
        """Return some bytes, about `n` at most; none at the end."""


class Writes(Protocol):
    """Where bytes go."""

    def write(self, data: bytes) -> Any:
        """Write bytes, perhaps later."""

    async def drain(self) -> None:
        """Wait until all bytes are given to the system."""

    def write_eof(self) -> None:
        """Say that no more bytes come."""


def unbuffered(writer: asyncio.StreamWriter) -> asyncio.StreamWriter:
    """Let a writer's ``drain`` wait until all bytes are given to the system, as a tunnel needs it."""
    writer.transport.set_write_buffer_limits(high=0)
    return writer


class Tunnel:
    """Carries the bytes of a TCP connection through a comm, both ways, until both directions have ended.

    The other side of the comm has a tunnel, too. Bytes are data; empty bytes are their end; a number says how
    much of what came was passed on, where the end counts as one; None says that nothing comes any more.

    Parameters
    ----------
    comm : Comm
        Belongs to the tunnel from now on.
    reader, writer : Reads, Writes
        The TCP connection; see :func:`unbuffered`.
    """

    def __init__(self, comm: Comm, reader: Reads, writer: Writes) -> None:
        #: Bytes that came through the comm and were passed on.
        self.delivered = 0
        self._comm = comm
        self._reader = reader
        self._writer = writer
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting = 0
        self._outstanding = 0
        self._passed_on = asyncio.Event()
        self._directions = 2
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Carry until both directions have ended, and close the comm.

        Raises
        ------
        OSError
            If either connection breaks.
        """
        tasks = [asyncio.create_task(step) for step in (self._send(), self._receive(), self._deliver())]
        try:
            await asyncio.gather(*tasks)
            await self._comm.close()
        finally:
            await cancel(*tasks)
            self._comm.abort()

    async def _send(self) -> None:
        chunk = b"-"
        while chunk:
            chunk = await self._reader.read(CHUNK)
            self._outstanding += len(chunk) or 1
            await self._write(chunk)
            while self._outstanding > (_WINDOW if chunk else 0):
                self._passed_on.clear()
                await self._passed_on.wait()
        await self._end_direction()

    async def _receive(self) -> None:
        while (message := await self._comm.read()) is not None:
            if isinstance(message, int):
                self._outstanding -= message
                self._passed_on.set()
                continue
            self._waiting += len(message)
            if self._waiting > _WINDOW + CHUNK:
                raise OSError("the other side sends more than it may")
            # Not passed on here: a browser that does not read would keep numbers from the other direction.
            self._arrived.put_nowait(bytes(message))

    async def _deliver(self) -> None:
        unsaid = 0
        while chunk := await self._arrived.get():
            self._writer.write(chunk)
            await self._writer.drain()
            self.delivered += len(chunk)
            self._waiting -= len(chunk)
            unsaid += len(chunk)
            if unsaid >= _WINDOW // 4:
                await self._write(unsaid)
                unsaid = 0
        self._writer.write_eof()
        await self._write(unsaid + 1)
        await self._end_direction()

    async def _end_direction(self) -> None:
        # Whoever closes while something is under way to it makes the system drop what the other has not read.
        self._directions -= 1
        if not self._directions:
            await self._write(None)

    async def _write(self, message: bytes | int | None) -> None:
        async with self._writing:
            await self._comm.write(message)
