"""The worker groups: the wanted workers in SpecCluster's dictionary, as many as a user or the work needs.

:class:`Groups` keeps what is wanted. A :class:`CMLAdaptive` scales one group by the tasks that need it, with
sessions that start slowly.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import UserDict
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import dask.config
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.utils import NoOpAwaitable, import_term
from distributed.worker import Worker
from tornado.ioloop import PeriodicCallback

from dask_cml import protocol
from dask_cml.checks import choice, integer, message, of_type, seconds, worker_name
from dask_cml.core.policy import Snapshot, Supply, sessions_wanted, unrunnable
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP, dask_names, read_name, session_name
from dask_cml.options import Options, Sessions, check_room
from dask_cml.output import get_logger
from dask_cml.protocol import Request, WantedGroup
from dask_cml.sessions.process import CMLWorker
from dask_cml.timing import timing

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

#: The most bytes of all groups, as JSON. The scheduler writes them into its file at every change.
_MOST_BYTES = 500_000


class Specs(UserDict[str, Any]):
    """The dictionary ``worker_spec``, whose keys may be given as numbers, as in the examples of SpecCluster.

    A worker's name is its key, and ``dask worker``, the scheduler and the platform know names as texts only.

    Examples
    --------
    >>> specs = Specs({7: {"cls": "distributed.Worker"}})
    >>> specs |= {8: specs[7]}
    >>> [*specs], 8 in specs
    (['7', '8'], True)
    """

    def __ior__(self, specs: Any) -> Specs:  # type: ignore[override, misc]  # UserDict's takes keys as they are
        self.update(specs)
        return self

    def items(self) -> Any:
        """Return a view that a list copies in one step: another thread may show the specs."""
        return self.data.items()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name))

    def __getitem__(self, name: Any) -> Any:
        return super().__getitem__(str(name))

    def __setitem__(self, name: Any, spec: Any) -> None:
        if not (isinstance(spec, Mapping) and "cls" in spec):
            expected = "a mapping with the worker's class as `cls`, such as cluster.new_spec"
            raise ValueError(of_type(f"worker_spec[{name!r}]", spec, expected))
        super().__setitem__(worker_name(str(name)), spec)

    def __delitem__(self, name: Any) -> None:
        super().__delitem__(str(name))


def check_class(options: Options) -> None:
    """Refuse a class of Dask workers that cannot be imported. Every session of the group would fail.

    Raises
    ------
    ValueError
        If this process, whose packages the sessions have, cannot import it.
    """
    name = options.worker_class
    if name is None or "PYTHONPATH" in options.env:  # where it may be
        return
    try:
        found, why = import_term(name), "it is no class of Dask workers"
    except (ImportError, AttributeError) as error:
        found, why = None, repr(error)
    except Exception:  # its module may need what only workers have, such as a GPU
        return
    if not (isinstance(found, type) and issubclass(found, Worker)):
        expected = (
            f"the name of a class of Dask workers that can be imported, such as 'my_package.MyWorker' ({why})"
        )
        raise ValueError(message("worker_class", name, expected))


class Groups:
    """The worker groups of a cluster, and which entries of its ``worker_spec`` belong to them.

    All of it changes in the event loop, except that the constructor of a cluster calls ``want_first``. No
    method waits.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster. Its ``new_spec`` is the spec of the default group.
    options : Options
        The options of the cluster, and of its default group.
    """

    def __init__(self, cluster: CMLCluster, options: Options) -> None:
        self._cluster, self._prefix = cluster, options.name
        #: The names in ``worker_spec`` with their groups, as far as they were not changed by hand.
        self._known: dict[str, str] = {}
        self._options = {DEFAULT_GROUP: options}
        #: Number of workers that a group has above its target, because the scheduler has not chosen yet
        #: which ones cost least to close. Below zero if more are asked for than the keeper wants yet.
        self._excess: dict[str, int] = {}
        #: The number of a group's next session, for names of this class.
        self._numbers: dict[str, int] = {}
        #: All names that sessions of the cluster have had. A second session with such a name would exit.
        self._given: set[str] = set()
        self._adaptives: dict[str, Adaptive] = {}
        self.demand = Demand(cluster)

    def want_first(self) -> None:
        """Want the first workers of all groups, unless that was done, or the cluster runs already."""
        options = self.options()
        if isinstance(self._cluster.worker_spec, Specs):  # SpecCluster.__init__ (spec.py:263) sets a dict
            return
        self._cluster.worker_spec = Specs(self._cluster.worker_spec)
        if options.create_mode == "connect":
            return
        self.resize(DEFAULT_GROUP, options.n_workers, ())
        for name, of_group in options.groups().items():
            self.check_size(name, of_group)
            self._options[name] = of_group
            self.resize(name, of_group.n_workers, ())

    def take_changes_by_hand(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return what users have removed from ``worker_spec``, and added, since the last call.

        Returns
        -------
        closed, new : dict of str to str
            The groups by the workers' names.
        """
        before = self._known
        self._known = self.wanted()
        closed = {name: group for name, group in before.items() if name not in self._known}
        return closed, {name: group for name, group in self._known.items() if name not in before}

    # -- groups

    def __contains__(self, group: object) -> bool:
        return group in self._options

    @property
    def names(self) -> list[str]:
        """The names of the groups, the default group first."""
        return [*self._options]

    def options(self, group: str = DEFAULT_GROUP) -> Options:
        """Return the options of a group.

        Raises
        ------
        ValueError
            If the group does not exist.
        """
        return self._options[choice("worker_group", group, self.names)]

    def check_size(self, group: str, options: Options) -> None:
        """Refuse a group with which the scheduler's file would be too large: it holds all groups."""
        others = sum(len(json.dumps(self.options(name).group_arguments())) for name in self.names)
        size, most = len(json.dumps(options.group_arguments())), max(0, _MOST_BYTES - others)
        if size > most:
            what = f"invalid options of worker group {group!r} with {size} bytes"
            raise ValueError(f"{what}: expected at most {most}, of {_MOST_BYTES} for all groups of a cluster")

    def remove(self, group: str) -> None:
        """Remove a group. Its workers are not wanted any more."""
        self.drop(self.workers(group))
        self._options.pop(group, None)
        self._excess.pop(group, None)
        self.adapt(group, None)

    @property
    def described(self) -> dict[str, WantedGroup]:
        """What is wanted of the groups, for other processes."""
        described = {}
        for name, options in self._options.items():
            own = {} if name == DEFAULT_GROUP else options.group_arguments()
            described[name] = WantedGroup(own, self.target(name), self.limits(name))
        return described

    def take(self, groups: Mapping[str, WantedGroup]) -> None:
        """Have these groups and limits of adaptive scaling instead of the present ones."""
        known = self.described
        for name in known.keys() - groups.keys():
            self.remove(name)
        for name, group in groups.items():
            if name not in known or known[name].options != group.options:
                self._options[name] = self.options().of_group(group.options)
            self.limit(name, group.adapt)

    def show(self, groups: Mapping[str, WantedGroup], wanted: Mapping[str, str]) -> None:
        """Have the groups and the wanted workers of a keeper instead of the present ones.

        Parameters
        ----------
        groups : mapping of str to WantedGroup
            The groups.
        wanted : mapping of str to str
            The groups of the wanted workers by their names.
        """
        self.take(groups)
        if self.wanted() != wanted:
            self.drop([*self._cluster.worker_spec])
            self._add({name: self.spec(group) for name, group in wanted.items() if group in self})
        # More may be asked for than the keeper wants by now.
        self._excess = {name: len(self.workers(name)) - group.target for name, group in groups.items()}

    # -- adaptive scaling

    def adapt(self, group: str, adaptive: Adaptive | None) -> None:
        """Let an Adaptive scale a group, instead of the one before. None: the group does not adapt."""
        previous = self._adaptives.pop(group, None)
        if isinstance(previous, CMLAdaptive):
            previous.release()
        elif previous is not None:
            previous.stop()
        if adaptive is not None:
            self._adaptives[group] = adaptive
            if self._cluster.sharing.is_keeper:
                self.begin_adapting()
        if group == DEFAULT_GROUP:
            self._cluster._adaptive = adaptive  # Dask's widget shows it

    def limit(self, group: str, limits: Mapping[str, Any] | None) -> None:
        """Let a group adapt between limits of a report. None: it has a fixed size."""
        if self.limits(group) != limits:
            adaptive = None if limits is None else CMLAdaptive(self._cluster, worker_group=group, **limits)
            self.adapt(group, adaptive)

    def begin_adapting(self) -> None:
        """Adapt regularly from now on, in the event loop."""
        for adaptive in [*self._adaptives.values()]:
            if isinstance(adaptive, CMLAdaptive):
                adaptive.begin()

    def yield_adapting(self) -> None:
        """Let another process adapt the groups between the limits of the last report."""
        for group, adaptive in [*self._adaptives.items()]:
            if self.limits(group) is not None:
                self.adapt(group, None)
                adaptive.state = "inactive"  # its user may still stop it

    def stop_adapting(self) -> None:
        """Stop adaptive scaling of all groups."""
        for group in [*self._adaptives]:
            self.adapt(group, None)

    def adapts(self, group: str) -> bool:
        """Return whether a group adapts."""
        return group in self._adaptives

    def limits(self, group: str) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling for the report. None: it has a fixed size."""
        adaptive = self._adaptives.get(group)
        return adaptive.limits if isinstance(adaptive, CMLAdaptive) else None

    # -- specs

    def spec(self, group: str) -> dict[str, Any]:
        """Return the spec of a group's workers, in SpecCluster's form."""
        options = self.options(group)
        spec: dict[str, Any] = {"cls": CMLWorker, "options": {"options": options} | options.per_session}
        if group != DEFAULT_GROUP:
            spec["worker_group"] = group
        if options.processes > 1:  # SpecCluster's suffixes of the Dask workers' names
            spec["group"] = dask_names("", options.processes)
        return spec

    def new(self, group: str) -> dict[str, Any]:
        """Return the name and the spec of the next worker of a group. No session has had that name."""
        if group != DEFAULT_GROUP:
            return {self._next_name(group): self.spec(group)}
        # A subclass may override it, and give names of its own.
        [(name, spec)] = Specs(self._cluster.new_worker_spec()).items()
        return {self._next_name(group) if name in self._given else name: spec}

    def _next_name(self, group: str) -> str:
        number = self._numbers.get(group, 0)
        name = session_name(self._prefix, group, number)
        while name in self._given or name in self._cluster.worker_spec:
            number += 1
            name = session_name(self._prefix, group, number)
        self._numbers[group] = number
        return name

    def given(self, names: Iterable[str]) -> None:
        """Never give the names of sessions again, in the cluster's whole life."""
        self._given.update(names)
        # For callers of SpecCluster.new_worker_spec (spec.py:549), which knows no names but the wanted.
        while str(self._cluster._new_worker_name(self._cluster._i)) in self._given:
            self._cluster._i += 1

    def group_of(self, name: str) -> str:
        """Return the group of a wanted worker."""
        group: str = self._cluster.worker_spec.get(name, {}).get("worker_group", DEFAULT_GROUP)
        return group

    # -- wanted workers

    def workers(self, group: str | None = None) -> list[str]:
        """Return the names of the wanted workers of a group, or of all, the oldest first."""
        return [name for name, of in self.wanted().items() if group in (None, of)]

    def wanted(self) -> dict[str, str]:
        """Return the groups of the wanted workers by their names, the oldest first."""
        specs = [*self._cluster.worker_spec.items()]  # another thread may show them
        return {name: spec.get("worker_group", DEFAULT_GROUP) for name, spec in specs}

    def dask_workers(self, group: str | None = None) -> dict[str, list[str]]:
        """Return the names of the Dask workers of the wanted workers of a group, or of all."""
        workers = {}
        for name, spec in [*self._cluster.worker_spec.items()]:
            if group in (None, spec.get("worker_group", DEFAULT_GROUP)):
                workers[name] = [f"{name}{suffix}" for suffix in spec.get("group", ("",))]
        return workers

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse names that no session or Dask worker of the cluster can have or have had.

        Raises
        ------
        ValueError
            If there are such names.
        """
        workers = self.dask_workers()
        known = self._given.union(workers, *workers.values())
        odd = [name for name in names if read_name(self._prefix, name) is None]
        unknown = [name for name in odd if known.isdisjoint((name, name.rpartition("-")[0]))]
        if unknown:
            raise ValueError(message("workers", unknown, f"names of workers, such as {self._prefix}-0"))

    def target(self, group: str) -> int:
        """Return how many workers of a group are wanted."""
        return max(0, len(self.workers(group)) - self._excess.get(group, 0))

    def excess(self, group: str) -> int:
        """Return how many of a group's workers are still to be chosen, to close them."""
        return max(0, min(self._excess.get(group, 0), len(self.workers(group))))

    def others(self, group: str | None = None) -> Sessions:
        """Return the sizes and numbers of all wanted sessions, with the scheduler's, without a group's."""
        sessions = [(self.options().scheduler, 1)]
        for name, options in [*self._options.items()]:  # a user's thread may ask
            if name != group:
                sessions.append((options.worker, self.target(name)))
        return sessions

    def sessions_for(self, group: str, n: int | None, memory: float | str | None, cores: float | None) -> int:
        """Return to how many sessions a group is to be scaled.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or more exceed a limit of the site.
        """
        options = self.options(group)
        n = options.sessions_for(n, memory, cores)
        if n > self.target(group):
            check_room("n", n, options.worker, self.others(group))
        return n

    def resize(self, group: str, n: int, absent: Collection[str]) -> None:
        """Want `n` workers of a group.

        Parameters
        ----------
        group : str
            The group.
        n : int
            Number of workers.
        absent : collection of str
            The names of the workers that are not connected. They are dropped first, in this order.
        """
        wanted = self.workers(group)
        surplus = len(wanted) - n
        dropped = [name for name in absent if name in wanted][: max(0, surplus)]
        self.drop(dropped)
        self._excess[group] = max(0, surplus - len(dropped))
        for _ in range(-surplus):
            self._add(self.new(group))

    def close(self, group: str, names: Iterable[str]) -> None:
        """Drop surplus workers that the scheduler has chosen."""
        wanted, excess = {*self.workers(group)}, self.excess(group)
        chosen = [name for name in names if name in wanted][:excess]
        self.drop(chosen)
        self._excess[group] = excess - len(chosen)

    def replace(self, name: str) -> bool | None:
        """Want another worker by the spec of a lost one, unless one too many was wanted anyway.

        Return whether another one is wanted, or None if the lost one was not wanted any more.
        """
        group, spec = self.group_of(name), self._cluster.worker_spec.get(name)
        if spec is None:
            return None
        self.drop([name])
        if self._excess.get(group, 0) > 0:
            self._excess[group] -= 1
            return False
        self.given([name])
        self._add({next(iter(self.new(group))): spec})
        return True

    def drop(self, names: Iterable[str]) -> None:
        """Want some workers no more, otherwise than by hand."""
        for name in names:
            self._cluster.worker_spec.pop(name, None)
            self._known.pop(name, None)

    def _add(self, specs: Mapping[str, Any]) -> None:
        """Want workers with these specs, otherwise than by hand."""
        self._cluster.worker_spec.update(specs)
        self._known |= {name: self.group_of(name) for name in map(str, specs)}

    def renew(self) -> None:
        """Want workers with their specs under new names, because another scheduler begins."""
        for group in self.names:
            self.drop(self.workers(group)[self.target(group) :])
        self._excess.clear()
        specs = dict(self._cluster.worker_spec)
        self.given(specs)
        self.drop(specs)
        for name, spec in specs.items():
            if isinstance(spec.get("options", {}).get("options"), Options):  # else it is of another class
                [name] = self.new(spec.get("worker_group", DEFAULT_GROUP))
            self._add({name: spec})


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

    def __init__(self, cluster: CMLCluster) -> None:
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
                self._answer = await self._cluster.sharing.link.ask(protocol.DEMAND)
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

    def __init__(self, cluster: CMLCluster) -> None:
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

    cluster: CMLCluster
    interval: float
    state: Any = "inactive"  # older releases of Dask's class have none

    def __init__(
        self,
        cluster: CMLCluster,
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
        # As numbers of Python, which JSON and the messages can represent.
        kwargs["target_duration"] = seconds("target_duration", default if duration is None else duration)
        # Without an interval, Dask's class does not start before the cluster does.
        super().__init__(cluster, interval=0, **kwargs)
        default = dask.config.get("distributed.adaptive.interval")
        self.interval = seconds("interval", default if interval is None else interval)
        self.wait_count = self._least_wait_count = integer("wait_count", self.wait_count, 0)
        self.periodic_callback = PeriodicCallback(self._adapt, self.interval * 1000)
        #: How many checks in a row have found no work, since when, and how long the last such pause was. The
        #: time before the first work is none.
        self._idle_checks, self._idle_since, self._last_pause = 1, -math.inf, math.inf
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
        snapshot = await self.cluster.groups.demand.snapshot(max_age=self.interval / 2)
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
