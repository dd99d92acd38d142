"""How long a scheduler runs: the limit of its cluster's hours, and its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from distributed.scheduler import Scheduler

#: Seconds before a cluster reaches its limit, when its users are told.
NOTICE = 600.0
#: Seconds after which a scheduler that shuts down exits, even if its shutdown does not finish.
_EXIT_WITHIN = 30.0


class Lifetime:
    """The age of a cluster, and the limit ``cml.limits.hours`` of its creator.

    Parameters
    ----------
    begin : mapping
        What the scheduler begins with: the ``hours``, if they are limited, and when the cluster was
        ``created``.

    Examples
    --------
    >>> Lifetime({"created": "2026-01-01T00:00:00+00:00", "hours": 0.5}).left < 0
    True
    """

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self.hours: float | None = begin.get("hours")
        created = datetime.fromisoformat(begin["created"]).timestamp() if self.hours else time.time()
        # Not the clock from now on, which may be set.
        self._created = time.monotonic() - max(0.0, time.time() - created)

    @property
    def age(self) -> float:
        """Seconds since the cluster was created, or since the scheduler began if there is no limit."""
        return time.monotonic() - self._created

    @property
    def left(self) -> float:
        """Seconds until the limit. Infinite without a limit."""
        return float("inf") if self.hours is None else self.hours * 3600 - self.age


async def close_within(scheduler: Scheduler, reason: str) -> None:
    """Close a scheduler. Dask may fail to, for example while it connects to a frozen worker."""
    timer = threading.Timer(_EXIT_WITHIN, os._exit, [1])
    timer.daemon = True
    timer.start()
    await scheduler.close(reason=reason)
    timer.cancel()
