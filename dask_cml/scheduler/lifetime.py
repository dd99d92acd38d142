"""How long a scheduler runs: the limit of its cluster's hours, and its end."""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import datetime

from distributed.scheduler import Scheduler

#: Seconds before a cluster reaches its limit, when its users are told.
NOTICE = 600
#: Seconds after which a scheduler that shuts down exits, even if its shutdown does not finish.
_EXIT_WITHIN = 30.0


def end_of(created: str, hours: float | None) -> float:
    """Return the monotonic time at which a cluster reaches its limit. The clock may be set until then.

    Parameters
    ----------
    created : str
        When the cluster was created, in ISO 8601.
    hours : float or None
        The limit ``cml.limits.hours`` of its creator. None: no limit.
    """
    if hours is None:
        return math.inf
    age = time.time() - datetime.fromisoformat(created).timestamp()
    return time.monotonic() + hours * 3600 - max(0.0, age)


async def close_within(scheduler: Scheduler, reason: str) -> None:
    """Close a scheduler. Dask may fail to, for example while it connects to a frozen worker."""
    timer = threading.Timer(_EXIT_WITHIN, os._exit, [1])
    timer.daemon = True
    timer.start()
    await scheduler.close(reason=reason)
    timer.cancel()
