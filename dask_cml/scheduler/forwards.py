"""Serves the dashboard, which listens on the loopback only, at the scheduler's own port."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.comm.core import Comm
from distributed.core import Status
from distributed.scheduler import Scheduler

_LOOK_INTERVAL = 0.5


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
        """Serve the dashboard on a comm until one side closes it.

        Parameters
        ----------
        comm : Comm
            The connection, which is then used for nothing else.
        """
        # Dask's comms over asyncio lack it.
        if (stream := getattr(comm, "stream", None)) is None:
            return {"status": "error", "message": "the scheduler's comms cannot carry its dashboard"}
        self.comms.add(comm)
        try:
            await comm.write({"status": "OK"})
            self._scheduler.http_server.handle_stream(stream, ("127.0.0.1", 0))
            while not stream.closed():  # noqa: ASYNC110, Tornado's WebSockets tell nobody else of their end
                await asyncio.sleep(_LOOK_INTERVAL)
        finally:
            self.comms.discard(comm)
            comm.abort()
        return Status.dont_reply

    def close(self) -> None:
        """Close all connections."""
        for comm in [*self.comms]:
            comm.abort()
