"""Adaptive scaling in units of sessions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distributed.deploy.adaptive import Adaptive

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster


class CMLAdaptive(Adaptive):
    """Dask's Adaptive, counting worker sessions and not the Dask workers in them.

    ``minimum`` and ``maximum`` are sessions, too. See :class:`distributed.deploy.Adaptive` for the
    parameters.

    Examples
    --------
    >>> cluster.adapt(minimum=1, maximum=10)  # doctest: +SKIP
    """

    cluster: CMLCluster

    @property
    def plan(self) -> set[Any]:
        """The sessions that should exist."""
        return set(self.cluster.worker_spec)

    @property
    def requested(self) -> set[Any]:
        """The sessions that the platform has granted."""
        return self.plan & set(self.cluster.workers)

    @property
    def observed(self) -> set[Any]:
        """The sessions of which a Dask worker has registered."""
        return self.cluster.arrived

    async def target(self) -> int:
        """Return how many sessions the work at hand can use."""
        target = math.ceil(await super().target() / self.cluster.options.processes)
        return self.cluster.reconciler.affordable(target)

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the sessions to close to have `target` of them."""
        return await self.cluster.reconciler.choose(len(self.plan) - target)

    async def scale_up(self, n: int) -> None:  # type: ignore[override]  # as in Adaptive
        """Have `n` sessions."""
        self.cluster.want(n)
        await self.cluster._correct_state()

    async def scale_down(self, workers: list[str]) -> None:  # type: ignore[override]  # as in Adaptive
        """Close these sessions; their data moves to others first."""
        await self.cluster.scale_down(workers)
