"""The clusters of the project: the web UI keeps what users create in it, and shows all by their files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from distributed.core import Status

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.dashboard.proxy import OpenComm
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML
from dask_cml.observers import (
    Observers,
    changing,
    has_dashboard,
    may_connect,
    open_dashboard,
)
from dask_cml.options import setting
from dask_cml.options.table import ARGUMENTS
from dask_cml.options.unattended import SETTLED, unattended
from dask_cml.output import get_logger
from dask_cml.records import history, liveness, operations, store
from dask_cml.records.history import EndedCluster, ended_clusters
from dask_cml.records.liveness import Finding, State
from dask_cml.records.record import Maker, Record, cluster_address
from dask_cml.records.usage import Usage, usage_of
from dask_cml.serve import views
from dask_cml.sessions.workers_api import load_platform
from dask_cml.sharing.sharing import Sharing

logger = get_logger(__name__)

#: Seconds. If CML refuses a launch within this time, the request fails. After that, the cluster shows why.
_PATIENCE = 3.0
#: Seconds to shut down the clusters of the web UI. Kubernetes grants 30.
_GRACE = 25.0
#: The arguments of a new cluster.
_ALLOWED = tuple(name for name in ARGUMENTS if name not in SETTLED)
_UNSEEN = Finding(State.UNKNOWN, "its scheduler has not answered yet")


class ServedCluster(CMLCluster):
    """A cluster that shuts down with the web UI, because a user has created it there.

    Parameters
    ----------
    user : str or None
        The user who creates it.
    **options
        Arguments of :class:`dask_cml.CMLCluster`.

    Attributes
    ----------
    task : asyncio.Task
        Starts the cluster, or connects to it.
    failure : Exception or None
        Why it did not start.
    """

    task: asyncio.Task[None]
    failure: Exception | None = None

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
        #: The clusters that shut down with the web UI, by the ids of their records.
        self.kept: dict[str, ServedCluster] = {}
        #: Why the web UI cannot create clusters, or None.
        self.problem: str | None = None
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self.problem = str(error)

    # -- observers

    async def polled(self) -> None:
        """Forget the own clusters that have ended, and keep those of a web UI that was killed."""
        for id, cluster in [*self.kept.items()]:
            if cluster.task.done() and cluster.failure is None and cluster.status == Status.closed:
                del self.kept[id]
        for id, record in self.records.items():
            is_left = record.maker.serves and record.maker.lives() is False
            if is_left and may_connect(record, self.findings[id]) and id not in self.kept:
                options = {"create_mode": "connect", "shutdown_on_close": True}
                cluster = self.kept[id] = ServedCluster(None, name=record.name, **options)
                cluster.sharing.new_record = record
                cluster.task = asyncio.create_task(self._take_over(id, cluster))

    async def _take_over(self, id: str, cluster: ServedCluster) -> None:
        try:
            await cluster
        except Exception as error:  # of Dask, too: the next poll tries again
            logger.info("Cluster %s not managed: %s", cluster.name, error)
            self.kept.pop(id, None)
            await cluster.leave()

    async def close(self) -> None:
        """Stop reading, and shut down the clusters of the web UI. The others keep running.

        Raises
        ------
        CMLError
            If CML did not stop some sessions in time. The message names their clusters.
        """
        await super().close()
        await cancel(*(cluster.task for cluster in self.kept.values()))
        ending = {cluster.name: asyncio.ensure_future(cluster.close()) for cluster in self.kept.values()}
        if ending:
            await asyncio.wait(ending.values(), timeout=_GRACE)
        left = [name for name, task in ending.items() if not task.done() or task.exception() is not None]
        await cancel(*ending.values())
        if left:
            raise CMLError(f"some sessions of these clusters were not stopped: {', '.join(left)}")

    # -- lookups

    def _by_name(self) -> dict[str, Record]:
        new = [cluster.sharing.new_record for cluster in self.kept.values()]
        return {record.name: record for record in [*new, *self.records.values()]}

    def find(self, name: str) -> Record:
        """Return the last known record of a cluster.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        known = self._by_name()
        if name not in known:
            raise NoSuchCluster(name, (*known,))
        return known[name]

    def _finding(self, record: Record) -> Finding:
        return self.findings.get(record.id, _UNSEEN)

    def dashboard(self, name: str) -> OpenComm:
        """Return what opens a comm on which a cluster's scheduler serves its dashboard.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If it does not run, or has no dashboard.
        """
        record = self.find(name)
        if not has_dashboard(record, self._finding(record)):
            raise CMLError(f"cluster {name!r} has no dashboard now: try again later")
        return functools.partial(open_dashboard, record)

    # -- descriptions

    def describe(self) -> list[dict[str, Any]]:
        """Describe all clusters, by name."""
        return [self._describe(record) for _, record in sorted(self._by_name().items())]

    def _describe(self, record: Record) -> dict[str, Any]:
        kept, described = self.kept.get(record.id), views.described(record, self._finding(record))
        return described if kept is None else described | views.kept(kept, kept.failure)

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster as it is now, with its sessions.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        return await self._details(self.find(name))

    async def _details(self, known: Record) -> dict[str, Any]:
        def read() -> tuple[Record, Finding, Usage, list[str]]:
            record = store.refreshed(known)
            finding = liveness.seen(record, self._listing)
            end = time.time() if finding.state is State.ALIVE else history.end_of(record)
            return record, finding, usage_of(record, end), [*operations.session_logs(record).paths()]

        record, finding, usage, logs = await asyncio.to_thread(read)
        self.findings[record.id] = finding
        return {
            **self._describe(record),
            "sessions": views.sessions_of(record, finding),
            "logs": logs,
            "session_hours": usage.total.hours,
            "usage": usage.to_json(),
            "cost": usage.total.cost,
            "client": f'Client("{cluster_address(record.name)}")',
            "security": record.security is not None,
            "dashboard_id": record.id if has_dashboard(record, finding) else None,
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
        dead = [
            record
            for record in self.records.values()
            if record.id not in self.kept and self._finding(record).state is State.DEAD
        ]
        clusters = await asyncio.to_thread(ended_clusters, dead)
        if id is None:
            return clusters
        chosen = [cluster for cluster in clusters if cluster.id == id]
        if not chosen:
            raise NoSuchCluster(id)
        return chosen

    # -- changes

    @contextlib.asynccontextmanager
    async def changing(self, name: str) -> AsyncIterator[CMLCluster]:
        """Connect to a running cluster to change it, until its files show the change.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        CMLError
            If it does not run, or has no keys.
        """
        record = self.find(name)
        if record.id not in self.kept and record.security is None:
            raise CMLError(
                f"cluster {name!r} has no keys, so the web UI cannot tell it from another program at its "
                "address: change it in the notebook that created it"
            )
        if (status := self._describe(record)["status"]) != "running":
            raise CMLError(f"cluster {name!r} is {status}: try again later")
        async with changing(record) as cluster:
            yield cluster

    async def create(self, options: Mapping[str, Any], user: str | None = None) -> dict[str, Any]:
        """Create a cluster that shuts down with this process, and describe it with its sessions.

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
        id = cluster.sharing.new_record.id
        for earlier, other in [*self.kept.items()]:
            if other.name == cluster.name and other.failure is not None:
                del self.kept[earlier]
        self.kept[id] = cluster
        cluster.task = asyncio.create_task(self._start(id, cluster))
        await asyncio.wait({cluster.task}, timeout=_PATIENCE)
        if cluster.failure is not None:
            if cluster.status == Status.closed:
                self.kept.pop(id, None)
            raise cluster.failure
        return await self._details(cluster.sharing.new_record)

    async def _start(self, id: str, cluster: ServedCluster) -> None:
        try:
            await cluster
        except Exception as error:  # of Dask or the platform's library, too: the page shows it
            if not isinstance(error, (CMLError, OSError)):
                logger.exception("Cluster %s not started", cluster.name)
            cluster.failure = error
            if isinstance(error, ClusterExists):
                self.kept.pop(id, None)  # which would hide the existing cluster
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
        record = self.find(name)
        cluster, reason = self.kept.get(record.id), operations.deleted_by(user)
        if cluster is not None:
            cluster.end_reason = reason
            await cluster.shutdown()
            self.kept.pop(record.id, None)
        elif (error := (await operations.end_all([record], reason))[name]) is not None:
            raise error
        # A thread may read the last ones.
        self.records = {id: known for id, known in self.records.items() if id != record.id}
