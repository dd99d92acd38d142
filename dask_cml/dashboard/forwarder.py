"""Forwards the scheduler's dashboard to a port of this machine, through the scheduler's own comm port."""

from __future__ import annotations

from dask_cml.dashboard.http_server import HostGuard, LocalServer, local_socket
from dask_cml.dashboard.proxy import DashboardProxy, OpenComm, dashboard_application
from dask_cml.options import setting


class DashboardForwarder(LocalServer):
    """Listens on a port of 127.0.0.1, and answers requests by the dashboard of a scheduler.

    The scheduler must have the plugin :class:`~dask_cml.scheduler.plugin.CMLSchedulerPlugin`. If the
    scheduler cannot be reached, browsers get ``502 Bad Gateway``. Requests from other sites' pages get ``403
    Forbidden``; see :class:`~dask_cml.dashboard.http_server.HostGuard`.

    Parameters
    ----------
    open_comm : callable
        Opens a comm on which the scheduler serves its dashboard, such as
        ``functools.partial(proxy.open_comm, address, connection_args)``.
    port : int
        The port to listen on. Default: any free port.

    Raises
    ------
    OSError
        If the port is in use.

    Examples
    --------
    >>> import asyncio
    >>> import functools
    >>> from dask_cml.dashboard.proxy import open_comm
    >>> async def link(open_comm):
    ...     forwarder = DashboardForwarder(open_comm)
    ...     await forwarder.close()
    ...     return forwarder.link
    >>> asyncio.run(link(functools.partial(open_comm, cluster.scheduler_address)))
    'http://127.0.0.1:.../status'
    """

    def initialize(self, open_comm: OpenComm, port: int = 0) -> None:  # type: ignore[override]
        """Start to listen. Tornado calls this instead of ``__init__``."""
        guard = HostGuard(setting("forward-hosts"))
        application = dashboard_application([(r"/.*", _Forwarded)], guard, open_comm=open_comm)
        super().initialize(application, local_socket(port))

    @property
    def link(self) -> str:
        """The dashboard's URL for a browser on this machine."""
        return f"http://127.0.0.1:{self.port}/status"


class _Forwarded(DashboardProxy):
    async def get(self) -> None:
        await self.forward(self.settings["open_comm"], self.request.path[1:])
