"""Identify the user of each request, and refuse requests from other sites."""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tornado.httputil import HTTPServerRequest
from tornado.web import HTTPError, RequestHandler

from dask_cml.dashboard.http_server import HostGuard
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, reason_of
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.sessions.here import SERVED_PORTS, this_session, this_user

logger = get_logger(__name__)

#: Browsers never add this header without a script, so these requests need no XSRF token.
_BEARER = "Bearer "
#: The header for the token beside an API key of CML, which is the bearer token of a program's requests there.
#: Pages of other sites cannot add it either.
_TOKEN_HEADER = "Dask-CML-Token"
#: Sets the token, for programs that cannot read the output of ``dask cml serve``.
TOKEN_VARIABLE = "DASK_CML_SERVE_TOKEN"
_MAY_CHANGE = "RW"
#: The page loads nothing from other sites.
POLICY = "default-src 'self'; img-src 'self' data:"
#: The status of the answer to an expected error, whose reason is for the user. The first class counts.
_STATUS: dict[type[BaseException], int] = {
    NoSuchCluster: 404,
    ClusterExists: 409,
    CMLError: 503,
    TypeError: 400,
    ValueError: 400,
    OSError: 503,
}


@dataclass(frozen=True)
class User:
    """The user who sends a request.

    Parameters
    ----------
    name : str or None
        The user's name, if the platform sends it.
    may_change : bool
        Whether the user may create, scale and delete clusters. Otherwise, the user may only view them.
    """

    name: str | None
    may_change: bool


@dataclass
class Access:
    """Identifies users by the headers of CML's ingress, or by a token.

    Parameters
    ----------
    port : int
        The port of the web UI.
    """

    port: int
    token: str = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.guard = HostGuard("The web UI", self.port)
        #: The users who may change clusters. None: those to whom CML grants write access.
        self._users: tuple[str, ...] | None = setting("serve.users")
        #: Why a user may not change clusters, for users.
        self.read_only = (
            "your role in the project is read-only"
            if self._users is None
            else "cml.serve.users does not contain your name"
        )
        #: The cookie's name. It contains the port, because browsers send cookies to all ports of a host.
        self.cookie = f"dask-cml-{self.port}"
        #: The path below which users with the token see the web UI. Browsers send the cookie with the token
        #: only below this path: at another port of this machine, another user's program may listen.
        self.path = f"/{hmac.new(self.token.encode(), b'path', 'sha256').hexdigest()[:32]}"
        ports = {os.environ.get(variable) for variable in SERVED_PORTS}
        #: Whether requests come through CML's ingress. Elsewhere, any program could send its headers.
        self.behind_entry = this_session() is not None and str(self.port) in ports

    @property
    def how_to_log_in(self) -> str:
        """What a user without a name and without the token can do."""
        if self.behind_entry:
            return (
                "CML has named no user: open the web UI by its link in CML. A program sends the token that "
                f"{TOKEN_VARIABLE} sets in the header {_TOKEN_HEADER}, also with an API key."
            )
        return "Open the link that `dask cml serve` printed, or send the token in it."

    def accepts(self, token: str) -> bool:
        """Return whether this token is valid."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def is_below_path(self, request: HTTPServerRequest) -> bool:
        """Return whether a request is for an address below the path of users with the token."""
        return str(request.uri).startswith(f"{self.path}/")

    def user(self, request: HTTPServerRequest) -> User | None:
        """Return the user with the token, or the user that CML's ingress names, or None."""
        name = request.headers.get("REMOTE-USER") if self.behind_entry else None
        sent = [sent_token(request)]
        if self.is_below_path(request) and self.cookie in request.cookies:
            sent.append(request.cookies[self.cookie].value)
        if any(map(self.accepts, sent)):
            return User(name or this_user(), may_change=True)
        if not name:
            return None
        if self._users is not None:
            return User(name, name in self._users)
        return User(name, request.headers.get("REMOTE-USER-PERM") == _MAY_CHANGE)


def sent_token(request: HTTPServerRequest) -> str:
    """Return the token that a program has sent, or an empty text. An API key of CML may come with it."""
    header = request.headers.get("Authorization", "")
    bearer = header[len(_BEARER) :] if header.startswith(_BEARER) else ""
    return request.headers.get(_TOKEN_HEADER) or bearer


class Handler(RequestHandler):
    """Answers requests of users, and refuses requests from other origins."""

    access: Access

    def initialize(self, **_: Any) -> None:
        """Get the objects that all handlers share."""
        self.access = self.settings["access"]
        self.clusters = self.settings["clusters"]
        self.dashboards = self.settings["dashboards"]

    def set_default_headers(self) -> None:
        """Stop other sites from embedding the web UI, and the web UI from loading their content."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "SAMEORIGIN")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", POLICY)

    @property
    def root(self) -> str:
        """The relative path of the list, because a proxy may serve the pages below any path."""
        return "../" * (self.request.path.count("/") - 1)

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster, with the address of its dashboard for this user."""
        details = await self.clusters.details(name)
        id = details.pop("dashboard_id")
        link = self.dashboards.link(self.request, details["name"], id) if id and self.dashboards else None
        return {**details, "dashboard": link}

    def answer_error(self, message: str) -> None:
        """Answer with the reason of an error, which is for the user."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(message)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the message of an expected error, or the name of the status."""
        error: BaseException | None = kwargs.get("exc_info", (None, None, None))[1]
        message = self._reason
        if isinstance(error, HTTPError):
            # Tornado keeps the message as a format for logs.
            message = (error.log_message or message) % error.args
        elif error is not None and isinstance(error, (*_STATUS,)):
            self.set_status(next(status for kind, status in _STATUS.items() if isinstance(error, kind)))
            message = reason_of(error)
        self.answer_error(message)

    def log_exception(self, *exc_info: Any) -> None:
        """Log unexpected errors."""
        if not isinstance(exc_info[1], (HTTPError, *_STATUS)):
            logger.error("Request %s %s failed", self.request.method, self.request.path, exc_info=exc_info)

    def get_current_user(self) -> User | None:
        """Return the user who sends the request, or None."""
        return self.access.user(self.request)

    def prepare(self) -> None:
        """Refuse other hosts and origins, unknown users, and changes by read-only users."""
        reads = self.request.method in ("GET", "HEAD")
        why = self.access.guard.why_refused(self.request)
        if why is not None:
            raise HTTPError(403, why)
        if reads and self.access.accepts(self.get_query_argument("token", "")):
            self._take_token()
            return
        if self.current_user is None:
            raise HTTPError(401, self.access.how_to_log_in)
        if not reads and not self.current_user.may_change:
            raise HTTPError(403, f"You cannot change clusters: {self.access.read_only}.")
        if not reads and not sent_token(self.request):
            self.check_xsrf_cookie()

    def _take_token(self) -> None:
        """Move the token from the address, which others may see, to a cookie."""
        if self.access.is_below_path(self.request) and self.request.path == "/":
            # Without a path, the cookie is for addresses below this one, also behind a proxy.
            self.set_cookie(self.access.cookie, self.access.token, path="", httponly=True, samesite="Lax")
            self.redirect("?")
            return
        path = "" if self.access.is_below_path(self.request) else f"{self.access.path[1:]}/"
        self.redirect(f"{self.root or './'}{path}?{urlencode({'token': self.access.token})}")
