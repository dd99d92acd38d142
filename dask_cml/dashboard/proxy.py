"""Answers requests of browsers by a scheduler's dashboard, and trusts neither side.

Only GET requests and WebSockets pass. Only headers on an allow-list pass, of requests and of answers: no
cookies, no passwords, no service workers. A request gets one answer, which ends where its length says.

The dashboard listens on the loopback of the scheduler's session, which only the platform's https entry
reaches. So the scheduler's plugin also serves it on a comm, through the scheduler's own comm port.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from distributed.comm.core import Comm, connect
from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream, StreamClosedError
from tornado.web import RequestHandler

from dask_cml.cancellation import first_of, within
from dask_cml.dashboard.http_server import HostGuard, LocalApplication, LocalServer, local_socket
from dask_cml.output import get_logger
from dask_cml.protocol import FORWARD, call

logger = get_logger(__name__)

#: Opens a comm on which a scheduler serves its dashboard. Raises OSError.
OpenComm = Callable[[], Awaitable[Comm]]
#: Characters of a scheduler's error.
_MOST_CHARACTERS = 1000

_REQUEST_HEADERS = (
    "Accept",
    "Accept-Encoding",
    "Accept-Language",
    "If-Modified-Since",
    "If-None-Match",
    "Sec-WebSocket-Extensions",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Version",
    "User-Agent",
)
_ANSWER_HEADERS = (
    "Cache-Control",
    "Content-Encoding",
    "Content-Type",
    "ETag",
    "Expires",
    "Last-Modified",
    "Vary",
)
_SOCKET_HEADERS = ("Sec-WebSocket-Accept", "Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol")
_HEADER = re.compile(r"[\t\x20-\x7e]*")
#: The target of a redirect, relative to the address that was asked for.
_RELATIVE = re.compile(r"[\w.-][\w./-]*", re.ASCII)
#: Parts of the dashboard that reach other servers, or run code. `hardware` fills the disks of all workers.
_CLOSED = {"proxy", "jupyter", "hardware", ".", ".."}
#: How often a path may be percent-encoded.
_MOST_ENCODED = 3
#: Seconds for the head of an answer, and for its body. Bytes of an answer.
_HEAD_TIMEOUT, _ANSWER_TIMEOUT, _MOST_BYTES = 60.0, 600.0, 2**30
#: Bytes of a WebSocket that are read at once.
_CHUNK = 2**16


async def open_comm(
    address: str, connection_args: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> Comm:
    """Open a comm on which a scheduler serves its dashboard. Its ``stream`` carries HTTP.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping, optional
        The result of :func:`dask_cml.protocol.connection_args`.
    timeout : float
        Time limit for the connection, and for the scheduler's answer, in seconds. Default 30.

    Raises
    ------
    OSError
        If the scheduler does not accept the connection, or has no dashboard.
    """

    async def opened() -> Comm:
        comm = await connect(address, timeout=timeout, **(connection_args or {}))
        try:
            answer = await call(comm, FORWARD)
            if not isinstance(answer, dict):  # Dask has no such handler
                raise OSError("the scheduler has no plugin of dask-cml")
            if answer.get("status") != "OK":
                raise OSError(f"{answer.get('message')}"[:_MOST_CHARACTERS])
        except BaseException:
            comm.abort()
            raise
        return comm

    try:
        return await within(timeout, opened())
    except (OSError, ValueError, RuntimeError, asyncio.TimeoutError) as error:
        why = str(error) or f"no answer within {timeout:g} s"
        raise OSError(f"cannot reach the dashboard of the scheduler at {address}: {why}") from error


class DashboardProxy(RequestHandler):
    """Answers a request by a scheduler's dashboard. A subclass has the method ``get``."""

    #: Whether pages of all origins may open WebSockets.
    any_origin = False
    #: Answers the request.
    _forwarding: asyncio.Task[Any] | None = None

    def set_default_headers(self) -> None:
        """Add no headers of the server."""
        self.clear_header("Server")
        self.clear_header("Content-Type")

    def compute_etag(self) -> None:
        """Leave the ETag to the dashboard."""

    def prepare(self) -> None:
        """Refuse requests for other hosts, of other origins, and for service workers."""
        why = self.settings["guard"].why_refused(self.request, self.any_origin)
        if "Service-Worker" in self.request.headers:
            why = "The dashboard has no service workers"
        if why is not None:
            self.refuse(403, why)

    def refuse(self, status: int, message: str) -> None:
        """Answer with the reason of a refusal or failure, unless the answer has begun."""
        if self._headers_written or self._finished:
            self._hang_up()
            return
        logger.info("Request for a dashboard refused: %s", message)
        self.clear()  # of the headers of an answer that broke off
        self.set_status(status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{message}\n")

    async def forward(self, open_comm: OpenComm, path: str) -> None:
        """Answer the request by the dashboard.

        Parameters
        ----------
        open_comm : callable
            Opens a comm on which a scheduler serves its dashboard.
        path : str
            The path at the dashboard as the browser sent it, without the first slash.
        """
        if not _is_served(path):
            self.refuse(404, "This part of the dashboard is not served here")
            return
        self._forwarding = asyncio.current_task()
        try:
            comm = await open_comm()
            try:
                await self._exchange(comm.stream, path)  # type: ignore[attr-defined]  # of TCP
            finally:
                comm.abort()
        except OSError as error:
            self.refuse(502, str(error))
        except asyncio.CancelledError:  # the browser is gone, or the server closes
            self._hang_up()

    async def _exchange(self, stream: IOStream, path: str) -> None:
        request = self.request
        parameters = HTTP1ConnectionParameters(
            header_timeout=_HEAD_TIMEOUT, body_timeout=_ANSWER_TIMEOUT, max_body_size=_MOST_BYTES
        )
        connection = HTTP1Connection(stream, is_client=True, params=parameters)
        upgrades = request.headers.get("Upgrade", "").lower() == "websocket"
        headers = HTTPHeaders(_allowed(request.headers, _REQUEST_HEADERS))
        headers["Host"] = "127.0.0.1"
        headers["Connection"] = "Upgrade" if upgrades else "close"
        if upgrades:
            headers["Upgrade"] = "websocket"
        target = f"/{path}?{request.query}" if request.query else f"/{path}"
        connection.write_headers(RequestStartLine("GET", target, "HTTP/1.1"), headers)
        connection.finish()
        answer = _Answer(self, connection)
        with contextlib.suppress(StreamClosedError):
            await connection.read_response(answer)
        if upgrades and answer.socket is not None:
            await self._carry(answer.socket, answer.headers)
        elif answer.complete:
            self.finish()
        else:
            raise OSError("the dashboard's answer is invalid, incomplete or late")

    async def _carry(self, stream: IOStream, headers: Mapping[str, str]) -> None:
        """Carry a WebSocket's bytes until one side closes it."""
        browser: IOStream = self.detach()
        browser.set_nodelay(True)
        lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"]
        lines += [f"{name}: {value}" for name, value in _allowed(headers, _SOCKET_HEADERS).items()]
        with contextlib.closing(browser), contextlib.suppress(OSError):  # the browser has closed it
            await browser.write("\r\n".join([*lines, "", ""]).encode())
            await carry(browser, stream)

    def on_connection_close(self) -> None:
        """Receive no more of the answer."""
        if self._forwarding is not None:
            self._forwarding.cancel()

    def _hang_up(self) -> None:
        """Close the browser's connection, so that no part of an answer passes for the whole."""
        if not self._finished:
            self.detach().close()


class _Answer(HTTPMessageDelegate):
    """Passes an answer on to a browser.

    Parameters
    ----------
    handler : DashboardProxy
        Answers the browser.
    connection : HTTP1Connection
        The connection to the dashboard.
    """

    def __init__(self, handler: DashboardProxy, connection: HTTP1Connection) -> None:
        self.complete = False
        self.headers: Mapping[str, str] = {}
        #: The connection for a WebSocket, if the dashboard switches to one.
        self.socket: IOStream | None = None
        self._handler = handler
        self._connection = connection

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> None:
        """Pass the head on."""
        assert isinstance(start_line, ResponseStartLine)
        if start_line.code < 200:
            stream = self._connection.detach()
            if start_line.code == 101:
                self.headers, self.socket = headers, stream
            return
        self._handler.set_status(start_line.code)
        for name, value in _allowed(headers, _ANSWER_HEADERS).items():
            self._handler.set_header(name, value)
        location = headers.get("Location", "")
        if _RELATIVE.fullmatch(location):
            self._handler.set_header("Location", location)

    async def data_received(self, chunk: bytes) -> None:
        """Pass a part of the body on, and wait until the browser has it."""
        try:
            self._handler.write(chunk)
            await self._handler.flush()
        except (StreamClosedError, asyncio.CancelledError):
            self._connection.close()

    def finish(self) -> None:
        """Note that the answer is complete."""
        self.complete = True


def _is_served(path: str) -> bool:
    for _ in range(_MOST_ENCODED):
        decoded = unquote(path)
        if decoded == path:
            return not _CLOSED & {*path.replace("\\", "/").lower().split("/")}
        path = decoded
    return False


def _allowed(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    allowed = {}
    for name in names:
        value = headers.get(name)
        if value is not None and _HEADER.fullmatch(value):
            allowed[name] = value
    return allowed


async def carry(one: IOStream, other: IOStream) -> None:
    """Carry bytes in both directions until one connection is closed."""
    await first_of(_copy(one, other), _copy(other, one))


async def _copy(source: IOStream, target: IOStream) -> None:
    with contextlib.suppress(OSError):
        while True:
            await target.write(await source.read_bytes(_CHUNK, partial=True))


class DashboardForwarder(LocalServer):
    """Listens on a port of 127.0.0.1, and answers requests by the dashboard of a scheduler.

    The scheduler must have the plugin :class:`~dask_cml.scheduler.plugin.CMLSchedulerPlugin`. If the
    scheduler cannot be reached, browsers get ``502 Bad Gateway``. Requests from other sites' pages get ``403
    Forbidden``; see :class:`~dask_cml.dashboard.http_server.HostGuard`.

    Parameters
    ----------
    open_comm : callable
        Opens a comm on which the scheduler serves its dashboard, such as
        ``functools.partial(open_comm, address, connection_args)``.
    port : int
        The port to listen on. Default: any free port.

    Raises
    ------
    OSError
        If the port is in use.

    Examples
    --------
    >>> import asyncio
    >>> import functools
    >>> from dask_cml.dashboard.proxy import open_comm
    >>> async def link(open_comm):
    ...     forwarder = DashboardForwarder(open_comm)
    ...     await forwarder.close()
    ...     return forwarder.link
    >>> asyncio.run(link(functools.partial(open_comm, cluster.scheduler_address)))
    'http://127.0.0.1:.../status'
    """

    def initialize(self, open_comm: OpenComm, port: int = 0) -> None:  # type: ignore[override]
        """Start to listen. Tornado calls this instead of ``__init__``."""
        application = LocalApplication([(r"/.*", _Forwarded)], guard=HostGuard(), open_comm=open_comm)
        super().initialize(application, local_socket(port))
        #: The dashboard's URL for a browser on this machine.
        self.link = f"http://127.0.0.1:{self.port}/status"


class _Forwarded(DashboardProxy):
    async def get(self) -> None:
        await self.forward(self.settings["open_comm"], self.request.path[1:])
