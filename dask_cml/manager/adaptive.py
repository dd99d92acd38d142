"""Adaptive scaling of a worker group by the tasks that need it, with sessions that start slowly."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import secrets
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from time import monotonic
from typing import Any

from distributed.deploy.adaptive import Adaptive

from dask_cml.manager.policy import Snapshot, sessions_wanted
from dask_cml.manager.retirement import choose
from dask_cml.manager.state import ClusterState
from dask_cml.naming import DEFAULT_GROUP, session_name

logger = logging.getLogger(__name__)

_LAST_STARTS = 20


def stop_adapting(adaptive: Adaptive, reason: str) -> None:
    """Stop adaptive scaling, and pass the reason to a class that accepts one.

    Parameters
    ----------
    adaptive : distributed.deploy.Adaptive
        An instance of any class. Dask's own class accepts a reason since distributed 2024.11.
    reason : str
        The reason, for the log.
    """
    if isinstance(adaptive, CMLAdaptive):
        adaptive.released = True
    takes_reason = "reason" in inspect.signature(adaptive.stop).parameters
    adaptive.stop(**({"reason": reason} if takes_reason else {}))


class _Lull:
    """Pauses without any work.

    Attributes
    ----------
    looks : int
        Number of looks in a row that found no work.
    last : float
        Duration of the last pause that has ended, in seconds. Infinite if there was none.
    """

    def __init__(self) -> None:
        self.looks, self.last = 0, math.inf
        # The time before the first work does not count as a pause.
        self._since = -math.inf
        self._worked = False

    def look(self, has_work: bool, now: float) -> None:
        """Record whether work exists now."""
        if has_work:
            if self.looks:
                self.last = now - self._since
            self.looks, self._worked = 0, True
        else:
            if not self.looks and self._worked:
                self._since = now
            self.looks += 1


class CMLAdaptive(Adaptive):
    """Dask's Adaptive for resources, and for sessions that take seconds to minutes to start.

    It scales one worker group by the tasks that need it: those that ask for its resources, or those that ask
    for none. It counts worker sessions, not their Dask workers, and so do ``minimum`` and ``maximum``. Its
    decisions depend on the *start time* of a session: from its launch until its Dask worker connects. It
    takes the start time from the scheduler's session at first, and then from the group's own sessions.

    - It launches as many sessions as are needed to finish the known work within a time span after their
      start. Present and starting sessions work until then, so it launches nothing for work that will be done
      before.
    - The time span is ``target_duration``, or a quarter of the start time if that is longer. With more than
      ``minimum`` sessions, an additional session must be worth its start. The time span is then
      ``target_duration`` plus half of the start time, or at least twice ``target_duration``.
    - It closes no starting session while work waits. When work decreases, it keeps unneeded sessions for
      ``wait_count`` times ``interval`` plus the start time.
    - Without any work, it keeps them for ``wait_count`` times ``interval`` only, unless the last such pause
      was shorter than the start time.

    Parameters
    ----------
    cluster : dask_cml.CMLCluster
        The cluster.
    worker_group : str
        The worker group to scale. Default: the default group.
    key : str, optional
        Names the request, in the cluster's scheduler. Default: a new request.
    **kwargs
        Arguments of :class:`distributed.deploy.Adaptive`, with its defaults.

    Examples
    --------
    >>> adaptive = cluster.adapt(minimum=1, maximum=10)
    """

    cluster: Any

    def __init__(
        self, cluster: Any, *, worker_group: str = DEFAULT_GROUP, key: str | None = None, **kwargs: Any
    ) -> None:
        self._group = worker_group
        self._state: ClusterState = cluster.manager.state if hasattr(cluster, "manager") else cluster
        #: Names the request for adaptive scaling, in the scheduler's state.
        self.key = key or secrets.token_hex(8)
        #: Whether the scheduler's state says that this one does not scale any more.
        self.released = False
        super().__init__(cluster, **kwargs)
        self._lull = _Lull()
        self._least_wait_count = self.wait_count
        self._starts: deque[float] = deque(maxlen=_LAST_STARTS)
        self._seen = self.observed
        self._busy, self._lent = 0, list[str]()

    def __repr__(self) -> str:
        limits = f"minimum={self.minimum}, maximum={self.maximum}"
        return f"CMLAdaptive({self._state.fleet.name!r}, worker_group={self._group!r}, {limits})"

    @classmethod
    def of(cls, state: ClusterState, group: str, adapting: Mapping[str, Any]) -> CMLAdaptive:
        """Return the adaptive scaling that another process has asked for.

        Parameters
        ----------
        state : ClusterState
            The parts of the manager.
        group : str
            The worker group.
        adapting : mapping
            What the other process has asked for, in the form of :attr:`limits`.
        """
        maximum = math.inf if adapting["maximum"] is None else adapting["maximum"]
        limits = {"minimum": adapting["minimum"], "maximum": maximum, **adapting["options"]}
        return cls(state, worker_group=group, key=adapting["key"], **limits)

    @property
    def limits(self) -> dict[str, Any]:
        """What other managers must know to continue."""
        return {
            "minimum": self.minimum,
            "maximum": None if math.isinf(self.maximum) else int(self.maximum),
            "key": self.key,
            "options": {
                "interval": self.interval,
                "wait_count": self._least_wait_count,
                "target_duration": self.target_duration,
            },
        }

    def __del__(self) -> None:
        self.released = True
        # Before distributed 2024.11 one that has stopped logs its end again, when logs are silenced no more.
        if getattr(self, "periodic_callback", None) is not None:
            super().__del__()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop adaptive scaling. The cluster keeps its current number of workers."""
        super().stop(*args, **kwargs)
        if not self.released:
            self.released = True
            self._state.stop_adapting(self._group, self.key)

    async def adapt(self) -> None:
        """Look at the work and scale, if this process's manager leads. Otherwise, the leader does."""
        if self._state.leads:
            await super().adapt()

    @property
    def plan(self) -> set[Any]:
        """The wanted sessions."""
        fleet = self._state.fleet
        return set(fleet.group(self._group).names) if self._group in fleet.groups else set()

    # Sessions that are not launched yet are closed like starting ones.
    requested = plan

    @property
    def observed(self) -> set[Any]:
        """The wanted sessions of which a Dask worker is connected."""
        return self._state.fleet.arrived(self._group)

    @property
    def start_time(self) -> float:
        """The start time of a session, in seconds. 0 if none has started yet."""
        if self._starts:
            return fmean(self._starts)
        return self._state.start_time or 0.0

    async def target(self) -> int:
        """Return how many sessions the known work needs."""
        fleet = self._state.fleet
        # Groups that adapt share one answer.
        answer = await self._state.client.demand(max_age=(self.interval or 0.0) / 2)
        snapshot = Snapshot.of(answer, fleet.states)
        arrived, workers, now = self.observed, fleet.workers, monotonic()
        self._learn(arrived, now)
        start = self.start_time
        self._lull.look(snapshot.has_work(self._group), now)
        if self.interval:
            soon = self._lull.looks < self._least_wait_count or self._lull.last <= start
            self.wait_count = self._least_wait_count + (math.ceil(start / self.interval) if soon else 0)
        self._busy = snapshot.supply(self._group).busy
        self._lent = [session_name(fleet.name, self._group, n) for n in snapshot.lent(self._group)]
        launched = [workers[key].launched_at for key in self.plan - arrived if key in workers]
        return sessions_wanted(
            snapshot,
            self._group,
            arrived=len(arrived),
            planned=len(self.plan),
            underway=[now - at for at in launched if at is not None],
            start_time=start,
            target_duration=self.target_duration,
            minimum=self.minimum,
        )

    async def safe_target(self) -> int:
        """Return the target within its bounds, the site's limits, and what the quota allowed lately."""
        try:
            target = await super().safe_target()
        except (OSError, asyncio.TimeoutError) as error:
            # Dask's Adaptive before 2024.11 stops for good at an OSError.
            logger.warning("Adaptive scaling got no answer from the scheduler: %r", error)
            return len(self.plan)
        if self._group not in self._state.fleet.groups:
            return 0  # the group was deleted meanwhile
        return self._state.backoffs.affordable(target, self._group)

    def _learn(self, arrived: set[Any], now: float) -> None:
        for key in arrived - self._seen:
            worker = self._state.fleet.workers.get(key)
            if worker is not None and worker.launched_at is not None:
                self._starts.append(now - worker.launched_at)
        self._seen = arrived

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the sessions to close so that `target` remain."""
        plan, more = self.plan, self._workers_to_close_kwargs
        n = len(plan) - target
        # The scheduler does not know which busy sessions run another group's tasks. Close idle ones first.
        lent = [key for key in self._lent if key in plan][: max(0, n - max(0, len(plan) - self._busy))]
        chosen = await choose(self._state, n - len(lent), self.worker_key, self._group, **more)
        return [*dict.fromkeys([*lent, *chosen])]

    async def scale_up(self, n: int) -> None:  # type: ignore[override]  # as in Adaptive
        """Scale to `n` sessions."""
        await self._decide("resize", n=n)

    async def scale_down(self, workers: list[str]) -> None:  # type: ignore[override]  # as in Adaptive
        """Close these sessions after moving their data to others."""
        await self._decide("shrink", names=sorted(workers))

    async def _decide(self, op: str, **arguments: Any) -> None:
        # The next look tries again. Adaptive before 2024.11 would stop at an OSError.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await self._state.client.decide(op, group=self._group, key=self.key, **arguments)
