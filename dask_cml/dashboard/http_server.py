"""An HTTP server on this machine's loopback that idle connections cannot stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application

logger = logging.getLogger(__name__)

#: Seconds without a request, and for its body.
_IDLE_TIMEOUT, _BODY_TIMEOUT = 60.0, 30.0
#: Bytes of a request's body and of its headers.
_MOST_BODY, _MOST_HEADERS = 2**20, 2**16
#: Seconds without accepting connections if that fails: the process may have too many open files.
_PAUSE = 0.5


def local_socket(port: int) -> socket.socket:
    """Listen at a port of 127.0.0.1; 0: any free port.

    Raises
    ------
    OSError
        If the port is in use.
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    listener.setblocking(False)
    return listener


class LocalServer(HTTPServer):
    """An HTTP server with limits: of connections, of the time without a request, and of the request's size.

    With too many connections, it closes the oldest one that waits for bytes.

    Parameters
    ----------
    application : tornado.web.Application
        Answers the requests.
    listener : socket
        The socket that accepts connections; see :func:`local_socket`.
    """

    def initialize(self, application: Application, listener: socket.socket) -> None:  # type: ignore[override]
        """Start to listen. Tornado calls this instead of ``__init__``."""
        super().initialize(
            application,
            idle_connection_timeout=_IDLE_TIMEOUT,
            body_timeout=_BODY_TIMEOUT,
            max_body_size=_MOST_BODY,
            max_header_size=_MOST_HEADERS,
        )
        self._streams: list[IOStream] = []
        # A connection that is carried to a dashboard needs two descriptors, and a page has two servers.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = 500 if descriptors == resource.RLIM_INFINITY else min(500, max(descriptors // 8, 8))
        #: The port at 127.0.0.1.
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._listen()

    async def close(self) -> None:
        """Stop listening, and close all connections, also those that are not HTTP any more."""
        if self._listener.fileno() >= 0:  # it is not closed
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for stream in self._streams:
            stream.close()
        await self.close_all_connections()

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection."""
        self._streams = [each for each in self._streams if not each.closed()]
        if len(self._streams) >= self._most:
            next((each for each in self._streams if each.reading()), stream).close()
        if not stream.closed():
            self._streams.append(stream)
            super().handle_stream(stream, address)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:  # it is not closed
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Tornado's own way logs a traceback, without a pause, for each connection that lacks a descriptor.
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("No connections accepted for %g s: %s", _PAUSE, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE, self._listen)
        else:
            self.handle_stream(IOStream(connection), address)
