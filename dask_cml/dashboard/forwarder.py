"""Forwards the scheduler's dashboard to a port of this machine, through the scheduler's own comm port."""

from __future__ import annotations

from dask_cml.dashboard.connection import OpenComm
from dask_cml.dashboard.host_guard import HostGuard
from dask_cml.dashboard.http_server import LocalServer, local_socket
from dask_cml.dashboard.proxy import DashboardProxy, dashboard_application
from dask_cml.options import setting


class DashboardForwarder:
    """Listens on a port of 127.0.0.1, and answers requests by the dashboard of a scheduler.

    The scheduler must have the plugin :class:`~dask_cml.scheduler.plugin.CMLSchedulerPlugin`. If the
    scheduler cannot be reached, browsers get ``502 Bad Gateway``. Requests from other sites' pages get ``403
    Forbidden``; see :class:`~dask_cml.dashboard.host_guard.HostGuard`.

    Parameters
    ----------
    open_comm : callable
        Opens a comm that the scheduler connects to its dashboard, such as
        ``functools.partial(connection.open_comm, address, connection_args)``.
    port : int
        The port to listen on. Default: any free port.

    Examples
    --------
    >>> import asyncio
    >>> import functools
    >>> from dask_cml.dashboard.connection import open_comm
    >>> async def link(open_comm):
    ...     async with DashboardForwarder(open_comm) as forwarder:
    ...         return forwarder.link
    >>> asyncio.run(link(functools.partial(open_comm, cluster.scheduler_address)))
    'http://127.0.0.1:.../status'
    """

    def __init__(self, open_comm: OpenComm, *, port: int = 0) -> None:
        self.port = port
        self._open_comm = open_comm
        self._server: LocalServer | None = None

    async def __aenter__(self) -> DashboardForwarder:
        await self.start()
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    @property
    def link(self) -> str:
        """The dashboard's URL for a browser on this machine."""
        return f"http://127.0.0.1:{self.port}/status"

    async def start(self) -> None:
        """Start to listen.

        Raises
        ------
        OSError
            If the port is in use.
        """
        if self._server is None:
            listener = local_socket(self.port)
            self.port = listener.getsockname()[1]
            guard = HostGuard(setting("forward-hosts"))
            application = dashboard_application([(r"/.*", _Forwarded)], guard, open_comm=self._open_comm)
            self._server = LocalServer(application, listener)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()


class _Forwarded(DashboardProxy):
    async def get(self) -> None:
        await self.forward(self.settings["open_comm"], self.request.path[1:])
