"""Manage the clusters created on the page, and observe all other clusters of the project."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from distributed.core import Status

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.dashboard.connection import OpenComm
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML
from dask_cml.manager.manager import Manager
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.observers import EXPECTED, Observed, Observers
from dask_cml.options import OPTION_NAMES, Options, setting
from dask_cml.options.unattended import unattended
from dask_cml.records import liveness, operations
from dask_cml.records.liveness import Finding
from dask_cml.records.record import Maker, Record
from dask_cml.records.usage import Usage
from dask_cml.serve import views
from dask_cml.serve.views import TaskRate
from dask_cml.sessions.workers_api import load_platform

logger = logging.getLogger(__name__)

#: Seconds. If CML refuses a launch within this time, the request fails. Later, the cluster shows why.
_PATIENCE = 3.0
#: Seconds to shut down the clusters that the page created. Kubernetes grants 30.
_GRACE = 25.0
#: Seconds between two reads of a cluster's usage, and from the last request until reads stop.
_USAGE_AGE, _LOOKED_AT = 10.0, 30.0
#: The options that users of the page cannot set.
_SETTLED: dict[str, Any] = {
    "create_mode": "create",
    "shutdown_on_close": True,
    "forward_dashboard": False,
}
#: The arguments of a new cluster.
_ALLOWED = tuple(name for name in OPTION_NAMES if name not in _SETTLED)


@dataclass
class CreatedCluster:
    """A cluster that a user of the page created.

    Parameters
    ----------
    cluster : CMLCluster
        Its manager.
    user : str or None
        The user.
    created : str
        The time of its creation, in ISO 8601.
    failure : Exception or None
        Why it failed.
    starting : asyncio.Task or None
        The task that starts it.
    """

    cluster: CMLCluster
    user: str | None
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    failure: Exception | None = None
    starting: asyncio.Task[None] | None = None


class ProjectClusters(Observers):
    """Manages the clusters that users create on the page, and observes the other clusters of the project.

    While an observed cluster has other managers, the page only watches it. Otherwise, the page replaces lost
    workers and continues adaptive scaling. It does not keep an orphan running. If an earlier page was killed,
    this page takes over the clusters created there.

    Parameters
    ----------
    interval : float
        Time between two reads of the records, in seconds.

    Examples
    --------
    >>> async def names():
    ...     clusters = ProjectClusters()
    ...     clusters.start()
    ...     found = [each["name"] for each in clusters.describe()]
    ...     await clusters.close()
    ...     return found
    >>> asyncio.run(names())
    []
    """

    def __init__(self, interval: float = 2.0) -> None:
        super().__init__(interval)
        self._created: dict[str, CreatedCluster] = {}
        self._rates: dict[str, TaskRate] = {}
        self._usages: dict[str, tuple[float, Usage]] = {}
        self._looked_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        #: Why the page can create no clusters, or None.
        self.problem: str | None = None
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self.problem = str(error)

    def start(self) -> None:
        """Start observing. Call this in the event loop."""
        super().start()
        self._reading = asyncio.create_task(self._read_usages())

    async def close(self) -> None:
        """Shut down the clusters that the page created. The others keep running.

        Raises
        ------
        CMLError
            If CML did not stop some sessions in time. The message names their clusters.
        """
        await cancel(self._looking, self._reading, *(each.starting for each in self._created.values()))
        ending = {name: asyncio.create_task(self._close(each)) for name, each in self._owned().items()}
        if ending:
            await asyncio.wait(ending.values(), timeout=_GRACE)
        left = [name for name, task in ending.items() if not task.done() or task.exception() is not None]
        await cancel(*ending.values())
        await super().close()
        if left:
            raise CMLError(f"some sessions of these clusters were not stopped: {', '.join(left)}")

    @staticmethod
    async def _close(cluster: CMLCluster) -> None:
        closing = cluster.close()
        if closing is not None:
            await closing

    def _owned(self) -> dict[str, CMLCluster]:
        """Return the clusters that shut down with this page."""
        adopted = {
            each.record.name: each.cluster
            for each in self.observed.values()
            if each.cluster is not None and each.cluster.shutdown_on_close
        }
        return {**adopted, **self._running()}

    # -- observers

    async def examine(self, record: Record) -> Finding:
        """Return whether a cluster's scheduler is alive, dead or neither."""
        return (await liveness.judge([record]))[record.name]

    def manage(self, record: Record, **arguments: Any) -> CMLCluster:
        """Return a cluster with a manager. The page owns the clusters of an earlier, killed page."""
        owns = bool(record.maker.serves) and record.maker.lives() is False
        return super().manage(record, shutdown_on_close=owns, observes=not owns, **arguments)

    def looked(self) -> None:
        """Count finished tasks, and forget clusters that another process deleted."""
        now, managers = time.monotonic(), self._managers()
        for name, each in [*self._created.items()]:
            if each.cluster.status == Status.closed and each.failure is None and each.starting is None:
                if (problem := each.cluster.manager.state.problem) is None:
                    del self._created[name]
                else:
                    each.failure = CMLError(problem)
        self._rates = {name: self._rates.get(name, TaskRate()) for name in managers}
        for name, cluster in managers.items():
            self._rates[name].count(cluster.manager.state.tasks_done, now)

    def _managers(self) -> dict[str, CMLCluster]:
        observed = {each.record.name: each.cluster for each in self.observed.values() if each.cluster}
        return {**observed, **self._running()}

    def _running(self) -> dict[str, CMLCluster]:
        return {name: each.cluster for name, each in self._created.items() if each.failure is None}

    async def _read_usages(self) -> None:
        """Read the usage of all clusters, while the page is in use."""
        while True:
            if time.monotonic() - self._looked_at < _LOOKED_AT:
                for name in self._managers():
                    try:
                        await self._usage(name)
                    except Exception as error:
                        logger.info("Usage of cluster %s not read: %s", name, error)
            await asyncio.sleep(self._interval)

    async def _usage(self, name: str) -> Usage:
        read, usage = self._usages.get(name, (-math.inf, Usage()))
        if time.monotonic() - read > _USAGE_AGE:
            usage = await asyncio.to_thread(operations.usage, name)
            self._usages[name] = time.monotonic(), usage
        return usage

    # -- descriptions

    def describe(self) -> list[dict[str, Any]]:
        """Describe all clusters, by name."""
        self._looked_at = time.monotonic()
        names = self._names()
        self._usages = {name: each for name, each in self._usages.items() if name in names}
        return [self._describe_alone(name) for name in sorted(names)]

    def _describe_alone(self, name: str) -> dict[str, Any]:
        """Describe a cluster. An error in one description does not affect the others."""
        try:
            return self._describe(name)
        except Exception as error:
            logger.debug("Cluster %s not described", name, exc_info=True)
            problem = f"it cannot be described: {type(error).__name__}: {error}"
            return views.unmanaged(name, None, None, "unknown", problem)

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster with its sessions.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        self._looked_at = time.monotonic()
        usage, logs = Usage(), list[str]()
        with contextlib.suppress(*EXPECTED):
            usage = await self._usage(name)
        cluster, record = self._managers().get(name), self._record(name)
        if record is not None:
            logs = [*await asyncio.to_thread(operations.session_logs(record).paths)]
        sessions = (
            views.sessions_of(cluster) if cluster else views.recorded_sessions(record) if record else []
        )
        description = self._describe(name)
        return {
            **description,
            "sessions": sessions,
            "logs": logs,
            "usage": views.usage_as_json(usage),
            "client": f'Client("{description["address"]}")',
            "security": bool(record and record.security),
            "has_dashboard": bool(cluster and "dashboard" in cluster.scheduler_info.get("services", {})),
        }

    def _describe(self, name: str) -> dict[str, Any]:
        _, usage = self._usages.get(name, (0.0, None))
        rate = self._rates.get(name, TaskRate())
        if (own := self._created.get(name)) is not None:
            if own.failure is not None:
                return views.unmanaged(name, own.created, own.user, "failed", str(own.failure))
            return views.managed(own.cluster, own.created, own.user, True, rate, usage)
        if (observed := self._observed_as(name)) is not None:
            record, cluster = observed.record, observed.cluster
            if cluster is None or cluster.status != Status.running:
                return views.recorded(record, observed.finding, usage)
            owned = cluster.shutdown_on_close
            return views.managed(cluster, record.created, record.maker.user, owned, rate, usage)
        raise NoSuchCluster(name, (*self._names(),))

    def _record(self, name: str) -> Record | None:
        if (own := self._created.get(name)) is not None:
            return own.cluster.manager.state.record if own.failure is None else None
        observed = self._observed_as(name)
        return None if observed is None else observed.record

    def _observed_as(self, name: str) -> Observed | None:
        return next((each for each in self.observed.values() if each.record.name == name), None)

    def _names(self) -> set[str]:
        return {*self._created, *(each.record.name for each in self.observed.values())}

    def manager_of(self, name: str) -> CMLCluster:
        """Return the manager of a running cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If it does not run.
        """
        cluster = self._managers().get(name)
        if cluster is None or cluster.status != Status.running:
            status = self._describe(name)["status"]
            raise CMLError(f"cluster {name!r} is not running: its status is {status}")
        return cluster

    def dashboard_of(self, name: str) -> OpenComm:
        """Return a function that opens comms to a cluster's dashboard. Raises as `manager_of` does."""
        return self.manager_of(name).manager.state.open_dashboard

    def record_id(self, name: str) -> str | None:
        """Return the id of a cluster's record, if the cluster has one."""
        record = self._record(name)
        return None if record is None else record.id

    # -- changes

    async def create(self, options: Mapping[str, Any], user: str | None = None) -> dict[str, Any]:
        """Create a cluster that shuts down with this process, and describe it.

        Parameters
        ----------
        options : mapping
            Arguments of :class:`dask_cml.CMLCluster`.
        user : str, optional
            The user who creates it.

        Raises
        ------
        TypeError, ValueError
            If an option is invalid.
        CMLError
            If CML refuses the launch at once, or a cluster with this name exists. If the cluster fails later,
            its status is ``failed``.
        """
        if unknown := [name for name in options if name not in _ALLOWED]:
            raise TypeError(f"invalid option {unknown[0]!r}: expected one of {', '.join(_ALLOWED)}")
        maker = Maker.this_process(user, serves=True)
        given = Options.read(**unattended(options), **_SETTLED).inheriting()
        cluster = CMLCluster.of_manager(
            lambda **more: Manager(given, maker=maker, **more), asynchronous=True, quiet=True
        )
        name = cluster.options.name
        if name in self._created and self._created[name].failure is None:
            await self._close(cluster)
            raise ClusterExists(name)
        own = self._created[name] = CreatedCluster(cluster, user)
        own.starting = asyncio.create_task(self._start(own))
        await asyncio.wait({own.starting}, timeout=_PATIENCE)
        if own.failure is not None:
            del self._created[name]
            raise own.failure
        return self._describe(name)

    async def _start(self, own: CreatedCluster) -> None:
        try:
            await own.cluster
        except Exception as error:
            if not isinstance(error, CMLError):
                logger.exception("Cluster %s not started", own.cluster.options.name)
            own.failure = error
            with contextlib.suppress(CMLError):
                await self._close(own.cluster)
        finally:
            own.starting = None

    def scale(self, name: str, n: int, worker_group: str = DEFAULT_GROUP) -> None:
        """Scale a worker group. Raises as `manager_of` and ``CMLCluster.scale`` do."""
        self.manager_of(name).scale(n, worker_group=worker_group)

    def adapt(
        self, name: str, minimum: int = 0, maximum: int | None = None, worker_group: str = DEFAULT_GROUP
    ) -> None:
        """Adapt a worker group. Raises as `manager_of` and ``CMLCluster.adapt`` do."""
        most = math.inf if maximum is None else maximum
        self.manager_of(name).adapt(minimum, most, worker_group=worker_group)

    def stop_adapting(self, name: str, worker_group: str = DEFAULT_GROUP) -> None:
        """Stop adaptive scaling of a worker group, and keep its target."""
        cluster = self.manager_of(name)
        cluster.manager.wishes.stop_adapting(worker_group)

    async def delete(self, name: str) -> None:
        """Stop all sessions of a cluster, or forget a failed cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If CML did not stop some sessions.
        """
        if name not in self._names():
            raise NoSuchCluster(name, (*self._names(),))
        if (own := self._created.get(name)) is not None:
            if own.failure is None:
                await self._close(own.cluster)
            self._created.pop(name, None)
        elif (cluster := self._managers().get(name)) is not None and cluster.status == Status.running:
            await self._close(cluster)
        elif (record := self._record(name)) is not None:
            error = (await operations.end_all([record]))[name]
            if error is not None:
                raise error
