"""Checks which requests of browsers may reach a server that trusts all its clients.

For any web page, a browser on this machine sends requests to 127.0.0.1. A page whose own name resolves to
127.0.0.1 by now can even read the answers. Such requests have that name as their Host. A page of another
origin can open WebSockets and post forms. Such requests have it as their Origin.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest

_SAFE = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """A request that is refused. Its text is the reason, for the client."""


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
    port : int, optional
        The port of the session that serves the page whose requests are accepted, even if a proxy has changed
        their Host. Default: pages of both ports of the session.
    """

    def __init__(
        self, hosts: Collection[str] = (), server: str = "The dashboard", port: int | None = None
    ) -> None:
        self._server = server
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        engine, domain = os.environ.get("CDSW_ENGINE_ID"), os.environ.get("CDSW_DOMAIN", "").lower()
        self._domain = f".{domain}" if domain else None
        own = f"{engine}.{domain}".lower()
        pages = {"CDSW_APP_PORT": own, "CDSW_READONLY_PORT": f"read-only-{own}"} if engine and domain else {}
        #: Hosts of this session's own pages.
        self._pages = {
            page for variable, page in pages.items() if port is None or os.environ.get(variable) == str(port)
        }

    def check_host(self, request: HTTPServerRequest) -> None:
        """Refuse a request for another host.

        Raises
        ------
        Refused
            If the request is refused. The error contains the reason.
        """
        host = request.headers.get("Host", "")
        if not self._is_known(_split(f"//{host}")[0]):
            raise Refused(
                f"{self._server} refuses requests for host {host!r}. If this is your proxy, add it to "
                "cml.forward-hosts in Dask's configuration, and create the cluster again"
            )

    def check_origin(self, request: HTTPServerRequest) -> None:
        """Refuse a request that a page of another origin has sent, and that could change something.

        Raises
        ------
        Refused
            If the request is refused. The error contains the reason.
        """
        origin = request.headers.get("Origin")
        if origin is None or (request.method in _SAFE and "Upgrade" not in request.headers):
            return
        if not self._is_same(origin, request.headers.get("Host", "")):
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
