"""The clusters of the project: the web UI keeps what users create in it, and shows all by their files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from distributed.core import Status
from tornado.web import HTTPError

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.dashboard.proxy import OpenComm
from dask_cml.display import status_of
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML, reason_of
from dask_cml.layout import SCHEDULER
from dask_cml.observers import (
    Observers,
    changing,
    has_dashboard,
    may_connect,
    open_dashboard,
)
from dask_cml.options import SessionSize, setting
from dask_cml.options.table import ARGUMENTS
from dask_cml.options.unattended import SETTLED, unattended
from dask_cml.output import get_logger
from dask_cml.protocol import Report
from dask_cml.records import history, operations, store
from dask_cml.records.history import EndedCluster, ended_clusters, usage_of
from dask_cml.records.store import Finding, Maker, Record, State, cluster_address
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import Session
from dask_cml.sessions.workers_api import load_platform
from dask_cml.sharing.sharing import Sharing
from dask_cml.timing import timing
from dask_cml.words import idle, pending, scheduler_words

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

    @property
    def description(self) -> dict[str, Any]:
        """What the files do not say of it."""
        if self.failure is not None:
            return {"status": "failed", "words": "failed", "problem": reason_of(self.failure), "groups": []}
        if self.status in (Status.closing, Status.failed):
            problem = "CML did not stop some sessions; delete the cluster again"
            failed = {"problem": self.problem or problem} if self.status == Status.failed else {}
            return {"status": "closing", "words": "closing", "kept": True, **failed}
        return {"kept": True}

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
        #: Why the web UI cannot create clusters.
        self._obstacle = ""
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self._obstacle = str(error)

    @property
    def problem(self) -> str | None:
        """Why the web UI cannot create or read clusters, or None."""
        return reason_of(self.unread) if self.unread else self._obstacle or None

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
        cluster, described = self.kept.get(record.id), _described(record, self._finding(record))
        return described if cluster is None else described | cluster.description

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster as it is now, with its sessions.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name.
        """
        known = self.find(name)

        def read() -> tuple[Record, Finding, dict[str, Any]]:
            record = store.refreshed(known)
            finding = store.seen(record, self._listing)
            usage = usage_of(record, history.end_of(record))
            more = {
                # Of a cluster that has ended since the last poll, the last known record lists some.
                "sessions": [] if store.is_removed(record) else _sessions_of(record, finding),
                "logs": [*record.logs().paths()],
                "session_hours": usage.total.hours,
                "usage": usage.to_json(),
                "cost": usage.total.cost,
            }
            return record, finding, more

        record, finding, more = await asyncio.to_thread(read)
        self.findings[record.id] = finding
        return {
            **self._describe(record),
            **more,
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
        HTTPError
            If no ended cluster has this id.
        """
        dead = [
            record
            for record in self.records.values()
            if record.id not in self.kept and self._finding(record).state is State.DEAD
        ]
        clusters = await asyncio.to_thread(ended_clusters, dead)
        chosen = [cluster for cluster in clusters if id in (None, cluster.id)]
        if id is not None and not chosen:
            raise HTTPError(404, "The history has no cluster with the id %r", id)
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

    async def create(self, options: Mapping[str, Any], user: str | None = None) -> str:
        """Create a cluster that shuts down with this process, and return its name.

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
                self._forget(id)
            raise cluster.failure
        return cluster.name

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
            cluster.ending.reason = reason
            await cluster.shutdown()
        elif (error := (await operations.end_all([record], reason))[name]) is not None:
            raise error
        self._forget(record.id)

    def _forget(self, id: str) -> None:
        """Show a cluster no more, of which nothing is left."""
        self.kept.pop(id, None)
        # A thread may read the last ones.
        self.records = {known: record for known, record in self.records.items() if known != id}


# -- descriptions by files, for JSON


def _described(record: Record, finding: Finding) -> dict[str, Any]:
    """Describe a cluster."""
    row = operations.description(record, finding)
    status = row["status"]
    runs = status in ("running", "starting")
    groups = [group | group["size"] for group in operations.worker_groups(record)] if runs else []
    n_wanted, n_arrived = (sum(group[key] for group in groups) for key in ("n_workers", "n_arrived"))
    words = _words(record, row["idle"], n_wanted - n_arrived) if runs else []
    n_launched = sum(key != SCHEDULER for key in record.sessions.values())
    usage = usage_of(record, time.time()).to_json() if runs else None
    return row | {
        "created": record.created.isoformat(),
        "most_age": record.scheduler.hours and record.scheduler.hours * 3600,
        "session_hours": usage and usage["total"]["hours"],
        "usage": usage,
        "words": ", ".join([status, *words]),
        "problem": None if status == "starting" else row["problem"],
        "groups": groups,
        "n_workers": n_wanted if runs else n_launched,
        "n_arrived": n_arrived,
        "kept": False,
        "tasks_done": record.scheduler.activity.get("tasks_done") if status == "running" else None,
    }


def _words(record: Record, idle_for: float | None, n_absent: int) -> list[str]:
    """Return what is special about a cluster that starts or runs, in words."""
    waits = {launch.key: seconds for launch, seconds in operations.queued(record).items()}
    launched = [launch.launched for launch in record.launches.values() if launch.key == SCHEDULER]
    is_another = launched and record.scheduler.number and record.scheduler.address is not None
    restarted = time.time() - launched[-1] if is_another else None
    scheduler = scheduler_words(waits.pop(SCHEDULER, None), restarted)
    return [*filter(None, [idle(idle_for, timing.idle), scheduler, pending(waits.values(), n_absent)])]


def _sessions_of(record: Record, finding: Finding) -> list[dict[str, Any]]:
    """Describe a cluster's sessions, the scheduler's first, by the keeper's report or else by their files."""
    lives = finding.state is State.ALIVE
    sessions = [*map(Session.from_json, Report.read(record.scheduler.report).sessions)] if lives else []
    arrived = record.scheduler.workers.sessions if lives else ()
    if not sessions:
        launches = sorted(record.launches.values(), key=lambda launch: (launch.key != SCHEDULER, launch.key))
        sessions = [_launched(record, launch, lives) for launch in launches]
    return [
        {
            "role": session.role,
            "name": session.name,
            "id": session.id,
            "status": status_of(session, arrived),
            "age": session.age,
            **asdict(session.size),
            "link": session.link,
        }
        for session in sessions
    ]


def _launched(record: Record, launch: Launch, lives: bool) -> Session:
    """Return a session that no manager reports, of a cluster whose scheduler may live."""
    status = "running" if lives and launch.started else "unknown"
    role, name, url = "worker", launch.key, None
    if launch.key == SCHEDULER:
        role, name, url = "scheduler", f"{record.name}-scheduler", record.scheduler.app_url
    since = datetime.fromtimestamp(launch.launched, timezone.utc)
    return Session(launch.id, role, name, status, None, url, since, launch.size or SessionSize(0, 0))
