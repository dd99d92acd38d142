"""The launches of wanted workers, in tasks: a call that hangs blocks nothing else."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from dask_cml.cancellation import cancel, gather_or_cancel
from dask_cml.core.backoff import Backoff
from dask_cml.core.interface import Cluster
from dask_cml.core.processes import Processes
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import setting
from dask_cml.options.limits import room
from dask_cml.output import Logger
from dask_cml.sessions.answers import CallFailed
from dask_cml.timing import timing
from dask_cml.words import command

logger = Logger(__name__)

#: How many sessions of a group say how long its sessions take to start.
_LAST_STARTS = 20


class Launches:
    """Decides when to launch which wanted workers, and remembers what the platform has answered.

    Parameters
    ----------
    cluster : Cluster
        The cluster, which launches a worker by its name.
    processes : Processes
        Its sessions.
    """

    def __init__(self, cluster: Cluster, processes: Processes) -> None:
        self._cluster, self._processes = cluster, processes
        self._backoffs: dict[str, Backoff] = {}
        #: How long the last sessions of each group took from their launch until they connected, in seconds.
        self._starts: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STARTS))
        self._failure_limit: int = setting("failure-limit")
        self._quota_pause: float = setting("quota-retry")
        #: The tasks that launch workers, by the workers' names.
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # -- what is

    @property
    def under_way(self) -> Collection[str]:
        """The names of the workers that are being launched."""
        return self._tasks.keys()

    @property
    def ready(self) -> list[str]:
        """The wanted workers without a session, unless their group pauses after failures or refusals."""
        groups = self._cluster.groups
        known = self._cluster.workers.keys() | self._tasks.keys()
        ready: list[str] = []
        for group in groups.names:
            backoff, names = self.backoff(group), groups.workers(group)
            missing = [name for name in names if name not in known]
            if missing and not backoff.pause:
                room = backoff.ceiling - (len(names) - len(missing))
                ready += missing[: int(max(0, min(room, len(missing))))]
        return ready

    def backoff(self, group: str = DEFAULT_GROUP) -> Backoff:
        """Return the backoff of a group."""
        backoff = self._backoffs.get(group)
        if backoff is None:  # or a user's thread has just changed the group
            cluster = self._cluster
            of_group = "" if group == DEFAULT_GROUP else f"group {group} of "
            name = f"{of_group}cluster {cluster.options.name}"
            scale = command("scale", cluster.options.name, "N", group=group)
            backoff = Backoff(name, scale, cluster.tell, self._failure_limit, self._quota_pause)
            self._backoffs[group] = backoff
        return backoff

    def begin_anew(self, group: str) -> None:
        """Forget the failures of a group, because a user has changed it."""
        self._backoffs.pop(group, None)

    def take_over(
        self, failures: Mapping[str, int], gave_up: Mapping[str, str], start_times: Mapping[str, float]
    ) -> None:
        """Begin with what the last keeper has reported, instead of what this process knew before."""
        self._backoffs.clear()
        for group, n in failures.items():
            self.backoff(group).begin_after(n, gave_up.get(group))
        self._starts.clear()
        for group, seconds in start_times.items():
            self._starts[group].append(seconds)

    # -- for the next keeper

    @property
    def failures(self) -> dict[str, int]:
        """The failures in a row of the groups that have had some."""
        failures = {group: backoff.failures for group, backoff in [*self._backoffs.items()]}
        return {group: n for group, n in failures.items() if n}

    @property
    def start_times(self) -> dict[str, float]:
        """How long sessions of the groups take to start, as far as this is known, in tenths of a second."""
        times = {group: round(self.start_time(group), 1) for group in self._cluster.groups.names}
        return {group: seconds for group, seconds in times.items() if seconds}

    def start_time(self, group: str) -> float:
        """Return how long a session of a group takes from its launch until its Dask worker connects.

        Before the first one has connected, this is the time that the scheduler's session took. 0: unknown.
        """
        if starts := self._starts.get(group):
            return fmean(starts)
        return getattr(self._cluster.scheduler, "start_time", None) or 0.0

    def note_start(self, group: str, seconds: float) -> None:
        """Note that a session of a group has connected, some seconds after its launch."""
        self._starts[group].append(seconds)

    @property
    def pause(self) -> float:
        """Seconds until the next launch of a group that pauses. Infinite if none pauses."""
        pauses = [self.backoff(group).pause for group in self._cluster.groups.names]
        return min([pause for pause in pauses if pause], default=float("inf"))

    @property
    def gave_up(self) -> dict[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        reasons = {}
        for group, backoff in [*self._backoffs.items()]:  # a user's thread may scale a group
            if backoff.gave_up and group in self._cluster.groups:
                reasons[group] = backoff.words or ""
        return reasons

    @property
    def shortages(self) -> dict[str, str]:
        """Why the platform has launched only some workers of some groups."""
        backoffs = {group: self.backoff(group) for group in self._cluster.groups.names}
        return {group: backoff.shortage for group, backoff in backoffs.items() if backoff.shortage}

    @property
    def problem(self) -> str | None:
        """The failures and refusals of all groups, as a clause. None if there are none."""
        failures = []
        for group in self._cluster.groups.names:
            words = self.backoff(group).words
            if words:
                failures.append(words if group == DEFAULT_GROUP else f"{group}: {words}")
        return "; ".join(failures) or None

    def within_limits(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group fit into the site's limits, with the other groups."""
        groups = self._cluster.groups
        fit, limit = room(groups.options(group).worker, groups.others(group))
        if n > fit:
            self.backoff(group).limited(n, int(fit), limit)
        return int(min(n, fit))

    def affordable(self, n: int, group: str) -> int:
        """Return how many of `n` workers of a group to ask for; see :meth:`Backoff.affordable`."""
        n = self.within_limits(n, group)
        return self.backoff(group).affordable(
            n, len(self._cluster.groups.workers(group)), self._processes.waits(group)
        )

    # -- launch

    async def start(self, names: Sequence[str], *, unasked: bool = False) -> None:
        """Launch workers in a task. Wait some seconds for it.

        With `unasked`, no scheduler says yet whether this process keeps the cluster: it launches one.
        """
        task = asyncio.create_task(self._launch_together(names, unasked))
        self._tasks |= dict.fromkeys(names, task)
        task.add_done_callback(self._launched)
        await asyncio.wait([task], timeout=timing.launch)
        if not task.done():
            task.add_done_callback(lambda _: self._cluster.woken.set())

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._tasks = {name: other for name, other in self._tasks.items() if other is not task}
        if not task.cancelled() and (error := task.exception()) is not None:  # the next step tries again
            name = self._cluster.options.name
            logger.warning("Workers of cluster %s not launched yet: %r", name, error)

    async def stop(self) -> None:
        """Wait for no launch any more. A session that is launched nevertheless is stopped by its id."""
        await cancel(*{*self._tasks.values()})

    async def _launch_together(self, names: Sequence[str], unasked: bool) -> None:
        """Launch workers, and count all their failures as one."""
        began, cluster = time.monotonic(), self._cluster
        groups = {name: cluster.groups.group_of(name) for name in names}
        backoffs = {group: self.backoff(group) for group in {*groups.values()}}
        errors = await self._launch_some(names, groups, unasked)
        for group, backoff in backoffs.items():
            with cluster.groups.changing():
                if self._backoffs.get(group) is backoff:  # else a user has changed the group meanwhile
                    in_group = [name for name in names if groups[name] == group]
                    of_group = {name: errors[name] for name in in_group if name in errors}
                    self._count(group, in_group, of_group, began)

    async def _launch_some(
        self, names: Sequence[str], groups: Mapping[str, str], unasked: bool
    ) -> dict[str, CMLError]:
        """Launch workers, as many at once as the API allows. Return the errors by the workers' names.

        After a refusal, no further workers of the group are tried: so an exhausted quota refuses only a few
        of a hundred launches. After an error of the platform that may pass, no further workers at all.
        """
        cluster = self._cluster
        errors: dict[str, CMLError] = {}
        refused: set[str] = set()
        queue = iter(names)

        async def launch() -> None:
            for name in queue:
                may_launch = unasked or cluster.keeps
                if not may_launch or any(isinstance(error, CallFailed) for error in errors.values()):
                    return
                if groups[name] in refused or name not in cluster.worker_spec:
                    continue
                try:
                    await cluster.launch_worker(name)
                except CMLError as error:
                    errors[name] = error
                    if isinstance(error, LaunchRefused):
                        refused.add(groups[name])
                except Exception as error:  # of a subclass's worker, or of the platform's library
                    logger.exception("Session %s not launched", name)
                    errors[name] = CMLError(f"{name} not launched: {error!r}")

        await gather_or_cancel(*[launch() for _ in range(cluster.api.threads)])
        return errors

    def _count(self, group: str, names: Sequence[str], errors: Mapping[str, CMLError], began: float) -> None:
        """Let failed or refused launches delay a group's next ones. The caller holds the groups' lock."""
        cluster, backoff, failures = self._cluster, self.backoff(group), [*errors.values()]
        refusal = next((error for error in failures if isinstance(error, LaunchRefused)), None)
        if refusal is not None:
            workers = cluster.groups.workers(group)
            launched = [name for name in workers if name in cluster.workers]
            if cluster.groups.adapts(group):  # it decides again how many to ask for
                cluster.groups.drop(name for name in names if name not in cluster.workers)
            backoff.refused(len(launched), len(workers), refusal.reason)
        elif failures and not isinstance(failures[0], CallFailed):
            backoff.failed(str(failures[0]), len(failures), began)
        elif not failures:
            backoff.granted(len(self._processes.wanted(group)))
