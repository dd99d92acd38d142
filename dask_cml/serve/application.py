"""The web application of ``dask cml serve``, from its start until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import webbrowser
from collections.abc import Callable
from pathlib import Path

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

from dask_cml.serve import api, dashboard, pages
from dask_cml.serve.access import Access
from dask_cml.serve.board import Board

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
#: Of a request's body.
_MOST_BYTES = 2**20
#: Of CML, in the order in which they are tried; the page is served where the port is that it listens on.
_PORTS = ("CDSW_APP_PORT", "CDSW_READONLY_PORT")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def port_of_session() -> int:
    """Return the port that the platform serves; 0, a free one, outside of its sessions."""
    return int(next(filter(None, map(os.environ.get, _PORTS)), 0))


def make_application(board: Board, access: Access) -> Application:
    """Return the page, its API and the dashboards.

    Parameters
    ----------
    board : Board
        The clusters.
    access : Access
        Knows the users.
    """
    return Application(
        [*api.ROUTES, *dashboard.ROUTES, *pages.ROUTES],
        board=board,
        access=access,
        xsrf_cookies=True,
        xsrf_cookie_name=f"{access.cookie}-xsrf",
        xsrf_cookie_kwargs={"samesite": "Lax"},
        static_path=str(Path(__file__).parent / "static"),
        default_handler_class=pages.NotFound,
        log_function=lambda _: None,
    )


async def serve(port: int | None, on_start: Callable[[str, bool], None], open_browser: bool = False) -> None:
    """Serve the page until SIGTERM, SIGINT or SIGHUP, and stop the clusters that it keeps.

    Parameters
    ----------
    port : int, optional
        The port, on 127.0.0.1. Default: the one that the platform serves, or a free one.
    on_start : callable
        Called with the page's link, and whether the platform serves the page, when it listens.
    open_browser : bool
        Whether to open the link in a browser.

    Raises
    ------
    OSError
        If the port is taken.
    CMLError
        If the platform did not stop sessions at the end. It names their clusters.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    sockets = bind_sockets(port_of_session() if port is None else port, _HOST)
    access = Access(sockets[0].getsockname()[1])
    board = Board()
    server = HTTPServer(make_application(board, access), max_body_size=_MOST_BYTES)
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    board.start()
    try:
        server.add_sockets(sockets)
        link = f"http://{_HOST}:{access.port}/"
        if not access.behind_entry:
            link += f"?token={access.token}"
        on_start(link, access.behind_entry)
        if open_browser:
            await asyncio.to_thread(webbrowser.open, link)
        await stop.wait()
    finally:
        server.stop()
        try:
            await board.close()
        finally:
            await server.close_all_connections()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
