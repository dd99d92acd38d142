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

#: Seconds between two checks whether the sessions of a deleted worker group have ended.
_GROUP_INTERVAL = 0.1


class CMLCluster(ShownCluster):
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
        Folder on the project file system for the sessions' logs, which remain there. Default: the cluster's
        own folder, which the cluster removes when it shuts down.
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
        If an argument is invalid. Nothing is launched then.
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
        """Connect to the cluster of a record, without reading files."""
        return cls(**record.options, name=record.name, create_mode="create", **arguments, _record=record)

    # -- scaling

    def scale(  # type: ignore[override]  # as in SpecCluster
        self,
        n: int = 0,
        memory: float | str | None = None,
        cores: float | None = None,
        worker_group: str = DEFAULT_GROUP,
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
            If an argument is invalid.

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
        """Scale a group to `n` sessions for adaptive scaling, which continues."""
        if self._fleet.resize(n, driver, group):
            await self._carry_out()

    async def scale_down(self, workers: Iterable[str], driver: object | None = None) -> None:
        """Close worker sessions after moving their data to others.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions or of Dask workers.
        driver : Adaptive, optional
            The adaptive scaling that requests it, which continues. Default: the user.
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
        """Scale a worker group by the tasks that need it.

        Parameters
        ----------
        minimum : int, optional
            Minimum number of worker sessions. Default 0.
        maximum : int, optional
            Maximum number of worker sessions. Default: unlimited.
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
            If an argument is invalid.

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
        self._fleet.drive(None, worker_group)  # the previous adaptive scaling must not scale any more
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
        # Inform the other managers at once: another one may scale soon, and the last request counts.
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
            If an argument is invalid, or a group with this name exists.
        CMLError
            If the cluster is not running.

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
        if name == DEFAULT_GROUP or name not in self._fleet.groups:
            raise ValueError(message("name", name, "a worker group of the cluster other than 'default'"))
        return self.sync(self._delete_worker_group, name)

    async def _add_worker_group(self, name: str, options: Options) -> None:
        if self.status != Status.running:
            raise CMLError(f"cannot add a worker group to cluster {self.name}: it is {self.status.name}")
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
                raise CMLError(f"worker group {name!r} not deleted: cluster {self.name} is closing")
            if not self._fleet.group(name).ends:
                raise CMLError(
                    f"worker group {name!r} of cluster {self.name} not deleted: no other worker can take its "
                    "data, or it was scaled meanwhile"
                )
            await self._carry_out()
            await asyncio.sleep(_GROUP_INTERVAL)
        await self._record_keeper.remove_group(name)
        await self._carry_out()

    # -- end

    def close(self, timeout: float | None = None) -> Awaitable[None] | None:
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
        return self._end(timeout, self.shutdown_on_close or self._adopts)

    def leave(self) -> Awaitable[None] | None:
        """Close this object only. The scheduler and the workers keep running.

        Examples
        --------
        >>> CMLCluster.from_name("mine").leave()
        """
        return self._end(None, shutdown=False)
