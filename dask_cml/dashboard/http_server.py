"""An HTTP server on this machine's loopback: limits its connections, and refuses what it does not need.

For any web page, a browser on this machine sends requests to 127.0.0.1. A page whose own name resolves to
127.0.0.1 by now can even read the answers. Such requests have that name as their Host. A page of another
origin can open WebSockets and post forms. Such requests have it as their Origin.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Any
from urllib.parse import urlsplit

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.iostream import IOStream
from tornado.netutil import is_valid_ip
from tornado.web import Application, RequestHandler

from dask_cml.checks import message
from dask_cml.options import setting
from dask_cml.sessions.here import served_hosts

#: Seconds without a request, and for its body.
_IDLE_TIMEOUT, _BODY_TIMEOUT = 60.0, 30.0
#: Bytes of a request's body and of its headers. Tornado breaks off a request with a body of twice as many.
_MOST_BODY, _MOST_HEADERS = 2**16, 2**16
_SAFE = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class _Listener(socket.socket):
    """Lets connections wait while this process has no file descriptor for them."""

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise BlockingIOError from error  # any other error Tornado logs, thousands of times a second
            raise


def local_socket(port: int) -> socket.socket:
    """Listen at a port of 127.0.0.1; 0: any free port.

    Raises
    ------
    OSError
        If the port is in use.
    """
    listener = _Listener(fileno=socket.create_server(("127.0.0.1", port), backlog=512).detach())
    listener.setblocking(False)
    return listener


class LocalServer(HTTPServer):
    """An HTTP server with limits: of connections, of the time without a request, and of the request's size.

    With too many connections, it closes the oldest one that waits for bytes.

    Parameters
    ----------
    application : LocalApplication
        Answers the requests.
    listener : socket
        The socket that accepts connections; see :func:`local_socket`.
    """

    def initialize(  # type: ignore[override]
        self, application: LocalApplication, listener: socket.socket
    ) -> None:
        """Start to listen. Tornado calls this instead of ``__init__``."""
        super().initialize(
            application,
            idle_connection_timeout=_IDLE_TIMEOUT,
            body_timeout=_BODY_TIMEOUT,
            max_body_size=2 * _MOST_BODY,
            max_header_size=_MOST_HEADERS,
        )
        self._streams: list[IOStream] = []
        # A connection that is carried to a dashboard needs two descriptors, and the web UI has two servers.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = 500 if descriptors == resource.RLIM_INFINITY else min(500, max(descriptors // 8, 8))
        #: The port at 127.0.0.1.
        self.port: int = listener.getsockname()[1]
        self.add_socket(listener)

    async def close(self) -> None:
        """Stop listening, and close all connections, including WebSockets."""
        self.stop()
        for stream in self._streams:
            stream.close()
        await self.close_all_connections()

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection."""
        self._streams = [known for known in self._streams if not known.closed()]
        if len(self._streams) >= self._most:
            idle = (known for known in self._streams if known.reading())
            next(idle, stream).close()
        if not stream.closed():
            self._streams.append(stream)
            super().handle_stream(stream, address)


class LocalApplication(Application):
    """Answers the requests of a :class:`LocalServer`. Refuses large bodies and forms with parts.

    Tornado parses a form before its handler can refuse it, and a form with many fields or parts stops the
    event loop. The handlers need JSON alone, so no form is parsed.
    """

    def log_request(self, handler: RequestHandler) -> None:
        """Log no requests."""

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """Return what answers a request. Tornado calls this before it reads the body."""
        # Programs such as curl call JSON a form. Without a type, Tornado does not parse it.
        kind = request.headers.pop("Content-Type", "")
        length = request.headers.get("Content-Length", "")
        if kind.lower().startswith("multipart/"):
            return self._refuse(request, 415, message("Content-Type", kind, "application/json"))
        if length.isdecimal() and int(length) > _MOST_BODY:
            return self._refuse(
                request, 413, f"invalid body of {length} bytes: expected at most {_MOST_BODY}"
            )
        return super().find_handler(request, **kwargs)

    def _refuse(self, request: HTTPServerRequest, status: int, why: str) -> Any:
        return self.get_handler_delegate(request, _Refused, {"status": status, "why": why})


class _Refused(RequestHandler):
    """Refuses a request."""

    def initialize(self, status: int, why: str) -> None:
        """Get the status and the reason."""
        self._status, self._why = status, why

    def prepare(self) -> None:
        """Answer with JSON, as the web UI's API does."""
        self.set_status(self._status)
        self.finish({"error": self._why})


class HostGuard:
    """Checks the Host and the Origin of requests.

    Valid hosts are ``localhost``, this machine's name, IP addresses, which no page can redirect, the names
    below CML's domain in a CML session, and the names in ``cml.forward-hosts``, such as a JupyterHub's. Ports
    are not checked, because tunnels and proxies have ports of their own.

    Parameters
    ----------
    server : str
        The server's name, for messages.
    port : int, optional
        The port of the session that serves the page whose requests are accepted, even if a proxy has changed
        their Host. Default: pages of both ports of the session.
    """

    def __init__(self, server: str = "The dashboard", port: int | None = None) -> None:
        self._server = server
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, setting("forward-hosts"))}
        domain = os.environ.get("CDSW_DOMAIN", "").lower()
        self._domain = f".{domain}" if domain else None
        #: Hosts of this session's own pages.
        self.pages = [
            host
            for variable, host in served_hosts().items()
            if port is None or os.environ.get(variable) == str(port)
        ]

    def why_refused(self, request: HTTPServerRequest, any_origin: bool = False) -> str | None:
        """Return why a request must be refused, for its client. Return None if it may be answered.

        A request is refused if it is for another host, or if a page of another origin has sent it, and it
        could change something.

        Parameters
        ----------
        request : HTTPServerRequest
            The request.
        any_origin : bool
            Whether to accept pages of all origins. Default False.
        """
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._is_known(_split(f"//{host}")[0]):
            return (
                f"{self._server} refuses requests for host {host!r}. If this is your proxy, add it to "
                "cml.forward-hosts in Dask's configuration, before it starts"
            )
        reads = request.method in _SAFE and "Upgrade" not in request.headers
        if any_origin or reads or origin is None or self._is_same(origin, host):
            return None
        return f"{self._server} refuses requests from pages of {origin!r}"

    def _is_known(self, name: str | None) -> bool:
        if not name:
            return False
        is_below = self._domain is not None and name.endswith(self._domain)
        return is_below or name in self._hosts or is_valid_ip(name)

    def _is_same(self, origin: str, host: str) -> bool:
        name, port, scheme = _split(origin)
        default = _DEFAULT_PORTS.get(scheme)
        if default is None or name is None:
            return False
        host_name, host_port, _ = _split(f"//{host}")
        return name in self.pages or (name, port or default) == (host_name, host_port or default)


def _split(url: str) -> tuple[str | None, int | None, str]:
    """Return host, port and scheme of a URL. The host is None if it is invalid."""
    try:
        parts = urlsplit(url)
        if parts.netloc != url.partition("//")[2] or "@" in parts.netloc:
            return None, None, ""
        return parts.hostname, parts.port, parts.scheme
    except ValueError:
        return None, None, ""
