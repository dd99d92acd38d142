"""Run the web application of ``dask cml serve`` until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path

from tornado.web import Application

from dask_cml.dashboard.http_server import SERVED_PORTS, LocalServer, local_socket
from dask_cml.serve import api, metrics, pages
from dask_cml.serve.access import Access
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.serve.dashboards import Dashboards, serve_dashboards

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def port_of_session() -> int:
    """Return the port that CML serves in this session. Outside of sessions, return 0 for any free port."""
    return int(next(filter(None, map(os.environ.get, SERVED_PORTS)), 0))


def make_application(clusters: ProjectClusters, access: Access, dashboards: Dashboards | None) -> Application:
    """Return the page and its API.

    Parameters
    ----------
    clusters : ProjectClusters
        The clusters.
    access : Access
        Identifies the users.
    dashboards : Dashboards or None
        Serves the dashboards of the clusters, if there is a port for them.
    """
    return Application(
        [*api.ROUTES, *metrics.ROUTES, *pages.ROUTES],
        clusters=clusters,
        access=access,
        dashboards=dashboards,
        xsrf_cookie_name=f"{access.cookie}-xsrf",
        xsrf_cookie_kwargs={"samesite": "Lax"},
        static_path=str(Path(__file__).parent / "static"),
        default_handler_class=pages.NotFound,
        log_function=lambda _: None,
    )


async def serve(
    port: int | None,
    on_start: Callable[[str, bool], None],
    open_browser: bool = False,
    dashboard_port: int = 0,
) -> None:
    """Serve the page until SIGTERM, SIGINT or SIGHUP, and shut down the clusters that it created.

    Parameters
    ----------
    port : int, optional
        The port on 127.0.0.1. Default: the one that CML serves, or any free port.
    on_start : callable
        Called when the page listens, with its link and whether requests come through CML's ingress.
    open_browser : bool
        Whether to open the page in a browser. Default False.
    dashboard_port : int
        The port of the dashboards. Default: the second one that CML serves, or any free port.

    Raises
    ------
    OSError
        If a port is in use.
    CMLError
        If CML did not stop some sessions on shutdown. The message names their clusters.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    listener = local_socket(port_of_session() if port is None else port)
    access, clusters = Access(listener.getsockname()[1]), ProjectClusters()
    dashboards = serve_dashboards(clusters, access, dashboard_port)
    server = LocalServer(make_application(clusters, access, dashboards), listener)
    async with contextlib.AsyncExitStack() as ending:
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop.set)
            ending.callback(loop.remove_signal_handler, number)
        if dashboards is not None:
            ending.push_async_callback(dashboards.close)
        for part in (clusters, server):  # which closes first
            ending.push_async_callback(part.close)
        clusters.start()
        link = f"http://127.0.0.1:{access.port}/"
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
