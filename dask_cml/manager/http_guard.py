"""Which requests of browsers are passed on to a server that trusts all who reach it.

A browser on this machine sends requests to 127.0.0.1 for any page of the web. A page whose own name leads to
127.0.0.1 by now may even read the answers, and such requests have that name as their Host. A page of another
origin may open WebSockets and post forms, and its requests have it as their Origin.
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
#: What says where a request ends and whom it is for is there once at most.
_ONCE = (b"host", b"origin", b"content-length", b"upgrade")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """A request that is not passed on.

    Parameters
    ----------
    words : str
        Why, for the one who asks.
    status : str
        The HTTP status.
    """

    def __init__(self, words: str, status: str = "403 Forbidden") -> None:
        super().__init__(words)
        self.status = status


class HostGuard:
    """Knows by which names a server on this machine may be asked.

    These are ``localhost`` and this machine's own name; addresses of numbers, which no page can have lead
    elsewhere; in a CML session, the names below its domain; and those that are given. Ports do not matter,
    because tunnels and proxies have ports of their own.

    Parameters
    ----------
    hosts : collection of str
        More names, such as that of a JupyterHub.
    server : str
        What answers, in words.
    """

    def __init__(self, hosts: Collection[str] = (), server: str = "The dashboard") -> None:
        self._server = server
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        engine, domain = os.environ.get("CDSW_ENGINE_ID"), os.environ.get("CDSW_DOMAIN", "").lower()
        self._domain = f".{domain}" if domain else None
        #: The pages of this session itself.
        own = f"{engine}.{domain}".lower()
        self._pages = {own, f"read-only-{own}"} if engine and domain else set()

    def check(self, method: bytes, headers: dict[bytes, bytes]) -> None:
        """Refuse a request that another page may have had sent.

        Parameters
        ----------
        method : bytes
            The request's.
        headers : dict of bytes to bytes
            Its headers, with names in lower case.

        Raises
        ------
        Refused
            With the reason.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known(_split(f"//{host}")[0]):
            raise Refused(
                f"{self._server} does not answer requests for the host {host!r}. If it is your proxy, name "
                "it in Dask's configuration before you create the cluster: cml.forward-hosts"
            )
        if method in _SAFE and b"upgrade" not in headers:
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and not self._is_same(origin, host):
            raise Refused(f"{self._server} does not take orders from pages of {origin!r}")

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
    """Return host, port and scheme; None for a host that is none."""
    try:
        parts = urlsplit(url)
        if parts.netloc != url.partition("//")[2] or "@" in parts.netloc:
            return None, None, ""
        return parts.hostname, parts.port, parts.scheme
    except ValueError:
        return None, None, ""


class CheckedRequests:
    """The bytes of a connection on which a browser asks, each request checked before any byte of it is read.

    What follows a request for another protocol, a WebSocket, is read as it is.

    Parameters
    ----------
    reader : StreamReader
        Where they come from.
    guard : HostGuard
        Checks them.
    """

    def __init__(self, reader: asyncio.StreamReader, guard: HostGuard) -> None:
        self._reader = reader
        self._guard = guard
        self._head = b""
        self._body = 0
        self._upgraded = False

    async def begin(self) -> bool:
        """Wait for a request; return whether there is one.

        Raises
        ------
        Refused
            If it is not passed on.
        """
        self._head = await self._next()
        return bool(self._head)

    async def read(self, n: int) -> bytes:
        """Return bytes of the requests, at most `n` except for the head of one; none at the end.

        Raises
        ------
        Refused
            If the next request is not passed on.
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
            raise Refused("A request's body needs its length", "411 Length Required")
        self._body, self._upgraded = int(length), b"upgrade" in headers
        return head


def _parse(head: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a request's method and headers; whatever two readers may understand differently is refused."""
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
