"""Checks which requests of browsers may reach a server that trusts all its clients.

For any web page, a browser on this machine sends requests to 127.0.0.1. A page whose own name resolves to
127.0.0.1 by now can even read the answers. Such requests have that name as their Host. A page of another
origin can open WebSockets and post forms. Such requests have it as their Origin.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

_REQUEST_LINE = re.compile(rb"([A-Z]+) \S+ HTTP/1\.[01]")
_SAFE = (b"GET", b"HEAD", b"OPTIONS")
#: Headers that decide where a request ends and which server it is for. Each may occur once.
_ONCE = (b"host", b"origin", b"content-length", b"upgrade")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """A request that is refused.

    Parameters
    ----------
    words : str
        The reason, for the client.
    status : str
        The HTTP status.
    """

    def __init__(self, words: str, status: str = "403 Forbidden") -> None:
        super().__init__(words)
        self.status = status


class HostGuard:
    """Checks the Host and the Origin of requests.

    Valid hosts are ``localhost``, this machine's name, IP addresses, which no page can redirect, the names
    below CML's domain in a CML session, and additional ones. Ports are not checked, because tunnels and
    proxies have ports of their own.

    Parameters
    ----------
    hosts : collection of str
        Additional host names, such as that of a JupyterHub.
    server : str
        The server's name, for messages.
    """

    def __init__(self, hosts: Collection[str] = (), server: str = "The dashboard") -> None:
        self._server = server
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        engine, domain = os.environ.get("CDSW_ENGINE_ID"), os.environ.get("CDSW_DOMAIN", "").lower()
        self._domain = f".{domain}" if domain else None
        #: Hosts of this session's own pages.
        own = f"{engine}.{domain}".lower()
        self._pages = {own, f"read-only-{own}"} if engine and domain else set()

    def check(self, method: bytes, headers: dict[bytes, bytes]) -> None:
        """Refuse a request that another page may have sent.

        Parameters
        ----------
        method : bytes
            The method of the request.
        headers : dict of bytes to bytes
            Its headers, with names in lower case.

        Raises
        ------
        Refused
            If the request is refused. The error contains the reason.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known(_split(f"//{host}")[0]):
            raise Refused(
                f"{self._server} refuses requests for host {host!r}. If this is your proxy, add it to "
                "cml.forward-hosts in Dask's configuration, and create the cluster again"
            )
        if method in _SAFE and b"upgrade" not in headers:
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and not self._is_same(origin, host):
            raise Refused(f"{self._server} refuses requests from pages of {origin!r}")

    def _is_known(self, name: str | None) -> bool:
        if not name:
            return False
        if name in self._hosts or (self._domain is not None and name.endswith(self._domain)):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_same(self, origin: str, host: str) -> bool:
        name, port, scheme = _split(origin)
        default = _DEFAULT_PORTS.get(scheme)
        if default is None or name is None:
            return False
        asked, at, _ = _split(f"//{host}")
        return name in self._pages or (name, port or default) == (asked, at or default)


def _split(url: str) -> tuple[str | None, int | None, str]:
    """Return host, port and scheme of a URL. The host is None if it is invalid."""
    try:
        parts = urlsplit(url)
        if parts.netloc != url.partition("//")[2] or "@" in parts.netloc:
            return None, None, ""
        return parts.hostname, parts.port, parts.scheme
    except ValueError:
        return None, None, ""


class CheckedRequests:
    """The bytes of a browser's connection. Each request is checked before any of its bytes is returned.

    After a request for another protocol, such as WebSocket, all bytes are returned unchecked.

    Parameters
    ----------
    reader : StreamReader
        The connection's reader.
    guard : HostGuard
        Checks the requests.
    """

    def __init__(self, reader: asyncio.StreamReader, guard: HostGuard) -> None:
        self._reader = reader
        self._guard = guard
        self._head = b""
        self._body = 0
        self._upgraded = False

    async def begin(self) -> bool:
        """Wait for a request. Return False if the connection ends first.

        Raises
        ------
        Refused
            If the request is refused.
        """
        self._head = await self._next()
        return bool(self._head)

    async def read(self, n: int) -> bytes:
        """Return bytes of the requests: the head of one, or at most `n`. Return no bytes at the end.

        Raises
        ------
        Refused
            If the next request is refused.
        """
        if self._head:
            head, self._head = self._head, b""
            return head
        if self._upgraded:
            return await self._reader.read(n)
        if self._body:
            chunk = await self._reader.read(min(n, self._body))
            self._body -= len(chunk)
            return chunk
        return await self._next()

    async def _next(self) -> bytes:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError:
            raise Refused(
                "The request's headers are too long", "431 Request Header Fields Too Large"
            ) from None
        method, headers = _parse(head)
        self._guard.check(method, headers)
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            raise Refused("The request's body lacks a Content-Length", "411 Length Required")
        self._body, self._upgraded = int(length), b"upgrade" in headers
        return head


def _parse(head: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a request's method and headers. Refuse a request that two readers may understand differently."""
    first, *lines = head[:-4].split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    headers: dict[bytes, bytes] = {}
    for each in lines:
        name, colon, value = each.partition(b":")
        name = name.lower()
        if not colon or name != name.strip() or not name or (name in _ONCE and name in headers):
            line = None
        headers[name] = value.strip()
    if line is None or b"\n" in head.replace(b"\r\n", b""):
        raise Refused("The request is not valid HTTP", "400 Bad Request")
    return line[1], headers
