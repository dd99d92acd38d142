"""Watches for sessions that the platform lists as ended but the scheduler still counts as connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dask_cml.errors import CMLError
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import setting
from dask_cml.sessions.process import CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI

logger = logging.getLogger(__name__)


class Watch:
    """Looks regularly at the platform's list, because a node that fails closes no connections.

    The scheduler counts a worker as connected until its connection breaks. If packets stop, that takes
    ``distributed.comm.timeouts.tcp``. The platform notices within a second.

    Parameters
    ----------
    fleet : Fleet
        The workers. A manager can watch those that its own session launched.
    api : WorkersAPI
        Lists the sessions.
    client : SchedulerClient
        Drops the Dask workers of ended sessions.
    poke : callable
        Called after some were dropped.
    """

    def __init__(
        self, fleet: Fleet[CMLWorker], api: WorkersAPI, client: SchedulerClient, poke: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._api = api
        self._client = client
        self._poke = poke
        self._interval: float = setting("api.watch-interval")

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._fleet.workers:
                continue
            try:
                await self._look()
            except (CMLError, OSError, asyncio.TimeoutError) as error:
                logger.info("Sessions of cluster %s not watched: %r", self._fleet.name, error)
            except Exception:
                logger.exception("Sessions of cluster %s not watched", self._fleet.name)

    async def _look(self) -> None:
        listing = await self._api.sessions()
        ended = [key for key, worker in self._fleet.workers.items() if worker.update(listing)]
        names = {name for key in ended for name in self._fleet.dask_names(key)}
        if believed := names & self._client.observed:
            logger.info("Workers %s dropped from the scheduler: their sessions have ended", sorted(believed))
            await self._client.drop(believed)
            self._poke()
