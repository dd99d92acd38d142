"""Run the servers of ``dask cml serve`` until a signal stops them: the web UI, and the clusters' dashboards.

The dashboards have a separate port, and so a separate origin. A scheduler controls the scripts of its
dashboard. At the web UI's origin, these could act as the web UI's user. The links contain a secret for each
cluster, so dashboards need no cookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import signal
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tornado
from tornado.httputil import HTTPServerRequest

from dask_cml.dashboard.http_server import LocalApplication, LocalServer, local_socket
from dask_cml.dashboard.proxy import DashboardProxy
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.output import get_logger
from dask_cml.serve import api, metrics, pages
from dask_cml.serve.access import Access
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.sessions.here import SERVED_PORTS, served_hosts

logger = get_logger(__name__)

#: The variable with the port of the dashboards in a CML session.
_SECOND = "CDSW_READONLY_PORT"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: The first release of Tornado without known security holes.
_SAFE_TORNADO = "6.5.5"
#: In CML, another Tornado in the home folder may keep sessions from starting.
_UNSAFE = "Tornado %s has security holes, which %s does not have: in CML, choose a newer runtime"


def listen_for_web_ui(port: int | None) -> socket.socket:
    """Listen at a port of 127.0.0.1. None: the one that CML serves, or any free port.

    Raises
    ------
    CMLError
        If the port is in use. The message says what to do.
    OSError
        If the port cannot be used.
    """
    served = int(next(filter(None, map(os.environ.get, SERVED_PORTS)), 0))
    if port is not None or not served:
        return _listen("the web UI", port or 0, "choose another one with --port, or 0 for a free one")
    second = os.environ.get(_SECOND)
    free = "0" if second in (None, "", str(served)) else f"${_SECOND}"
    advice = f"run it as a CML Application, or run `dask cml serve --port {free}`"
    return _listen("the web UI", served, advice, "another program, usually JupyterLab,")


def _listen(server: str, port: int, advice: str, program: str = "another program") -> socket.socket:
    try:
        return local_socket(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise CMLError(f"{server} cannot listen at port {port}, because {program} does: {advice}") from error


def make_application(
    clusters: ProjectClusters, access: Access, dashboards: Dashboards | None
) -> LocalApplication:
    """Return the web UI and its API.

    Parameters
    ----------
    clusters : ProjectClusters
        The clusters.
    access : Access
        Identifies the users.
    dashboards : Dashboards or None
        Serves the dashboards of the clusters, if there is a port for them.
    """
    return _WebUIApplication(
        [*api.ROUTES, *metrics.ROUTES, *pages.ROUTES],
        clusters=clusters,
        access=access,
        dashboards=dashboards,
        xsrf_cookie_name=f"{access.cookie}-xsrf",
        xsrf_cookie_kwargs={"samesite": "Lax"},
        static_path=str(Path(__file__).parent / "static"),
        default_handler_class=pages.NotFound,
    )


class _WebUIApplication(LocalApplication):
    """Answers requests below the path of users with the token like others."""

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        access = self.settings["access"]
        if access.is_below_path(request):
            request.path = request.path.removeprefix(access.path)
        return super().find_handler(request, **kwargs)


class Dashboards(LocalServer):
    """Serves the dashboards of clusters. Create it by :func:`serve_dashboards`.

    Parameters
    ----------
    clusters : ProjectClusters
        The clusters.
    access : Access
        The web UI's access. In a CML session, it and its dashboards use the two ports that CML serves.
    port : int
        The port outside of CML. Default: any free port.

    Raises
    ------
    CMLError
        If the port is in use.
    OSError
        If CML serves no second port.
    """

    def initialize(  # type: ignore[override]
        self, clusters: ProjectClusters, access: Access, port: int = 0
    ) -> None:
        """Start to listen. Tornado calls this instead of ``__init__``."""
        self._key = secrets.token_bytes(32)
        #: The host in the links. None for the host of the web UI.
        self._host: str | None = None
        if access.behind_entry:
            self._host = served_hosts().get(_SECOND)
            second = os.environ.get(_SECOND)
            if self._host is None or second in (None, "", str(access.port)):
                raise OSError("CML serves no second port here")
            port = int(second)
        routes = [(r"/([^/]+)/([^/]+)/(.*)", _Dashboard)]
        application = LocalApplication(routes, guard=access.guard, clusters=clusters, dashboards=self)
        advice = "choose another one with --dashboard-port, or 0 for a free one"
        super().initialize(application, _listen("the server of dashboards", port, advice))

    def link(self, request: HTTPServerRequest, name: str, id: str) -> str:
        """Return the address of a cluster's dashboard, for the scheme of the web UI.

        Parameters
        ----------
        request : HTTPServerRequest
            The request of the web UI's user.
        name : str
            The name of the cluster.
        id : str
            The id of its record.
        """
        return f"//{self.host(request)}/{self.secret(id)}/{quote(name, safe='')}/"

    def host(self, request: HTTPServerRequest) -> str:
        """Return the host and port of the dashboards for the user who sent a request."""
        return self._host or f"{request.host_name}:{self.port}"

    def secret(self, id: str) -> str:
        """Return the secret in a cluster's links."""
        return hmac.new(self._key, id.encode(), hashlib.sha256).hexdigest()


def serve_dashboards(clusters: ProjectClusters, access: Access, port: int = 0) -> Dashboards | None:
    """Return :class:`Dashboards`. In a CML session that has no port for them, log a warning and return None.

    Raises
    ------
    CMLError
        If the port is in use outside of CML.
    """
    try:
        return Dashboards(clusters, access, port)
    except (CMLError, OSError) as error:
        if not access.behind_entry:
            raise
        logger.warning("Dashboards not served: %s", error)
        return None


class _Dashboard(DashboardProxy):
    """``/SECRET/NAME/...``: pages and WebSockets of a cluster's dashboard."""

    # Pages in a sandbox have none. The secret protects the dashboard.
    any_origin = True

    def set_default_headers(self) -> None:
        super().set_default_headers()
        # The dashboards of all clusters share this port, and browsers send cookies to all ports of a host.
        # In a sandbox, a page has its own origin and no cookies.
        self.set_header("Content-Security-Policy", "sandbox allow-scripts allow-popups allow-forms")
        self.set_header("Referrer-Policy", "no-referrer")

    async def get(self, secret: str, name: str, path: str) -> None:
        clusters, dashboards = self.settings["clusters"], self.settings["dashboards"]
        try:
            expected = dashboards.secret(clusters.find(name).id)
            if not hmac.compare_digest(secret.encode(), expected.encode()):
                raise NoSuchCluster(name)
            if path:
                await self.forward(clusters.dashboard(name), self.request.path.split("/", 3)[3])
            else:
                self.redirect("status")
        except NoSuchCluster:
            self.refuse(404, "No dashboard at this address: open the dashboard from the cluster's page")
        except CMLError as error:
            self.refuse(502, str(error))


async def serve(
    port: int | None,
    on_start: Callable[[str, bool], None],
    open_browser: bool = False,
    dashboard_port: int = 0,
) -> None:
    """Serve the web UI until SIGTERM, SIGINT or SIGHUP, and shut down the clusters that it created.

    Parameters
    ----------
    port : int, optional
        The port on 127.0.0.1. Default: the one that CML serves, or any free port.
    on_start : callable
        Called when the web UI listens, with its link and whether CML forwards requests to it.
    open_browser : bool
        Whether to open the web UI in a browser. Default False.
    dashboard_port : int
        The port of the dashboards. Default: the second one that CML serves, or any free port.

    Raises
    ------
    CMLError
        If a port is in use. Also if CML did not stop some sessions on shutdown. The message names their
        clusters.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if tornado.version_info < tuple(map(int, _SAFE_TORNADO.split("."))):
        logger.warning(_UNSAFE, tornado.version, _SAFE_TORNADO)
    async with contextlib.AsyncExitStack() as ending:
        listener = ending.enter_context(listen_for_web_ui(port))
        access, clusters = Access(listener.getsockname()[1]), ProjectClusters()
        dashboards = serve_dashboards(clusters, access, dashboard_port)
        server = LocalServer(make_application(clusters, access, dashboards), listener)
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop.set)
            ending.callback(loop.remove_signal_handler, number)
        if dashboards is not None:
            ending.push_async_callback(dashboards.close)
        ending.push_async_callback(clusters.close)
        ending.push_async_callback(server.close)  # runs first
        clusters.start()
        # CML serves some ports of this session.
        link = next((f"https://{host}/" for host in access.guard.pages), f"http://127.0.0.1:{access.port}/")
        if not access.behind_entry:
            link += f"?token={access.token}"
        on_start(link, access.behind_entry)
        with _opened(link) if open_browser else contextlib.nullcontext():
            await stop.wait()


@contextlib.contextmanager
def _opened(link: str) -> Iterator[None]:
    """Open a link in a browser by a private file, because other users can read a browser's command line."""
    with tempfile.NamedTemporaryFile("w", prefix="dask-cml-", suffix=".html") as file:
        file.write(pages.render("redirect", link=link))
        file.flush()
        # A daemon thread, because a browser in a terminal returns only when its user quits it.
        threading.Thread(target=webbrowser.open, args=(Path(file.name).as_uri(),), daemon=True).start()
        yield
