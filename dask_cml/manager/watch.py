"""What the platform says of sessions that nobody misses yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dask_cml.checks import seconds
from dask_cml.errors import CMLError
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import setting
from dask_cml.sessions.process import CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI

logger = logging.getLogger(__name__)


class Watch:
    """Look at the platform's list now and then, for a node that goes says goodbye to nobody.

    The scheduler takes a worker to be there as long as its connection is not known to be broken, which takes
    ``distributed.comm.timeouts.tcp`` when nothing comes any more. The platform knows within a second.

    Parameters
    ----------
    fleet : Fleet
        The workers that are watched. Each manager can watch those that its own session launched.
    api : WorkersAPI
        Lists the sessions.
    client : SchedulerClient
        Drops their Dask workers.
    poke : callable
        Called when it has dropped some.
    """

    def __init__(
        self, fleet: Fleet[CMLWorker], api: WorkersAPI, client: SchedulerClient, poke: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._api = api
        self._client = client
        self._poke = poke
        self._interval: float = setting("api.watch-interval", seconds)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._fleet.workers:
                continue
            try:
                await self._look()
            except (CMLError, OSError, asyncio.TimeoutError) as error:
                logger.info("The sessions of %s are not watched: %r", self._fleet.name, error)
            except Exception:
                logger.exception("The sessions of %s are not watched", self._fleet.name)

    async def _look(self) -> None:
        listing = await self._api.sessions()
        ended = [key for key, worker in self._fleet.workers.items() if worker.update(listing)]
        names = {name for key in ended for name in self._fleet.dask_names(key)}
        if believed := names & self._client.observed:
            logger.info("The sessions of %s have ended, and the scheduler drops them", sorted(believed))
            await self._client.drop(believed)
            self._poke()
