"""Manage the clusters created on the page, and observe all other clusters of the project."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed.core import Status

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML
from dask_cml.manager.manager import Manager
from dask_cml.observers import EXPECTED, Observed, Observers
from dask_cml.options import OPTION_NAMES, Options, setting
from dask_cml.options.unattended import unattended
from dask_cml.records import operations
from dask_cml.records.history import EndedCluster, ended_clusters
from dask_cml.records.liveness import Finding, State
from dask_cml.records.record import Maker, Record
from dask_cml.records.usage import Usage
from dask_cml.serve import views
from dask_cml.serve.metrics import StartTimes
from dask_cml.sessions.workers_api import load_platform

logger = logging.getLogger(__name__)

#: Seconds. If CML refuses a launch within this time, the request fails. After that, the cluster shows why.
_PATIENCE = 3.0
#: Seconds to shut down the clusters that the page created. Kubernetes grants 30.
_GRACE = 25.0
#: Seconds between two reads of the clusters' usage, and from the last request until reads stop.
_USAGE_AGE, _ASKED_LATELY = 10.0, 30.0
#: The options that users of the page cannot set.
_SETTLED: dict[str, Any] = {
    "create_mode": "create",
    "shutdown_on_close": True,
    "forward_dashboard": False,
}
#: The arguments of a new cluster.
_ALLOWED = tuple(name for name in OPTION_NAMES if name not in _SETTLED)


@dataclass
class CreatedCluster(Observed):
    """A cluster that a user of the page created. Its task starts it.

    Parameters
    ----------
    failure : Exception or None
        Why it did not start.
    """

    failure: Exception | None = None


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
        #: The usage of each running cluster, as it was read last.
        self.usages: dict[str, Usage] = {}
        self.starts = StartTimes()
        self._usages_read_at = self._asked_at = -math.inf
        #: Why the page cannot create clusters, or None.
        self.problem: str | None = None
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self.problem = str(error)

    async def close(self) -> None:
        """Shut down the clusters that the page created. The others keep running.

        Raises
        ------
        CMLError
            If CML did not stop some sessions in time. The message names their clusters.
        """
        await cancel(self._looking, *(each.task for each in self._created.values()))
        owned = {name: each for name, each in self._managers().items() if each.shutdown_on_close}
        ending = {name: asyncio.ensure_future(each.close()) for name, each in owned.items()}
        if ending:
            await asyncio.wait(ending.values(), timeout=_GRACE)
        left = [name for name, task in ending.items() if not task.done() or task.exception() is not None]
        await cancel(*ending.values())
        await super().close()
        if left:
            raise CMLError(f"some sessions of these clusters were not stopped: {', '.join(left)}")

    # -- observers

    def manage(self, record: Record, **arguments: Any) -> CMLCluster:
        """Return a cluster with a manager. The page owns the clusters of an earlier, killed page."""
        owns = bool(record.maker.serves) and record.maker.lives() is False
        return super().manage(record, shutdown_on_close=owns, observes=not owns, **arguments)

    async def looked(self) -> None:
        """Read usages, and forget clusters that have ended."""
        managers, now = self._managers(), time.monotonic()
        for name, each in [*self._created.items()]:
            if name not in managers and each.failure is None and each.task and each.task.done():
                del self._created[name]  # the history says why it ended
        self.starts.look(managers.values())
        if now - self._asked_at < _ASKED_LATELY and now - self._usages_read_at > _USAGE_AGE:
            self._usages_read_at = now
            self.usages = {name: used for name in managers if (used := await self._usage(name)) is not None}

    # -- lookups

    def _all(self) -> dict[str, Observed]:
        return {**{each.record.name: each for each in self.observed.values()}, **self._created}

    def _one(self, name: str) -> Observed:
        found = self._all()
        if name not in found:
            raise NoSuchCluster(name, (*found,))
        return found[name]

    def _managers(self) -> dict[str, CMLCluster]:
        managers = {name: each.cluster for name, each in self._all().items() if each.cluster is not None}
        return {name: each for name, each in managers.items() if each.status != Status.closed}

    async def _usage(self, name: str) -> Usage | None:
        """Read the usage of a cluster. If that fails, return what is known."""
        with contextlib.suppress(*EXPECTED):
            self.usages[name] = await asyncio.to_thread(operations.usage, name)
        return self.usages.get(name)

    def manager_of(self, name: str) -> CMLCluster:
        """Return the manager of a running cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If it does not run.
        """
        each = self._one(name)
        if each.cluster is None or each.cluster.status != Status.running:
            status = self._describe(name, each)["status"]
            raise CMLError(f"cluster {name!r} is not running: its status is {status}")
        return each.cluster

    def record_of(self, name: str) -> Record | None:
        """Return a cluster's record. Return None if a cluster of the page has none yet, or has failed.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        each = self._one(name)
        if isinstance(each, CreatedCluster):
            cluster = self._managers().get(name)
            return None if cluster is None else cluster.manager.state.record_keeper.record
        return each.record

    # -- descriptions

    def describe(self) -> list[dict[str, Any]]:
        """Describe all clusters, by name. An error in one description does not affect the others."""
        self._asked_at = time.monotonic()
        described = []
        for name, each in sorted(self._all().items()):
            try:
                described.append(self._describe(name, each))
            except Exception as error:
                logger.debug("Cluster %s not described", name, exc_info=True)
                problem = f"it cannot be described: {type(error).__name__}: {error}"
                described.append(views.unmanaged(each.record, "unknown", problem))
        return described

    def _describe(self, name: str, each: Observed) -> dict[str, Any]:
        usage = self.usages.get(name)
        if isinstance(each, CreatedCluster) and each.failure is not None:
            return views.unmanaged(each.record, "failed", str(each.failure))
        if each.cluster is not None and (
            isinstance(each, CreatedCluster) or each.cluster.status == Status.running
        ):
            return views.managed(each.record, each.cluster, usage)
        finding = each.finding or Finding(State.UNKNOWN, "its scheduler was not contacted yet")
        status = operations.status_of(each.record, finding)
        problem = None if status in ("running", "starting") else finding.why
        return views.unmanaged(each.record, status, problem, usage)

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster with its sessions.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        each, record = self._one(name), self.record_of(name)
        usage, logs, sessions = Usage(), list[str](), list[dict[str, Any]]()
        if record is not None:
            usage = await self._usage(name) or Usage()
            logs = [*await asyncio.to_thread(operations.session_logs(record).paths)]
            sessions = views.recorded_sessions(record)
        if (cluster := self._managers().get(name)) is not None:
            sessions = views.sessions_of(cluster)
        has_dashboard = cluster is not None and cluster.manager.state.has_dashboard
        description = self._describe(name, each)
        return {
            **description,
            "sessions": sessions,
            "logs": logs,
            "usage": usage.to_json(),
            "client": f'Client("{description["address"]}")',
            "security": record is not None and record.security is not None,
            "dashboard_id": record.id if record is not None and has_dashboard else None,
        }

    async def ended(self, id: str | None = None) -> list[EndedCluster]:
        """Return the clusters that have ended, the last one first.

        Parameters
        ----------
        id : str, optional
            The id of the only one.

        Raises
        ------
        NoSuchCluster
            If no ended cluster has this id.
        """
        observed = [each for each in self.observed.values() if each.cluster is None and each.finding]
        dead = [each.record for each in observed if each.finding and each.finding.state is State.DEAD]
        found = await asyncio.to_thread(ended_clusters, dead)
        chosen = [each for each in found if id in (None, each.id)]
        if id is not None and not chosen:
            raise NoSuchCluster(id)
        return chosen

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
        name = given.name
        if name in self._created and name in self._managers():
            raise ClusterExists(name)
        cluster = CMLCluster.of_manager(Manager(given, maker=maker), asynchronous=True, quiet=True)
        own = self._created[name] = CreatedCluster(Record(name, maker=maker), cluster)
        own.task = asyncio.create_task(self._start(own, cluster))
        await asyncio.wait({own.task}, timeout=_PATIENCE)
        if own.failure is not None:
            if name not in self._managers():
                self._created.pop(name, None)
            raise own.failure
        return self._describe(name, own)

    async def _start(self, own: CreatedCluster, cluster: CMLCluster) -> None:
        try:
            await cluster
        except Exception as error:
            if not isinstance(error, CMLError):
                logger.exception("Cluster %s not started", own.record.name)
            own.failure = error
            if isinstance(error, ClusterExists) and self._created.get(own.record.name) is own:
                del self._created[own.record.name]  # which would hide the other one
            with contextlib.suppress(CMLError):
                await cluster.close()

    async def delete(self, name: str, user: str | None = None) -> None:
        """Stop all sessions of a cluster, or forget a failed cluster.

        Parameters
        ----------
        name : str
            The name of the cluster.
        user : str, optional
            The user who deletes it.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If CML did not stop some sessions.
        """
        each = self._one(name)
        created = self._created.get(name)
        if each.cluster is not None and (created or each.cluster.status == Status.running):
            each.cluster.manager.end_reason = operations.deleted_by(user)
            await each.cluster.close()
        elif (error := (await operations.end_all([each.record], user))[name]) is not None:
            raise error
        if created is not None and self._created.get(name) is created:
            del self._created[name]
