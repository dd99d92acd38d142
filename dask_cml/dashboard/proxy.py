"""Answers requests of browsers by a scheduler's dashboard, and trusts neither side.

Only GET requests and WebSockets pass. Of the headers of requests and of answers, those of an allow-list pass:
no cookies, no passwords, no service workers. Each request gets one answer, which ends where its length says.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream, StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from dask_cml.aio import cancel
from dask_cml.dashboard.connection import OpenComm, dashboard_stream
from dask_cml.dashboard.host_guard import HostGuard, Refused
from dask_cml.tunnel import CHUNK

logger = logging.getLogger(__name__)

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
    "Content-Disposition",
    "Content-Encoding",
    "Content-Language",
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
#: Parts of the dashboard that reach other servers or run code.
_CLOSED = {"proxy", "jupyter", ".", ".."}
#: How often a path may be percent-encoded.
_MOST_ENCODED = 3
#: Seconds for the head of an answer, and for the whole of it. Bytes of an answer.
_HEAD_TIMEOUT, _ANSWER_TIMEOUT, _MOST_BYTES = 60.0, 600.0, 2**30


def dashboard_application(routes: list[Any], guard: HostGuard, **settings: Any) -> Application:
    """Return an application whose handlers are subclasses of :class:`DashboardProxy`.

    Parameters
    ----------
    routes : list
        Its routes.
    guard : HostGuard
        Checks the requests.
    **settings
        What its handlers need besides.
    """
    return Application(routes, guard=guard, exchanges=set(), log_function=lambda _: None, **settings)


class DashboardProxy(RequestHandler):
    """Answers a request by a scheduler's dashboard. A subclass has the method ``get``."""

    #: The connection to the dashboard.
    _stream: IOStream | None = None

    def set_default_headers(self) -> None:
        """Add no headers of the server."""
        self.clear_header("Server")
        self.clear_header("Content-Type")

    def compute_etag(self) -> None:
        """Leave the ETag to the dashboard."""

    def prepare(self) -> None:
        """Refuse requests for other hosts, of other origins, and for service workers."""
        try:
            self.settings["guard"].check_host(self.request)
            self.check_origin()
        except Refused as refused:
            raise HTTPError(403, str(refused)) from None
        if "Service-Worker" in self.request.headers:
            raise HTTPError(403, "The dashboard has no service workers")

    def check_origin(self) -> None:
        """Refuse WebSockets of other origins."""
        self.settings["guard"].check_origin(self.request)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the reason."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{error_text(error) or self._reason}\n")

    def log_exception(self, *exc_info: Any) -> None:
        """Log refusals and errors of schedulers in one line, and others with a traceback."""
        if isinstance(error := exc_info[1], HTTPError):
            logger.info("Request for a dashboard refused: %s", error)
        else:
            logger.error("Request for a dashboard failed", exc_info=exc_info)

    async def forward(self, open_comm: OpenComm, path: str) -> None:
        """Answer the request by the dashboard.

        Parameters
        ----------
        open_comm : callable
            Opens a comm that a scheduler connects to its dashboard.
        path : str
            The path at the dashboard as the browser sent it, without the first slash.
        """
        if not _is_served(path):
            raise HTTPError(404, "This part of the dashboard is not served here")
        exchanges, task = self.settings["exchanges"], asyncio.current_task()
        exchanges.add(task)
        try:
            async with dashboard_stream(open_comm) as self._stream:
                await self._exchange(self._stream, path)
        except (OSError, asyncio.TimeoutError) as error:
            if not self._headers_written:
                raise HTTPError(502, str(error)) from None
            self._hang_up()
        except asyncio.CancelledError:  # the server closes
            self._hang_up()
        finally:
            exchanges.discard(task)

    async def _exchange(self, stream: IOStream, path: str) -> None:
        request = self.request
        parameters = HTTP1ConnectionParameters(header_timeout=_HEAD_TIMEOUT, max_body_size=_MOST_BYTES)
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
        answer = _Answer(self, stream, connection if upgrades else None)
        # Tornado logs a traceback if it is cancelled while it passes a part of the answer on.
        limit = asyncio.get_running_loop().call_later(_ANSWER_TIMEOUT, self._hang_up)
        try:
            await connection.read_response(answer)
        finally:
            limit.cancel()
        if answer.socket is not None:
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
        directions: list[asyncio.Task[None]] = []
        try:
            await browser.write("\r\n".join([*lines, "", ""]).encode())
            pairs = ((browser, stream), (stream, browser))
            directions += [asyncio.create_task(_copy(*pair)) for pair in pairs]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the browser has closed it
        finally:
            browser.close()
            await cancel(*directions)

    def on_connection_close(self) -> None:
        """Receive no more of the answer: the browser is gone."""
        if self._stream is not None:
            self._stream.close()

    def _hang_up(self) -> None:
        """Close the browser's connection, so that no part of an answer passes for the whole."""
        self.on_connection_close()
        if not self._finished:
            self.detach().close()


class _Answer(HTTPMessageDelegate):
    """Passes an answer on to a browser.

    Parameters
    ----------
    handler : DashboardProxy
        Answers the browser.
    stream : IOStream
        The connection to the dashboard.
    upgrades : HTTP1Connection or None
        The same, if the browser asks for a WebSocket.
    """

    def __init__(self, handler: DashboardProxy, stream: IOStream, upgrades: HTTP1Connection | None) -> None:
        self.complete = False
        self.headers: Mapping[str, str] = {}
        #: The connection for the WebSocket, if the dashboard agrees.
        self.socket: IOStream | None = None
        self._handler = handler
        self._stream = stream
        self._upgrades = upgrades

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> None:
        """Pass the head on."""
        assert isinstance(start_line, ResponseStartLine)
        if start_line.code == 101:
            if self._upgrades is None:
                self._stream.close()
            else:
                self.headers, self.socket = headers, self._upgrades.detach()
        elif start_line.code >= 200:
            self._handler.set_status(start_line.code)
            for name, value in _allowed(headers, _ANSWER_HEADERS).items():
                self._handler.set_header(name, value)
            if _RELATIVE.fullmatch(location := headers.get("Location", "")):
                self._handler.set_header("Location", location)

    async def data_received(self, chunk: bytes) -> None:
        """Pass a part of the body on, and wait until the browser has it."""
        try:
            self._handler.write(chunk)
            await self._handler.flush()
        except (StreamClosedError, asyncio.CancelledError):
            self._stream.close()

    def finish(self) -> None:
        """Note that the answer is complete."""
        self.complete = True


def error_text(error: BaseException | None) -> str | None:
    """Return the text of an HTTPError for the user, which tornado keeps as a format for logs."""
    if isinstance(error, HTTPError) and error.log_message:
        return error.log_message % error.args
    return None


def _is_served(path: str) -> bool:
    for _ in range(_MOST_ENCODED):
        if (decoded := unquote(path)) == path:
            return not _CLOSED & {*path.replace("\\", "/").lower().split("/")}
        path = decoded
    return False


def _allowed(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {each: headers[each] for each in names if each in headers and _HEADER.fullmatch(headers[each])}


async def _copy(source: IOStream, sink: IOStream) -> None:
    while True:
        await sink.write(await source.read_bytes(CHUNK, partial=True))
