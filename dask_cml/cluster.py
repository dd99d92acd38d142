"""The cluster manager."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.security import Security
from distributed.utils import Log, Logs, NoOpAwaitable

from dask_cml.manager.adaptive import CMLAdaptive, stop_adapting
from dask_cml.manager.display import first_line, sessions_html
from dask_cml.manager.fleet import session_keys
from dask_cml.manager.lifecycle import ManagedCluster
from dask_cml.manager.sizing import bounds, sessions_for
from dask_cml.manager.waiting import pending, waiting
from dask_cml.options import OPTION_NAMES, Options
from dask_cml.records import store
from dask_cml.records.record import Record, cluster_address
from dask_cml.sessions.process import Session
from dask_cml.sessions.session_logs import SessionLogs


class CMLCluster(ManagedCluster):
    """A Dask cluster on CML worker sessions.

    The scheduler runs in a session of its own, each worker session runs one Dask worker or several. The
    cluster keeps what it is asked for: sessions that fail, are evicted or never come are replaced. Every
    session that it launched is stopped with it.

    Every argument that is None is taken from Dask's configuration, ``cml.<argument with dashes>``.

    Parameters
    ----------
    n_workers : int, optional
        Worker sessions at the start. Default 0.
    cpu : float, optional
        Virtual CPUs of a worker session. Default 1.
    memory : float or str, optional
        Memory of a worker session, in GiB, or a string such as ``"16 GiB"``. Default 2.
    nvidia_gpu : int, optional
        GPUs of a worker session. Default 0.
    nthreads : int, optional
        Threads of a worker session, shared evenly by its processes. Default: as many as `cpu`.
    processes : int, optional
        Dask workers in a worker session. Default 1, or one for each GPU with ``dask cuda worker``.
    resources : mapping of str to float, optional
        What the workers of a session offer in all to tasks as ``client.submit(f, resources={"GPU": 1})``.
        Its processes share it evenly. Default: ``GPU``, as many as `nvidia_gpu`.
    scheduler_cpu, scheduler_memory, scheduler_nvidia_gpu : optional
        As `cpu`, `memory` and `nvidia_gpu`, of the scheduler's session. Default 1, 2 and 0.
    env : mapping of str to str, optional
        Environment variables of every session.
    worker_args, scheduler_args : sequence of str, optional
        More command-line arguments of ``dask worker`` and ``dask scheduler``.
    worker_class : str, optional
        As ``dask worker --worker-class``.
    worker_command : sequence of str, optional
        The command that runs a session's workers. Default ``["dask", "worker"]``. The other one is
        ``["dask", "cuda", "worker"]``, which starts a Dask worker for each GPU.
    launch_options, scheduler_launch_options : mapping, optional
        More parameters of the platform's ``launch_workers``, e.g. ``accelerator_label_id``: those of a worker
        session, and those of the scheduler's.
    name : str, optional
        The cluster's name. Default: a random one.
    create_mode : {"create", "connect", "create-or-connect"}, optional
        ``"create"``, the default, creates a cluster and fails if its `name` is taken. ``"connect"`` connects
        to the running cluster of this name. ``"create-or-connect"`` does either.
        A running cluster keeps its options, and lives on when an object that connected to it goes, as with
        :meth:`from_name`: :meth:`close` ends it, the end of ``with`` or of the process does not, unless
        ``shutdown_on_close=True`` is given.
    security : bool or distributed.Security, optional
        True, the default: TLS with keys made for this cluster, which go with it. Clients, other managers and
        ``dask cml`` find them. False: whoever reaches the scheduler can use the cluster. A Security: your own
        keys.
    pending_timeout : float or str, optional
        Seconds, or a string such as ``"15 minutes"``, for which the scheduler's session may wait for room and
        start. Default 15 minutes. Worker sessions wait as long as they are wanted.
    scheduler_timeout : float or str, optional
        Seconds within which the scheduler must answer once its session runs. Default 90 s.
    worker_timeout : float or str, optional
        Seconds within which a worker must have registered once its session runs, else it is replaced. Default
        10 minutes.
    idle_timeout : float or str, optional
        After which the scheduler ends an idle cluster. Default: never.
    orphan_timeout : float or str, optional
        So long without its maker, another manager or any client, and the cluster ends itself. Default 5
        minutes. It does not hold with ``shutdown_on_close=False``.
    log_directory : path, optional
        A folder on the project file system for the sessions' logs, which stay there. Default: the cluster's
        own folder, which the cluster removes at its end.
    shutdown_on_close : bool, optional
        False: the cluster runs on after this object and this process, until the CML session ends that
        launched it. Default True.
    forward_dashboard : bool, optional
        Whether ``dashboard_link`` is a port of this machine that leads to the dashboard. Default False.
    platform : {"auto", "local"}, optional
        ``"local"`` is the platform for laptops and tests. Default ``"auto"``, CML itself.
    asynchronous : bool
        Whether this is used with ``await`` in a running event loop.
    loop : tornado.ioloop.IOLoop, optional
        The event loop to use.
    silence_logs : int, str or False
        The logging level below which Dask's logs are not shown in this process. Default ``logging.WARNING``.
    quiet : bool
        Whether to print nothing about what happens to the sessions.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not allowed, before anything is launched.
    NotOnCML
        If there is no platform.
    LaunchRefused
        If a session of the start is refused, e.g. for a quota. No session is left then.
    SessionFailed
        If the scheduler's session ends before it answers.
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
        _record: Record | None = None,
        _observes: bool = False,
    ) -> None:
        arguments = locals()
        given = {name: arguments[name] for name in OPTION_NAMES}
        options = Options.read(**given)
        super().__init__(
            options.inheriting() if _record is None else options,
            given,
            record=_record,
            observes=_observes,
            asynchronous=asynchronous,
            loop=loop,
            silence_logs=silence_logs,
            quiet=quiet,
        )

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
        """Rebuild the manager of a cluster that another process of the project has made.

        The cluster runs on when this object goes, with its ``with`` block or its process; :meth:`close`
        ends it. CML stops a worker with the session that launched it, so those that this object launches end
        with the session of this process.

        Parameters
        ----------
        name : str
            The cluster's.
        shutdown_on_close : bool
            Whether the cluster ends with this object.
        forward_dashboard : bool, optional
            As for a new cluster.
        asynchronous, loop, silence_logs, quiet
            As for a new cluster.

        Raises
        ------
        NoSuchCluster
            If there is none of this name. It lists those that there are.
        CMLError
            If its scheduler does not answer.

        Examples
        --------
        >>> with CMLCluster.from_name("mine") as cluster:
        ...     print(cluster.name)
        mine
        """
        return cls._from_record(
            store.read(name),
            shutdown_on_close=shutdown_on_close,
            forward_dashboard=forward_dashboard,
            asynchronous=asynchronous,
            loop=loop,
            silence_logs=silence_logs,
            quiet=quiet,
        )

    @classmethod
    def _from_record(cls, record: Record, **arguments: Any) -> CMLCluster:
        """Do the same, without a look at the file system."""
        return cls(**record.options, name=record.name, create_mode="create", **arguments, _record=record)

    # -- scaling

    def scale(  # type: ignore[override]  # as in SpecCluster
        self, n: int = 0, memory: float | str | None = None, cores: float | None = None
    ) -> Awaitable[None] | None:
        """Have `n` worker sessions from now on; adaptive scaling ends.

        This returns at once. Workers to close are those that the scheduler would close, and what they hold
        is moved to others first.

        Parameters
        ----------
        n : int
            Worker sessions.
        memory : float or str, optional
            At least so much memory in all, in GiB or as a string such as ``"100 GiB"``.
        cores : float, optional
            At least so many threads in all.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not allowed.

        Examples
        --------
        >>> cluster.scale(2)
        >>> cluster.scale(memory="4 GiB")
        """
        n = sessions_for(self.options, n, memory, cores)
        self._fleet.resize(n)
        if isinstance(self._adaptive, CMLAdaptive):
            stop_adapting(self._adaptive, "scale() was called")
        self._reconciler.backoff.reset()
        self.loop.add_callback(self._correct_state)
        return NoOpAwaitable() if self.asynchronous else None

    async def _resize(self, n: int, driver: object) -> None:
        """Scale to `n` sessions for adaptive scaling, which goes on."""
        if self._fleet.resize(n, driver):
            await self._carry_out()

    async def scale_down(self, workers: Iterable[str], driver: object | None = None) -> None:
        """Close worker sessions, after their data has been moved.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions, or of Dask workers in them.
        driver : Adaptive, optional
            The adaptive scaling that asks; it goes on. Default: the user.
        """
        keys = session_keys(self._fleet.keys, self.options.processes)
        if self._fleet.remove({keys.get(worker, worker) for worker in workers}, driver):
            await self._carry_out()

    def adapt(  # type: ignore[override]  # two numbers come first, as in dask-kubernetes
        self,
        minimum: float = 0,
        maximum: float = math.inf,
        *,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: float | str | None = None,
        maximum_memory: float | str | None = None,
        Adaptive: type[Adaptive] = CMLAdaptive,
        **kwargs: Any,
    ) -> Adaptive:
        """Scale with the work that there is.

        Parameters
        ----------
        minimum, maximum : int, optional
            Worker sessions.
        minimum_cores, maximum_cores : int, optional
            Threads in all.
        minimum_memory, maximum_memory : float or str, optional
            Memory in all, in GiB or as a string such as ``"100 GiB"``.
        Adaptive : type, optional
            Another class than :class:`CMLAdaptive`.
        **kwargs
            For the class, e.g. ``interval``, ``wait_count`` and ``target_duration``.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not allowed.

        Examples
        --------
        >>> adaptive = cluster.adapt(1, 10)
        """
        minimum, maximum = bounds(
            self.options,
            minimum,
            maximum,
            cores=(minimum_cores, maximum_cores),
            memory=(minimum_memory, maximum_memory),
        )
        self._fleet.drive(None)  # the adaptive scaling before has no say any more
        adaptive = Cluster.adapt(self, Adaptive=Adaptive, minimum=minimum, maximum=maximum, **kwargs)
        self._fleet.drive(adaptive)
        self._reconciler.backoff.reset()
        # Tells the claim at once: another manager may scale soon, and the last wish counts.
        self.loop.add_callback(self._correct_state)
        return adaptive

    # SpecCluster's own state of the workers. It sets these; here they show what the fleet has.

    # And Dask's own state of the scheduler, which the scheduler client has.

    # -- what there is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions, the scheduler's first, as last heard of."""
        processes = [self.scheduler, *[*self.workers.values()]]
        return [p.session for p in processes if p is not None and p.session is not None]

    @property
    def scheduler_address(self) -> str:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by that."""
        address: str = super().scheduler_address
        has_keys = self.scheduler_comm and self._launcher.security is not None
        return cluster_address(self.name) if has_keys else address

    @property
    def dashboard_link(self) -> str:
        """Where the platform serves the scheduler's dashboard; empty if there is none."""
        if self.scheduler is None or "dashboard" not in self.scheduler_info.get("services", {}):
            return ""
        if self._forwarder is not None:
            return self._forwarder.link
        session = self.scheduler.session
        return f"{session.app_url.rstrip('/')}/status" if session and session.app_url else ""

    def get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Any:
        """Return what the cluster has reported, and the logs of its sessions, ended ones too.

        Parameters
        ----------
        cluster, scheduler : bool
            Whether to include the cluster manager's log and the scheduler's.
        workers : bool or iterable of str
            Whether to include the workers' logs; or which, by the names of sessions, the names of Dask
            workers or their addresses.

        Returns
        -------
        dict of str to str
            The logs of ``"Cluster"``, ``"Scheduler"`` and each worker session by its name, the oldest line
            first. They are what the sessions print: the output of tasks, too. Of a log longer than 1 MiB this
            is the end.

        Raises
        ------
        ValueError
            If there is no such worker. It lists those that there are.

        Examples
        --------
        >>> print(cluster.get_logs()["mine-0"])
        2... - distributed.nanny - INFO - ...Start Nanny at: ...
        """
        return self.sync(self._get_logs, cluster=cluster, scheduler=scheduler, workers=workers)

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Logs:
        reported = {"Cluster": [line for _, line in self._cluster_manager_logs]} if cluster else {}
        names = {address: info["name"] for address, info in self.scheduler_info["workers"].items()}
        if not isinstance(workers, bool):
            workers = [workers] if isinstance(workers, str) else workers
            workers = [names.get(worker, worker) for worker in workers]
        options = self.options
        logs = SessionLogs(self.name, self._folder, options.log_directory, options.processes)
        found = await asyncio.to_thread(logs.read, scheduler, workers, [*self.workers])
        return Logs({name: Log("\n".join(lines)) for name, lines in (reported | found).items()})

    def usage(self) -> Any:
        """Return the hours of the cluster's sessions so far, by worker group, ended sessions included.

        A session counts from its launch, or if it waited for room from when it got it. It counts until a
        manager stops it or finds that it has ended: hours without any manager are an upper bound. Sizes are
        those of the options, even if a resource profile in `launch_options` sets others. After
        :meth:`close` the result is that of the cluster's whole life.

        Returns
        -------
        Usage
            A dict of :class:`SessionHours` by the names of worker groups, and ``"scheduler"``; ``total`` is
            their sum. It prints as a table. With ``asynchronous=True`` it is awaited.

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
        usage = self._record_keeper.usage
        return asyncio.to_thread(usage) if self.asynchronous else usage()

    @property
    def n_pending(self) -> int:
        """How many of the wanted worker sessions have not arrived yet."""
        return len(self._fleet.keys) - len(self._arrived)

    @property
    def _pending(self) -> str:
        return pending(self.n_pending, self._fleet.waits.values())

    def __repr__(self) -> str:
        text = super().__repr__()
        n = len(self.scheduler_info["workers"])
        if self.n_pending:
            text = text.replace(f"workers={n}", f"workers={n} ({self._pending})", 1)
        if self.scheduler is not None and (waits := self.scheduler.waits_for) is not None:
            text = f"{text[:-1]}, scheduler {waiting(waits)})"
        if self.status == Status.running and not self._client.connected:
            text = f"{text[:-1]}, not connected to the scheduler)"
        if self._reconciler.problem:
            text = f"{text[:-1]}, problem: {first_line(self._reconciler.problem)})"
        return text

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        problem = self._reconciler.problem
        rows = sessions_html(self.scheduler_address, self.sessions, self._pending, problem)
        return super()._repr_html_(cluster_status=(cluster_status or "") + rows)

    def job_script(self) -> str:
        """Return what the scheduler's session and a worker's are launched with.

        The values of environment variables are hidden. It launches nothing; with ``asynchronous=True`` a
        cluster launches nothing before it is awaited.

        Examples
        --------
        >>> print(cluster.job_script())
        # mine-scheduler: cpu=1 memory=2 nvidia_gpu=0
        ...
        """
        return self._launcher.plans()

    def get_snippet(self) -> str:
        """Return the code by which another process of the project gets this cluster; dask-ctl shows it.

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

    # -- end

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
        """Stop every session and close the cluster, unless it was made with ``shutdown_on_close=False``.

        One that :meth:`from_name` gave is ended, too; see :meth:`leave`.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which to wait no longer.

        Raises
        ------
        CMLError
            If the platform did not stop sessions. It names them.
        """
        return self._end(timeout, self.shutdown_on_close or self._adopts)

    def leave(self) -> Awaitable[None] | None:
        """Close this object only: scheduler and workers run on.

        Examples
        --------
        >>> CMLCluster.from_name("mine").leave()
        """
        return self._end(None, shutdown=False)
