"""Forwards the scheduler's dashboard to a port of this machine, through the scheduler's own comm port.

The dashboard listens on the loopback of the scheduler's session, which only the platform's https entry
reaches. For each connection of a browser, the forwarder opens a Dask connection to the scheduler, with the
cluster's keys. There the plugin connects it to the dashboard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from distributed.comm.core import Comm, connect
from distributed.utils import wait_for

from dask_cml.aio import cancel
from dask_cml.manager.http_guard import CheckedRequests, HostGuard, Refused
from dask_cml.options import setting
from dask_cml.wire import CHUNK, FORWARD, Tunnel, unbuffered

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT = 5.0
#: Seconds. Browsers connect before they send a request, and some send none.
_FIRST_REQUEST_TIMEOUT = 60.0
_HEAD = """\
HTTP/1.1 {status}\r
Content-Type: text/plain; charset=utf-8\r
Content-Length: {length}\r
Connection: close\r
\r
"""


class DashboardForwarder:
    """Listens on a port of 127.0.0.1, and forwards connections to the dashboard of a scheduler.

    The scheduler must have the plugin :class:`~dask_cml.scheduler.plugin.CMLSchedulerPlugin`. If the
    scheduler cannot be reached, browsers get ``502 Bad Gateway``. Requests from other sites' pages get ``403
    Forbidden``; see :class:`~dask_cml.manager.http_guard.HostGuard`.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping, optional
        The result of ``Security.get_connection_args("client")``.
    timeout : float
        Time limit for the scheduler to accept a connection, in seconds. Default 30.
    port : int
        The port to listen on. Default: any free port.

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
        self._guard = HostGuard(setting("forward-hosts"))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DashboardForwarder:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    @property
    def link(self) -> str:
        """The dashboard's URL for a browser on this machine."""
        return f"http://127.0.0.1:{self.port}/status"

    async def start(self) -> None:
        """Start to listen.

        Raises
        ------
        OSError
            If the port is in use.
        """
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, backlog=512)
            self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await cancel(*self._tasks)
            await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # the connection was accepted just before close()
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
            logger.info("Request to the dashboard of %s refused: %s", self.address, refused)
            if tunnel is None or not tunnel.delivered:
                await _answer(reader, writer, refused.status, str(refused))
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            logger.debug("Connection to the dashboard of %s ended: %r", self.address, error)
            if tunnel is None or not tunnel.delivered:
                words = f"Cannot reach the Dask scheduler at {self.address}: {error!r}"
                await _answer(reader, writer, "502 Bad Gateway", words)
        except Exception:
            logger.exception("Connection to the dashboard of %s failed", self.address)
        finally:
            writer.transport.abort()

    async def _asks(self, requests: CheckedRequests) -> bool:
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError):
            return await wait_for(requests.begin(), _FIRST_REQUEST_TIMEOUT)
        return False


async def connect_dashboard(address: str, connection_args: Mapping[str, Any], timeout: float) -> Comm:
    """Open a connection to a scheduler that the scheduler connects to its dashboard.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping
        The result of ``Security.get_connection_args("client")``.
    timeout : float
        Time limit for the scheduler to accept the connection, in seconds.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not accept the connection, or has no dashboard.
    """

    async def ask() -> Comm:
        comm = await connect(address, timeout=timeout, **connection_args)
        try:
            comm.name = "dashboard"
            await comm.write({"op": FORWARD})
            answer = await comm.read()
            if not isinstance(answer, dict):
                raise OSError("the scheduler has no plugin that forwards its dashboard")
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
    """Send the reason to a browser, if it still listens."""

    async def answer() -> None:
        body = f"{words}\n".encode()
        writer.write(_HEAD.format(status=status, length=len(body)).encode() + body)
        await writer.drain()
        writer.write_eof()
        while await reader.read(CHUNK):  # the system drops the answer if the request is not read to its end
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await wait_for(answer(), _ANSWER_TIMEOUT)
