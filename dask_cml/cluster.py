"""The cluster manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.core import Status, rpc
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.security import Security
from distributed.utils import Log, Logs, NoOpAwaitable, silence_logging_cmgr

from dask_cml.aio import cancel
from dask_cml.checks import gibibytes, integer, message, positive
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused
from dask_cml.manager.adaptive import CMLAdaptive, stop_adapting
from dask_cml.manager.at_exit import end_at_exit, no_longer_end_at_exit, unclosed
from dask_cml.manager.dashboard import DashboardForwarder
from dask_cml.manager.display import first_line, sessions_html, show_start
from dask_cml.manager.fleet import Fleet, session_keys
from dask_cml.manager.leadership import Leadership
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.record_keeper import SCHEDULER, RecordKeeper
from dask_cml.manager.waiting import pending, waiting
from dask_cml.options import OPTION_NAMES, Options, state_directory
from dask_cml.records import probe, store
from dask_cml.records.operations import wait_until_running
from dask_cml.records.record import Record
from dask_cml.sessions import tls
from dask_cml.sessions.owner import lifetime
from dask_cml.sessions.process import CMLScheduler, CMLWorker, Session, connection_args
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.sessions.workers_api import WorkersAPI, load_platform

logger = logging.getLogger(__name__)

_GOODBYE_TIMEOUT = 3.0


class CMLCluster(SpecCluster):
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
        Dask workers in a worker session. Default 1.
    scheduler_cpu, scheduler_memory, scheduler_nvidia_gpu : optional
        As `cpu`, `memory` and `nvidia_gpu`, of the scheduler's session. Default 1, 2 and 0.
    env : mapping of str to str, optional
        Environment variables of every session.
    worker_args, scheduler_args : sequence of str, optional
        More command-line arguments of ``dask worker`` and ``dask scheduler``.
    worker_class : str, optional
        As ``dask worker --worker-class``.
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
        True: TLS with keys made for this cluster, which go with it. Default False.
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

    scheduler: CMLScheduler
    scheduler_comm: Any
    loop: Any
    _watch_worker_status_task: Any

    def __init__(
        self,
        n_workers: int | None = None,
        cpu: float | None = None,
        memory: float | str | None = None,
        nvidia_gpu: int | None = None,
        *,
        nthreads: int | None = None,
        processes: int | None = None,
        scheduler_cpu: float | None = None,
        scheduler_memory: float | str | None = None,
        scheduler_nvidia_gpu: int | None = None,
        env: Mapping[str, str] | None = None,
        worker_args: Sequence[str] | None = None,
        scheduler_args: Sequence[str] | None = None,
        worker_class: str | None = None,
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
    ) -> None:
        arguments = locals()
        self._given = {name: arguments[name] for name in OPTION_NAMES}
        # What ends a cluster is needed even if this constructor fails.
        self.status = Status.closed
        self._pid = os.getpid()
        self.options = Options.read(**self._given)
        if _record is None:
            self.options = self.options.inheriting()
        self._api = WorkersAPI(load_platform(self.options.platform))
        self._api.check_options(self.options.launch_options)
        self._api.check_options(self.options.scheduler_launch_options, "scheduler_launch_options")
        self._folder = state_directory() / self.options.name
        self._tls: Security | None = None
        self._fleet: Fleet[CMLWorker] = Fleet(self.options.name, self.options.processes)
        if _record is None:  # otherwise it takes over what another process has launched
            self._fleet.resize(self.options.n_workers)
        self._reconciler = Reconciler(self)
        self._leadership = Leadership(self, leads=_record is None)
        self._record_keeper = self._make_record_keeper(_record)
        self._adopts = _record is not None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._forwarder: DashboardForwarder | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stepping: asyncio.Task[Any] | None = None
        self._close_lock = threading.Lock()
        self._silence = contextlib.ExitStack()
        if silence_logs:
            self._silence.enter_context(silence_logging_cmgr(level=silence_logs))
        self._quiet = quiet
        end_at_exit(self)
        try:
            super().__init__(
                worker=self._worker_template(),
                asynchronous=asynchronous,
                loop=loop,
                name=self.options.name,
                shutdown_on_close=self.options.shutdown_on_close,
            )
        except BaseException:  # Ctrl-C, too, must leave no session
            self._end(None, shutdown=not self._adopts)
            raise

    # -- start

    async def _start(self) -> None:
        if self.status in (Status.closing, Status.closed):
            raise CMLError(f"the cluster {self.name} is closed")
        if self._starting is None:
            self.status = Status.starting
            self._starting = asyncio.create_task(self._start_once())
        try:
            await self._starting
        except asyncio.CancelledError:
            closed_meanwhile = self._closing is not None
            await self._close(shutdown=not self._adopts)
            if closed_meanwhile:
                raise CMLError(f"the cluster {self.name} was closed while it started") from None
            raise
        except LaunchRefused:
            await self._close(shutdown=not self._adopts)
            # A smaller cluster, asked for at once, must not be refused for what is being stopped.
            await self._api.wait_until_ended(self._api.names)
            raise
        except BaseException:
            # SpecCluster's `__await__` does not close a cluster whose start fails, and its `_start` makes a
            # bare RuntimeError of every error.
            await self._close(shutdown=not self._adopts)
            raise

    async def _start_once(self) -> None:
        self.quiet = self._quiet
        self._lock = asyncio.Lock()
        await (self._adopt() if self._adopts else self._create_or_connect())
        self.scheduler_comm = rpc(self.scheduler.address, connection_args=connection_args(self._tls))
        await Cluster._start(self)
        # From now on other processes can take part.
        await self._record_keeper.write(scheduler_id=str(self.scheduler_info["id"]))
        if not (self._adopts or self.shutdown_on_close):
            self._log(lifetime(self.name))
        self._watch_worker_status_task.add_done_callback(self._reconciler.poke)
        await self._leadership.start()
        if self.options.forward_dashboard:
            arguments = connection_args(self._tls)
            self._forwarder = DashboardForwarder(self.scheduler_comm.address, arguments)
            await self._forwarder.start()
        self._keeping = asyncio.create_task(self._reconciler.run())

    async def _create_or_connect(self) -> None:
        mode = self.options.create_mode
        if mode != "connect":
            try:
                await self._launch()
                return
            except ClusterExists:
                if mode == "create":
                    raise
        name, given = self.options.name, self._given
        timeout = self.options.pending_timeout + self.options.scheduler_timeout
        record = await wait_until_running(name, timeout)
        differing = self.options.differing(given, record.options)
        kept = f"; it keeps its {', '.join(differing)}" if differing else ""
        self._log(f"Connected to the running cluster {name}{kept}")
        self._adopts = True
        self.options = self.options.of_running(record.options, bool(given["shutdown_on_close"]))
        self.shutdown_on_close = self.options.shutdown_on_close
        self.new_spec = self._worker_template()
        # What was asked of a cluster that is not created is not asked of the one that runs.
        self._fleet = Fleet(self.options.name, self.options.processes)
        self._leadership = Leadership(self, leads=False)
        self._record_keeper = self._make_record_keeper(record)
        await self._adopt()

    def _make_record_keeper(self, record: Record | None) -> RecordKeeper:
        return RecordKeeper(self.options.name, self._api, self._fleet, lambda: self.scheduler, record)

    def _worker_template(self) -> dict[str, Any]:
        template: dict[str, Any] = {"cls": CMLWorker, "options": {}}
        if self.options.processes > 1:
            template["group"] = [f"-{i}" for i in range(self.options.processes)]
        return template

    async def _launch(self) -> None:
        self._tls, files = await asyncio.to_thread(tls.as_files, self.options.security, self._folder)
        self.security = self._tls or Security()
        await self._record_keeper.take_name(self.options.arguments(), tls.paths(self._tls))
        if others := [repr(each.options.name) for each in unclosed() if each is not self]:
            self._log(f"This process has other clusters open, each with its sessions: {', '.join(others)}")
        self.scheduler = CMLScheduler(self._api, self.options, self._folder, self._tls)
        self._record_keeper.start()
        await asyncio.to_thread(self._write_files, files)
        workers = {key: self.make_worker(key) for key in self._fleet.missing}
        for key, worker in workers.items():
            self._fleet.launched(key, worker)
        showing = asyncio.create_task(show_start(self))
        tasks: list[asyncio.Future[Any]] = []
        try:
            # The scheduler's first: where sessions wait for room, workers would take its place.
            await self.scheduler.launch()
            # The workers right after it: a session takes long to start. They find the scheduler by its file.
            tasks += [asyncio.ensure_future(p) for p in (self.scheduler, *workers.values())]
            await asyncio.gather(*tasks)
        except BaseException:
            await cancel(*tasks)
            raise
        finally:
            await cancel(showing)

    def _write_files(self, files: Mapping[Path, str]) -> None:
        tls.write(files)
        if self.options.log_directory is not None:
            Path(self.options.log_directory).mkdir(parents=True, exist_ok=True)

    async def _adopt(self) -> None:
        record = self._record_keeper.record
        assert record is not None
        # As long as Dask's clients wait: a busy scheduler may need it, and one that is gone refuses at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if not await probe.is_alive(record, timeout=patience):
            address = record.scheduler_address or "whose address is not known yet"
            raise CMLError(
                f"the scheduler of the cluster {record.name!r}, {address}, does not answer; "
                "`dask cml delete` ends what may be left of it"
            )
        self._tls = record.get_security()
        self.security = self._tls or Security()
        self.scheduler = CMLScheduler(self._api, self.options, self._folder, self._tls)
        self.scheduler.address = record.scheduler_address
        session = record.scheduler_session or ""
        self.scheduler.adopt(session, record.app_url, record.owners.get(session))
        for session_id, key in record.sessions.items():
            if key != SCHEDULER:
                self._leadership.adopt(key, session_id, record.owners.get(session_id))
        self._fleet.follow(len(self._fleet.keys))
        self._record_keeper.start()

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

    def __await__(self) -> Generator[Any, Any, CMLCluster]:
        return self._ready().__await__()

    async def _ready(self) -> CMLCluster:
        if self.status != Status.running:
            await self._start()
        await self._correct_state()
        return self

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
        n = integer("n", n, 0)
        if memory is not None:
            n = max(n, math.ceil(gibibytes("memory", memory) / self.options.worker.memory))
        if cores is not None:
            n = max(n, math.ceil(positive("cores", cores) / self.options.nthreads))
        self._fleet.resize(n)
        if isinstance(self._adaptive, CMLAdaptive):
            stop_adapting(self._adaptive, "scale() was called")
        self._reconciler.start_anew()
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

    async def _carry_out(self) -> None:
        """Make the sessions what they should be, or return when the cluster closes."""
        step = self._correct_state()
        await asyncio.wait([step])
        if not step.cancelled():
            step.result()

    def adapt(
        self,
        Adaptive: type[Adaptive] = CMLAdaptive,
        minimum: float = 0,
        maximum: float = math.inf,
        minimum_cores: int | None = None,
        maximum_cores: int | None = None,
        minimum_memory: float | str | None = None,
        maximum_memory: float | str | None = None,
        **kwargs: Any,
    ) -> Adaptive:
        """Scale with the work that there is.

        Parameters
        ----------
        Adaptive : type, optional
            Another class than :class:`CMLAdaptive`.
        minimum, maximum : int, optional
            Worker sessions.
        minimum_cores, maximum_cores : int, optional
            Threads in all.
        minimum_memory, maximum_memory : float or str, optional
            Memory in all, in GiB or as a string such as ``"100 GiB"``.
        **kwargs
            For the class, e.g. ``interval``, ``wait_count`` and ``target_duration``.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not allowed.

        Examples
        --------
        >>> adaptive = cluster.adapt(minimum=1, maximum=10)
        """
        minimum = integer("minimum", minimum or 0, 0)
        if maximum is None:
            maximum = math.inf
        elif maximum != math.inf:
            maximum = integer("maximum", maximum, 0)
        per_session = {"cores": self.options.nthreads, "memory": self.options.worker.memory}
        for unit, low, high in (
            ("cores", minimum_cores, maximum_cores),
            ("memory", minimum_memory, maximum_memory),
        ):
            check = gibibytes if unit == "memory" else positive
            if low is not None:
                low = check(f"minimum_{unit}", low)
                minimum = max(minimum, math.ceil(low / per_session[unit]))
            if high is not None:
                high = check(f"maximum_{unit}", high)
                maximum = min(maximum, math.floor(high / per_session[unit]))
        if maximum < minimum:
            raise ValueError(message("maximum", maximum, f"at least the minimum, {minimum} worker sessions"))
        self._fleet.drive(None)  # the adaptive scaling before has no say any more
        adaptive = Cluster.adapt(self, Adaptive=Adaptive, minimum=minimum, maximum=maximum, **kwargs)
        self._fleet.drive(adaptive)
        self._reconciler.start_anew()
        # Tells the claim at once: another manager may scale soon, and the last wish counts.
        self.loop.add_callback(self._correct_state)
        return adaptive

    @property
    def _arrived(self) -> set[str]:
        """The worker sessions of which a Dask worker has registered."""
        return self._fleet.arrived(self.observed)

    # SpecCluster's own state of the workers. It sets these; here they show what the fleet has.

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The wanted worker sessions, by name."""
        return dict.fromkeys(self._fleet.keys, self.new_spec)

    @worker_spec.setter
    def worker_spec(self, _: Any) -> None:
        pass

    @property
    def workers(self) -> dict[str, CMLWorker]:
        """The worker sessions by name, also those that are not wanted any more."""
        return self._fleet.workers

    @workers.setter
    def workers(self, _: Any) -> None:
        pass

    def make_worker(self, key: str) -> CMLWorker:
        """Make a worker, unlaunched.

        Parameters
        ----------
        key : str
            Its name.
        """
        address = getattr(self.scheduler, "address", None)
        return CMLWorker(
            address, key, api=self._api, options=self.options, folder=self._folder, security=self._tls
        )

    async def _correct_state_internal(self) -> None:
        async with self._lock:
            self._correct_state_waiting = None
            self._stepping = asyncio.current_task()
            if self.status == Status.running and await self._leadership.sync():
                await self._reconciler.step()

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster closes a lost worker after a while and leaves it at that; the reconciler replaces it.
        if op == "remove":
            self.scheduler_info["workers"].pop(msg, None)
        else:
            Cluster._update_worker_status(self, op, msg)
        self._reconciler.poke()

    def _threads_per_worker(self) -> int:
        return self.options.nthreads

    def _memory_per_worker(self) -> int:
        return int(self.options.worker.memory * 2**30)

    # -- what there is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions, the scheduler's first, as last heard of."""
        processes = [self.scheduler, *[*self.workers.values()]]
        return [p.session for p in processes if p is not None and p.session is not None]

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

    @property
    def n_pending(self) -> int:
        """How many of the wanted worker sessions have not arrived yet."""
        return len(self._fleet.keys) - len(self._arrived)

    @property
    def _cluster_class_name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        text = super().__repr__()
        n = len(self.scheduler_info["workers"])
        if self.n_pending:
            text = text.replace(f"workers={n}", f"workers={n} ({pending(self)})", 1)
        if self.scheduler is not None and (waits := self.scheduler.waits_for) is not None:
            text = f"{text[:-1]}, scheduler {waiting(waits)})"
        if self.status == Status.running and self._watch_worker_status_task.done():
            text = f"{text[:-1]}, not connected to the scheduler)"
        if self._reconciler.trouble:
            text = f"{text[:-1]}, trouble: {first_line(self._reconciler.trouble)})"
        return text

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        return super()._repr_html_(cluster_status=(cluster_status or "") + sessions_html(self))

    def job_script(self) -> str:
        """Return what the scheduler's session and a worker's are launched with.

        It launches nothing; with ``asynchronous=True`` a cluster launches nothing before it is awaited.

        Examples
        --------
        >>> print(cluster.job_script())
        # mine-scheduler: cpu=1 memory=2 nvidia_gpu=0
        ...
        """
        if self._tls is None:  # the paths, for what is not started; no file is written
            self._tls, _ = tls.as_files(self.options.security, self._folder)
        scheduler = self.scheduler or CMLScheduler(self._api, self.options, self._folder, self._tls)
        worker = self.make_worker(self._fleet.new_key())
        return f"{scheduler.plan}\n{worker.plan}"

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

    def _end(self, timeout: float | None, shutdown: bool) -> Awaitable[None] | None:
        if self.asynchronous:
            return self.sync(self._close, shutdown, callback_timeout=timeout)
        if self._is_a_forks_copy:
            return None
        with self._close_lock:  # the second of two threads would wait for a loop that the first has stopped
            try:
                if self.status != Status.closed:
                    self.sync(self._close, shutdown, callback_timeout=timeout)
            finally:
                self._loop_runner.stop()
        return None

    def __exit__(self, *_: object) -> None:
        self._end(None, self.shutdown_on_close)

    async def __aexit__(self, *_: object) -> None:
        await self._close(self.shutdown_on_close)

    @property
    def _is_a_forks_copy(self) -> bool:
        """Whether this is in a fork of the cluster's process, whose end must not be the cluster's."""
        return self._pid != os.getpid()

    async def _close(self, shutdown: bool = True) -> None:
        if self._is_a_forks_copy or self.status == Status.closed:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_once(shutdown))
        await asyncio.shield(self._closing)

    async def _close_once(self, shutdown: bool) -> None:
        # Not SpecCluster's, which retires every worker first and waits long for a scheduler that is gone.
        if self._adaptive is not None:
            stop_adapting(self._adaptive, "the cluster closes")
        self.status = Status.closing
        self._fleet.close()
        await cancel(self._starting, self._keeping, self._correct_state_waiting, self._stepping)
        await self._reconciler.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._record_keeper.close()
        try:
            if not shutdown:
                await self._hand_over()
            # First, because a scheduler that ends does not answer, and that is waited for.
            await self._leadership.close(stays=not shutdown)
            if shutdown:
                await self._say_goodbye()
                await self._record_keeper.end()
            else:
                await self._api.close()
        finally:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(Cluster._close(self), _GOODBYE_TIMEOUT)
            self.status = Status.closed
            self._silence.close()
            for process in (self.scheduler, *self.workers.values()):
                if process is not None:
                    process.status = Status.closed
            self._fleet.clear()
            no_longer_end_at_exit(self)

    async def _hand_over(self) -> None:
        """Leave the sessions to other managers; what these do not know of is stopped."""
        if self._leadership.id:  # what was asked for last, and launched for it, may not be told yet
            await self._leadership.sync()
        if self._record_keeper.gone:  # nobody can take them over any more
            return
        processes = (self.scheduler, *self.workers.values())
        self._api.forget(*[p.session_id for p in processes if p is not None and p.session_id])

    async def _say_goodbye(self) -> None:
        """Let the scheduler tell its workers and clients that it ends, if it is there."""
        if self.scheduler_comm is not None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self.scheduler_comm.terminate(), _GOODBYE_TIMEOUT)

    def _end_soon(self, shutdown: bool) -> None:
        """Close from within one of the cluster's own tasks, which close() waits for."""
        self._closing = self._closing or asyncio.create_task(self._close_once(shutdown))
