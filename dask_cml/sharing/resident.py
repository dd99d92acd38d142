"""The process in a scheduler's session that keeps the cluster while no process of a user does.

:mod:`dask_cml.scheduler.resident` starts it, as ``python -m dask_cml.sharing.resident NAME``.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from distributed.core import Status

from dask_cml.cancellation import wait_until_set
from dask_cml.cluster import CMLCluster
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.protocol import Rank
from dask_cml.timing import timing

logger = logging.getLogger("distributed.scheduler.dask_cml")


class ResidentCluster(CMLCluster):
    """A cluster in its scheduler's session, with which it ends."""

    _rank = Rank.RESIDENT


async def keep(name: str, closes: asyncio.Event) -> None:
    """Keep a cluster until another process does, its scheduler closes, or the cluster ends.

    Parameters
    ----------
    name : str
        The cluster's name.
    closes : asyncio.Event
        Set when the scheduler closes, or has ended.

    Raises
    ------
    CMLError
        If the scheduler does not answer, or this session cannot reach the platform.
    """
    cluster = ResidentCluster(name=name, create_mode="connect", asynchronous=True, quiet=True)
    try:
        await cluster
    except NoSuchCluster:
        return
    while cluster.status != Status.closed and not closes.is_set():
        link = cluster.sharing.link
        if link.connected and link.board.keeper not in (None, link.id):
            break
        await wait_until_set(closes, timing.retry)
    try:
        if not closes.is_set():
            await cluster.leave()
        elif (why := await cluster.sharing.why_closed()) is not None:
            cluster.end_reason = why
            await cluster.shutdown()
        # Else the scheduler is lost. This process ends with it, and carries out nothing more.
    except CMLError as error:
        logger.warning("%s", error)


async def _keep_until_input_ends(name: str) -> None:
    closes, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        closes.set()

    loop.add_reader(sys.stdin, end)  # nothing is written to it
    await keep(name, closes)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s - %(name)s - %(levelname)s - %(message)s", level=logging.INFO)
    try:
        asyncio.run(_keep_until_input_ends(sys.argv[1]))
    except CMLError as error:
        sys.exit(f"Cluster not kept: {error}")
