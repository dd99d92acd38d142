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
from distributed.utils import NoOpAwaitable

from dask_cml.checks import group_name, message
from dask_cml.errors import CMLError
from dask_cml.manager.adaptive import CMLAdaptive, stop_adapting
from dask_cml.manager.role import ManagerRole
from dask_cml.manager.shown_cluster import ShownCluster
from dask_cml.manager.sizing import bounds, sessions_for
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import GROUP_OPTIONS, OPTION_NAMES, Options
from dask_cml.records import store
from dask_cml.records.record import Record

#: Seconds between two looks at whether the sessions of a deleted worker group are gone.
_GROUP_INTERVAL = 0.1


class CMLCluster(ShownCluster):
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
    worker_groups : mapping of str to mapping, optional
        More groups of worker sessions by name, each with the arguments of :meth:`add_worker_group`.
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
        _record: Record | None = None,
        _role: ManagerRole | None = None,
    ) -> None:
        arguments = locals()
        given = {name: arguments[name] for name in OPTION_NAMES}
        options = Options.read(**given)
        super().__init__(
            options.inheriting() if _record is None else options,
            given,
            record=_record,
            role=_role,
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
        self,
        n: int = 0,
        memory: float | str | None = None,
        cores: float | None = None,
        worker_group: str = DEFAULT_GROUP,
    ) -> Awaitable[None] | None:
        """Scale a worker group to `n` sessions; its adaptive scaling ends.

        This returns at once. The scheduler picks the workers to close, and moves what they hold to others
        first.

        Parameters
        ----------
        n : int
            Worker sessions.
        memory : float or str, optional
            At least so much memory in all, in GiB or as a string such as ``"100 GiB"``.
        cores : float, optional
            At least so many threads in all.
        worker_group : str
            The worker group.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not allowed.

        Examples
        --------
        >>> cluster.scale(2)
        >>> cluster.scale(memory="4 GiB")
        """
        n = sessions_for(self._fleet.group(worker_group).options, n, memory, cores)
        self._fleet.resize(n, group=worker_group)
        if isinstance(adaptive := self._adaptives.get(worker_group), CMLAdaptive):
            stop_adapting(adaptive, "scale() was called")
        self._reconciler.backoffs.of(worker_group).reset()
        self.loop.add_callback(self._correct_state)
        return NoOpAwaitable() if self.asynchronous else None

    async def _resize(self, n: int, driver: object, group: str = DEFAULT_GROUP) -> None:
        """Scale a group to `n` sessions for adaptive scaling, which goes on."""
        if self._fleet.resize(n, driver, group):
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
        keys = {name: key for key in self._fleet.keys for name in self._fleet.dask_names(key)}
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
        worker_group: str = DEFAULT_GROUP,
        Adaptive: type[Adaptive] = CMLAdaptive,
        **kwargs: Any,
    ) -> Adaptive:
        """Scale a worker group with the work that only it can do, or it best.

        Parameters
        ----------
        minimum, maximum : int, optional
            Worker sessions.
        minimum_cores, maximum_cores : int, optional
            Threads in all.
        minimum_memory, maximum_memory : float or str, optional
            Memory in all, in GiB or as a string such as ``"100 GiB"``.
        worker_group : str
            The worker group. Several can adapt at once.
        Adaptive : type, optional
            Another class than :class:`CMLAdaptive`, for the default group.
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
            self._fleet.group(worker_group).options,
            minimum,
            maximum,
            cores=(minimum_cores, maximum_cores),
            memory=(minimum_memory, maximum_memory),
        )
        if worker_group != DEFAULT_GROUP and not issubclass(Adaptive, CMLAdaptive):
            raise ValueError(message("Adaptive", Adaptive, f"a CMLAdaptive for the group {worker_group!r}"))
        self._fleet.drive(None, worker_group)  # the adaptive scaling before has no say any more
        if worker_group == DEFAULT_GROUP:
            adaptive = Cluster.adapt(self, Adaptive=Adaptive, minimum=minimum, maximum=maximum, **kwargs)
        else:
            if before := self._adaptives.get(worker_group):
                stop_adapting(before, "adapt() was called")
            kwargs.update(minimum=minimum, maximum=maximum, worker_group=worker_group)
            adaptive = Adaptive(self, **kwargs)
        self._adaptives[worker_group] = adaptive
        self._fleet.drive(adaptive, worker_group)
        self._reconciler.backoffs.of(worker_group).reset()
        # Tells the claim at once: another manager may scale soon, and the last wish counts.
        self.loop.add_callback(self._correct_state)
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
        resources: Mapping[str, float] | None = None,
        worker_class: str | None = None,
        worker_command: Sequence[str] | None = None,
        worker_args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        launch_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add a group of worker sessions with a size and options of its own.

        Parameters
        ----------
        name : str
            The group's name: letters, digits, ``_`` and ``-``. Its Dask workers are named with it.
        n_workers : int
            Worker sessions at the start.
        cpu, memory, nvidia_gpu, nthreads, processes, resources, worker_class, worker_command, worker_args, \
        launch_options : optional
            As for the cluster. Default: the cluster's. `nthreads`, `processes` and `resources` follow from
            this group's `cpu`, `nvidia_gpu` and `worker_command` if these are given.
        env : mapping of str to str, optional
            Environment variables, added to the cluster's.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not allowed, or a group of this name.
        CMLError
            If the cluster does not run.

        Examples
        --------
        >>> cluster.add_worker_group("big", n_workers=1, memory="4 GiB")
        >>> cluster.scale(2, worker_group="big")
        >>> cluster.delete_worker_group("big")
        """
        arguments = locals()
        given = {each: arguments[each] for each in GROUP_OPTIONS}
        options = self.options.of_group(given)
        self._api.check_options(options.launch_options)
        return self.sync(self._add_worker_group, group_name("name", name), options)

    def delete_worker_group(self, name: str) -> Any:
        """Stop all sessions of a worker group and delete it. Its workers hand over their data first.

        Parameters
        ----------
        name : str
            The group's name.

        Raises
        ------
        ValueError
            If there is no such group, or it is the default one.
        CMLError
            If the group stays, because no other worker can take its data, or because it is scaled meanwhile.
        """
        if name == DEFAULT_GROUP or name not in self._fleet.groups:
            raise ValueError(message("name", name, "a worker group of the cluster, and not the default one"))
        return self.sync(self._delete_worker_group, name)

    async def _add_worker_group(self, name: str, options: Options) -> None:
        if self.status != Status.running:
            raise CMLError(f"cannot add a worker group to the cluster {self.name}: it is {self.status.name}")
        self._fleet.add_group(name, options)
        try:
            await self._record_keeper.add_group(name, options.group_arguments())
        except BaseException:
            self._fleet.forget_group(name)
            raise
        self._fleet.resize(options.n_workers, group=name)
        await self._carry_out()

    async def _delete_worker_group(self, name: str) -> None:
        if (adaptive := self._adaptives.pop(name, None)) is not None:
            stop_adapting(adaptive, "the worker group is deleted")
        self._fleet.end_group(name)
        while not self._leadership.forget_ended_group(name):
            if self.status != Status.running:
                raise CMLError(f"the worker group {name!r} stays: the cluster {self.name} closes")
            if not self._fleet.group(name).ends:
                raise CMLError(
                    f"the worker group {name!r} of the cluster {self.name} stays: no other worker can take "
                    "its data, or it was scaled meanwhile"
                )
            await self._carry_out()
            await asyncio.sleep(_GROUP_INTERVAL)
        await self._record_keeper.remove_group(name)
        await self._carry_out()

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
