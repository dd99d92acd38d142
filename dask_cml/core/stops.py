"""The stops of sessions, in tasks: a call that hangs blocks nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from dask_cml.cancellation import cancel
from dask_cml.core.interface import Cluster
from dask_cml.output import Logger
from dask_cml.timing import timing

logger = Logger(__name__)


class Stops:
    """Stops sessions, and knows which are being stopped.

    Parameters
    ----------
    cluster : Cluster
        The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tasks: dict[asyncio.Task[None], set[str]] = {}

    @property
    def under_way(self) -> set[str]:
        """The sessions that are being stopped."""
        return set().union(*self._tasks.values())

    async def start(self, ids: Collection[str]) -> None:
        """Stop sessions in a task. Wait some seconds for it."""
        new = {*ids} - self.under_way
        if not new:
            return
        task = asyncio.create_task(self._cluster.api.stop(*sorted(new)))
        self._tasks[task] = new
        task.add_done_callback(self._stopped)
        await asyncio.wait([task], timeout=timing.stop)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:  # the next step tries again
            logger.info("Sessions not stopped yet: %s", error)
        else:
            self._cluster.woken.set()

    async def close(self) -> None:
        """Stop waiting for sessions to end."""
        await cancel(*self._tasks)
