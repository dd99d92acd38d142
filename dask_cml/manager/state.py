"""What a cluster is now, by its manager."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.objects import SchedulerInfo

from dask_cml.dashboard.connection import open_comm
from dask_cml.display.group import WorkerGroup
from dask_cml.display.words import pending, waiting
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.launcher import Launcher
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.manager.unrunnable import UnrunnableTasks
from dask_cml.msgpack_comm import MsgpackComm
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.records.record import Record, cluster_address
from dask_cml.records.usage import Usage
from dask_cml.sessions.session import Session


class ClusterState:
    """Says what a cluster is now. Each property is a snapshot, which any thread may read.

    Parameters
    ----------
    status : callable
        Returns the manager's status.
    fleet, client, launcher, reconciler, record_keeper, unrunnable
        The manager's parts.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        fleet: Fleet,
        client: SchedulerClient,
        launcher: Launcher,
        reconciler: Reconciler,
        record_keeper: RecordKeeper,
        unrunnable: UnrunnableTasks,
    ) -> None:
        self._status = status
        self._fleet = fleet
        self._client = client
        self._launcher = launcher
        self._reconciler = reconciler
        self._record_keeper = record_keeper
        self._unrunnable = unrunnable

    @property
    def status(self) -> Status:
        """The manager's status, such as ``running``."""
        return self._status()

    @property
    def start_time(self) -> float | None:
        """Time from the launch of the scheduler's session to its first answer, in seconds."""
        return None if self._launcher.scheduler is None else self._launcher.scheduler.start_time

    @property
    def leads(self) -> bool:
        """Whether this manager launches and stops sessions."""
        return self.status == Status.running and self._client.leads

    @property
    def connected(self) -> bool:
        """Whether the scheduler answers."""
        return self._client.connected

    @property
    def alone(self) -> bool:
        """Whether no other manager is connected."""
        return self._fleet.managers <= 1

    @property
    def tasks_done(self) -> int:
        """Number of tasks that the scheduler has completed, when it answered last."""
        return self._fleet.tasks_done

    @property
    def record(self) -> Record | None:
        """The cluster's record when this manager created or read it. None before that."""
        return self._record_keeper.record

    @property
    def scheduler_info(self) -> SchedulerInfo:
        """The scheduler's last information on itself and its workers, as from ``Scheduler.identity``."""
        return SchedulerInfo({**self._client.info, "workers": dict(self._fleet.workers_info)})

    @property
    def scheduler_comm(self) -> Any:
        """Dask's own connection to the scheduler. None before the start."""
        return self._client.rpc

    async def open_dashboard(self) -> MsgpackComm:
        """Open a comm to the scheduler's dashboard.

        Raises
        ------
        OSError
            If the scheduler does not accept the connection, or has no dashboard.
        """
        return await open_comm(str(self._client.address), self._client.connection_args)

    @property
    def address(self) -> str | None:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by it."""
        if self._client.address is None or self.status == Status.closed:
            return None
        return self._client.address if self._launcher.security is None else cluster_address(self._fleet.name)

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        processes = [self._launcher.scheduler, *self._fleet.workers.values()]
        return [p.session for p in processes if p is not None and p.session is not None]

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by name, the default group first."""
        return {
            group.name: WorkerGroup(
                name=group.name,
                n_workers=group.target,
                n_arrived=len(self._fleet.arrived(group.name)),
                size=group.options.worker,
                nthreads=group.options.nthreads,
                processes=group.options.processes,
                resources=dict(group.options.resources),
            )
            for group in self._fleet.states
        }

    def limits(self, group: str = DEFAULT_GROUP) -> Mapping[str, float] | None:
        """Return the ``minimum`` and ``maximum`` of a group's adaptive scaling. None: it has a fixed size."""
        adapting = self._fleet.group(group).adapting
        if adapting is None:
            return None
        maximum = adapting["maximum"]
        return {"minimum": adapting["minimum"], "maximum": math.inf if maximum is None else maximum}

    @property
    def problem(self) -> str | None:
        """The current problem, as a clause. None if there is none."""
        return self._reconciler.problem or self._unrunnable.words or self._fleet.full

    def gave_up(self, group: str) -> bool:
        """Whether no workers of a group are launched until it is scaled, after too many failures."""
        return self._reconciler.backoffs.of(group).gave_up

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        return len(self._fleet.names) - len(self._fleet.arrived())

    @property
    def pending(self) -> str:
        """The text for worker sessions that are not connected yet."""
        return pending(self.n_pending, self._fleet.waits.values())

    @property
    def scheduler_wait(self) -> str:
        """The text for a scheduler that waits for room."""
        scheduler = self._launcher.scheduler
        waits = None if scheduler is None else scheduler.waits_for
        return "" if waits is None else f"scheduler {waiting(waits)}"

    @property
    def folder(self) -> Path:
        """The cluster's folder on the project file system."""
        return self._launcher.place.folder

    def usage(self) -> Usage:
        """Return the cluster's usage; see :meth:`dask_cml.CMLCluster.usage`. Blocks."""
        return self._record_keeper.usage()

    def plans(self) -> str:
        """Return the plans of the scheduler's session and of the next session of each worker group."""
        return self._launcher.plans()
