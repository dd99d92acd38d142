"""A cluster's dashboard below the page, through the scheduler's own comm port."""

from __future__ import annotations

import asyncio
from typing import Any

from tornado.iostream import IOStream, StreamClosedError
from tornado.web import HTTPError

from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.manager.dashboard import connect_dashboard
from dask_cml.serve.access import Handler
from dask_cml.wire import Tunnel

_TIMEOUT = 30.0
#: What of a request the dashboard gets: nothing by which the page, or the platform, knows the user.
_PASSED_ON = (
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
_UPGRADE = ("Connection: Upgrade", "Upgrade: websocket")


class _Browser:
    """A browser's connection as one end of a tunnel.

    Parameters
    ----------
    stream : IOStream
        The connection, whose request has been read.
    head : bytes
        The head of the request that is sent instead.
    upgraded : bool
        Whether what the browser sends from now on is passed on, as on a WebSocket.
    """

    def __init__(self, stream: IOStream, head: bytes, upgraded: bool) -> None:
        self._stream = stream
        self._head = head
        self._upgraded = upgraded
        self._written: Any = None

    async def read(self, n: int) -> bytes:
        """Return some bytes; none when the browser has gone."""
        if self._head:
            head, self._head = self._head, b""
            return head
        try:
            chunk = await self._stream.read_bytes(n, partial=True)
            while not self._upgraded:  # another request would be for the page, and gets no answer here
                chunk = await self._stream.read_bytes(n, partial=True)
        except StreamClosedError:
            return b""
        return chunk

    def write(self, data: bytes) -> None:
        """Write bytes to the browser."""
        self._written = self._stream.write(data)

    async def drain(self) -> None:
        """Wait until they are given to the system."""
        await self._written

    def write_eof(self) -> None:
        """Close the connection: the answer is complete."""
        self._stream.close()


class Dashboard(Handler):
    """``/clusters/NAME/dashboard/...``: pages and WebSockets of the scheduler's dashboard."""

    async def get(self, name: str, path: str | None) -> None:
        """Carry one request to the dashboard and the answer back, or a WebSocket until its end."""
        if not path:
            self.go_to("dashboard/status" if path is None else "status")
            return
        try:
            state = self.board.manager_of(name).manager.state
            comm = await connect_dashboard(state.scheduler_comm.address, state.connection_args, _TIMEOUT)
        except NoSuchCluster as error:
            raise HTTPError(404, str(error)) from None
        except (OSError, asyncio.TimeoutError, CMLError) as error:
            words = f"The dashboard of the cluster {name} does not answer: {error}"
            raise HTTPError(502, words) from None
        upgrade = self.request.headers.get("Upgrade", "").lower() == "websocket"
        stream: IOStream = self.detach()
        try:
            browser = _Browser(stream, self._head(upgrade), upgrade)
            await Tunnel(comm, browser, browser).run()
        except OSError:
            pass  # the browser or the scheduler has gone
        finally:
            comm.abort()
            stream.close()

    def _head(self, upgrade: bool) -> bytes:
        """Return the head of the request that the dashboard gets."""
        # As it came: what is encoded in it stays so.
        path = self.request.path.split("/", 4)[-1]
        query = f"?{self.request.query}" if self.request.query else ""
        given = self.request.headers
        headers = [f"{key}: {given[key]}" for key in _PASSED_ON if key in given]
        headers += ["Host: 127.0.0.1", *(_UPGRADE if upgrade else ["Connection: close"])]
        return "\r\n".join([f"GET /{path}{query} HTTP/1.1", *headers, "", ""]).encode("latin-1")


ROUTES = [(r"/clusters/([^/]+)/dashboard(?:/(.*))?", Dashboard)]
