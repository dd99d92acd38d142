"""The scheduler's dashboard at a port of this machine, through the scheduler's own comm port.

The dashboard listens on the loopback of the scheduler's session, where only the platform's https entry finds
it. For each connection that a browser makes to the forwarder, a Dask connection of its own is made to the
scheduler, where the plugin connects it with the dashboard; TLS and its keys are those of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from distributed.comm.core import Comm, connect
from distributed.utils import wait_for

from dask_cml.tasks import cancel

logger = logging.getLogger(__name__)

#: What the scheduler is asked for, once for each connection; the plugin answers ``{"status": "OK"}``.
FORWARD = "cml_forward"

_CHUNK = 2**16
# A comm's write() does not wait until the other side has read: so much is sent before it says that it has.
_WINDOW = 8 * _CHUNK
_ANSWER_TIMEOUT = 5.0
_BAD_GATEWAY = """\
HTTP/1.1 502 Bad Gateway\r
Content-Type: text/plain; charset=utf-8\r
Content-Length: {length}\r
Connection: close\r
\r
"""


class DashboardForwarder:
    """Listens on a free port of 127.0.0.1, and leads to the dashboard of a scheduler.

    The scheduler needs the plugin :class:`~dask_cml.plugin.CMLSchedulerPlugin`. A scheduler that is gone is
    told to browsers as ``502 Bad Gateway``.

    Parameters
    ----------
    address : str
        The scheduler's.
    connection_args : mapping, optional
        As ``Security.get_connection_args("client")`` returns them.
    timeout : float
        Seconds within which the scheduler must accept a connection.
    port : int
        The port to listen on. Default: a free one.

    Examples
    --------
    >>> async def link():
    ...     async with DashboardForwarder(cluster.scheduler_address) as forwarder:
    ...         return forwarder.link
    >>> asyncio.run(link())
    'http://127.0.0.1:.../status'
    """

    def __init__(
        self,
        address: str,
        connection_args: Mapping[str, Any] | None = None,
        *,
        timeout: float = 5.0,
        port: int = 0,
    ) -> None:
        self.address = address
        self.port = port
        self._connection_args = dict(connection_args or {})
        self._timeout = timeout
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DashboardForwarder:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    @property
    def link(self) -> str:
        """The dashboard's address for a browser on this machine."""
        return f"http://127.0.0.1:{self.port}/status"

    async def start(self) -> None:
        """Listen.

        Raises
        ------
        OSError
            If the port is taken.
        """
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, backlog=512)
            self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop to listen, and end all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await cancel(*self._tasks)
            await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it was accepted just before the end
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tunnel = None
        try:
            comm = await wait_for(self._connect(), self._timeout)
            tunnel = Tunnel(comm, reader, writer)
            await tunnel.run()
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            logger.debug("A connection to the dashboard of %s ends: %r", self.address, error)
            if tunnel is None or not tunnel.delivered:
                await _answer(reader, writer, f"The Dask scheduler at {self.address} is not there: {error!r}")
        except Exception:
            logger.exception("A connection to the dashboard of %s failed", self.address)
        finally:
            writer.transport.abort()

    async def _connect(self) -> Comm:
        comm = await connect(self.address, timeout=self._timeout, **self._connection_args)
        try:
            comm.name = "dashboard"
            await comm.write({"op": FORWARD})
            answer = await comm.read()
            if not isinstance(answer, dict):
                raise OSError("it has no plugin that forwards its dashboard")
            if answer.get("status") != "OK":
                raise OSError(answer.get("message", answer.get("status")))
        except BaseException:
            comm.abort()
            raise
        return comm


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: str) -> None:
    """Tell a browser why there is no dashboard, as far as it listens."""

    async def answer() -> None:
        body = f"{words}\n".encode()
        writer.write(_BAD_GATEWAY.format(length=len(body)).encode() + body)
        await writer.drain()
        writer.write_eof()
        while await reader.read(_CHUNK):  # the system would take the answer back if the request were not read
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await wait_for(answer(), _ANSWER_TIMEOUT)


class Tunnel:
    """Carries the bytes of a TCP connection through a comm, both ways, until both directions have ended.

    The other side of the comm has a tunnel, too. Bytes are data; empty bytes are their end; a number says how
    much of what came was passed on, where the end counts as one; None says that nothing comes any more.

    Parameters
    ----------
    comm : Comm
        Belongs to the tunnel from now on.
    reader, writer : StreamReader, StreamWriter
        The TCP connection.
    """

    def __init__(self, comm: Comm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        #: Bytes that came through the comm and were passed on.
        self.delivered = 0
        self._comm = comm
        self._reader = reader
        self._writer = writer
        # With nothing left in the transport, passed on means: given to the system.
        writer.transport.set_write_buffer_limits(high=0)
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
            chunk = await self._reader.read(_CHUNK)
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
            if self._waiting > _WINDOW + _CHUNK:
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
