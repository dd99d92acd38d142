"""Protects a scheduler's own dashboard: refuses WebSockets of other sites, and removes costly pages."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from distributed.scheduler import Scheduler
from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher
from tornado.web import RequestHandler

from dask_cml import compat
from dask_cml.layout import HOSTS
from dask_cml.sessions.here import served_hosts


class ForeignSockets(Matcher):
    """Matches WebSockets that pages of other hosts open."""

    def __init__(self) -> None:
        hosts = os.environ.get(HOSTS, "").split(",")
        self._hosts = {"127.0.0.1", "localhost", *map(str.lower, hosts), *served_hosts().values()} - {""}

    def allow(self, url: str) -> None:
        """Match no WebSockets of pages of this URL's host: CML may serve the session at another one."""
        if host := urlsplit(url).hostname:
            self._hosts.add(host)

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return a mapping if a request is matched, else None."""
        origin = request.headers.get("Origin")
        if "Upgrade" not in request.headers or origin is None:
            return None
        try:
            host = urlsplit(origin).hostname
        except ValueError:
            host = None
        return None if host in self._hosts else {}


class _Refusal(RequestHandler):
    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(
            "The dashboard refuses pages of this host. If it is your proxy, add it to cml.forward-hosts in "
            "Dask's configuration, and create the cluster again\n"
        )


def protect(scheduler: Scheduler) -> ForeignSockets:
    """Refuse WebSockets of other hosts' pages, and remove costly pages. Return what is refused."""
    application = scheduler.http_application
    refused = ForeignSockets()
    compat.refuse_requests(application, refused, _Refusal)
    compat.remove_pages(application, _is_costly)
    return refused


def _is_costly(matcher: Any) -> bool:
    """Return whether a page benchmarks the disks of workers: every reader of the dashboard could open it."""
    pattern = getattr(getattr(matcher, "regex", None), "pattern", "")
    return "/hardware" in pattern
