"""The start times of worker sessions, for the page's metrics."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from dask_cml.cluster import CMLCluster

#: The upper limits of start times, in seconds.
_BUCKETS = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, math.inf)


class StartTimes:
    """Counts how long worker sessions took from their launch until they were connected."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._counts = [0] * len(_BUCKETS)
        self.total = 0.0

    def look(self, clusters: Iterable[CMLCluster]) -> None:
        """Count the sessions that have connected since the last look."""
        before, self._starting = self._starting, set()
        for cluster in clusters:
            connected = cluster.manager.fleet.arrived()
            for each in cluster.sessions:
                if each.role == "worker" and each.name not in connected:
                    self._starting.add(each.id)
                elif each.id in before:
                    took = each.age
                    self._counts[bisect_left(_BUCKETS, took)] += 1
                    self.total += took

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """Upper limits, each with the number of sessions that took no longer."""
        limits = ["+Inf" if math.isinf(each) else f"{each:g}" for each in _BUCKETS]
        return [*zip(limits, accumulate(self._counts), strict=True)]
