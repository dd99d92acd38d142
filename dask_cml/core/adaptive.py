"""Adaptive scaling of a worker group by the tasks that need it, with sessions that start slowly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from time import monotonic
from typing import Any

import dask.config
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.utils import NoOpAwaitable
from tornado.ioloop import PeriodicCallback

from dask_cml import protocol
from dask_cml.checks import integer, seconds
from dask_cml.core.policy import Snapshot, Supply, sessions_wanted, unrunnable
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.output import get_logger
from dask_cml.protocol import Request
from dask_cml.timing import timing

logger = get_logger(__name__)


class Demand:
    """What the scheduler knows of the work, and what the groups can do.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.

    Attributes
    ----------
    unrunnable : dict of str to str or None
        How many tasks no worker can run, now or later, in words, by their reasons. None: not known yet.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.unrunnable: dict[str, str] | None = None
        self._answer: Mapping[str, Any] = {}
        self._answered = -math.inf
        self._lock = asyncio.Lock()

    async def snapshot(self, max_age: float = 0.0) -> Snapshot:
        """Return the work and the groups. Callers that wait for each other share one question.

        Parameters
        ----------
        max_age : float
            Maximum age of an answer that is used again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        async with self._lock:
            if monotonic() - self._answered >= max_age:
                self._answer = await self._cluster._ask_scheduler(protocol.DEMAND)
                self._answered = monotonic()
        return Snapshot.of(self._answer, map(self._supply, self._cluster.groups.names))

    async def watch(self) -> None:
        """Find the tasks that no worker can run, again and again."""
        while True:
            try:
                self.unrunnable = await self._find_unrunnable()
            except Exception as error:  # of a scheduler without an answer, or with an odd one
                logger.info("Tasks of cluster %s not known: %r", self._cluster.options.name, error)
            await asyncio.sleep(timing.look)

    async def _find_unrunnable(self) -> dict[str, str]:
        cluster, snapshot = self._cluster, await self.snapshot(max_age=timing.look / 2)
        expected: set[str] = set()
        # Usually, no task is restricted, and a cluster may have thousands of workers.
        if snapshot.restricted:
            for address, info in [*cluster.scheduler_info["workers"].items()]:
                expected |= {address, str(info["name"]), str(info.get("host"))}
            for name, dask_names in cluster.groups.dask_workers().items():
                expected |= {name, *dask_names}
        return unrunnable(snapshot, expected)

    def _supply(self, group: str) -> Supply:
        groups = self._cluster.groups
        options = groups.options(group)
        return Supply(
            name=group,
            processes=options.processes,
            nthreads=options.nthreads,
            resources=options.resources,
            adapts=groups.adapts(group),
            target=groups.target(group),
        )


class AdaptedCluster:
    """The cluster of an Adaptive of another class, which calls ``scale`` and ``scale_down`` as users do.

    A user who scales the cluster stops adaptive scaling. What the Adaptive asks for before its stop does not,
    and what it asks for later changes nothing.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, whose other members are found here, too.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def __await__(self) -> Any:
        return self._cluster.__await__()

    def _adapts(self) -> bool:
        is_its_cluster = getattr(self._cluster._adaptive, "cluster", None) is self
        return is_its_cluster and self._cluster.status == Status.running

    def scale(self, n: int = 0, memory: float | str | None = None, cores: float | None = None) -> Any:
        """Scale to `n` sessions as :meth:`CMLCluster.scale` does, and go on with adaptive scaling."""
        if not self._adapts():
            return NoOpAwaitable()
        n = self._cluster.groups.sessions_for(DEFAULT_GROUP, n, memory, cores)
        return self._cluster.sharing.request(Request("resize", n=n))

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Close workers by their names, after moving their data to others."""
        if self._adapts():
            await self._cluster._ask("close", names=[*map(str, workers)])  # also names that Dask alone knows
            await self._cluster._correct_state_internal()


class CMLAdaptive(Adaptive):
    """Dask's Adaptive for resources, and for sessions that take seconds to minutes to start.

    It scales one worker group by the tasks that need it: tasks that ask for its resources, or for no
    resources. It counts worker sessions, not their Dask workers, and so do ``minimum`` and ``maximum``. Its
    decisions depend on the *start time* of a session: from its launch until its Dask worker connects. It
    takes the start time from the scheduler's session at first, and then from the group's own sessions.

    - It launches as many sessions as are needed to finish the known work within a time span after their
      start. It launches nothing for work that present and starting sessions will have done by then.
    - The time span is ``target_duration``, or a quarter of the start time if that is longer. With more than
      ``minimum`` sessions, an additional session must be worth its start. The time span is then
      ``target_duration`` plus half of the start time, or at least twice ``target_duration``.
    - It closes no starting session while work waits. When work decreases, it closes unneeded sessions after
      ``wait_count`` times ``interval`` plus the start time.
    - Without any work, it closes them after ``wait_count`` times ``interval`` only, unless the last pause
      without work was shorter than the start time.

    The process that manages the cluster adapts it. In other processes, this object only holds the limits.

    Parameters
    ----------
    cluster : dask_cml.CMLCluster
        The cluster.
    worker_group : str
        The worker group to scale. Default: the default group.
    interval : str, float or timedelta, optional
        Time between two checks of the work. Default: ``distributed.adaptive.interval``.
    **kwargs
        Arguments of :class:`distributed.deploy.Adaptive`, with its defaults.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> adaptive = cluster.adapt(minimum=1, maximum=10)
    """

    cluster: Any
    state: Any = "inactive"  # older releases of Dask's class have none

    def __init__(
        self,
        cluster: Any,
        *,
        worker_group: str = DEFAULT_GROUP,
        interval: str | float | timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        self._group = worker_group
        #: The last error that is logged.
        self._logged = ""
        duration = kwargs.get("target_duration")
        default = dask.config.get("distributed.adaptive.target-duration")
        seconds("target_duration", default if duration is None else duration)
        # Without an interval, Dask's class does not start before the cluster does.
        super().__init__(cluster, interval=0, **kwargs)
        if interval is None:
            interval = dask.config.get("distributed.adaptive.interval")
        self.interval = seconds("interval", interval)
        integer("wait_count", self.wait_count, 0)
        if self.interval:
            self.periodic_callback = PeriodicCallback(self._adapt, self.interval * 1000)
        #: How many checks in a row have found no work, since when, and how long the last such pause was. The
        #: time before the first work is none.
        self._idle_checks, self._idle_since, self._last_pause = 1, -math.inf, math.inf
        self._least_wait_count = self.wait_count
        self._busy = 0
        self._borrowed: list[str] = []

    def __repr__(self) -> str:
        limits = f"minimum={self.minimum}, maximum={self.maximum}"
        return f"CMLAdaptive({self.cluster.name!r}, worker_group={self._group!r}, {limits})"

    @property
    def limits(self) -> dict[str, Any]:
        """The limits and options for the report."""
        return {
            "minimum": int(self.minimum),
            "maximum": int(self.maximum),
            "interval": self.interval,
            "wait_count": self._least_wait_count,
            "target_duration": self.target_duration,
        }

    # -- begin and end

    def begin(self) -> None:
        """Adapt regularly from now on, in the event loop of the process that manages the cluster."""
        if self.periodic_callback is not None and not self.periodic_callback.is_running():
            self.periodic_callback.start()
            self.state = "running"

    async def _adapt(self) -> None:
        """Adapt. Log an error that repeats itself once."""
        try:
            await self.adapt()
        except Exception as error:  # of Dask's Adaptive, or of a user's subclass
            if repr(error) != self._logged:
                logger.warning("Adaptive scaling of cluster %s failed", self.cluster.name, exc_info=True)
            self._logged = repr(error)

    def release(self) -> None:
        """Adapt no more, because something else scales the group."""
        if self.periodic_callback is not None:
            self.periodic_callback.stop()
        self.periodic_callback = None
        self.state = "stopped"

    def stop(self, reason: str = "unknown") -> None:
        """Stop adaptive scaling at the present number of workers.

        Parameters
        ----------
        reason : str
            The reason, for Dask's log.
        """
        if self.state != "stopped":
            self.release()
            self.cluster._stop_adapting(self._group)

    def __del__(self) -> None:
        """Ask for nothing: Adaptive's would stop adaptive scaling, which its keeper goes on with."""

    # -- for Dask's AdaptiveCore

    @property
    def _acts(self) -> bool:
        """Whether this process manages the cluster, and nothing else scales the group."""
        return self.cluster.keeps and self.state != "stopped"

    async def adapt(self) -> None:
        """Scale by the work, if this process manages the cluster."""
        if self._acts:
            await super().adapt()

    @property
    def plan(self) -> set[Any]:
        """The wanted sessions."""
        groups = self.cluster.groups
        return {*groups.workers(self._group)[: groups.target(self._group)]}

    # Sessions that are not launched yet are closed like starting sessions.
    requested = plan

    @property
    def observed(self) -> set[Any]:
        """The wanted sessions of which a Dask worker is connected."""
        return self.cluster.processes.arrived(self._group) if self.cluster.sharing.is_keeper else set()

    async def target(self) -> int:
        """Return how many sessions the known work needs."""
        # Groups that adapt share one answer of the scheduler.
        snapshot = await self.cluster.groups.demand.snapshot(max_age=(self.interval or 0.0) / 2)
        arrived, workers, now = self.observed, self.cluster.workers, monotonic()
        start_time = self.cluster.processes.start_time(self._group)
        if snapshot.has_work(self._group):
            if self._idle_checks:
                self._last_pause = now - self._idle_since
            self._idle_checks = 0
        else:
            if not self._idle_checks:
                self._idle_since = now
            self._idle_checks += 1
        if self.interval:
            self.wait_count = self._least_wait_count
            if self._idle_checks < self._least_wait_count or self._last_pause <= start_time:
                self.wait_count += math.ceil(start_time / self.interval)
        self._busy = snapshot.supply(self._group).busy
        self._borrowed = [*snapshot.borrowed(self._group)]
        plan = self.plan
        starting = [workers[name] for name in plan - arrived if name in workers]
        launched = [getattr(worker, "launched_at", None) for worker in starting]  # none of another class
        return sessions_wanted(
            snapshot,
            self._group,
            arrived=len(arrived),
            planned=len(plan),
            underway=[now - launched_at for launched_at in launched if launched_at is not None],
            start_time=start_time,
            target_duration=self.target_duration,
            minimum=self.minimum,
        )

    async def safe_target(self) -> int:
        """Return the target within its bounds, the site's limits, and what the quota allowed lately."""
        try:
            target = await super().safe_target()
        except (OSError, asyncio.TimeoutError, CMLError) as error:
            logger.warning("Adaptive scaling got no answer from the scheduler: %r", error)
            return len(self.plan)
        if not self._acts:
            return len(self.plan)
        return int(self.cluster.processes.affordable(target, self._group))

    async def workers_to_close(self, target: int) -> list[str]:
        """Return the sessions to close so that `target` remain."""
        plan, arguments = self.plan, self._workers_to_close_kwargs
        n = len(plan) - target
        # The scheduler does not know which busy sessions run other groups' tasks. Idle sessions close first.
        n_idle = max(0, len(plan) - self._busy)
        borrowed = [name for name in self._borrowed if name in plan][: max(0, n - n_idle)]
        chosen = await self.cluster.processes.retirements.choose(
            self._group, n - len(borrowed), worker_key=self.worker_key, **arguments
        )
        return [*dict.fromkeys([*borrowed, *chosen])]

    async def scale_up(self, n: int) -> None:  # type: ignore[override]  # as in Adaptive
        """Scale to `n` sessions."""
        if self._acts:
            self.cluster.groups.resize(self._group, n, ())
            self.cluster.look.woken.set()

    async def scale_down(self, workers: list[str]) -> None:  # type: ignore[override]  # as in Adaptive
        """Close these sessions after moving their data to others."""
        if self._acts:
            self.cluster.groups.drop(workers)
            self.cluster.look.woken.set()
