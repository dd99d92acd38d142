"""Who may see the page and change clusters, and which requests are answered at all."""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

from tornado.httputil import HTTPServerRequest
from tornado.web import HTTPError, RequestHandler

from dask_cml.manager.http_guard import HostGuard, Refused
from dask_cml.options import setting
from dask_cml.sessions.owner import this_session, this_user

#: Requests with it need no protection of forms: a browser does not send it by itself.
_BEARER = "Bearer "
#: The token, where a program cannot read what ``dask cml serve`` prints.
TOKEN_VARIABLE = "DASK_CML_SERVE_TOKEN"
_MAY_CHANGE = "RW"


@dataclass(frozen=True)
class User:
    """Whoever sends a request.

    Parameters
    ----------
    name : str or None
        The name, if the platform says it.
    may_change : bool
        Whether the user may create, scale and delete clusters, or only look.
    """

    name: str | None
    may_change: bool


@dataclass
class Access:
    """Knows users by the headers of the platform's entry, or by a token.

    Parameters
    ----------
    port : int
        The port that the page listens on.
    """

    port: int
    token: str = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24))

    def __post_init__(self) -> None:
        self.guard = HostGuard(setting("forward-hosts"), "The page")
        ports = {os.environ.get(name) for name in ("CDSW_APP_PORT", "CDSW_READONLY_PORT")}
        #: Elsewhere every program of this machine could send the headers.
        self.behind_entry = this_session() is not None and str(self.port) in ports

    @property
    def cookie(self) -> str:
        """The name of the cookie: browsers send cookies to all ports of a host."""
        return f"dask-cml-{self.port}"

    def fits(self, token: str | None) -> bool:
        """Return whether this is the token."""
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def user(self, request: HTTPServerRequest) -> User | None:
        """Return whom the platform's entry names, or who sends the token; None if neither is there."""
        if self.behind_entry and (name := request.headers.get("REMOTE-USER")):
            return User(name, request.headers.get("REMOTE-USER-PERM") == _MAY_CHANGE)
        cookie = request.cookies.get(self.cookie)
        for token in (bearer(request), cookie.value if cookie else None):
            if self.fits(token):
                return User(this_user(), may_change=True)
        return None


def bearer(request: HTTPServerRequest) -> str | None:
    """Return the token in a request's Authorization header; None if it has none."""
    header = request.headers.get("Authorization", "")
    return header[len(_BEARER) :] if header.startswith(_BEARER) else None


def words_of(error: HTTPError) -> str | None:
    """Return what an error says to the user, which tornado keeps as a format for logs."""
    return error.log_message % error.args if error.log_message else None


class Handler(RequestHandler):
    """Answer requests of users only, and none that a page of another origin has sent."""

    access: Access

    def initialize(self, **_: Any) -> None:
        """Find what all handlers share."""
        self.access = self.settings["access"]
        self.board = self.settings["board"]

    def set_default_headers(self) -> None:
        """Let no other page show this one, and load nothing from elsewhere."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "SAMEORIGIN")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", "default-src 'self'; img-src 'self' data:")

    def get_current_user(self) -> User | None:
        """Return who asks; None if nobody who may."""
        return self.access.user(self.request)

    def prepare(self) -> None:
        """Refuse foreign hosts and origins, users without a token, and changes by users who may only look."""
        given = self.request.headers.items()
        headers = {name.lower().encode(): value.encode("latin-1") for name, value in given}
        method = (self.request.method or "").encode()
        try:
            self.access.guard.check(method, headers)
        except Refused as refused:
            raise HTTPError(403, str(refused)) from None
        if method == b"GET" and self.access.fits(self.get_query_argument("token", None)):
            self._remember()
            return
        if self.current_user is None:
            raise HTTPError(401, "open the link that `dask cml serve` has printed, or send its token")
        if method not in (b"GET", b"HEAD") and not self.current_user.may_change:
            raise HTTPError(403, "you may look at this project, and change nothing")
        if bearer(self.request) is None and method not in (b"GET", b"HEAD"):
            super().check_xsrf_cookie()

    def _remember(self) -> None:
        """Keep the token in a cookie, and out of the address, which others may see."""
        self.set_cookie(self.access.cookie, self.access.token, httponly=True, samesite="Lax")
        self.go_to("?")

    def go_to(self, location: str) -> None:
        """Send the browser elsewhere, relative to this page: a proxy may serve it below another path."""
        self.set_status(302)
        self.set_header("Location", location)
        self.finish()

    def check_xsrf_cookie(self) -> None:
        """Leave the proof that the page sent a change to `prepare`, where it is known who asks."""
