"""What a cluster is now, by its manager, whose parts share this state."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from distributed.core import Status
from distributed.objects import SchedulerInfo
from tornado.ioloop import IOLoop

from dask_cml.dashboard.proxy import open_comm
from dask_cml.errors import CMLError
from dask_cml.manager.backoff import Backoffs
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.launcher import Launcher
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.msgpack_comm import MsgpackComm
from dask_cml.options import Options, SessionSize
from dask_cml.records.record import Record, cluster_address
from dask_cml.sessions.session import Session
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.words import span, waiting, waiting_workers


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
        Virtual CPUs, memory in GiB, and GPUs of each session.
    nthreads : int
        Number of threads in each session.
    processes : int
        Number of Dask workers in each session.
    resources : dict of str to float
        Resources of each session. Its Dask workers share them evenly.
    """

    name: str
    n_workers: int
    n_arrived: int
    size: SessionSize
    nthreads: int
    processes: int
    resources: dict[str, float]


class ClusterState:
    """What a cluster is now. Each property is a snapshot, which any thread may read.

    Parameters
    ----------
    options : Options
        The cluster's options.
    record : Record, optional
        The record of a running cluster. Default: the cluster is new.
    observes : bool
        Whether this manager only observes.
    log : callable
        Gets each line for the user.
    changed : callable
        Called in the event loop after an answer of the scheduler, with True if it has answered wishes.

    Attributes
    ----------
    api : WorkersAPI
        Launches, lists and stops sessions.
    status : distributed.core.Status
        The manager's status, such as ``running``.
    end, outage, retiring, unrunnable : str or None
        Problems as clauses, each written by the part that finds it: why the cluster has ended, why the
        platform does not answer, which workers still move their data, and which tasks no worker can run.
    """

    def __init__(
        self,
        options: Options,
        record: Record | None = None,
        *,
        observes: bool = False,
        log: Callable[[str], None],
        changed: Callable[[bool], None],
    ) -> None:
        self.status = Status.created
        self.options = options
        self.api = WorkersAPI(load_platform(options.platform))
        self.observes = observes
        self.log = log
        self.fleet = Fleet(options, secrets.token_hex(8))
        self.client = SchedulerClient(self.fleet, observes, changed)
        self.launcher = Launcher(self.api, options, self.fleet, lambda: changed(False))
        self.record_keeper = RecordKeeper(self.launcher, self.fleet, record)
        self.backoffs = Backoffs(self.fleet, log)
        self.end: str | None = None
        self.outage: str | None = None
        self.retiring: str | None = None
        self.unrunnable: str | None = None

    @property
    def status_words(self) -> str:
        """The text for the status. For a closed cluster, how long it lasted and what it used."""
        if self.status == Status.running and not self.client.connected:
            return "not connected to the scheduler"
        lasted = self.record_keeper.lasted
        if self.status != Status.closed or lasted is None:
            return self.status.name
        used = self.record_keeper.usage().total
        noun = f"session{'s' * (used.sessions != 1)}"
        return f"closed after {span(lasted)}; {used.sessions} {noun}, {used.vcpu_hours:.2f} vCPU hours"

    @property
    def start_time(self) -> float | None:
        """Time from the launch of the scheduler's session to its first answer, in seconds."""
        return None if self.launcher.scheduler is None else self.launcher.scheduler.start_time

    @property
    def leads(self) -> bool:
        """Whether this manager launches and stops sessions."""
        return self.status == Status.running and self.client.leads

    @property
    def scheduler_info(self) -> SchedulerInfo:
        """The scheduler's last information on itself and its workers, as from ``Scheduler.identity``."""
        return SchedulerInfo({**self.client.info, "workers": dict(self.fleet.workers_info)})

    @property
    def has_dashboard(self) -> bool:
        """Whether the scheduler has a dashboard. Without it, Dask serves other pages at its port."""
        listens = "dashboard" in self.client.info.get("services", {})
        return listens and "--no-dashboard" not in self.options.scheduler_args

    async def open_dashboard(self) -> MsgpackComm:
        """Open a comm on which the scheduler serves its dashboard.

        Raises
        ------
        OSError
            If the scheduler does not accept the connection, or has no dashboard.
        """
        return await open_comm(str(self.client.address), self.client.connection_args)

    @property
    def address(self) -> str | None:
        """The address for clients: ``cml://<name>`` if the cluster has keys, which clients find by it."""
        if self.client.address is None or self.status == Status.closed:
            return None
        has_keys = self.launcher.place.security is not None
        return cluster_address(self.fleet.name) if has_keys else self.client.address

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        sessions = [each.session for each in self.launcher.processes]
        return [each for each in sessions if each is not None]

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by name, the default group first."""
        return {
            group.name: WorkerGroup(
                name=group.name,
                n_workers=group.wanted.target,
                n_arrived=len(self.fleet.arrived(group.name)),
                size=group.options.worker,
                nthreads=group.options.nthreads,
                processes=group.options.processes,
                resources=dict(group.options.resources),
            )
            for group in self.fleet.states
        }

    @property
    def loop(self) -> IOLoop:
        """The event loop, for adaptive scaling that another process has asked for."""
        return IOLoop.current()

    def stop_adapting(self, group: str, key: str | None = None) -> None:
        """Keep a group's number of sessions. With a key, only if that request to adapt is the last one."""
        with contextlib.suppress(CMLError):  # the cluster is closed
            self.fleet.wish("stop_adapting", group=group, key=key)
            self.client.send_wishes()

    @property
    def problem(self) -> str | None:
        """The current problem, as a clause. None if there is none."""
        found = (self.end, self.outage, self.backoffs.words, self.retiring, self.unrunnable, self.fleet.full)
        return next(filter(None, found), None)

    @property
    def n_pending(self) -> int:
        """Number of wanted worker sessions that are not connected yet."""
        return len({*self.fleet.names} - self.fleet.arrived())

    @property
    def pending(self) -> str:
        """The text for worker sessions that are not connected yet."""
        waits = self.fleet.waits().values()
        n = self.n_pending - len(waits)
        return ", ".join(filter(None, [f"{n} pending" if n > 0 else "", waiting_workers(waits)]))

    @property
    def scheduler_words(self) -> str:
        """The text for a scheduler that waits for room, or that has replaced a lost one."""
        session = None if self.launcher.scheduler is None else self.launcher.scheduler.session
        if session is not None and session.waits_for is not None:
            return f"scheduler {waiting(session.waits_for)}"
        if session is None or not self.launcher.place.number or not self.client.connected:
            return ""
        return f"scheduler restarted {span(session.age)} ago"

    @property
    def age(self) -> str:
        """The cluster's age and its limit, such as ``12.3 of 48 h``. Empty without a limit."""
        age, most = self.fleet.age / 3600, self.fleet.most_age / 3600
        return f"{age:.1f} of {most:g} h" if most else ""
