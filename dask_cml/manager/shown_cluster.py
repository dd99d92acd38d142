"""The parts of a cluster that users inspect: sessions, worker groups, addresses, logs and representations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo
from distributed.utils import Log, Logs

from dask_cml.manager.display import escaped, first_line, sessions_html
from dask_cml.manager.group import WorkerGroup
from dask_cml.manager.lifecycle import ManagedCluster
from dask_cml.manager.waiting import pending, waiting
from dask_cml.records.record import cluster_address
from dask_cml.sessions.process import Session
from dask_cml.sessions.session_logs import SessionLogs


class ShownCluster(ManagedCluster):
    """A managed cluster with the methods by which users inspect it."""

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        processes = [self.scheduler, *[*self.workers.values()]]
        return [p.session for p in processes if p is not None and p.session is not None]

    @property
    def worker_groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by name, the default group first.

        Examples
        --------
        >>> cluster.worker_groups["default"].n_workers
        2
        """
        found = {}
        for group in self._fleet.states:
            options = group.options
            found[group.name] = WorkerGroup(
                name=group.name,
                n_workers=group.target,
                n_arrived=self._n_arrived(group),
                size=options.worker,
                nthreads=options.nthreads,
                processes=options.processes,
                resources=dict(options.resources),
            )
        return found

    @property
    def scheduler_address(self) -> str:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by it."""
        address: str = super().scheduler_address
        has_keys = self.scheduler_comm and self._launcher.security is not None
        return cluster_address(self.name) if has_keys else address

    @property
    def dashboard_link(self) -> str:
        """The URL of the scheduler's dashboard. Empty without a dashboard."""
        if self.scheduler is None or "dashboard" not in self.scheduler_info.get("services", {}):
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
        return self.sync(self._get_logs, cluster=cluster, scheduler=scheduler, workers=workers)

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: bool | Iterable[str] = True
    ) -> Logs:
        reported = {"Cluster": [line for _, line in self._cluster_manager_logs]} if cluster else {}
        names = {address: info["name"] for address, info in self.scheduler_info["workers"].items()}
        if not isinstance(workers, bool):
            workers = [workers] if isinstance(workers, str) else workers
            workers = [names.get(worker, worker) for worker in workers]
        processes = {name: group.processes for name, group in self.worker_groups.items()}
        logs = SessionLogs(self.name, self._folder, self.options.log_directory, processes)
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
        usage = self._record_keeper.usage
        return asyncio.to_thread(usage) if self.asynchronous else usage()

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        return len(self._fleet.keys) - len(self._arrived)

    @property
    def _pending(self) -> str:
        return pending(self.n_pending, self._fleet.waits.values())

    @property
    def _scheduler_wait(self) -> str:
        waits = None if self.scheduler is None else self.scheduler.waits_for
        return "" if waits is None else f"scheduler {waiting(waits)}"

    def __repr__(self) -> str:
        text = super().__repr__()
        n = len(self.scheduler_info["workers"])
        if self.n_pending:
            text = text.replace(f"workers={n}", f"workers={n} ({self._pending})", 1)
        if self._scheduler_wait:
            text = f"{text[:-1]}, {self._scheduler_wait})"
        if self.status == Status.running and not self._client.connected:
            text = f"{text[:-1]}, not connected to the scheduler)"
        if self._reconciler.problem:
            text = f"{text[:-1]}, problem: {first_line(self._reconciler.problem)})"
        return text

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        problem = self._reconciler.problem
        groups = self.worker_groups.values()
        status, address = self.status.name, self.scheduler_address
        rows = sessions_html(status, address, self.sessions, groups, self._pending, problem)
        # Dask's template escapes neither the cluster's name nor those of workers.
        shown = {
            "name": escaped(self.name),
            "dashboard_link": escaped(self.dashboard_link),
            "scheduler_info": SchedulerInfo(escaped(self.scheduler_info)),
        }
        stand_in = type(type(self).__name__, (), shown)()
        return Cluster._repr_html_(stand_in, cluster_status=(cluster_status or "") + rows)

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
        return self._launcher.plans()

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
