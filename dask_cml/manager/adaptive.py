"""Adaptive scaling in units of sessions, for sessions that take long to start."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections import deque
from statistics import fmean
from time import monotonic
from typing import Any

from distributed.deploy.adaptive import Adaptive

logger = logging.getLogger(__name__)

#: In start times, the least work that makes a session worth its launch: of the first ones, and on top of
#: ``target_duration`` of those that come to others, which get on with the work meanwhile.
_FIRST, _MORE = 0.25, 0.5
_LAST_STARTS = 20


def stop_adapting(adaptive: Adaptive, reason: str) -> None:
    """Stop adaptive scaling, and give the reason to a class that takes one.

    Parameters
    ----------
    adaptive : distributed.deploy.Adaptive
        Of any class; Dask's takes a reason from distributed 2024.11 on.
    reason : str
        The reason, for the log.
    """
    takes_reason = "reason" in inspect.signature(adaptive.stop).parameters
    adaptive.stop(**({"reason": reason} if takes_reason else {}))


class CMLAdaptive(Adaptive):
    """Dask's Adaptive, made for sessions that take from seconds to minutes to start.

    It counts worker sessions, not the Dask workers in them; ``minimum`` and ``maximum`` are sessions, too. It
    goes by the *start time*, from the launch of a session until its Dask worker registers, which it learns
    from the scheduler's session first, and then from those that come.

    - It launches as many sessions as are needed to finish the work that is known within a while after they
      have come. What is there, or on its way, works until then: nothing is launched for work that will be
      over before.
    - That while is ``target_duration``, or a quarter of the start time if that is longer. Once there are more
      than ``minimum`` sessions the work gets on without others. Another one must be worth its start, so the
      while is ``target_duration`` and half of the start time, and twice the ``target_duration`` at least.
    - No session on its way is closed while work waits. When none does, a session that is not needed is kept
      for ``wait_count`` times ``interval`` and as long as another one would take to start.

    Parameters
    ----------
    cluster : dask_cml.CMLCluster
        The cluster to scale.
    **kwargs
        As for :class:`distributed.deploy.Adaptive`, whose defaults these are.

    Examples
    --------
    >>> adaptive = cluster.adapt(minimum=1, maximum=10)
    """

    cluster: Any

    def __init__(self, cluster: Any, **kwargs: Any) -> None:
        super().__init__(cluster, **kwargs)
        self._least_wait_count = self.wait_count
        self._starts: deque[float] = deque(maxlen=_LAST_STARTS)
        self._seen = self.observed

    @property
    def plan(self) -> set[Any]:
        """The sessions that should exist."""
        return set(self.cluster.worker_spec)

    @property
    def requested(self) -> set[Any]:
        """The planned ones, because those not launched yet are closed like others that are not there."""
        return self.plan

    @property
    def observed(self) -> set[Any]:
        """The sessions of which a Dask worker has registered."""
        return self.cluster._arrived

    @property
    def start_time(self) -> float:
        """How long a session takes to start, in seconds, as far as is known."""
        if self._starts:
            return fmean(self._starts)
        return getattr(self.cluster.scheduler, "start_time", None) or 0.0

    async def target(self) -> int:
        """Return how many sessions there should be for the work that is known."""
        arrived = self.observed
        self._learn(arrived)
        start = self.start_time
        if len(self.plan) <= self.minimum:
            duration = max(self.target_duration, _FIRST * start)
        else:
            duration = self.target_duration + max(self.target_duration, _MORE * start)
        if self.interval:
            self.wait_count = self._least_wait_count + math.ceil(start / self.interval)
        useful = await self._sessions_to_finish_in(duration)
        target = useful
        if useful > len(arrived):
            # What is there, or will come before a session that is launched now, does some of the work.
            needed = useful - math.ceil(self._done_meanwhile(arrived) / duration)
            # The scheduler never says more than there are tasks. So this is for few long ones.
            needed = max(needed, await self._sessions_to_finish_in(start + duration))
            target = max(len(self.plan), min(useful, needed))
        return target

    async def safe_target(self) -> int:
        """Return the same within ``minimum`` and ``maximum``, and what the quota allowed lately."""
        try:
            target = await super().safe_target()
        except (OSError, asyncio.TimeoutError) as error:
            # Dask's Adaptive before 2024.11 stops for good at an OSError.
            logger.warning("Adaptive scaling got no answer from the scheduler: %r", error)
            return len(self.plan)
        return self.cluster._reconciler.backoffs.affordable(target)

    async def _sessions_to_finish_in(self, duration: float) -> int:
        n: int = await self.scheduler.adaptive_target(target_duration=duration)
        # Without any worker the scheduler takes one to have one thread.
        options = self.cluster.options
        return math.ceil(n / (options.processes if self.cluster.observed else options.nthreads))

    def _learn(self, arrived: set[Any]) -> None:
        now = monotonic()
        for key in arrived - self._seen:
            worker = self.cluster.workers.get(key)
            if worker is not None and worker.launched_at is not None:
                self._starts.append(now - worker.launched_at)
        self._seen = arrived

    def _done_meanwhile(self, arrived: set[Any]) -> float:
        """Return the session seconds of work done before a session that is launched now would come."""
        now, start = monotonic(), self.start_time
        done = 0.0
        for key in self.plan:
            worker = self.cluster.workers.get(key)
            if key in arrived:
                done += start
            elif worker is not None and worker.launched_at is not None:
                done += min(now - worker.launched_at, start)
        return done

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the sessions to close to have `target` of them."""
        n = len(self.plan) - target
        return await self.cluster._reconciler.choose(n, self.worker_key, **self._workers_to_close_kwargs)

    async def scale_up(self, n: int) -> None:  # type: ignore[override]  # as in Adaptive
        """Have `n` sessions."""
        # The reconciler tries again and logs the error; Adaptive before 2024.11 would stop.
        with contextlib.suppress(OSError):
            await self.cluster._resize(n, self)

    async def scale_down(self, workers: list[str]) -> None:  # type: ignore[override]  # as in Adaptive
        """Close these sessions; their data moves to others first."""
        await self.cluster.scale_down(workers, self)
