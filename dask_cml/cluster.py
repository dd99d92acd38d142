"""The cluster manager: SpecCluster on CML sessions.

To see how ``scale(3)`` works, read :meth:`CMLCluster.scale`; ``Sharing.request``, which carries it out or
posts it to the keeper; :meth:`CMLCluster._carry_out`, which changes ``worker_spec``;
:meth:`CMLCluster._step`, which retires, stops and launches; and ``Workers.launch``.
Again and again, the :class:`~dask_cml.core.look.Look` replaces lost workers in that dict, and takes a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.deploy import adaptive as dask_adaptive
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.security import Security
from distributed.utils import Log, Logs, in_async_call

from dask_cml import checks, output
from dask_cml.cancellation import cancel, end_of, gather_or_cancel, within
from dask_cml.core.ending import Ending, How, end_at_exit, open_clusters
from dask_cml.core.groups import AdaptedCluster, CMLAdaptive, Groups, check_class
from dask_cml.core.look import Look
from dask_cml.core.workers import Workers, startup_information
from dask_cml.display import EscapedLogs, describe, html_of
from dask_cml.errors import CMLError, LaunchRefused, shows_errors_in_short, without_frames
from dask_cml.naming import DEFAULT_GROUP, session_name
from dask_cml.options import (
    Options,
    SessionSize,
    adaptive_bounds,
    arguments_of,
    check_new,
    check_room,
    refuse_unexpected,
    set_attribute,
    state_directory,
)
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS
from dask_cml.output import get_logger
from dask_cml.protocol import NO_ANSWER, Rank, Request, after
from dask_cml.sessions import here, tls
from dask_cml.sessions.plan import Place, plan_worker
from dask_cml.sessions.process import CMLScheduler, CMLWorker, Session
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.timing import timing
from dask_cml.words import command, first_line, printable, printable_lines

if TYPE_CHECKING:
    from dask_cml.sharing.sharing import Sharing

logger = get_logger(__name__)

#: The platform of a running cluster before its record is read.
_UNKNOWN = ModuleType("unknown")
#: Maximum number of sessions of adaptive scaling without a maximum and without a limit.
_MAXIMUM = 100
#: What a user can do whose quota is too small.
_ASK_FOR_LESS = (
    "Ask for fewer or smaller workers. Or create the cluster without workers and scale it: it launches as "
    "many as there is room for. To see what runs, run `dask cml list`"
)


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group of a cluster.

    Parameters
    ----------
    name : str
        The group's name.
    n_workers : int
        Number of requested worker sessions.
    n_arrived : int
        Number of worker sessions with a connected Dask worker.
    size : SessionSize
        Virtual CPUs, memory in GiB, and GPUs of a session.
    nthreads : int
        Number of threads in a session.
    processes : int
        Number of Dask workers in a session.
    resources : dict of str to float
        Resources of a session. Its Dask workers share them evenly.
    """

    name: str
    n_workers: int
    n_arrived: int
    size: SessionSize
    nthreads: int
    processes: int
    resources: dict[str, float]


class CMLCluster(SpecCluster):
    """A Dask cluster on CML worker sessions.

    The scheduler runs in a session of its own. Each worker session runs one or more Dask workers. The cluster
    replaces sessions that fail, are evicted or do not start. :meth:`close`, the end of a ``with`` block and
    the end of the process stop all its sessions, unless ``shutdown_on_close`` is False.

    Arguments that are None are taken from Dask's configuration: ``cml.<argument with dashes>``. The page
    Options of the documentation describes each option in full.

    Parameters
    ----------
    n_workers : int, optional
        Number of worker sessions to launch at first. Default 0.
    cpu : float, optional
        Virtual CPUs of a worker session. Default 1.
    memory : float or str, optional
        Memory of a worker session, in GiB, or a string such as ``"16 GiB"``. Default 2.
    nvidia_gpu : int, optional
        Number of GPUs of a worker session. Default 0.
    nthreads : int, optional
        Number of threads of a worker session. Default: one per whole CPU, split evenly among `processes`.
    processes : int, optional
        Number of Dask workers in a worker session. Default: one per GPU, or 1 without GPUs.
    resources : mapping of str to float, optional
        Resources of a worker session, such as ``{"GPU": 1}``. Default: its GPUs.
    memory_reserve : float or str, optional
        Memory of a session that its Dask workers leave free. Default: 0.25 GiB plus 2 %, at most half.
    scratch : float or str, optional
        Local disk of a worker session, in GiB, or a string such as ``"50 GB"``. Default ``"10 GB"``.
    worker_command : sequence of str, optional
        Command that starts the Dask workers. Default: ``dask worker``, or with GPUs and
        dask-cuda ``dask cuda worker``.
    worker_class : str, optional
        Class of the Dask workers, as in ``dask worker --worker-class``. Default: Dask's own.
    worker_args : sequence of str, optional
        Additional command-line arguments of ``dask worker``. Default: none.
    launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for a worker session. Default: none.
    worker_groups : mapping of str to mapping, optional
        Additional worker groups by name, with arguments of :meth:`add_worker_group`. Default: none.
    scheduler_cpu : float, optional
        Virtual CPUs of the scheduler's session. Default 1.
    scheduler_memory : float or str, optional
        Memory of the scheduler's session, in GiB, or a string such as ``"4 GiB"``. Default 2.
    scheduler_nvidia_gpu : int, optional
        Number of GPUs of the scheduler's session. Default 0.
    scheduler_args : sequence of str, optional
        Additional command-line arguments of ``dask scheduler``. Default: none.
    scheduler_launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for the scheduler's session. Default: none.
    env : mapping of str to str, optional
        Environment variables of all sessions. Default: none.
    log_directory : path, optional
        Folder for the sessions' logs, which stay there. Default: one that goes with the cluster.
    name : str, optional
        Name of the cluster. Default: a random name.
    create_mode : {"create", "connect", "create-or-connect"}, optional
        Whether to create a cluster or connect to the running one of this name. Default ``"create"``.
    security : bool or distributed.Security, optional
        Whether to encrypt with keys made for this cluster, or your own keys. Default True.
    pending_timeout : float or str, optional
        Time limit for the scheduler's session to leave the queue, in seconds or as a string. Default 15
        minutes.
    scheduler_timeout : float or str, optional
        Time limit for the scheduler to answer after its session runs, in seconds or as a string. Default 90
        s.
    worker_timeout : float or str, optional
        Time limit for a worker to connect after its session runs, in seconds or as a string. Default 10
        minutes.
    idle_timeout : float or str, optional
        Idle time after which the cluster shuts down, in seconds or as a string. Default: never.
    orphan_timeout : float or str, optional
        Time without any client or process after which the cluster shuts down. Default 5 minutes.
    shutdown_on_close : bool, optional
        Whether to stop all sessions when this object is closed or its process exits. Default True.
    forward_dashboard : bool, optional
        Whether to serve the dashboard on a local port. Default False.
    platform : {"auto", "local"}, optional
        Platform that launches sessions. ``"local"`` is for laptops and tests. Default ``"auto"``.
    asynchronous : bool
        Whether the cluster is used with ``await`` in a running event loop. Default False.
    loop : tornado.ioloop.IOLoop, optional
        The event loop. Default: a new one in a thread or, if `asynchronous`, the running one.
    silence_logs : int, str or False
        Level below which Dask logs nothing in this process. Default ``logging.WARNING``.
    quiet : bool
        If True, print nothing about sessions. Default False.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid or exceeds a limit of the site. Nothing is launched then.
    NotOnCML
        If this is not a CML session, and `platform` is not ``"local"``.
    LaunchRefused
        If CML refuses to launch a session, for example because a quota is exhausted. All sessions are stopped
        then.
    SessionFailed
        If the scheduler's session ends before the scheduler answers.
    SchedulerTimeout
        If the scheduler does not answer in time.

    Examples
    --------
    >>> from dask.distributed import Client
    >>> from dask_cml import CMLCluster
    >>> with CMLCluster(n_workers=2, cpu=1, memory=1, platform="local") as cluster:
    ...     with Client(cluster) as client:
    ...         client.submit(sum, [1, 2]).result()
    3
    """

    #: Whether this object counts as a user, and may manage the cluster. None: that follows from the session.
    _rank: Rank | None = None
    __setattr__ = set_attribute

    @shows_errors_in_short
    def __init__(
        self,
        n_workers: int | None = None,
        cpu: float | None = None,
        memory: float | str | None = None,
        nvidia_gpu: int | None = None,
        *,
        nthreads: int | None = None,
        processes: int | None = None,
        resources: Mapping[str, float] | None = None,
        memory_reserve: float | str | None = None,
        scratch: float | str | None = None,
        worker_command: Sequence[str] | None = None,
        worker_class: str | None = None,
        worker_args: Sequence[str] | None = None,
        launch_options: Mapping[str, Any] | None = None,
        worker_groups: Mapping[str, Mapping[str, Any]] | None = None,
        scheduler_cpu: float | None = None,
        scheduler_memory: float | str | None = None,
        scheduler_nvidia_gpu: int | None = None,
        scheduler_args: Sequence[str] | None = None,
        scheduler_launch_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        log_directory: str | None = None,
        name: str | None = None,
        create_mode: str | None = None,
        security: bool | Security | None = None,
        pending_timeout: float | str | None = None,
        scheduler_timeout: float | str | None = None,
        worker_timeout: float | str | None = None,
        idle_timeout: float | str | None = None,
        orphan_timeout: float | str | None = None,
        shutdown_on_close: bool | None = None,
        forward_dashboard: bool | None = None,
        platform: str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: int | str | bool | None = logging.WARNING,
        quiet: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ARGUMENTS}
        refuse_unexpected(CMLCluster.__init__, kwargs)
        checks.dask_arguments(asynchronous, loop, silence_logs, quiet)
        if isinstance(n_workers, str) and not n_workers.isdecimal():
            expected = "a whole number; a cluster's name is its option `name`"
            raise TypeError(checks.message("n_workers", n_workers, expected))
        options = Options.read(**given).inheriting()
        if options.create_mode == "create":
            own = here.this_cluster()
            if own is not None and given.get("create_mode") is None:
                raise CMLError(
                    f"cluster not created: this process runs in a session of cluster {own}, perhaps because "
                    "a task imports the module that creates the cluster. Create it in a function, or below "
                    "`if __name__ == \"__main__\":`. For a cluster of this session, pass create_mode='create'"
                )
            check_new(options)
        try:
            self._set_up(
                options, given, quiet, asynchronous=asynchronous, loop=loop, silence_logs=silence_logs
            )
        except BaseException as error:  # also Ctrl-C must leave no session behind
            if hasattr(self, "ending"):
                self.ending.end_failed_constructor(error)
            raise

    def _set_up(self, options: Options, given: Mapping[str, Any], quiet: bool, **dask_arguments: Any) -> None:
        output.follow_cells()
        self.options = options
        self._quiet = quiet
        connects = options.create_mode == "connect"
        self.api = WorkersAPI(_UNKNOWN if connects else load_platform(options.platform))
        if not connects:
            self.api.check_options(options.scheduler_launch_options, "scheduler_launch_options")
            for group in (options, *options.groups().values()):
                self.api.check_options(group.launch_options)
                check_class(group)
        self.place = Place(state_directory() / options.name)
        self.groups = Groups(self, options)
        self.sharing = self._share(given)
        #: Not `workers`, as SpecCluster calls its dict of the launched ones.
        self.processes = Workers(self)
        self.look = Look(self)
        self.ending: Ending = Ending(self)
        self._starting: asyncio.Task[None] | None = None
        #: How many tasks wait for the start.
        self._n_starting = 0
        self._looking: asyncio.Task[Any] | None = None
        #: The steps that are under way, and the one that has not begun.
        self._steps: set[asyncio.Task[None]] = set()
        self._next_step: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        end_at_exit(self)
        super().__init__(
            scheduler={"cls": CMLScheduler, "options": {"options": options}},
            worker=self.groups.spec(DEFAULT_GROUP),
            name=options.name,
            shutdown_on_close=options.shutdown_on_close,
            **dask_arguments,
        )
        self._name = type(self).__name__  # for Dask's repr, which would show the cluster's name twice
        self.groups.want_first()

    def _share(self, given: Mapping[str, Any]) -> Sharing:
        """Return what shares this cluster with the other processes of the project.

        `given` are the arguments, unchecked: a running cluster keeps its own options.
        """
        from dask_cml.sharing.sharing import Sharing  # which imports the core

        return Sharing(self, given)

    @classmethod
    def from_name(  # type: ignore[override]
        cls,
        name: str,
        *,
        shutdown_on_close: bool = False,
        forward_dashboard: bool | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: int | str | bool | None = logging.WARNING,
        quiet: bool = False,
    ) -> CMLCluster:
        """Connect to a running cluster of the project.

        The cluster keeps running after :meth:`close`, this object's ``with`` block and its process. To end
        the cluster, call :meth:`shutdown`. CML stops a worker session with the session that launched it, so
        workers that this object launches end with this process's session.

        Parameters
        ----------
        name : str
            Name of the cluster.
        shutdown_on_close : bool
            Whether to stop all sessions when this object is closed or its process exits. Default False.
        forward_dashboard : bool, optional
            Whether to serve the dashboard on a local port. Default False.
        asynchronous : bool
            Whether the cluster is used with ``await`` in a running event loop. Default False.
        loop : tornado.ioloop.IOLoop, optional
            The event loop. Default: a new one in a thread or, if `asynchronous`, the running one.
        silence_logs : int, str or False
            Level below which Dask logs nothing in this process. Default ``logging.WARNING``.
        quiet : bool
            If True, print nothing about sessions. Default False.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name. The message lists the existing clusters.
        CMLError
            If the scheduler does not answer.

        Examples
        --------
        >>> with CMLCluster.from_name("mine") as cluster:
        ...     print(cluster.name)
        mine
        """
        # SpecCluster.from_name (spec.py:679) is not implemented.
        checks.cluster_name("name", name, "connect")
        return cls(
            name=name,
            create_mode="connect",
            shutdown_on_close=shutdown_on_close,
            forward_dashboard=forward_dashboard,
            asynchronous=asynchronous,
            loop=loop,
            silence_logs=silence_logs,
            quiet=quiet,
        )

    # -- scaling

    @shows_errors_in_short
    def scale(  # type: ignore[override]  # as in SpecCluster
        self,
        n: int | None = None,
        memory: float | str | None = None,
        cores: float | None = None,
        worker_group: str = DEFAULT_GROUP,
        **kwargs: Any,
    ) -> Awaitable[None] | None:
        """Scale a worker group to `n` sessions, and stop its adaptive scaling.

        Returns as soon as the request is noted. The scheduler chooses the workers to close, and first moves
        their data to others.

        Parameters
        ----------
        n : int, optional
            Number of worker sessions, unless `memory` or `cores` are given.
        memory : float or str, optional
            Minimum total memory of the sessions, in GiB, or a string such as ``"100 GiB"``. Default: none.
        cores : float, optional
            Minimum total number of threads. Default: none.
        worker_group : str
            The worker group. Default: the default group.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or exceeds a limit of the site.
        CMLError
            If this object is closed, or not connected yet.

        Examples
        --------
        >>> cluster.scale(2)
        >>> cluster.scale(memory="3 GiB")
        """
        # SpecCluster.scale (spec.py:515) knows no groups, and closes whichever workers it added last.
        # SpecCluster.scale_up (spec.py:589) is that method, too.
        refuse_unexpected(self.scale, kwargs)
        n = self.groups.sessions_for(worker_group, n, memory, cores)
        self._check_running(f"worker group {worker_group!r} not scaled", or_new=True)
        return self._in_loop(self._ask, "scale", group=worker_group, n=n)

    def sync(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function in the event loop, as Dask's classes do.

        Raises
        ------
        CMLError
            If the cluster is closed, and its event loop has ended.
        """
        # The error of SyncMethodMixin.sync (utils.py:367) would name the event loop alone.
        if self.status == Status.closed and not self.asynchronous:
            self._check_running("call refused")
        return super().sync(func, *args, **kwargs)

    def _in_loop(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function in the event loop, which alone changes the cluster. Another thread waits for it."""
        is_here = in_async_call(self.loop, default=True)  # or between two runs of the event loop
        return self.sync(function, *arguments, asynchronous=is_here, **named)

    def _ask(self, kind: Any, **arguments: Any) -> Awaitable[None]:
        """Carry out what a user asks for, or ask the process that manages the cluster."""
        request = Request(kind, **arguments)
        after(self.groups.described, request)  # an error is raised here, not by the manager
        return self.sharing.request(request)

    def _carry_out(self, request: Request, *, is_own: bool = False) -> None:
        """Carry out what a user asks for, in this process or in another.

        One that was posted here (`is_own`) has ended an Adaptive of another class then, or was its own.
        """
        group = request.group
        if request.kind == "close":
            # The names are of sessions or of Dask workers.
            known = {name: worker.name for worker in self.processes.workers() for name in worker.dask_names}
            self.groups.drop(known.get(name, name) for name in request.names)
            return  # failures count on: whoever closes workers says nothing of their causes
        groups = after(self.groups.described, request)
        wanted = groups.get(group)
        if wanted is not None and wanted.adapt is None and not is_own:
            self.groups.adapt(group, None)  # also an Adaptive of another class
        self.groups.take(groups)
        if wanted is not None:
            self._resize(group, wanted.target)
        self.processes.begin_anew(group)

    scale_up = scale

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Close workers by their names, after moving their data to others.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions or of Dask workers. Those that are gone change nothing.

        Raises
        ------
        TypeError, ValueError
            If no worker of the cluster can have such a name.
        CMLError
            If this object is closed, or not connected yet.
        """
        # SpecCluster.scale_down (spec.py:571) changes `worker_spec`, which another process may manage.
        names = checks.several("workers", workers)
        self.groups.check_names(names)
        self._check_running("workers not closed", or_new=True)
        await self._ask("close", names=names)
        await self._correct_state_internal()

    def _resize(self, group: str, n: int) -> None:
        """Want `n` workers of a group here."""
        self.groups.resize(group, n, self.processes.absent(group))
        self.loop.add_callback(self._correct_state_internal)  # type: ignore[union-attr]

    @shows_errors_in_short
    def adapt(  # type: ignore[override]  # two numbers come first, as in dask-kubernetes
        self,
        minimum: float = 0,
        maximum: float | None = math.inf,
        *,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: float | str | None = None,
        maximum_memory: float | str | None = None,
        worker_group: str = DEFAULT_GROUP,
        Adaptive: type[dask_adaptive.Adaptive] = CMLAdaptive,
        **kwargs: Any,
    ) -> dask_adaptive.Adaptive:
        """Scale a worker group automatically with its workload.

        Parameters
        ----------
        minimum : int, optional
            Minimum number of worker sessions. Default 0.
        maximum : int, optional
            Maximum number of worker sessions. Default: the limit of the site, or 100 with a warning.
        minimum_cores : int, optional
            Minimum total number of threads. Default: none.
        maximum_cores : int, optional
            Maximum total number of threads. Default: unlimited.
        minimum_memory : float or str, optional
            Minimum total memory of the sessions, in GiB, or a string such as ``"100 GiB"``. Default: none.
        maximum_memory : float or str, optional
            Maximum total memory of the sessions, in GiB or as a string. Default: unlimited.
        worker_group : str
            The worker group. Several can adapt at once. Default: the default group.
        Adaptive : type, optional
            Class of the adaptive scaling, which only the default group can choose. Default
            :class:`CMLAdaptive`.
        **kwargs
            Arguments of the class, such as ``interval``, ``wait_count`` and ``target_duration``.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or the minimum exceeds a limit of the site.
        CMLError
            If this object is closed, or not connected yet.

        Examples
        --------
        >>> adaptive = cluster.adapt(1, 10)
        """
        # SpecCluster.adapt (spec.py:615) knows no groups, no limits of a site, and no other process.
        # Adaptive passes memory_ratio to Scheduler.workers_to_close, and sets its other arguments.
        base = dask_adaptive.Adaptive if worker_group == DEFAULT_GROUP else CMLAdaptive
        checks.subclass("Adaptive", Adaptive, base)
        refuse_unexpected(self.adapt, kwargs, arguments_of(Adaptive) - {"cluster"} | {"memory_ratio"})
        options, others = self.groups.options(worker_group), self.groups.others(worker_group)
        least, most = adaptive_bounds(
            options,
            (minimum, minimum_memory, minimum_cores),
            (None if maximum == math.inf else maximum, maximum_memory, maximum_cores),
            others,
        )
        limit = max(least, _MAXIMUM) if math.isinf(most) else int(most)
        self._check_running(f"worker group {worker_group!r} not adapted", or_new=True)
        cluster: Any = AdaptedCluster(self)
        if issubclass(Adaptive, CMLAdaptive):
            cluster, kwargs["worker_group"] = self, worker_group
        adaptive = Adaptive(cluster, minimum=least, maximum=limit, **kwargs)
        self._in_loop(self._adapt, worker_group, adaptive)
        if math.isinf(most):
            words = "Cluster %s adapts to at most %s workers: adapt() got no finite maximum"
            logger.warning(words, self.options.name, limit)
        return adaptive

    def _adapt(self, group: str, adaptive: dask_adaptive.Adaptive) -> Any:
        """Let an Adaptive scale a group."""
        if not isinstance(adaptive, CMLAdaptive):  # it scales here, as a user does

            def stop_if_refused(asked: asyncio.Task[None]) -> None:
                if self._adaptive is adaptive and not asked.cancelled() and asked.exception() is not None:
                    self.groups.adapt(group, None)

            asked = self._ask("stop adapting", group=group)
            self.groups.adapt(group, adaptive)
            if isinstance(asked, asyncio.Task):  # the manager is asked, and may refuse
                asked.add_done_callback(stop_if_refused)
            return asked
        asked = self._ask("adapt", group=group, limits=adaptive.limits)
        if self.groups.adapts(group):  # here, and not in another process
            self.groups.adapt(group, adaptive)
        return asked

    def _stop_adapting(self, group: str) -> Any:
        """Stop a group's adaptive scaling at its present number of sessions.

        Return an awaitable in an event loop.

        Parameters
        ----------
        group : str
            The worker group.
        """
        runs = self.status in (Status.created, Status.running) or self.sharing.is_keeper
        if runs and group in self.groups:  # another process may have deleted it
            return self._in_loop(self._ask, "stop adapting", group=group)
        return None

    def _check_running(self, what: str, *, or_new: bool = False) -> None:
        """Refuse what a cluster cannot do that does not run.

        Parameters
        ----------
        what : str
            What it cannot do, as a clause.
        or_new : bool
            Whether a cluster that has not started can do it, if it is not one that may run already.

        Raises
        ------
        CMLError
            If it does not run, or its options are not known yet.
        """
        name = self.options.name
        if self.ending.is_forks_copy:
            raise CMLError(f"{what}: cluster {name} is of another process")
        if self.status == Status.running:
            return
        if not or_new or self.status != Status.created:
            why = self.sharing.end
            if why is None and self.ending.how is How.LEAVE:
                why = f"run CMLCluster.from_name({name!r})"
            suffix = f": {why}" if why else ""
            raise CMLError(f"{what}: cluster {name} is {self.status.name}{suffix}")
        if not self.sharing.is_keeper and self.options.create_mode != "create":
            raise CMLError(f"{what}: cluster {name} is not connected yet, await it first")

    def _new_worker_name(self, worker_number: int) -> str:
        # SpecCluster._new_worker_name (spec.py:541) is the number alone, which all clusters would share.
        return session_name(self.options.name, DEFAULT_GROUP, worker_number)

    # -- worker groups

    @shows_errors_in_short
    def add_worker_group(
        self,
        name: str,
        n_workers: int = 0,
        *,
        cpu: float | None = None,
        memory: float | str | None = None,
        nvidia_gpu: int | None = None,
        nthreads: int | None = None,
        processes: int | None = None,
        resources: Mapping[str, float] | None = None,
        memory_reserve: float | str | None = None,
        scratch: float | str | None = None,
        worker_command: Sequence[str] | None = None,
        worker_class: str | None = None,
        worker_args: Sequence[str] | None = None,
        launch_options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add a group of worker sessions with a size and options of its own.

        Arguments that are None are taken from the cluster. `nthreads`, `processes` and `resources` follow
        from `cpu` and `nvidia_gpu` if these are given.

        Parameters
        ----------
        name : str
            Name of the group: words of letters, digits and ``_``, joined by ``-``, such as ``gpu`` or
            ``big-mem``. The names of its Dask workers contain it.
        n_workers : int
            Number of worker sessions to launch. Default 0.
        cpu : float, optional
            Virtual CPUs of a session.
        memory : float or str, optional
            Memory of a session, in GiB, or a string such as ``"16 GiB"``.
        nvidia_gpu : int, optional
            Number of GPUs of a session.
        nthreads : int, optional
            Number of threads of a session.
        processes : int, optional
            Number of Dask workers in a session.
        resources : mapping of str to float, optional
            Resources of a session, for tasks that ask for them.
        memory_reserve : float or str, optional
            Part of a session's memory that its Dask workers leave to other processes, in GiB.
        scratch : float or str, optional
            Local disk of a session, in GiB, or a string such as ``"50 GB"``.
        worker_command : sequence of str, optional
            Command that starts the Dask workers of a session.
        worker_class : str, optional
            Class of the Dask workers.
        worker_args : sequence of str, optional
            Additional command-line arguments of ``dask worker``.
        launch_options : mapping, optional
            Additional parameters of CML's ``launch_workers``.
        env : mapping of str to str, optional
            Environment variables, in addition to the cluster's.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid or exceeds a limit of the site, or a group with this name exists.
        CMLError
            If the cluster is not running.

        Examples
        --------
        >>> cluster.add_worker_group("big", n_workers=1, memory="4 GiB")
        >>> cluster.scale(2, worker_group="big")
        >>> cluster.delete_worker_group("big")
        """
        given = {option: value for option, value in locals().items() if option in GROUP_OPTIONS}
        refuse_unexpected(self.add_worker_group, kwargs)
        options = self.options.of_group(given)
        checks.group_name("name", name)
        self._check_running(f"worker group {name!r} not added")
        self.api.check_options(options.launch_options)
        check_class(options)
        check_room("n_workers", options.n_workers, options.worker, self.groups.others())
        return self.sync(self._add_group, name, options)

    async def _add_group(self, name: str, options: Options) -> None:
        self._check_running(f"worker group {name!r} not added")
        self.groups.check_size(name, options)
        await self.api.find_labels(options.launch_options)
        await self._ask("add group", group=name, n=options.n_workers, options=options.group_arguments())
        await self._correct_state_internal()

    @shows_errors_in_short
    def delete_worker_group(self, name: str) -> Any:
        """Delete a worker group, and stop all its sessions after moving their data to other workers.

        The group itself is removed at once. Returns when its sessions have stopped.

        Parameters
        ----------
        name : str
            Name of the group.

        Raises
        ------
        ValueError
            If no such group exists, or it is the default group.
        CMLError
            If the cluster is not running, or if no other worker can take the data. The workers then stay
            until others can.
        """
        return self.sync(self._delete_group, name)

    async def _delete_group(self, name: str) -> None:
        self._check_running(f"worker group {name!r} not deleted")
        workers = {*self.processes.known(name)}
        await self._ask("delete group", group=name)
        await self._correct_state_internal()
        deleted = f"worker group {name!r} of cluster {self.options.name} deleted, but"

        fewest, deadline = math.inf, 0.0
        while left := [worker for worker in self.processes.known(name) if worker in workers]:
            names, now, staying = ", ".join(left), time.monotonic(), {*self.sharing.role.view.staying}
            self._check_running(f"{deleted} {names} not stopped")
            if staying.issuperset(left):
                raise CMLError(
                    f"{deleted} {names} stay until other workers can take their data. To launch some, run "
                    f"{command('scale', self.options.name, 'N')}"
                )
            # The keeper, if there is one, abandons workers that do not answer while they move their data.
            connected = {info.get("name") for info in startup_information(self).values()}
            is_kept = self.sharing.is_connected and self.sharing.link.board.keeper is not None
            if len(left) < fewest or (is_kept and connected & ({*left} - staying)):
                fewest, deadline = len(left), now + timing.finish
            elif now > deadline:
                unmanaged = "" if is_kept else "no process manages the cluster, "
                unchanged = f"{unmanaged}nothing has changed for {timing.finish:g} s"
                why = self.sharing.role.view.not_stopped or self.problem or unchanged
                raise CMLError(f"{deleted} {names} not stopped yet: {why}")
            await asyncio.sleep(timing.collect)

    # -- the step

    def _correct_state_internal(self) -> asyncio.Task[None]:  # type: ignore[override]  # as awaitable
        """Take a step soon, and return a task that waits for its end.

        SpecCluster._correct_state_internal (spec.py:352) retires workers by their names as addresses (359),
        waits for every launch and end (365, 389), and keeps what was refused as if it ran (390). A caller
        that is cancelled cancels it for all others, and so does the end of the cluster.
        """
        if self._next_step is None:
            step = self._next_step = asyncio.create_task(self._step())
            self._steps.add(step)
            step.add_done_callback(self._steps.discard)
        return asyncio.create_task(end_of(self._next_step))

    async def _step(self) -> None:
        """Make the sessions what ``worker_spec`` says, as far as the platform allows it now."""
        self._next_step = self._correct_state_waiting = None
        if self._starting is None or not self._starting.done():  # the start launches all
            return
        async with self._lock:
            if self.status != Status.running:
                return
            if not self.sharing.is_keeper:
                self.sharing.role.refuse_changes_by_hand()  # type: ignore[union-attr]  # of a Follower
                return
            self._note_changes_by_hand()
            if not self.keeps:
                return
            for group in self.groups.names:
                if excess := self.groups.excess(group):
                    self.groups.close(group, await self.processes.retirements.choose(group, excess))
            if not self.keeps:  # the scheduler may have answered late
                return
            await self.processes.close_others(self.worker_spec)
            await self._stop_unwanted(await self.processes.retirements.retire(self.processes.unwanted))
            if self.sharing.keeper.may_launch and (ready := self.processes.ready):
                await self.processes.launch(ready)
            elif not self.processes.launching:
                self.api.settle("launch")
            await self.sharing.keeper.publish()

    def _note_changes_by_hand(self) -> None:
        """Note what a user has changed in ``worker_spec``, as a subclass of SpecCluster may."""
        closed, new = self.groups.take_changes_by_hand()
        for group in {*closed.values(), *new.values()}:
            if group in self.groups:
                self.processes.begin_anew(group)
                if self.groups.limits(group) is None:  # else adaptive scaling goes on
                    self.sharing.asked(Request("resize", group, self.groups.target(group)))
        self.groups.given(new)

    async def _stop_unwanted(self, retired: Sequence[CMLWorker]) -> None:
        """Stop the sessions of retired workers, and those without a worker."""
        ids = {str(worker.session_id) for worker in retired}
        unused = await self.processes.find_unused()
        if not self.keeps:  # another process may use these workers by now
            return
        to_stop = unused | (ids & {*self.api.live})
        if not to_stop:
            self.api.settle("stop")
        await self.processes.stop(to_stop)
        await self.sharing.keeper.journal.write(self.processes.launched)
        for worker in [worker for worker in retired if worker.session_id not in self.api.live]:
            # With scale(0), the last worker is connected until its session has ended.
            with contextlib.suppress(*NO_ANSWER, CMLError):
                await self.processes.unregister(worker.dask_names)
            self.workers.pop(worker.name, None)
            await worker.close()
            self.sharing.keeper.event("stopped", worker.name)

    # -- the look

    def _begin_looking(self, unheard_since: float | None = -math.inf) -> None:
        """Look at the sessions and adapt from now on.

        Parameters
        ----------
        unheard_since : float or None
            The monotonic time since which the scheduler has not answered. None: it did. Default: it is new.
        """
        self.groups.begin_adapting()
        self.groups.demand.unrunnable = None
        looks = self.look.for_ever(unheard_since)
        self._looking = asyncio.create_task(gather_or_cancel(looks, self.groups.demand.watch()))

    async def _stop_looking(self, patience: float = 0.0) -> None:
        """Cancel the looks, the steps and, after `patience` seconds, the launches of this process."""
        self._next_step = self._correct_state_waiting = None  # a step that has not begun does not do it
        await cancel(self._looking, *self._steps)
        await self.processes.stop_launching(patience)

    # -- start

    async def __aenter__(self) -> Any:
        # SpecCluster.__aenter__ (spec.py:478) asserts that it runs. Another process may have shut it down.
        try:
            await self
            self._check_running("not connected")
        except (Exception, asyncio.CancelledError):
            await self._close()
            raise
        return self

    async def _start(self) -> None:
        """Create the cluster or connect to it. Return when its scheduler answers.

        SpecCluster._start (spec.py:304) launches the workers after the scheduler has answered, turns every
        error into a RuntimeError, and lets a second caller poll.
        """
        if self.status not in (Status.created, Status.running):
            raise CMLError(f"cluster {self.options.name} is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_once())
        self._n_starting += 1
        try:
            await asyncio.wait([self._starting])  # which a cancelled caller does not cancel
            self._starting.result()
        except (Exception, asyncio.CancelledError) as error:
            is_cancelled, was_closed = isinstance(error, asyncio.CancelledError), self.ending.has_begun
            if was_closed or not is_cancelled or self._n_starting == 1:  # else another task still waits
                await self.ending.end_failed_start(error)
            if is_cancelled and was_closed:
                raise CMLError(f"cluster {self.options.name} was closed while it started") from None
            if isinstance(error, CMLError):
                raise without_frames(error) from None
            raise
        finally:
            self._n_starting -= 1

    async def _start_once(self) -> None:
        if self.options.forward_dashboard:
            await self.sharing.forward_dashboard()
        self.quiet = self._quiet
        self.groups.want_first()
        async with self._lock:
            if creates := await self.sharing.open():
                await self._create()
        if not creates:
            await self.sharing.follow()
        await asyncio.to_thread(output.flush)

    def _move(self, place: Place) -> None:
        """Use another scheduler, or other keys, from now on.

        Parameters
        ----------
        place : Place
            The folder, the keys and the number of the scheduler.
        """
        self.place = place
        self.security = place.security or Security()

    def _take_options(self, options: Options) -> None:
        """Take the options of the running cluster to which this object connects.

        Parameters
        ----------
        options : Options
            The options.
        """
        self.options = options
        # What a user wanted of a cluster that was not created does not apply to the running cluster.
        self.worker_spec.clear()
        self.api = WorkersAPI(load_platform(options.platform))
        self.groups = Groups(self, options)
        # A subclass may have chosen other classes.
        self.scheduler_spec = {**self.scheduler_spec, "options": {"options": options}}
        self.new_spec = {**self.groups.spec(DEFAULT_GROUP), "cls": self.new_spec["cls"]}

    async def _create(self) -> None:
        """Launch the scheduler and all workers, and begin to look at them."""
        options = self.options
        try:
            await self.processes.create()
        except LaunchRefused as error:
            raise LaunchRefused(error.name, error.reason, _ASK_FOR_LESS) from None
        self._begin_looking()
        if limits_of_session := here.session_limits():
            self._tell(limits_of_session)
        if not options.shutdown_on_close:
            self._tell(here.lifetime(options.name, options.idle_timeout))

    # -- the connection to the scheduler

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster._update_worker_status (spec.py:398) closes a worker that has been gone for some seconds,
        # and keeps its spec. The keeper finds out why a session's worker is gone, and replaces it.
        if op == "add":
            self.look.note_seen(str(info["name"]) for info in msg["workers"].values())
        elif op == "remove":
            self.look.woken.set()
            gone = self.scheduler_info["workers"].get(msg)
            if gone is None:
                return
            if not isinstance(self.workers.get(gone["name"]), (CMLWorker, type(None))):
                super()._update_worker_status(op, msg)  # of a subclass
                return
        super(SpecCluster, self)._update_worker_status(op, msg)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | None = None) -> None:
        # Cluster._wait_for_workers (cluster.py:582) fails if the scheduler is lost: another replaces it.
        # It keeps its last answer as `scheduler_info`, although this process may know of more workers by now.
        patience = timeout and checks.seconds("timeout", timeout)
        deadline = math.inf if patience is None else time.monotonic() + patience
        n_running = 0
        while True:
            if self.sharing.is_connected:
                limit = max(timing.collect, min(timing.answer, deadline - time.monotonic()))
                try:
                    answer = await self.sharing.link.ask("identity", limit)
                except NO_ANSWER as error:
                    logger.debug("Workers of cluster %s not counted: %r", self.options.name, error)
                else:
                    workers, running = answer["workers"], Status.running.name
                    n_running = sum(info["status"] == running for info in workers.values())
                    known = self.scheduler_info["workers"]
                    workers = {address: workers.get(address, known[address]) for address in known}
                    self.scheduler_info = SchedulerInfo({**answer, "workers": workers})
                    if n_workers <= min(n_running, len(workers)):
                        return
            self._check_running(f"{n_workers} workers not connected")
            self._check_that_workers_may_come(f"{n_running} of {n_workers} workers connected")
            if time.monotonic() > deadline:
                problem = self.problem if self.sharing.is_connected else "the scheduler does not answer"
                why = f": {problem}" if problem else ""
                raise TimeoutError(f"Only {n_running}/{n_workers} workers arrived after {timeout}{why}")
            await asyncio.sleep(timing.collect)

    def _check_that_workers_may_come(self, what: str) -> None:
        """Refuse to wait for workers after too many failures, when no other worker is to connect.

        Raises
        ------
        CMLError
            If no worker of any group is to connect until a user scales a group that failed.
        """
        gave_up, groups = self.sharing.role.view.gave_up, self.groups
        for group in groups.names:
            arrived = self.processes.arrived(group)
            wanted = groups.target(group) - len(arrived)
            may_launch = group not in gave_up and (wanted > 0 or groups.limits(group) is not None)
            if may_launch or {*self.processes.known(group)} - arrived:
                return
        for group, why in gave_up.items():
            scale = command("scale", self.options.name, groups.target(group), group=group)
            raise CMLError(f"{what}: {why}. To try again, run {scale}")

    # -- end

    @shows_errors_in_short
    def close(self, timeout: float | None = None) -> Any:
        """Close this object, and shut the cluster down if ``shutdown_on_close`` is True.

        That is the default in the process that creates the cluster. An object that is connected to a running
        cluster, as by :meth:`from_name`, leaves it running by default. To end the cluster from there, call
        :meth:`shutdown`.

        Parameters
        ----------
        timeout : float, optional
            Maximum time to wait, in seconds. Default: unlimited.

        Raises
        ------
        CMLError
            If CML did not stop some sessions. The message names them.
        TimeoutError
            If it takes longer than `timeout`.

        Examples
        --------
        >>> CMLCluster.from_name("mine").close()  # the cluster keeps running
        """
        # SpecCluster.close (spec.py:298) leaves errors to Cluster.close (cluster.py:206), which returns
        # without words after a RuntimeError, as those of this package.
        self.ending.note_error(sys.exc_info()[1])
        how = How.LEAVE if self.status == Status.closed else self.ending.usual_how
        return self.ending.end_from_outside(how, timeout)

    @shows_errors_in_short
    def shutdown(self, timeout: float | None = None) -> Any:
        """Shut the cluster down: stop all its sessions, whoever created it.

        Parameters
        ----------
        timeout : float, optional
            Maximum time to wait, in seconds. Default: unlimited.

        Raises
        ------
        CMLError
            If CML did not stop some sessions. The message names them.
        TimeoutError
            If it takes longer than `timeout`.

        Examples
        --------
        >>> CMLCluster.from_name("mine").shutdown()  # doctest: +SKIP
        """
        return self.ending.end_from_outside(How.SHUT_DOWN, timeout)

    @shows_errors_in_short
    def leave(self) -> Any:
        """Close this object only. The scheduler and the workers keep running.

        If this process created the cluster, it continues as with ``shutdown_on_close=False``: until its
        ``idle_timeout``, :meth:`shutdown`, or the end of the session that launched it.

        The next manager carries out what this process has asked for.

        Examples
        --------
        >>> CMLCluster.from_name("mine").leave()
        """
        self.shutdown_on_close = False  # also at the end of the ``with`` block
        return self.ending.end_from_outside(How.LEAVE)

    async def _close(self) -> None:
        """Close this object, as at the end of an ``async with`` block.

        SpecCluster._close (spec.py:438) retires all workers, and asserts that all have ended. Without a
        scheduler, that waits for ever.
        """
        self.ending.note_error(sys.exc_info()[1])
        await self.ending.end(self.ending.usual_how)

    async def _close_dask(self) -> None:
        """Close what Dask's classes have opened, by their own code."""
        await self.sharing.close_dashboard()  # before Dask's code says that the cluster is closed
        await self.sharing.unsubscribe()
        self.worker_spec.clear()
        await self.processes.close_others()
        self.workers.clear()
        await self.sharing.forget()
        # With this status, SpecCluster._close (spec.py:438) does only its last steps.
        self.status = Status.closing_gracefully
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timing.retry, super()._close())
        self.status = Status.closed
        for callback in self.periodic_callbacks.values():  # of the widget, which shows the end
            callback.callback()

    # -- what the cluster is

    @property
    def is_remote(self) -> bool:
        """Whether another process manages the cluster. Requests made here are passed to it."""
        return not self.sharing.is_keeper and self.status == Status.running

    @property
    def keeps(self) -> bool:
        """Whether this process manages the cluster, as its scheduler has said lately."""
        return self.sharing.role.keeps

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return [*self.sharing.role.sessions]

    @property
    def problem(self) -> str | None:
        """The cluster's present problem, such as an exhausted quota. None if there is no problem."""
        return self.sharing.problem

    @property
    def worker_groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by name, the default group first.

        Examples
        --------
        >>> cluster.worker_groups["default"].n_workers
        2
        """
        groups = {}
        for name in self.groups.names:
            options = self.groups.options(name)
            groups[name] = WorkerGroup(
                name=name,
                n_workers=self.groups.target(name),
                n_arrived=len(self.processes.arrived(name)),
                size=options.worker,
                nthreads=options.nthreads,
                processes=options.processes,
                resources=dict(options.resources),
            )
        return groups

    @property
    def scheduler_address(self) -> str:
        """The address for clients. If the cluster has keys, ``cml://<name>``, by which clients find them."""
        # Cluster.scheduler_address (cluster.py:538) is that of one scheduler, which another may replace.
        if self.scheduler_comm is None or self.status == Status.closed:
            return "<Not Connected>"
        return self.sharing.address or str(self.scheduler_comm.address)

    @property
    def dashboard_link(self) -> str:
        """The URL of the dashboard. Empty if the scheduler has none, or another program uses its port."""
        # Cluster.dashboard_link (cluster.py:357) leads to the scheduler's port, which is its loopback's.
        listens = "dashboard" in self.scheduler_info.get("services", {})
        if self.scheduler is None or not listens:
            return ""
        return here.dashboard_link(self.sharing.dashboard_url, self.options.scheduler_args)

    @shows_errors_in_short
    def get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Any:
        """Return the cluster's log, and the logs of its sessions, including ended ones.

        Parameters
        ----------
        cluster : bool
            Whether to include the cluster's own log. Default True.
        scheduler : bool
            Whether to include the scheduler's log. Default True.
        workers : bool or iterable of str
            Whether to include the workers' logs, or a list of workers to include, by the names of sessions or
            Dask workers, or by addresses. Default True.

        Returns
        -------
        dict of str to str
            The logs by ``"Cluster"``, ``"Scheduler"`` and the names of worker sessions, the oldest line
            first. They contain the output of the sessions, including the output of tasks. Only the last MiB
            of a log is returned.

        Raises
        ------
        ValueError
            If a worker does not exist. The message lists the existing workers.
        TypeError
            If `cluster` or `scheduler` is the name of a worker.

        Examples
        --------
        >>> print(cluster.get_logs()["mine-0"])
        2... - distributed.nanny - INFO - ...Start Nanny at: ...
        """
        # Cluster.get_logs (cluster.py:318) asks the scheduler, and knows no ended worker.
        for argument, value in (("cluster", cluster), ("scheduler", scheduler)):
            if isinstance(value, str):
                expected = f"True or False; for the log of a worker, pass workers=[{value!r}]"
                raise TypeError(checks.message(argument, value, expected))
        if not isinstance(workers, bool):
            workers = checks.several("workers", [workers] if isinstance(workers, str) else workers)
        if self.asynchronous:
            return asyncio.to_thread(self._read_logs, cluster, scheduler, workers)
        return self._read_logs(cluster, scheduler, workers)

    def _read_logs(self, cluster: bool, scheduler: bool, workers: bool | list[str]) -> Logs:
        names = {address: info["name"] for address, info in [*self.scheduler_info["workers"].items()]}
        if not isinstance(workers, bool):
            workers = [names.get(worker, worker) for worker in workers]
        launched = [session.name for session in self.sessions if session.role == "worker"]
        read = self.sharing.logs().read(cluster, scheduler, workers, launched)
        if cluster:  # the log is that of all managers; and this process may have been told more
            told = "\n".join(read["Cluster"])
            read["Cluster"] += [line for _, line in self._cluster_manager_logs if line not in told]
        return EscapedLogs({name: Log("\n".join(lines)) for name, lines in read.items()})

    def usage(self) -> Any:
        """Return the hours of the cluster's sessions so far, by worker group, including ended sessions.

        A session counts from when its program starts, so not while it is queued. It counts until it
        is stopped or found to have ended. While no process manages the cluster, the hours may be too high.
        Sizes are those of the options, even if a resource profile in `launch_options` sets others. After the
        cluster has shut down, the result covers its whole lifetime.

        Returns
        -------
        Usage
            A dict of :class:`SessionHours` by the names of worker groups, and ``"scheduler"``. ``total`` is
            their sum. Its ``repr`` is a table. With ``asynchronous=True``, await the result.

        Raises
        ------
        NoSuchCluster
            If another process has deleted the cluster, and the history does not have it.

        Examples
        --------
        >>> cluster.usage()
        group      sessions  hours  vCPU hours  GiB hours  GPU hours
        scheduler         1   0...
        default           ...
        total             ...
        """
        return asyncio.to_thread(self.sharing.usage) if self.asynchronous else self.sharing.usage()

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        wanted = sum(self.groups.target(group) for group in self.groups.names)
        return max(0, wanted - len(self.processes.arrived()))

    def __repr__(self) -> str:
        # Cluster.__repr__ (cluster.py:548) shows no problem, and counts no worker that is on its way.
        words = describe(self, self.sessions)
        text = super().__repr__()
        head, workers, rest = text.partition(", workers=")
        n, threads, rest = rest.partition(", threads=")
        if notes := ", ".join(filter(None, [words["pending"], words["adapts"]])):
            n += f" ({notes})"
        parts = [f"{head}{workers}{n}{threads}{rest[:-1]}", words["idle"], words["age"], words["scheduler"]]
        if words["status"] != "running":
            parts.append(words["status"])
        if words["problem"]:
            parts.append(f"problem: {printable(first_line(words['problem']))}")
        return ", ".join(filter(None, parts)) + ")"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        # Cluster._repr_html_ (cluster.py:476) escapes nothing, and lists no sessions.
        return html_of(self, cluster_status or "")

    @classmethod
    def open(cls) -> list[CMLCluster]:
        """Return the open clusters of this process. :func:`dask_cml.close_all` closes them.

        Examples
        --------
        >>> [cluster.name for cluster in CMLCluster.open()]
        ['mine']
        """
        return [cluster for cluster in open_clusters() if isinstance(cluster, cls)]

    def job_script(self) -> str:
        """Return the code, size and environment of the scheduler's session and of a worker session.

        Values of environment variables are hidden. Nothing is launched. With ``asynchronous=True``, a cluster
        launches nothing before it is awaited.

        Examples
        --------
        >>> print(cluster.job_script())
        # mine-scheduler: cpu=1 memory=2 nvidia_gpu=0
        ...
        """
        place = self.place
        if self._starting is None:  # plans need only the paths of the keys, so no file is written
            security, _ = tls.as_files(self.options.security, place.folder)
            place = replace(place, security=security)
        plans = [CMLScheduler(self.api, self.options, place).plan]
        address = None if self.scheduler is None else self.scheduler.address
        for group in self.groups.names:
            [name] = self.groups.new(group)
            plans.append(plan_worker(self.groups.options(group), place, name, address, group))
        return "\n".join(map(str, plans))

    def get_snippet(self) -> str:
        """Return code by which another process of the project connects to this cluster. dask-ctl shows it.

        Examples
        --------
        >>> print(cluster.get_snippet())
        from dask.distributed import Client
        from dask_cml import CMLCluster
        <BLANKLINE>
        cluster = CMLCluster.from_name('mine')
        client = Client(cluster)
        """
        return (
            "from dask.distributed import Client\n"
            "from dask_cml import CMLCluster\n"
            "\n"
            f"cluster = CMLCluster.from_name({self.options.name!r})\n"
            "client = Client(cluster)"
        )

    # -- words

    def _tell(self, text: str) -> None:
        """Tell the user a line, and keep it for :meth:`get_logs`.

        Cluster._log (cluster.py:281) prints in the event loop, which a blocked or closed output would stop.

        Parameters
        ----------
        text : str
            The line.
        """
        line = printable_lines(text)
        self._cluster_manager_logs.append((datetime.now(), line))
        if not self.quiet:
            output.say(text)
        if self.sharing.is_keeper:
            self.sharing.keeper.log(line)
            self.sharing.keeper.tell_clients(line)


def close_all() -> None:
    """Close all clusters of this process, as :meth:`CMLCluster.close` does.

    It shuts down those that this process has created. Others keep running, and so do those that were created
    with ``shutdown_on_close=False``. A cluster that was created with ``asynchronous=True`` is closed by its
    own event loop. If this is called there, it returns at once, and errors are logged.

    Raises
    ------
    CMLError
        If the platform did not stop some sessions. The other clusters are closed nevertheless.

    Examples
    --------
    >>> import dask_cml
    >>> dask_cml.close_all()  # doctest: +SKIP
    """
    errors = []
    for cluster in CMLCluster.open():
        try:
            if cluster.asynchronous:  # this is its event loop, which goes on when this returns
                if ending := cluster.ending.begin(cluster.ending.usual_how):
                    cluster.loop.add_future(ending, lambda done: done.result())  # type: ignore[union-attr]
            else:
                cluster.close()
        except CMLError as error:
            errors.append(error)
    if errors:
        raise CMLError("; ".join(map(str, errors)))
