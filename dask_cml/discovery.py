"""The function by which dask-ctl finds the clusters of a project."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dask_cml import cluster
from dask_cml.protocol import Rank
from dask_cml.records import store


class CMLCluster(cluster.CMLCluster):
    """A running cluster for dask-ctl, which lists it often, and calls :meth:`close` to delete it.

    The cluster can still become an orphan. dask-ctl shows users the name of the class.
    """

    _rank = Rank.OBSERVER

    def close(self, timeout: float | None = None) -> Any:
        """Shut the cluster down."""
        return self.shutdown(timeout)

    def __exit__(self, *_: Any) -> None:
        self.leave()  # a block leaves the cluster running, as ``async with`` does


async def discover() -> AsyncIterator[tuple[str, type[CMLCluster]]]:
    """Yield the names of the running clusters, with the class that connects to them.

    Examples
    --------
    >>> async def names():
    ...     return [name async for name, _ in discover()]
    >>> asyncio.run(names())
    ['mine']
    """
    records = await asyncio.to_thread(store.records)
    for name, finding in (await store.judge(records)).items():
        if finding.state is store.State.ALIVE:
            yield name, CMLCluster
