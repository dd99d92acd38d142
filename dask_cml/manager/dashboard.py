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

from dask_cml import checks
from dask_cml.aio import cancel
from dask_cml.manager.http_guard import CheckedRequests, HostGuard, Refused
from dask_cml.options import setting
from dask_cml.wire import CHUNK, FORWARD, Tunnel, unbuffered

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 5.0
#: Browsers connect before they ask, and do not ask always.
_FIRST_REQUEST_TIMEOUT = 60.0
_HEAD = """\
HTTP/1.1 {status}\r
Content-Type: text/plain; charset=utf-8\r
Content-Length: {length}\r
Connection: close\r
\r
"""


class DashboardForwarder:
    """Listens on a free port of 127.0.0.1, and leads to the dashboard of a scheduler.

    The scheduler needs its plugin, :class:`~dask_cml.scheduler.plugin.CMLSchedulerPlugin`. A scheduler that
    is gone is told to browsers as ``502 Bad Gateway``, and requests of foreign pages as ``403 Forbidden``;
    see :class:`~dask_cml.manager.http_guard.HostGuard`.

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
        timeout: float = 30.0,
        port: int = 0,
    ) -> None:
        self.address = address
        self.port = port
        self._connection_args = dict(connection_args or {})
        self._timeout = timeout
        self._guard = HostGuard(setting("forward-hosts", checks.names))
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
        requests = CheckedRequests(reader, self._guard)
        try:
            if not await self._asks(requests):
                return
            comm = await connect_dashboard(self.address, self._connection_args, self._timeout)
            tunnel = Tunnel(comm, requests, unbuffered(writer))
            await tunnel.run()
        except Refused as refused:
            logger.info("A request to the dashboard of %s is refused: %s", self.address, refused)
            if tunnel is None or not tunnel.delivered:
                await _answer(reader, writer, refused.status, str(refused))
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            logger.debug("A connection to the dashboard of %s ends: %r", self.address, error)
            if tunnel is None or not tunnel.delivered:
                words = f"The Dask scheduler at {self.address} is not there: {error!r}"
                await _answer(reader, writer, "502 Bad Gateway", words)
        except Exception:
            logger.exception("A connection to the dashboard of %s failed", self.address)
        finally:
            writer.transport.abort()

    async def _asks(self, requests: CheckedRequests) -> bool:
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError):
            return await wait_for(requests.begin(), _FIRST_REQUEST_TIMEOUT)
        return False


async def connect_dashboard(address: str, connection_args: Mapping[str, Any], timeout: float) -> Comm:
    """Connect to a scheduler such that the bytes of the connection are those of one with its dashboard.

    Parameters
    ----------
    address : str
        The scheduler's.
    connection_args : mapping
        As ``Security.get_connection_args("client")`` returns them.
    timeout : float
        Seconds within which the scheduler must accept the connection.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If it does not, or has no dashboard.
    """

    async def ask() -> Comm:
        comm = await connect(address, timeout=timeout, **connection_args)
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

    return await wait_for(ask(), timeout)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: str, words: str
) -> None:
    """Tell a browser why there is no dashboard, as far as it listens."""

    async def answer() -> None:
        body = f"{words}\n".encode()
        writer.write(_HEAD.format(status=status, length=len(body)).encode() + body)
        await writer.drain()
        writer.write_eof()
        while await reader.read(CHUNK):  # the system would take the answer back if the request were not read
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await wait_for(answer(), _ANSWER_TIMEOUT)
