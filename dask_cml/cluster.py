"""The cluster manager."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.scheduler import Scheduler
from distributed.security import Security
from distributed.utils import Log, Logs, NoOpAwaitable, silence_logging_cmgr

from dask_cml.checks import check_loop, message
from dask_cml.dashboard.proxy import DashboardForwarder
from dask_cml.display import escaped, render, status_of
from dask_cml.errors import CMLError, without_frames
from dask_cml.manager.adaptive import CMLAdaptive
from dask_cml.manager.manager import Manager
from dask_cml.manager.state import WorkerGroup
from dask_cml.naming import DEFAULT_GROUP, dask_names, session_name
from dask_cml.options import GROUP_OPTIONS, OPTION_NAMES, Options, arguments_of, refuse_unexpected
from dask_cml.records import store
from dask_cml.sessions.process import CMLWorker
from dask_cml.sessions.session import Session
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.words import first_line, printable, printable_lines

if TYPE_CHECKING:
    from typing_extensions import Self

_WAIT_INTERVAL = 0.05
#: The arguments that are those of Dask's clusters, and no options.
_OF_DASK = ("asynchronous", "loop", "silence_logs", "quiet")


class _OfManager:
    """An attribute of Dask's classes that the manager owns. Their assignments change nothing."""

    def __init__(self, read: Callable[[Manager], Any]) -> None:
        self._read = read

    def __get__(self, cluster: CMLCluster | None, owner: type) -> Any:
        return self if cluster is None else self._read(cluster.manager)

    def __set__(self, cluster: CMLCluster, value: Any) -> None:
        pass


class CMLCluster(SpecCluster):
    """A Dask cluster on CML worker sessions.

    The scheduler runs in a session of its own. Each worker session runs one or more Dask workers. The cluster
    replaces sessions that fail, are evicted or do not start. When it is closed, it stops all its sessions.

    Arguments that are None are taken from Dask's configuration: ``cml.<argument with dashes>``.

    Parameters
    ----------
    n_workers : int, optional
        Number of worker sessions launched with the cluster. Default 0.
    cpu : float, optional
        Virtual CPUs of a worker session. Default 1.
    memory : float or str, optional
        Memory of a worker session, in GiB, or a string such as ``"16 GiB"``. Default 2.
    nvidia_gpu : int, optional
        Number of GPUs of a worker session. Default 0.
    nthreads : int, optional
        Number of threads of a worker session, shared evenly by its processes. Default: as many as `cpu`.
    processes : int, optional
        Number of Dask workers in a worker session. Default 1. With ``dask cuda worker``, one for each GPU.
    memory_reserve : float or str, optional
        Part of a worker session's memory that its Dask workers leave to the session's other processes, in
        GiB, or a string such as ``"500 MiB"``. Default: 0.25 GiB and 2 % of the memory.
    scratch : str, optional
        Local disk of a worker session. Its Dask workers spill at most 80 % of it. ``"none"``: unlimited.
        Default ``"10 GB"``, as CML's.
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
        Command that starts the Dask workers of a session. Default ``["dask", "worker"]``. With
        ``["dask", "cuda", "worker"]``, one Dask worker for each GPU.
    launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for a worker session, such as
        ``accelerator_label_id``. Default: none.
    scheduler_launch_options : mapping, optional
        Additional parameters of CML's ``launch_workers`` for the scheduler's session. Default: none.
    worker_groups : mapping of str to mapping, optional
        Additional worker groups by name, each with arguments of :meth:`add_worker_group`. Default: none.
    name : str, optional
        Name of the cluster. Default: a random name.
    create_mode : {"create", "connect", "create-or-connect"}, optional
        ``"create"`` creates a cluster, and fails if its `name` is in use. ``"connect"`` connects to the
        running cluster with this name. ``"create-or-connect"`` does either. Default ``"create"``.
        A running cluster keeps its options. As with :meth:`from_name`, :meth:`close` shuts it down, but it
        keeps running after the ``with`` block or the process, unless ``shutdown_on_close=True`` is given.
    security : bool or distributed.Security, optional
        True: TLS with the cluster's own keys, which clients, other managers and ``dask cml`` find. False:
        anyone who reaches the scheduler can use the cluster. A Security: your own keys. Default True.
    pending_timeout : float or str, optional
        Time limit for the scheduler's session to get room and start, in seconds, or a string such as
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
        Time without a connected client or manager after which the cluster shuts down, in seconds or as a
        string. Ignored with ``shutdown_on_close=False``. Default 5 minutes.
    log_directory : path, optional
        Folder on the project file system for the sessions' logs, which remain there, in a subfolder with the
        cluster's name. Default: the cluster's own folder, which the cluster removes when it shuts down.
    shutdown_on_close : bool, optional
        Whether to stop all sessions when this object is closed or its process exits. If False, the cluster
        keeps running until the CML session that launched it ends. Default True.
    forward_dashboard : bool, optional
        Whether this machine forwards the dashboard on a local port, which ``dashboard_link`` then names.
        Default False.
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
        Whether to print no messages about the sessions. Default False.

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
        scratch: str | None = None,
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
        arguments = locals()
        given = {name: arguments[name] for name in OPTION_NAMES}
        options = Options.read(**given).inheriting()
        self._begin(Manager(options, given, show=not quiet), **{name: arguments[name] for name in _OF_DASK})

    def _begin(
        self,
        manager: Manager,
        *,
        silence_logs: int | str | bool | None = logging.WARNING,
        quiet: bool = False,
        **arguments: Any,
    ) -> None:
        """Begin with a manager. Without a running event loop, start."""
        self._silence = contextlib.ExitStack()
        if silence_logs:
            self._silence.enter_context(silence_logging_cmgr(level=silence_logs))
        self._forwarder: DashboardForwarder | None = None
        self._close_lock = threading.Lock()
        self._quiet = quiet
        self.manager = manager
        manager.log = lambda text: self._log(printable_lines(text))
        try:
            SpecCluster.__init__(
                self,
                worker={"cls": CMLWorker, "options": {}},
                shutdown_on_close=self.manager.shutdown_on_close,
                **arguments,
            )
        except BaseException as error:  # also Ctrl-C must leave no session behind
            self._end(shutdown=not self.manager.adopts)
            if isinstance(error, KeyboardInterrupt):
                self.manager.show_interrupt()
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
            Whether to print no messages about the sessions. Default False.

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
        arguments = locals()
        check_loop(asynchronous, loop)
        own = {"shutdown_on_close": shutdown_on_close, "forward_dashboard": forward_dashboard}
        manager = Manager.adopt(store.read(name), **own)
        return cls.of_manager(manager, **{each: arguments[each] for each in _OF_DASK})

    @classmethod
    def of_manager(cls, manager: Manager, **arguments: Any) -> Self:
        """Return a cluster with a manager of its own.

        Parameters
        ----------
        manager : Manager
            The manager, which has not started.
        **arguments
            ``asynchronous``, ``loop``, ``silence_logs`` and ``quiet`` of the class.
        """
        cluster = cls.__new__(cls)
        cluster._begin(manager, **arguments)
        return cluster

    # -- scaling

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
            Minimum total memory, in GiB, or a string such as ``"100 GiB"``. Default: none.
        cores : float, optional
            Minimum total number of threads. Default: none.
        worker_group : str
            The worker group. Default: the default group.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or exceeds a limit of the site.

        Examples
        --------
        >>> cluster.scale(2)
        >>> cluster.scale(memory="3 GiB")
        """
        refuse_unexpected(self.scale, kwargs)
        options = self.manager.fleet.group(worker_group).options
        self.manager.wishes.scale(options.sessions_for(n, memory, cores), worker_group)
        return NoOpAwaitable() if self.asynchronous else None

    def scale_up(self, n: int) -> Awaitable[None] | None:  # type: ignore[override]
        """Scale the default group to `n` sessions within the limits of the site; see :meth:`scale`."""
        return self.scale(self.manager.state.backoffs.within_limits(n))

    async def scale_down(self, workers: Iterable[str]) -> None:
        """Close worker sessions after moving their data to others.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions or of Dask workers.
        """
        self.manager.wishes.remove([*workers])
        await self.manager.wishes.settle()

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
        """Scale a worker group by the tasks that need it.

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
            Minimum total memory, in GiB, or a string such as ``"100 GiB"``. Default: none.
        maximum_memory : float or str, optional
            Maximum total memory, in GiB or as a string. Default: unlimited.
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
        choosing = inspect.signature(Scheduler.workers_to_close).parameters
        refuse_unexpected(self.adapt, kwargs, (arguments_of(Adaptive) | {*choosing}) - {"cluster"})
        minimum, maximum = self.manager.wishes.bounds(
            worker_group,
            (minimum, minimum_memory, minimum_cores),
            (None if maximum == math.inf else maximum, maximum_memory, maximum_cores),
        )
        if issubclass(Adaptive, CMLAdaptive):
            kwargs["worker_group"] = worker_group
        elif worker_group != DEFAULT_GROUP:
            raise ValueError(message("Adaptive", Adaptive, f"a CMLAdaptive for the group {worker_group!r}"))
        adaptive = Adaptive(self, minimum=minimum, maximum=maximum, **kwargs)
        self.manager.wishes.adapt(adaptive, worker_group)
        return adaptive

    # -- worker groups

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
        scratch: str | None = None,
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
        from `cpu`, `nvidia_gpu` and `worker_command` if these are given.

        Parameters
        ----------
        name : str
            Name of the group: letters, digits, ``_`` and ``-``. The names of its Dask workers contain it.
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
        scratch : str, optional
            Local disk of a session, such as ``"10 GB"``.
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
        arguments = locals()
        given = {each: arguments[each] for each in GROUP_OPTIONS}
        options = self.options.of_group(given)
        return self.sync(self.manager.wishes.add_group, name, options)

    def delete_worker_group(self, name: str) -> Any:
        """Delete a worker group, and stop all its sessions after moving their data to other workers.

        Parameters
        ----------
        name : str
            Name of the group.

        Raises
        ------
        ValueError
            If no such group exists, or it is the default group.
        CMLError
            If no other worker can take the data, or the group is scaled meanwhile. The group remains then.
        """
        return self.sync(self.manager.wishes.delete_group, name)

    # -- what the cluster is

    name = _OfManager(lambda manager: manager.options.name)
    status = _OfManager(lambda manager: manager.status)
    options = _OfManager(lambda manager: manager.options)
    security = _OfManager(lambda manager: manager.state.launcher.place.security or Security())
    scheduler = _OfManager(lambda manager: manager.state.launcher.scheduler)
    workers = _OfManager(lambda manager: manager.fleet.workers)
    scheduler_info = _OfManager(lambda manager: manager.state.scheduler_info)
    scheduler_comm = _OfManager(lambda manager: manager.state.client.rpc)
    _adaptive = _OfManager(lambda manager: manager.wishes.adaptive())

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The wanted worker sessions by name, as in Dask's SpecCluster. A copy: use :meth:`scale`."""
        states = self.manager.fleet.states
        return {name: self._spec(group.options) for group in states for name in group.names}

    @worker_spec.setter
    def worker_spec(self, value: Any) -> None:
        if value:
            raise AttributeError("worker_spec is a copy: use scale() and add_worker_group()")

    def new_worker_spec(self) -> dict[str, Any]:
        """Return the name and the form of the next worker of the default group. Nothing is launched."""
        group = self.manager.fleet.group()
        return {session_name(self.name, group.name, group.wanted.number): self._spec(group.options)}

    def _spec(self, options: Options) -> dict[str, Any]:
        """Return SpecCluster's form of a worker session, by which it counts the Dask workers."""
        names = dask_names("", options.processes)
        return {"cls": CMLWorker, "options": {"nthreads": options.nthreads}, "group": names}

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return self.manager.state.sessions

    @property
    def worker_groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by name, the default group first.

        Examples
        --------
        >>> cluster.worker_groups["default"].n_workers
        2
        """
        return self.manager.state.groups

    @property
    def scheduler_address(self) -> str:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by it."""
        return self.manager.state.address or "<Not Connected>"

    @property
    def dashboard_link(self) -> str:
        """The URL of the scheduler's dashboard. Empty without a dashboard."""
        if self.scheduler is None or not self.manager.state.has_dashboard:
            return ""
        if self._forwarder is not None:
            return self._forwarder.link
        session = self.scheduler.session
        return f"{session.app_url.rstrip('/')}/status" if session and session.app_url else ""

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
            first. They contain the output of the sessions, including that of tasks. Of each log, the last
            MiB.

        Raises
        ------
        ValueError
            If a worker does not exist. The message lists the existing ones.

        Examples
        --------
        >>> print(cluster.get_logs()["mine-0"])
        2... - distributed.nanny - INFO - ...Start Nanny at: ...
        """
        return self.sync(self._get_logs, cluster, scheduler, workers)

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Logs:
        reported = {"Cluster": [line for _, line in self._cluster_manager_logs]} if cluster else {}
        names = {address: info["name"] for address, info in self.scheduler_info["workers"].items()}
        if not isinstance(workers, bool):
            workers = [workers] if isinstance(workers, str) else workers
            workers = [names.get(worker, worker) for worker in workers]
        logs = SessionLogs(self.name, self.manager.state.launcher.place.folder, self.options.log_directory)
        found = await asyncio.to_thread(logs.read, scheduler, workers, [*self.workers])
        return Logs({name: Log("\n".join(lines)) for name, lines in (reported | found).items()})

    def usage(self) -> Any:
        """Return the hours of the cluster's sessions so far, by worker group, including ended sessions.

        A session counts from its launch or, if it waited for room, from the end of its wait. It counts until
        a manager stops it or notices its end, so hours without any manager are an upper bound. Sizes are
        those of the options, even if a resource profile in `launch_options` sets others. After
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
        usage = self.manager.state.record_keeper.usage
        return asyncio.to_thread(usage) if self.asynchronous else usage()

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        return self.manager.state.n_pending

    def __repr__(self) -> str:
        text, state = super().__repr__(), self.manager.state
        n = len(self.scheduler_info["workers"])
        status = state.status_words
        words = [state.age, state.scheduler_words, "" if status == "running" else status]
        if state.n_pending:
            text = text.replace(f"workers={n}", f"workers={n} ({state.pending})", 1)
        if state.problem:
            words.append(f"problem: {printable(first_line(state.problem))}")
        return ", ".join([text[:-1], *filter(None, words)]) + ")"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        state, address = self.manager.state, self.scheduler_address
        values = {"state": state, "address": address, "status_of": status_of}
        rows = render("cml_sessions.html.j2", **values, connected=state.fleet.arrived())
        # Dask's template escapes neither the cluster's name nor those of workers.
        shown = {
            "name": escaped(self.name),
            "dashboard_link": escaped(self.dashboard_link) if self.status != Status.closed else "",
            "scheduler_info": SchedulerInfo(escaped(self.scheduler_info)),
        }
        stand_in = type(type(self).__name__, (), shown)()
        return str(Cluster._repr_html_(stand_in, cluster_status=(cluster_status or "") + rows))

    @classmethod
    def open(cls) -> list[CMLCluster]:
        """Return the clusters of this process that are not closed. :func:`dask_cml.close_all` closes them.

        Examples
        --------
        >>> [each.name for each in CMLCluster.open()]
        ['mine']
        """
        known = [each for each in [*SpecCluster._instances] if isinstance(each, cls)]
        own = [each for each in known if not each.manager.state.observes]  # a page shows the others
        return [each for each in own if each.status not in (Status.created, Status.closed)]

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
        return self.manager.state.launcher.plans()

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

    # -- start and end, for Dask's SpecCluster

    async def _start(self) -> None:
        self.quiet = self._quiet
        if self.options.forward_dashboard and self._forwarder is None:
            self._forwarder = DashboardForwarder(lambda: self.manager.state.open_dashboard())
        try:
            await self.manager.start()
        except BaseException:
            await self._release()
            raise

    async def _correct_state(self) -> None:
        await self.manager.wishes.settle()

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | None = None) -> None:
        began, longest = time.monotonic(), math.inf if timeout is None else parse_timedelta(timeout, "s")
        while (n := len(self.scheduler_info["workers"])) < n_workers:
            connected = f"{n} of {n_workers} workers connected"
            if self.status in (Status.closing, Status.closed, Status.failed):
                raise CMLError(f"{connected}: cluster {self.name} is {self.status.name}")
            if time.monotonic() - began > longest:
                raise TimeoutError(f"{connected} within {longest:g} s")
            await asyncio.sleep(_WAIT_INTERVAL)

    def __await__(self) -> Generator[Any, Any, Self]:
        async def ready() -> Self:
            try:
                await self._start()
                await self._correct_state()
            except CMLError as error:
                raise without_frames(error) from None
            return self

        return ready().__await__()

    async def __aenter__(self) -> Self:
        try:
            return await self
        except BaseException:  # also if it is cancelled, when Dask's class would leave it open
            await self._close()
            raise

    def __exit__(self, *_: object) -> None:
        self._end(shutdown=self.shutdown_on_close)

    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function. Remove the event loop's frames from errors of the platform."""
        try:
            return super().sync(func, *args, **kwargs)
        except CMLError as error:
            raise without_frames(error) from None

    @property
    def shutdown_on_close(self) -> bool:
        """Whether to stop all sessions at the end of the ``with`` block or the process."""
        return self.manager.shutdown_on_close

    @shutdown_on_close.setter
    def shutdown_on_close(self, value: bool) -> None:
        self.manager.shutdown_on_close = value

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
            If CML did not stop some sessions. The message names them.
        """
        return self._end(timeout, shutdown=self.shutdown_on_close or self.manager.adopts)

    def leave(self) -> Any:
        """Close this object only. The scheduler and the workers keep running.

        Examples
        --------
        >>> CMLCluster.from_name("mine").leave()
        """
        return self._end(shutdown=False)

    def _end(self, timeout: float | None = None, *, shutdown: bool) -> Any:
        if self.asynchronous:
            return self.sync(self._close, shutdown, callback_timeout=timeout)
        if not self.manager.is_forks_copy:
            with self._close_lock:  # a second thread would wait for a loop that the first one has stopped
                if self._loop_runner.is_started():
                    self.sync(self._close, shutdown, callback_timeout=timeout)
                self._loop_runner.stop()
        return None

    async def _close(self, shutdown: bool | None = None) -> None:
        """Close this object. By default, as at the end of an ``async with`` block."""
        try:
            await self.manager.close(self.shutdown_on_close if shutdown is None else shutdown)
        finally:
            await self._release()

    async def _release(self) -> None:
        self._silence.close()
        for callback in self.periodic_callbacks.values():  # of the widget, which shows the end
            callback.stop()
            callback.callback()
        if self._forwarder is not None:
            await self._forwarder.close()


def close_all() -> None:
    """Close the clusters of this process, and stop their sessions.

    A cluster that was created with ``asynchronous=True`` is closed by its own event loop.

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
            cluster.close()
        except CMLError as error:
            errors.append(error)
    if errors:
        raise CMLError("; ".join(map(str, errors)))
