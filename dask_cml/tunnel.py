"""A tunnel: carries the bytes of a TCP connection through one of Dask's comms."""

from __future__ import annotations

import asyncio

from distributed.comm.core import Comm

from dask_cml.cancellation import cancel
from dask_cml.msgpack_comm import MsgpackComm

CHUNK = 2**16
# A comm's write() does not wait for the reader. This many bytes are sent before the reader confirms some.
_WINDOW = 8 * CHUNK


class Tunnel:
    """Carries the bytes of a TCP connection through a comm, in both directions, until both have ended.

    The other side of the comm is a tunnel, too. A message of bytes is data, and empty bytes are the end of
    the data. A number confirms how many bytes were passed on; the end counts as one. It is written by hand,
    because no library carries bytes through Dask's comms.

    Parameters
    ----------
    comm : Comm or MsgpackComm
        The comm. The tunnel closes it.
    reader : StreamReader
        The TCP connection's reader.
    writer : StreamWriter
        The TCP connection's writer.
    """

    def __init__(
        self, comm: Comm | MsgpackComm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # So that `drain` waits until all bytes are in the system's buffer.
        writer.transport.set_write_buffer_limits(high=0)
        self._comm = comm
        self._reader = reader
        self._writer = writer
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting = 0
        self._outstanding = 0
        self._passed_on = asyncio.Event()
        self._has_sent_end = False
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Carry bytes until both directions have ended, then close the comm.

        Raises
        ------
        OSError
            If a connection breaks.
        """
        tasks = [asyncio.create_task(step) for step in (self._send(), self._receive(), self._deliver())]
        try:
            await asyncio.gather(*tasks)
            await self._comm.close()
        finally:
            await cancel(*tasks)
            self._comm.abort()

    async def _send(self) -> None:
        while not self._has_sent_end:
            chunk = await self._reader.read(CHUNK)
            self._has_sent_end = not chunk
            self._outstanding += len(chunk) or 1
            await self._write(chunk)
            while self._outstanding > (_WINDOW if chunk else 0):
                self._passed_on.clear()
                await self._passed_on.wait()

    async def _receive(self) -> None:
        ended = False
        while not ended or not self._has_sent_end or self._outstanding:
            message = await self._comm.read()
            if isinstance(message, int) and 0 < message <= self._outstanding:
                self._outstanding -= message
                self._passed_on.set()
                continue
            if not isinstance(message, (bytes, bytearray, memoryview)) or ended:
                raise OSError("the other side of the tunnel sent an invalid message")
            ended = not message
            self._waiting += len(message)
            if self._waiting > _WINDOW + CHUNK:
                raise OSError("the other side of the tunnel sent more bytes than allowed")
            # Deliver in another task: a browser that does not read must not delay the other direction's
            # numbers.
            self._arrived.put_nowait(bytes(message))

    async def _deliver(self) -> None:
        unsaid = 0
        while chunk := await self._arrived.get():
            self._writer.write(chunk)
            await self._writer.drain()
            self._waiting -= len(chunk)
            unsaid += len(chunk)
            if unsaid >= _WINDOW // 4:
                await self._write(unsaid)
                unsaid = 0
        self._writer.write_eof()
        await self._write(unsaid + 1)

    async def _write(self, message: bytes | int) -> None:
        async with self._writing:
            await self._comm.write(message)
