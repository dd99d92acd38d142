"""When and why a scheduler ends: at its limit of hours, if it is idle, or because it is asked to."""

from __future__ import annotations

import logging
import math
import time
from datetime import datetime

from distributed.scheduler import Scheduler

from dask_cml.protocol import TOPIC

logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Seconds before a cluster reaches its limit, when its scheduler warns its users.
NOTICE = 600


class Lifetime:
    """The limit of a cluster's hours, and the end of its scheduler.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler.
    created : str
        When the cluster was created, in ISO 8601.
    hours : float or None
        The limit ``cml.limits.hours`` of its creator. None: no limit.

    Attributes
    ----------
    closed : str or None
        Why the cluster ended, if it was not lost: then, no other scheduler replaces this one.
    """

    def __init__(self, scheduler: Scheduler, created: str, hours: float | None) -> None:
        self.hours = hours
        self.closed: str | None = None
        self._scheduler = scheduler
        self._has_warned = False
        #: The monotonic time of the limit. The clock may be set until then.
        self._end = math.inf
        if hours is not None:
            age = max(0.0, time.time() - datetime.fromisoformat(created).timestamp())
            self._end = time.monotonic() + hours * 3600 - age

    @property
    def age(self) -> dict[str, int]:
        """The cluster's ``age`` and its limit ``most_age``, in seconds. Empty without a limit."""
        if self.hours is None:
            return {}
        most = self.hours * 3600
        return {"age": int(most - self._end + time.monotonic()), "most_age": int(most)}

    def check(self) -> str | None:
        """Return why the cluster must end now. Warn its users some time before."""
        left = self._end - time.monotonic()
        if left <= 0:
            return f"reached its limit of {self.hours:g} h"
        if left <= NOTICE and not self._has_warned:
            self._has_warned = True
            logger.warning("Cluster shuts down in %.0f s, at its limit of %g h", left, self.hours)
            self._scheduler.log_event(TOPIC, {"action": "shuts down", "session": None, "seconds": left})
        return None

    def note_idle(self) -> None:
        """Note why Dask closes the scheduler, if it was idle for too long."""
        timeout, since = self._scheduler.idle_timeout, self._scheduler.idle_since
        if timeout and since and time.time() - since > timeout:
            self.closed = self.closed or f"idle for {timeout:g} s"

    async def end(self, reason: str) -> None:
        """End the cluster. If Dask does not close its scheduler, the program of the session kills it."""
        logger.warning("Scheduler closed: %s", reason)
        self.closed = reason
        await self._scheduler.close(reason=reason)
