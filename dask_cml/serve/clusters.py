"""The clusters of the project: the web UI keeps what users create in it, and observes the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributed.core import Status

from dask_cml.cluster import CMLCluster
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML, reason_of
from dask_cml.observers import Observed, Observers
from dask_cml.options import setting
from dask_cml.options.table import ARGUMENTS
from dask_cml.options.unattended import SETTLED, unattended
from dask_cml.output import get_logger
from dask_cml.records import history, operations, store
from dask_cml.records.history import EndedCluster, ended_clusters
from dask_cml.records.liveness import Finding, State
from dask_cml.records.record import Maker, Record
from dask_cml.records.usage import Usage, usage_of
from dask_cml.serve import views
from dask_cml.serve.metrics import StartTimes
from dask_cml.sessions.workers_api import load_platform
from dask_cml.sharing.sharing import Sharing

logger = get_logger(__name__)

#: Seconds. If CML refuses a launch within this time, the request fails. After that, the cluster shows why.
_PATIENCE = 3.0
#: The arguments of a new cluster.
_ALLOWED = tuple(name for name in ARGUMENTS if name not in SETTLED)


class ServedCluster(CMLCluster):
    """A cluster that a user creates in the web UI.

    Parameters
    ----------
    user : str or None
        The user who creates it.
    **options
        Arguments of :class:`dask_cml.CMLCluster`.
    """

    def __init__(self, user: str | None, **options: Any) -> None:
        self._user = user
        super().__init__(**options, asynchronous=True, quiet=True)

    def _share(self, given: Mapping[str, Any]) -> Sharing:
        return Sharing(self, given, Maker.this_process(self._user, serves=True))


class ProjectClusters(Observers):
    """The clusters that users create in the web UI, and the other clusters of the project.

    The web UI keeps the clusters that were created there, also in an earlier web UI that was killed. It only
    shows the other clusters.

    Parameters
    ----------
    interval : float
        Time between two reads of the records, in seconds.

    Examples
    --------
    >>> async def names():
    ...     clusters = ProjectClusters()
    ...     clusters.start()
    ...     names = [cluster["name"] for cluster in clusters.describe()]
    ...     await clusters.close()
    ...     return names
    >>> asyncio.run(names())
    []
    """

    def __init__(self, interval: float = 2.0) -> None:
        super().__init__(interval)
        #: The usage of each running cluster at the last poll.
        self.usages: dict[str, Usage] = {}
        self.starts = StartTimes()
        #: Why the web UI cannot create clusters, or None.
        self.problem: str | None = None
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self.problem = str(error)

    # -- observers

    def connect(self, record: Record) -> CMLCluster:
        """Return an object for a running cluster. It keeps what was created in a web UI that was killed."""
        if not record.maker.serves or record.maker.lives() is not False:
            return super().connect(record)
        return CMLCluster(
            name=record.name, create_mode="connect", shutdown_on_close=True, asynchronous=True, quiet=True
        )

    async def polled(self) -> None:
        """Sum up what the clusters have used."""
        connected = self._connected()
        self.starts.count(connected.values())
        records = [self.find(name).record for name in connected]
        self.usages = await asyncio.to_thread(
            lambda: {record.name: usage_of(record, time.time()) for record in records}
        )

    # -- lookups

    def _by_name(self) -> dict[str, Observed]:
        return {observed.record.name: observed for observed in self.observed.values()}

    def find(self, name: str) -> Observed:
        """Return what is known of a cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        known = self._by_name()
        if name not in known:
            raise NoSuchCluster(name, (*known,))
        return known[name]

    def _connected(self) -> dict[str, CMLCluster]:
        connected = {}
        for name, observed in self._by_name().items():
            if observed.cluster is not None and observed.cluster.status != Status.closed:
                connected[name] = observed.cluster
        return connected

    def running(self, name: str) -> CMLCluster:
        """Return a running cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If it does not run, or has no keys.
        """
        observed = self.find(name)
        if observed.cluster is None and observed.record.security is None:
            raise CMLError(
                f"cluster {name!r} has no keys, so the web UI cannot tell it from another program at its "
                "address: change it in the notebook that created it"
            )
        if observed.cluster is None or observed.cluster.status != Status.running:
            status = self._describe(observed)["status"]
            what = "is not connected to the web UI yet" if status == "running" else f"is {status}"
            raise CMLError(f"cluster {name!r} {what}: try again later")
        return observed.cluster

    # -- descriptions

    def describe(self) -> list[dict[str, Any]]:
        """Describe all clusters, by name. An error in one description does not affect the others."""
        described = []
        for name, observed in sorted(self._by_name().items()):
            try:
                described.append(self._describe(observed))
            except Exception as error:  # the record is what another process has written
                logger.debug("Cluster %s not described", name, exc_info=True)
                problem = f"it cannot be described: {type(error).__name__}: {error}"
                described.append(views.unconnected(observed.record, "unknown", problem))
        return described

    def _describe(self, observed: Observed) -> dict[str, Any]:
        record, cluster = observed.record, observed.cluster
        usage = self.usages.get(record.name)
        if observed.failure is not None:
            return views.unconnected(record, "failed", reason_of(observed.failure))
        if cluster is not None and (observed.owned or cluster.status == Status.running):
            return views.connected(record, cluster, usage)
        finding = observed.finding or Finding(State.UNKNOWN, "its scheduler was not contacted yet")
        status = operations.status_of(record, finding)
        problem = None if status in ("running", "starting") else finding.why
        return views.unconnected(record, status, problem, usage)

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster with its sessions.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        observed, cluster = self.find(name), self._connected().get(name)
        record = await asyncio.to_thread(store.refreshed, observed.record)
        logs = await asyncio.to_thread(operations.session_logs(record).paths)
        has_dashboard = cluster is not None and cluster._has_dashboard
        description = self._describe(observed)
        until = time.time()
        if description["status"] in ("stale", "not answering"):
            until = await asyncio.to_thread(history.end_of, record)
        usage = usage_of(record, until)
        return {
            **description,
            "sessions": views.sessions_of(cluster) if cluster else views.recorded_sessions(record),
            "logs": [*logs],
            "usage": usage.to_json(),
            "cost": usage.total.cost,
            "client": f'Client("{description["address"]}")',
            "security": record.security is not None,
            "dashboard_id": record.id if has_dashboard else None,
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
        dead = []
        for observed in self.observed.values():
            finding = observed.finding
            if observed.cluster is None and finding is not None and finding.state is State.DEAD:
                dead.append(observed.record)
        clusters = await asyncio.to_thread(ended_clusters, dead)
        if id is None:
            return clusters
        chosen = [cluster for cluster in clusters if cluster.id == id]
        if not chosen:
            raise NoSuchCluster(id)
        return chosen

    # -- changes

    async def adapt(self, name: str, **limits: Any) -> None:
        """Adapt a worker group of a running cluster, see :meth:`CMLCluster.adapt`."""
        cluster = self.running(name)
        cluster.adapt(**limits)
        await cluster.sharing.written()

    async def stop_adapting(self, name: str, group: str) -> None:
        """Keep the number of sessions of a running cluster's worker group."""
        cluster = self.running(name)
        cluster.groups.options(group)  # which must exist
        cluster._stop_adapting(group)
        await cluster.sharing.written()

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
        cluster = ServedCluster(user, **unattended(options))
        record = cluster.sharing.new_record
        if record.name in self._connected():
            raise ClusterExists(record.name)
        earlier = self._by_name().get(record.name)
        if earlier is not None and earlier.failure is not None:
            del self.observed[earlier.record.id]
        observed = self.observed[record.id] = Observed(record, cluster)
        observed.task = asyncio.create_task(self._start(observed, cluster))
        await asyncio.wait({observed.task}, timeout=_PATIENCE)
        if observed.failure is not None:
            if cluster.status == Status.closed:
                self.observed.pop(record.id, None)
            raise observed.failure
        return self._describe(observed)

    async def _start(self, observed: Observed, cluster: CMLCluster) -> None:
        try:
            await cluster
        except Exception as error:  # of Dask or the platform's library, too: the page shows it
            if not isinstance(error, (CMLError, OSError)):
                logger.exception("Cluster %s not started", observed.record.name)
            observed.failure, observed.record = error, replace(observed.record, launches={})
            if isinstance(error, ClusterExists):
                self.observed.pop(observed.record.id, None)  # which would hide the existing cluster
            with contextlib.suppress(CMLError):
                await cluster.shutdown()

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
        observed = self.find(name)
        cluster = observed.cluster
        if cluster is not None and (observed.owned or cluster.status == Status.running):
            cluster.end_reason = operations.deleted_by(user)
            await cluster.shutdown()
        else:
            errors = await operations.end_all([observed.record], user)
            error = errors[name]
            if error is not None:
                raise error
        self.observed.pop(observed.record.id, None)
