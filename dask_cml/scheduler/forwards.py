"""Carries the dashboard, which listens on the loopback only, through the scheduler's own port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from distributed.comm.core import Comm
from distributed.comm.utils import get_tcp_server_addresses
from distributed.core import Status
from distributed.scheduler import Scheduler

from dask_cml.tunnel import Tunnel

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")


class Forwards:
    """The open connections to the dashboard.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler whose dashboard it is.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: The open connections.
        self.comms: set[Comm] = set()

    async def forward(self, comm: Comm, **more: Any) -> Any:
        """Connect a comm to the dashboard, and carry bytes until both directions have ended.

        Parameters
        ----------
        comm : Comm
            The connection, which is then used for nothing else.
        """
        try:
            # Only to the dashboard: the message cannot choose another port.
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port())
        except OSError as error:
            return {"status": "error", "message": f"the scheduler's dashboard does not answer: {error}"}
        self.comms.add(comm)
        try:
            await comm.write({"status": "OK"})
            await Tunnel(comm, reader, writer).run()
        except OSError as error:
            logger.debug("Connection to the dashboard ended: %r", error)
        finally:
            self.comms.discard(comm)
            comm.abort()
            writer.transport.abort()
        return Status.dont_reply

    def _port(self) -> int:
        with contextlib.suppress(AttributeError, RuntimeError):
            for host, port, *_ in get_tcp_server_addresses(self._scheduler.http_server):
                if host in ("127.0.0.1", "0.0.0.0"):
                    return int(port)
        raise OSError("it does not listen on 127.0.0.1")

    def close(self) -> None:
        """Close all connections."""
        for comm in [*self.comms]:
            comm.abort()
