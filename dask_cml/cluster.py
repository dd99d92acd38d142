"""The cluster manager."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed.comm.core import Comm
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.scheduler import Scheduler
from distributed.security import Security
from distributed.utils import Log, Logs, NoOpAwaitable
from tornado.ioloop import PeriodicCallback

from dask_cml.checks import check_loop, check_silence_logs, group_name, message, web_link
from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.display import EscapedLogs, describe, escaped, render, status_of
from dask_cml.errors import CMLError, checks_arguments, without_frames
from dask_cml.keeper.adaptive import CMLAdaptive, calling_adaptive, make_adaptive
from dask_cml.keeper.at_exit import no_longer_end_at_exit
from dask_cml.keeper.kept_cluster import KeptCluster
from dask_cml.naming import DEFAULT_GROUP, session_name
from dask_cml.options import Amounts, Options, SessionSize, arguments_of, refuse_unexpected
from dask_cml.options.limits import check_new, check_room, room
from dask_cml.output import Logger
from dask_cml.records import store
from dask_cml.records.history import kept_logs
from dask_cml.records.record import cluster_address
from dask_cml.records.usage import Usage, usage_of
from dask_cml.sessions import tls
from dask_cml.sessions.plan import plan_worker
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session_logs import SessionLogs, log_folder
from dask_cml.timing import timing
from dask_cml.words import first_line, printable

logger = Logger(__name__)

#: Maximum number of sessions of adaptive scaling without a maximum and without a limit.
_MAXIMUM = 100
#: The clusters that :func:`close_all` closes in their own event loops.
_closing: set[asyncio.Future[Any]] = set()


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
        Number of worker sessions of which a Dask worker is connected.
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


class CMLCluster(KeptCluster):
    """A Dask cluster on CML worker sessions.

    The scheduler runs in a session of its own. Each worker session runs one or more Dask workers. The cluster
    replaces sessions that fail, are evicted or do not start. When it is closed, it stops all its sessions.

    Arguments that are None are taken from Dask's configuration: ``cml.<argument with dashes>``.

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
        Number of threads of a worker session, shared evenly by its processes. Default: as many as `cpu`.
    processes : int, optional
        Number of Dask workers in a worker session. Default: one for each GPU, or 1 without GPUs.
    memory_reserve : float or str, optional
        Memory kept free for everything in a worker session except the Dask workers, in GiB, or a string such
        as ``"500 MiB"``. Default: 0.25 GiB and 2 % of the memory.
    scratch : float or str, optional
        Local disk of a worker session, in GiB, or a string such as ``"50 GB"``. Its Dask workers spill at
        most 80 % of it. ``"none"``: unlimited. Default ``"10 GB"``, as CML's.
    resources : mapping of str to float, optional
        Resources of a worker session, for tasks such as ``client.submit(f, resources={"GPU": 1})``. Its
        processes share them evenly. Default: ``GPU``, as many as `nvidia_gpu`.
    scheduler_cpu : float, optional
        Virtual CPUs of the scheduler's session. Default 1.
    scheduler_memory : float or str, optional
        Memory of the scheduler's session, in GiB, or a string such as ``"4 GiB"``. Default 2.
    scheduler_nvidia_gpu : int, optional
        Number of GPUs of the scheduler's session. Default 0.
    env : mapping of str to str, optional
        Environment variables of all sessions. Default: none.
    worker_args : sequence of str, optional
        Additional command-line arguments of ``dask worker``. Default: none.
    scheduler_args : sequence of str, optional
        Additional command-line arguments of ``dask scheduler``. Default: none.
    worker_class : str, optional
        Class of the Dask workers, as in ``dask worker --worker-class``. Default: Dask's own.
    worker_command : sequence of str, optional
        Command that starts the Dask workers of a session. Default: ``["dask", "worker"]``. If dask-cuda is
        installed, ``["dask", "cuda", "worker"]`` for sessions with one process for each GPU, unless
        `worker_args` is set.
    launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for a worker session, such as
        ``accelerator_label_id``. Default: none.
    scheduler_launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for the scheduler's session. Default: none.
    worker_groups : mapping of str to mapping, optional
        Additional worker groups by name, with their arguments of :meth:`add_worker_group`. Default: none.
    name : str, optional
        Name of the cluster. Default: a random name.
    create_mode : {"create", "connect", "create-or-connect"}, optional
        ``"create"`` creates a cluster, and fails if its `name` is in use. ``"connect"`` connects to the
        running cluster with this name. ``"create-or-connect"`` does either. Default ``"create"``.
        A running cluster keeps its options. As with :meth:`from_name`, :meth:`close` shuts it down, but it
        keeps running after the ``with`` block or the process, unless ``shutdown_on_close=True`` is given.
    security : bool or distributed.Security, optional
        If True (default), encrypt with keys made for this cluster; clients find them automatically. If
        False, anyone who can reach the scheduler can use it. Pass a Security to use your own keys.
    pending_timeout : float or str, optional
        Time limit for the scheduler's session to leave the queue and start, in seconds, or a string such as
        ``"15 minutes"``. Default 15 minutes. Worker sessions have no such limit.
    scheduler_timeout : float or str, optional
        Time limit for the scheduler to answer after its session runs, in seconds or as a string. Default 90
        s.
    worker_timeout : float or str, optional
        Time limit for a worker to connect after its session runs, in seconds or as a string. After that, the
        cluster replaces the session. Default 10 minutes.
    idle_timeout : float or str, optional
        Idle time after which the scheduler shuts the cluster down, in seconds or as a string. Default: never.
    orphan_timeout : float or str, optional
        Time without a connected client and without a process that uses the cluster, after which it shuts
        down, in seconds or as a string. Ignored with ``shutdown_on_close=False``. Default 5 minutes.
    log_directory : path, optional
        Folder on the project file system for the sessions' logs, which remain there, in a subfolder with the
        cluster's name. Default: the cluster's own folder, which the cluster removes when it shuts down.
    shutdown_on_close : bool, optional
        Whether to stop all sessions when this object is closed or its process exits. If False, the cluster
        keeps running until the CML session that launched it ends. Default True.
    forward_dashboard : bool, optional
        Whether to serve the dashboard on a local port, and point ``dashboard_link`` at it, for programs that
        cannot log in to CML. Default False.
    platform : {"auto", "local"}, optional
        Platform that launches sessions. ``"auto"`` is CML. ``"local"`` is for laptops and tests. Default
        ``"auto"``.
    asynchronous : bool
        Whether the cluster is used with ``await`` in a running event loop. Default False.
    loop : tornado.ioloop.IOLoop, optional
        The event loop. Default: a new one in a thread or, if `asynchronous`, the running one.
    silence_logs : int, str or False
        Logging level below which this process shows none of Dask's logs. Default ``logging.WARNING``.
    quiet : bool
        If True, print nothing about sessions. Default False.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid or exceeds a limit of the site. Nothing is launched then.
    NotOnCML
        If this is not a CML session, and `platform` is not ``"local"``.
    LaunchRefused
        If CML refuses to launch a session, for example because a quota is exhausted, or the limit of the
        site for all of a user's sessions. All sessions are stopped then.
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

    @checks_arguments
    def __init__(
        self,
        n_workers: int | None = None,
        cpu: float | None = None,
        memory: float | str | None = None,
        nvidia_gpu: int | None = None,
        *,
        nthreads: int | None = None,
        processes: int | None = None,
        memory_reserve: float | str | None = None,
        scratch: float | str | None = None,
        resources: Mapping[str, float] | None = None,
        scheduler_cpu: float | None = None,
        scheduler_memory: float | str | None = None,
        scheduler_nvidia_gpu: int | None = None,
        env: Mapping[str, str] | None = None,
        worker_args: Sequence[str] | None = None,
        scheduler_args: Sequence[str] | None = None,
        worker_class: str | None = None,
        worker_command: Sequence[str] | None = None,
        launch_options: Mapping[str, Any] | None = None,
        scheduler_launch_options: Mapping[str, Any] | None = None,
        worker_groups: Mapping[str, Mapping[str, Any]] | None = None,
        name: str | None = None,
        create_mode: str | None = None,
        security: bool | Security | None = None,
        pending_timeout: float | str | None = None,
        scheduler_timeout: float | str | None = None,
        worker_timeout: float | str | None = None,
        idle_timeout: float | str | None = None,
        orphan_timeout: float | str | None = None,
        log_directory: str | None = None,
        shutdown_on_close: bool | None = None,
        forward_dashboard: bool | None = None,
        platform: str | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: int | str | bool | None = logging.WARNING,
        quiet: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_unexpected(CMLCluster, kwargs)
        check_loop(asynchronous, loop)
        check_silence_logs(silence_logs)
        given: dict[str, Any] = {
            "n_workers": n_workers,
            "cpu": cpu,
            "memory": memory,
            "nvidia_gpu": nvidia_gpu,
            "nthreads": nthreads,
            "processes": processes,
            "memory_reserve": memory_reserve,
            "scratch": scratch,
            "resources": resources,
            "scheduler_cpu": scheduler_cpu,
            "scheduler_memory": scheduler_memory,
            "scheduler_nvidia_gpu": scheduler_nvidia_gpu,
            "env": env,
            "worker_args": worker_args,
            "scheduler_args": scheduler_args,
            "worker_class": worker_class,
            "worker_command": worker_command,
            "launch_options": launch_options,
            "scheduler_launch_options": scheduler_launch_options,
            "worker_groups": worker_groups,
            "name": name,
            "create_mode": create_mode,
            "security": security,
            "pending_timeout": pending_timeout,
            "scheduler_timeout": scheduler_timeout,
            "worker_timeout": worker_timeout,
            "idle_timeout": idle_timeout,
            "orphan_timeout": orphan_timeout,
            "log_directory": log_directory,
            "shutdown_on_close": shutdown_on_close,
            "forward_dashboard": forward_dashboard,
            "platform": platform,
        }
        options = Options.read(**given).inheriting()
        if options.create_mode == "create":
            check_new(options)
        self._forwarder: DashboardForwarder | None = None
        self._close_lock = threading.RLock()
        #: Whether the thread that has the lock closes.
        self._closes = False
        self._shut_down_before_leave = False
        self._has_sessions_tab = False
        dask_arguments = {"asynchronous": asynchronous, "loop": loop, "silence_logs": silence_logs}
        try:
            super().__init__(options, given, quiet=quiet, **dask_arguments)
        except BaseException as error:  # also Ctrl-C must leave no session behind
            self._end_failed_start(error)
            if isinstance(error, (CMLError, KeyboardInterrupt)):
                raise without_frames(error) from None
            raise

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
        """Connect to a running cluster that another process of the project created.

        The cluster keeps running after this object's ``with`` block or process. :meth:`close` shuts it down.
        CML stops a worker session with the session that launched it, so workers that this object launches
        end with this process's session.

        Parameters
        ----------
        name : str
            Name of the cluster.
        shutdown_on_close : bool
            Whether to stop all sessions at the end of the ``with`` block or the process. Default False.
        forward_dashboard : bool, optional
            Whether this machine forwards the dashboard on a local port. Default False.
        asynchronous : bool
            Whether the cluster is used with ``await`` in a running event loop. Default False.
        loop : tornado.ioloop.IOLoop, optional
            The event loop. Default: a new one in a thread or, if `asynchronous`, the running one.
        silence_logs : int, str or False
            Logging level below which this process shows none of Dask's logs. Default ``logging.WARNING``.
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
        cluster: CMLCluster = cls(
            name=name,
            create_mode="connect",
            shutdown_on_close=shutdown_on_close,
            forward_dashboard=forward_dashboard,
            asynchronous=asynchronous,
            loop=loop,
            silence_logs=silence_logs,
            quiet=quiet,
        )
        return cluster

    # -- scaling

    @checks_arguments
    def scale(  # type: ignore[override]  # as in SpecCluster
        self,
        n: int = 0,
        memory: float | str | None = None,
        cores: float | None = None,
        worker_group: str = DEFAULT_GROUP,
        **kwargs: Any,
    ) -> Awaitable[None] | None:
        """Scale a worker group to `n` sessions, and stop its adaptive scaling.

        Returns at once. The scheduler chooses the workers to close, and first moves their data to others.

        Parameters
        ----------
        n : int
            Number of worker sessions. Default 0.
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
        refuse_unexpected(self.scale, kwargs)
        options = self.groups.options(worker_group)
        n = options.sessions_for(n, memory, cores)
        self._check_open(f"worker group {worker_group!r} not scaled")
        if n > self.target(worker_group):
            check_room("n", n, options.worker, self.groups.others(worker_group))
        caller = calling_adaptive()
        with self.groups.changing():
            if caller is None:
                self.groups.adapt(worker_group, None)
            elif caller is not self.groups.adaptive(worker_group):  # stopped meanwhile
                return NoOpAwaitable() if self.asynchronous else None
            if not self.is_remote:
                self._resize(worker_group, n)
                if caller is None:
                    self._ask(worker_group, target=n, adapt=None)
                return NoOpAwaitable() if self.asynchronous else None
            change = self._outbox.add(is_awaited=True, groups={worker_group: {"target": n, "adapt": None}})
        return self._write(change)

    # SpecCluster.scale_up (spec.py:589) is its own `scale`.
    scale_up = scale

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Close workers by their names, after moving their data to others.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions or of Dask workers.
        """
        # SpecCluster.scale_down (spec.py:571) is also what an Adaptive of another class calls.
        caller, keeper = calling_adaptive(), self.keeper
        if caller is not None and caller is not self.groups.adaptive(DEFAULT_GROUP):  # stopped meanwhile
            return
        if caller is not None and keeper is not None:
            keeper.close_workers(workers)
            await self
        else:
            await super().scale_down(workers)

    def _resize(self, group: str, n: int) -> None:
        """Want `n` workers of a group here. The caller holds the lock of the groups."""
        keeper = self.keeper
        absent = [*reversed(self.groups.workers(group))] if keeper is None else keeper.absent(group)
        self.groups.resize(group, n, absent)
        self._soon(self._correct_state)

    @checks_arguments
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
        Adaptive: type[Adaptive] = CMLAdaptive,
        **kwargs: Any,
    ) -> Adaptive:
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

        Examples
        --------
        >>> adaptive = cluster.adapt(1, 10)
        """
        # SpecCluster.adapt (spec.py:615) knows no groups, no limits of a site, and no other process.
        allowed = arguments_of(Adaptive) | {*inspect.signature(Scheduler.workers_to_close).parameters}
        refuse_unexpected(self.adapt, kwargs, allowed - {"cluster"})
        least, most = self._bounds(
            worker_group,
            (minimum, minimum_memory, minimum_cores),
            (None if maximum == math.inf else maximum, maximum_memory, maximum_cores),
        )
        self._check_open(f"worker group {worker_group!r} not adapted")
        is_cml_adaptive = issubclass(Adaptive, CMLAdaptive)
        if is_cml_adaptive:
            kwargs["worker_group"] = worker_group
        elif worker_group != DEFAULT_GROUP:
            raise ValueError(message("Adaptive", Adaptive, f"a CMLAdaptive for the group {worker_group!r}"))
        make = Adaptive if is_cml_adaptive else functools.partial(make_adaptive, Adaptive)
        adaptive = make(self, minimum=least, maximum=most, **kwargs)
        limits = adaptive.limits if isinstance(adaptive, CMLAdaptive) else None
        with self.groups.changing():
            is_remote = self.is_remote
            # In a remote, an Adaptive of another class scales as a user does.
            self.groups.adapt(worker_group, None if is_remote and is_cml_adaptive else adaptive)
            if is_remote:
                change = self._outbox.add(is_awaited=True, groups={worker_group: {"adapt": limits}})
            else:
                target = self.target(worker_group)
                if is_cml_adaptive:
                    target = min(max(target, least), most)
                self._resize(worker_group, target)
                self._ask(worker_group, target=target, adapt=limits)
        if is_remote:
            self._write(change)
        elif isinstance(adaptive, CMLAdaptive) and self.keeper is not None:
            self._soon(adaptive.begin)
        return adaptive

    def _bounds(self, group: str, minimum: Amounts, maximum: Amounts) -> tuple[int, int]:
        """Return the bounds of adaptive scaling; see :meth:`Options.bounds` for the arguments.

        Without a maximum, take the limit of the site, or else warn.
        """
        options = self.groups.options(group)
        least, most = options.bounds(minimum, maximum)
        check_room("minimum", least, options.worker, self.groups.others(group))
        if math.isinf(most):
            # At least one, so that adaptive scaling logs the limit if no session fits.
            most = max(1, room(options.worker, [(self.options.scheduler, 1)])[0])
        if math.isinf(most):
            most, name = max(least, _MAXIMUM), self.options.name
            logger.warning("Cluster %s adapts to at most %s workers: adapt() got no maximum", name, most)
        return least, int(most)

    def _check_open(self, what: str) -> None:
        """Refuse what a cluster cannot do that is over, or whose options are not known yet.

        Raises
        ------
        CMLError
            If it is closed, belongs to another process, or may be one that runs already.
        """
        if self.is_forks_copy or self.status not in (Status.created, Status.running):
            self._check_running(what)
        if self.status == Status.created and self.keeper is None and self.options.create_mode != "create":
            raise CMLError(f"{what}: cluster {self.options.name} is not connected yet, await it first")

    def _new_worker_name(self, worker_number: int) -> str:
        # SpecCluster._new_worker_name (spec.py:541) is the number alone, which all clusters would share.
        return session_name(self.options.name, DEFAULT_GROUP, worker_number)

    # -- worker groups

    @checks_arguments
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
        memory_reserve: float | str | None = None,
        scratch: float | str | None = None,
        resources: Mapping[str, float] | None = None,
        worker_class: str | None = None,
        worker_command: Sequence[str] | None = None,
        worker_args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        launch_options: Mapping[str, Any] | None = None,
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
        memory_reserve : float or str, optional
            Part of a session's memory that its Dask workers leave to other processes, in GiB.
        scratch : float or str, optional
            Local disk of a session, in GiB, or a string such as ``"50 GB"``.
        resources : mapping of str to float, optional
            Resources of a session, for tasks that ask for them.
        worker_class : str, optional
            Class of the Dask workers.
        worker_command : sequence of str, optional
            Command that starts the Dask workers of a session.
        worker_args : sequence of str, optional
            Additional command-line arguments of ``dask worker``.
        env : mapping of str to str, optional
            Environment variables, in addition to the cluster's.
        launch_options : mapping, optional
            Additional parameters of CML's ``launch_workers``.

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
        refuse_unexpected(self.add_worker_group, kwargs)
        given = {
            "n_workers": n_workers,
            "cpu": cpu,
            "memory": memory,
            "nvidia_gpu": nvidia_gpu,
            "nthreads": nthreads,
            "processes": processes,
            "memory_reserve": memory_reserve,
            "scratch": scratch,
            "resources": resources,
            "worker_class": worker_class,
            "worker_command": worker_command,
            "worker_args": worker_args,
            "env": env,
            "launch_options": launch_options,
        }
        options = self.options.of_group(given)
        group_name("name", name)
        self._check_running(f"worker group {name!r} not added")
        self._api.check_options(options.launch_options)
        check_room("n_workers", options.n_workers, options.worker, self.groups.others())
        return self.sync(self._add_group, name, options)

    @checks_arguments
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
            If the cluster is not running. Also if no other worker can take the data: then the workers stay
            until others can.
        """
        return self.sync(self._delete_group, name)

    # -- what the cluster is

    @property
    def is_remote(self) -> bool:
        """Whether another process keeps the cluster, so that this one writes on its board."""
        return self.keeper is None and self.status == Status.running

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
                n_workers=self.target(name),
                n_arrived=len(self.arrived(name)),
                size=options.worker,
                nthreads=options.nthreads,
                processes=options.processes,
                resources=dict(options.resources),
            )
        return groups

    @property
    def scheduler_address(self) -> str:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by it."""
        if self._remote.address is None or self.status == Status.closed:
            return "<Not Connected>"
        has_keys = self.place.security is not None
        return cluster_address(self.options.name) if has_keys else self._remote.address

    @property
    def has_dashboard(self) -> bool:
        """Whether the scheduler has a dashboard. Without it, Dask serves other pages at its port."""
        listens = "dashboard" in self.scheduler_info.get("services", {})
        return listens and "--no-dashboard" not in self.options.scheduler_args

    @property
    def dashboard_link(self) -> str:
        """The URL of the scheduler's dashboard. Empty without one, or if another program has its port."""
        if self.scheduler is None or not self.has_dashboard:
            return ""
        if self._forwarder is not None:
            return self._forwarder.link
        if not self._remote.board.serves_dashboard:
            return ""
        session = self.scheduler.session
        url = web_link((session and session.app_url) or self._remote.board.app_url)
        return f"{url.rstrip('/')}/status" if url else ""

    async def open_dashboard(self) -> Comm:
        """Open a comm on which the scheduler serves its dashboard.

        Raises
        ------
        OSError
            If the scheduler does not accept the connection, or has no dashboard.
        """
        return await open_comm(str(self._remote.address), self._remote.connection_args)

    @checks_arguments
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
            Whether to include the workers' logs. Or the workers to include: names of sessions, names of Dask
            workers, or addresses. Default True.

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
        for argument, value in (("cluster", cluster), ("scheduler", scheduler)):
            if isinstance(value, str):
                expected = f"True or False; for the log of a worker, pass workers=[{value!r}]"
                raise TypeError(message(argument, value, expected))
        return self.sync(self._get_logs, cluster, scheduler, workers)

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Logs:
        own = {"Cluster": [line for _, line in self._cluster_manager_logs]} if cluster else {}
        names = {address: info["name"] for address, info in self.scheduler_info["workers"].items()}
        if not isinstance(workers, bool):
            workers = [workers] if isinstance(workers, str) else workers
            workers = [names.get(worker, worker) for worker in workers]
        logs = SessionLogs(self.options.name, log_folder(self.place.folder, self.options.log_directory))
        if self.status == Status.closed and self.record is not None and not self.options.log_directory:
            logs = kept_logs(self.record)
        launched = [session.name for session in self.sessions if session.role == "worker"]
        read = await asyncio.to_thread(logs.read, scheduler, workers, launched)
        return EscapedLogs({name: Log("\n".join(lines)) for name, lines in (own | read).items()})

    def usage(self) -> Any:
        """Return the hours of the cluster's sessions so far, by worker group, including ended sessions.

        A session counts from its launch or, if it was queued, from the end of the queue. It counts until
        a process stops it or the keeper notices its end, so hours without a keeper are an upper bound. Sizes
        are taken from the options, even if a resource profile in `launch_options` sets others. After
        :meth:`close`, the result covers the cluster's whole lifetime.

        Returns
        -------
        Usage
            A dict of :class:`SessionHours` by the names of worker groups, and ``"scheduler"``. ``total`` is
            their sum. Its ``repr`` is a table. With ``asynchronous=True``, await the result.

        Raises
        ------
        NoSuchCluster
            If another process has deleted the cluster.

        Examples
        --------
        >>> cluster.usage()
        group      sessions  hours  vCPU hours  GiB hours  GPU hours
        scheduler         1   0...
        default           ...
        total             ...
        """
        return asyncio.to_thread(self._read_usage) if self.asynchronous else self._read_usage()

    def _read_usage(self) -> Usage:
        if self._usage is not None:
            return self._usage
        return usage_of(store.read_again(self.record or self.new_record), time.time())

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        return max(0, sum(self.target(group) for group in self.groups.names) - len(self.arrived()))

    def __repr__(self) -> str:
        description = describe(self)
        text = super().__repr__()
        head, workers, rest = text.partition(", workers=")
        n, threads, rest = rest.partition(", threads=")
        notes = ", ".join(filter(None, [description.pending, description.adapts]))
        if notes:
            n += f" ({notes})"
        parts = [f"{head}{workers}{n}{threads}{rest[:-1]}", description.idle]
        parts += [description.age, description.scheduler]
        if description.status != "running":
            parts.append(description.status)
        if description.problem:
            parts.append(f"problem: {printable(first_line(description.problem))}")
        return ", ".join(filter(None, parts)) + ")"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        description = describe(self)
        rows = render(
            "cml_sessions.html.j2",
            cluster=self,
            description=description,
            status_of=status_of,
            lists_sessions=not self._has_sessions_tab,
        )
        # Dask's template escapes nothing: neither the cluster's name, nor what workers say of themselves.
        shown = {
            "name": escaped(self.name),
            "dashboard_link": escaped(self.dashboard_link) if self.status != Status.closed else "",
            "scheduler_info": SchedulerInfo(escaped(self.scheduler_info)),
        }
        stand_in = type(type(self).__name__, (), shown)()
        return str(Cluster._repr_html_(stand_in, cluster_status=(cluster_status or "") + rows))

    def _scaling_status(self) -> str:
        # Cluster._scaling_status (cluster.py:367) looks at an object that only the process has that adapts.
        adaptive = SimpleNamespace(periodic_callback=self.limits() is not None)
        shown = {
            "_adaptive": adaptive,
            "scheduler_info": self.scheduler_info,
            "worker_spec": self.worker_spec,
        }
        stand_in: Any = SimpleNamespace(**shown)
        return str(Cluster._scaling_status(stand_in))

    def _widget(self) -> Any:
        # Cluster._widget (cluster.py:391) writes its HTML again and again, which would close a list in it.
        is_new = not hasattr(self, "_cached_widget")
        tab = super()._widget()
        if is_new and tab is not None:
            self._add_sessions_tab(tab)
        return tab

    def _add_sessions_tab(self, tab: Any) -> None:
        from ipywidgets import HTML

        sessions = HTML()
        interval = parse_timedelta(dask.config.get("distributed.deploy.cluster-repr-interval"), "ms")

        def update() -> None:
            sessions.value = render("cml_session_table.html.j2", cluster=self, status_of=status_of)

        def install() -> None:
            callback = self.periodic_callbacks["cml-sessions"] = PeriodicCallback(update, interval * 1000)
            callback.start()

        update()
        tab.children = [*tab.children, sessions]
        tab.set_title(len(tab.children) - 1, "Sessions")
        self._has_sessions_tab = True
        self.loop.add_callback(install)  # type: ignore[union-attr]

    @classmethod
    def open(cls) -> list[CMLCluster]:
        """Return the clusters of this process that are not closed. :func:`dask_cml.close_all` closes them.

        Examples
        --------
        >>> [cluster.name for cluster in CMLCluster.open()]
        ['mine']
        """
        clusters = []
        for cluster in [*SpecCluster._instances]:
            if not isinstance(cluster, cls) or not cluster.takes_lease:  # a web UI only shows clusters
                continue
            if cluster._starting is not None and cluster.status != Status.closed:
                clusters.append(cluster)
        return clusters

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
        if self.record is None:  # plans need only the paths of the keys, so no file is written
            security, _ = tls.as_files(self.options.security, place.folder)
            place = replace(place, security=security)
        plans = [CMLScheduler(self._api, self.options, place).plan]
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

    # -- start and end

    async def _start_once(self) -> None:
        if self.options.forward_dashboard and self._forwarder is None:
            self._forwarder = DashboardForwarder(lambda: self.open_dashboard())
        await super()._start_once()

    def _end_failed_start(self, error: BaseException) -> None:
        """Stop what a failed constructor has launched. Log an error, which must not replace the first."""
        if not hasattr(self, "_loop_runner"):  # Dask's classes have refused an argument
            no_longer_end_at_exit(self)
            return
        if isinstance(error, KeyboardInterrupt):
            self.note_interrupt()
        try:
            self._end(shutdown=not self._connects)
        except Exception as failed:  # also of Dask's code
            logger.error("Cluster %s not closed properly: %s", self.options.name, failed or repr(failed))
        if isinstance(error, KeyboardInterrupt):
            self._say_interrupted()

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | None = None) -> None:
        # Cluster._wait_for_workers (cluster.py:582) fails if the scheduler is lost, and asks a lost one for
        # Dask's long connect timeout. Another scheduler replaces it.
        deadline = math.inf if timeout is None else time.monotonic() + parse_timedelta(timeout, "s")
        what, time_left = f"{n_workers} workers not connected", timeout
        while True:
            if self._remote.connected:
                try:
                    await super()._wait_for_workers(n_workers, time_left)
                    return
                except TimeoutError:  # which is an OSError, too
                    raise
                except OSError:
                    logger.debug("Scheduler of cluster %s lost while %s", self.options.name, what)
            self._check_running(what)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {timeout} s: the scheduler does not answer")
            await asyncio.sleep(timing.collect)
            if timeout is not None:
                time_left = max(0.01, deadline - time.monotonic())

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        self.note_error(error)
        self._end(shutdown=self.shutdown_on_close)

    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function. Remove the event loop's frames from errors of the platform."""
        try:
            return super().sync(func, *args, **kwargs)
        except CMLError as error:
            raise without_frames(error) from None

    # -- end

    def close(self, timeout: float | None = None) -> Any:
        """Shut the cluster down: stop all sessions, unless it was created with ``shutdown_on_close=False``.

        This also shuts down a cluster from :meth:`from_name`. To keep it running, call :meth:`leave`.

        Parameters
        ----------
        timeout : float, optional
            Maximum time to wait, in seconds. Default: unlimited.

        Raises
        ------
        CMLError
            If CML did not stop some sessions. The message names them. With ``shutdown_on_close=False``, also
            as in :meth:`leave`.
        """
        # SpecCluster.close (spec.py:298) leaves errors to Cluster.close (cluster.py:206), which returns
        # without words after a RuntimeError, as those of this package.
        is_to_end = self.shutdown_on_close or self._connects or self._shut_down_before_leave
        return self._end(timeout, shutdown=is_to_end and self.status != Status.closed)

    def leave(self) -> Any:
        """Close this object only. The scheduler and the workers keep running.

        If this process keeps the cluster, it first carries out the last change, such as ``scale(0)``. It
        waits as long as sessions are launched or stopped, or move their data.

        Raises
        ------
        CMLError
            If the last change is not carried out. The message names the sessions and the next command.

        Examples
        --------
        >>> CMLCluster.from_name("mine").leave()
        """
        self._shut_down_before_leave |= self.shutdown_on_close  # for a close() before this has finished
        self.shutdown_on_close = False  # also at the end of the ``with`` block
        return self._end(shutdown=False)

    def _end(self, timeout: float | None = None, *, shutdown: bool) -> Any:
        if self.asynchronous:
            return self.sync(self._close, shutdown, callback_timeout=timeout)
        if self.is_forks_copy:
            return None
        # A second thread would wait for a loop that the first thread has stopped.
        if not self._close_lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(
                f"cluster {self.options.name} not closed within {timeout:g} s by another thread"
            )
        # A signal handler of the program may interrupt this thread while it closes, and close, too.
        is_nested, self._closes = self._closes, True
        try:
            if is_nested and self.status == Status.closed:
                return None
            if self._loop_runs:
                self.sync(self._close, shutdown, callback_timeout=timeout)
            else:
                self._close_without_loop(shutdown)
        finally:
            if not is_nested and self.status == Status.closed:  # an interrupted call still needs the loop
                self._loop_runner.stop()
            self._closes = is_nested
            self._close_lock.release()
        return None

    @property
    def _loop_runs(self) -> bool:
        return self.loop is not None and self.loop.asyncio_loop.is_running()  # type: ignore[attr-defined]

    async def _close_dask(self) -> None:
        if self._forwarder is not None:  # before Dask's code says that the cluster is closed
            await self._forwarder.close()
        await super()._close_dask()


def close_all() -> None:
    """Close the clusters of this process, and stop their sessions.

    A cluster that was created with ``asynchronous=True`` is closed by its own event loop. If this is called
    there, it returns at once, and errors are logged.

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
            closing = cluster.close()
            if closing is not None:  # in the cluster's own event loop, which goes on when this returns
                task = asyncio.ensure_future(closing)
                _closing.add(task)
                task.add_done_callback(_closed)
        except CMLError as error:
            errors.append(error)
    if errors:
        raise CMLError("; ".join(map(str, errors)))


def _closed(task: asyncio.Future[Any]) -> None:
    """Log the error of a task of :func:`close_all`, which nobody awaits."""
    _closing.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s", error)
