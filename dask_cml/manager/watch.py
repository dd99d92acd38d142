"""What the platform says of sessions that nobody misses yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from dask_cml.checks import seconds
from dask_cml.errors import CMLError
from dask_cml.options import setting

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)


class Watch:
    """Look at the platform's list now and then, for a node that goes says goodbye to nobody.

    The scheduler takes a worker to be there as long as its connection is not known to be broken, which takes
    ``distributed.comm.timeouts.tcp`` when nothing comes any more. The platform knows within a second.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster whose workers are watched. Each manager can watch those that its own session launched.
    """

    def __init__(self, cluster: CMLCluster) -> None:
        self._cluster = cluster
        self._interval: float = setting("api.watch-interval", seconds)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            if not self._cluster.workers or self._cluster._leadership.watches:
                continue
            try:
                await self._look()
            except (CMLError, OSError, asyncio.TimeoutError) as error:
                logger.info("The sessions of %s are not watched: %r", self._cluster.name, error)
            except Exception:
                logger.exception("The sessions of %s are not watched", self._cluster.name)

    async def _look(self) -> None:
        cluster = self._cluster
        listing = await cluster._api.sessions()
        ended = [key for key, worker in cluster.workers.items() if worker.update(listing)]
        believed = {name for key in ended for name in cluster._reconciler.names(key)} & cluster.observed
        if believed:
            logger.info("The sessions of %s have ended, and the scheduler drops them", sorted(believed))
            await drop(cluster, believed)


async def drop(cluster: CMLCluster, names: Collection[str]) -> None:
    """Have the scheduler take Dask workers for lost, so that their tasks run elsewhere.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster that they are of.
    names : collection of str
        Their names.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not answer.
    """
    workers = [*cluster.scheduler_info["workers"].items()]
    for address in [address for address, worker in workers if worker["name"] in names]:
        call = cluster.scheduler_comm.unregister(address=address, stimulus_id=f"cml-drop-{time.time()}")
        await cluster._reconciler.answer(call)
    cluster._reconciler.poke()
