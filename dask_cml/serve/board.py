"""All clusters of the project: those that this process keeps, and a manager for each of the others."""

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

from dask_cml.aio import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, NotOnCML
from dask_cml.manager.manager import Manager
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.observers import EXPECTED, Observed, Observers
from dask_cml.options import OPTION_NAMES, Options, setting
from dask_cml.options.unattended import unattended
from dask_cml.records import operations, probe
from dask_cml.records.probe import Finding
from dask_cml.records.record import Maker, Record
from dask_cml.records.usage import Usage
from dask_cml.serve import views
from dask_cml.serve.views import TaskRate
from dask_cml.sessions.workers_api import load_platform

logger = logging.getLogger(__name__)

#: A refusal that comes within so many seconds answers the request; a later one is shown with the cluster.
_PATIENCE = 3.0
#: Seconds within which the clusters that this process keeps must end with it. Kubernetes grants 30.
_GRACE = 25.0
#: Seconds for which what clusters have used is not read again, and nobody looks after whom it is not at all.
_USAGE_AGE, _LOOKED_AT = 10.0, 30.0
#: They say how long a cluster lives, or where this process shows its dashboard, and that is settled here.
_SETTLED: dict[str, Any] = {
    "create_mode": "create",
    "shutdown_on_close": True,
    "forward_dashboard": False,
}
#: The arguments that a new cluster may be given.
_ALLOWED = tuple(name for name in OPTION_NAMES if name not in _SETTLED)


@dataclass
class Kept:
    """A cluster that this process has created, or tried to.

    Parameters
    ----------
    cluster : CMLCluster
        Its manager.
    user : str or None
        The user who asked for it.
    created : str
        When, in ISO 8601.
    failure : Exception or None
        Why it did not start, or ended.
    starting : asyncio.Task or None
        Its start.
    """

    cluster: CMLCluster
    user: str | None
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    failure: Exception | None = None
    starting: asyncio.Task[None] | None = None


class Board(Observers):
    """Keep what the page creates, and observe the other clusters of the project.

    A cluster that another process has created gets a manager, which only looks as long as there are others.
    Without any other, it replaces lost workers and goes on to adapt, and yet keeps no orphan alive. What an
    earlier such process has created and left is kept from now on.

    Parameters
    ----------
    interval : float
        Seconds between two looks at the records.

    Examples
    --------
    >>> async def names():
    ...     board = Board()
    ...     board.start()
    ...     found = [cluster["name"] for cluster in board.clusters()]
    ...     await board.close()
    ...     return found
    >>> asyncio.run(names())
    []
    """

    def __init__(self, interval: float = 2.0) -> None:
        super().__init__(interval)
        self._kept: dict[str, Kept] = {}
        self._rates: dict[str, TaskRate] = {}
        self._usages: dict[str, tuple[float, Usage]] = {}
        self._looked_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        #: Why no cluster can be created, if that is known.
        self.problem: str | None = None
        try:
            load_platform(setting("platform"))
        except (NotOnCML, ValueError) as error:
            self.problem = str(error)

    def start(self) -> None:
        """Begin. To be called in the event loop."""
        super().start()
        self._reading = asyncio.create_task(self._read_usages())

    async def close(self) -> None:
        """Stop the clusters that this process keeps, and leave the others as they are.

        Raises
        ------
        CMLError
            If the platform did not stop sessions in time. It names their clusters.
        """
        await cancel(self._looking, self._reading, *(each.starting for each in self._kept.values()))
        ending = {name: asyncio.create_task(self._close(each)) for name, each in self._all_kept().items()}
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

    def _all_kept(self) -> dict[str, CMLCluster]:
        """Return the clusters that end with this process."""
        taken_up = {
            each.record.name: each.cluster
            for each in self.observed.values()
            if each.cluster is not None and each.cluster.shutdown_on_close
        }
        return {**taken_up, **self._created()}

    # -- observers

    async def examine(self, record: Record) -> Finding:
        """Find out whether a cluster runs, and whether it is dead if not."""
        return (await probe.judge([record]))[record.name]

    def manage(self, record: Record, **arguments: Any) -> CMLCluster:
        """Return a cluster, which is kept if an earlier process like this has created it."""
        keeps = bool(record.maker.serves) and record.maker.lives() is False
        return super().manage(record, shutdown_on_close=keeps, observes=not keeps, **arguments)

    def looked(self) -> None:
        """Count tasks, and drop what is gone."""
        now, managers = time.monotonic(), self._managers()
        for name, each in [*self._kept.items()]:
            if each.cluster.status == Status.closed and each.failure is None and each.starting is None:
                if (problem := each.cluster.manager.state.problem) is None:
                    del self._kept[name]  # it was deleted elsewhere
                else:
                    each.failure = CMLError(problem)
        self._rates = {name: self._rates.get(name, TaskRate()) for name in managers}
        for name, cluster in managers.items():
            self._rates[name].count(cluster.manager.state.tasks_done, now)

    def _managers(self) -> dict[str, CMLCluster]:
        observed = {each.record.name: each.cluster for each in self.observed.values() if each.cluster}
        return {**observed, **self._created()}

    def _created(self) -> dict[str, CMLCluster]:
        return {name: each.cluster for name, each in self._kept.items() if each.failure is None}

    async def _read_usages(self) -> None:
        """Read what the clusters have used, while somebody looks."""
        while True:
            if time.monotonic() - self._looked_at < _LOOKED_AT:
                for name in self._managers():
                    with contextlib.suppress(*EXPECTED):
                        await self._usage(name)
            await asyncio.sleep(self._interval)

    async def _usage(self, name: str) -> Usage:
        read, usage = self._usages.get(name, (-math.inf, Usage()))
        if time.monotonic() - read > _USAGE_AGE:
            usage = await asyncio.to_thread(operations.usage, name)
            self._usages[name] = time.monotonic(), usage
        return usage

    # -- what there is

    def clusters(self) -> list[dict[str, Any]]:
        """Describe all clusters, by name."""
        self._looked_at = time.monotonic()
        names = self._names()
        self._usages = {name: each for name, each in self._usages.items() if name in names}
        return [self._describe(name) for name in sorted(names)]

    async def details(self, name: str) -> dict[str, Any]:
        """Describe one cluster with its sessions.

        Raises
        ------
        NoSuchCluster
            If there is none of this name.
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
        if (kept := self._kept.get(name)) is not None:
            if kept.failure is not None:
                return views.failed(name, kept.created, kept.user, str(kept.failure))
            rate = self._rates.get(name, TaskRate())
            return views.managed(kept.cluster, kept.created, kept.user, True, rate, usage)
        if (observed := self._observed_as(name)) is not None:
            record, cluster = observed.record, observed.cluster
            if cluster is None or cluster.status != Status.running:
                return views.recorded(record, observed.finding, usage)
            rate = self._rates.get(name, TaskRate())
            keeps = cluster.shutdown_on_close
            return views.managed(cluster, record.created, record.maker.user, keeps, rate, usage)
        raise NoSuchCluster(name, (*self._names(),))

    def _record(self, name: str) -> Record | None:
        if (kept := self._kept.get(name)) is not None:
            return kept.cluster.manager.state.record if kept.failure is None else None
        observed = self._observed_as(name)
        return None if observed is None else observed.record

    def _observed_as(self, name: str) -> Observed | None:
        return next((each for each in self.observed.values() if each.record.name == name), None)

    def _names(self) -> set[str]:
        return {*self._kept, *(each.record.name for each in self.observed.values())}

    def manager_of(self, name: str) -> CMLCluster:
        """Return the manager of a running cluster.

        Raises
        ------
        NoSuchCluster
            If there is none of this name.
        CMLError
            If it does not run.
        """
        description = self._describe(name)
        cluster = self._managers().get(name)
        if cluster is None or cluster.status != Status.running:
            raise CMLError(f"the cluster {name!r} is not running: its status is {description['status']}")
        return cluster

    # -- what is done

    async def create(self, options: Mapping[str, Any], user: str | None = None) -> dict[str, Any]:
        """Create a cluster that this process keeps, and describe it.

        Parameters
        ----------
        options : mapping
            Arguments of :class:`dask_cml.CMLCluster`.
        user : str, optional
            The user who asks.

        Raises
        ------
        TypeError, ValueError
            For an option that is not allowed.
        CMLError
            If the platform refuses the cluster at once, or there is one of its name. A cluster that fails
            later is described as failed.
        """
        if unknown := [name for name in options if name not in _ALLOWED]:
            raise TypeError(f"invalid option {unknown[0]!r}: expected one of {', '.join(_ALLOWED)}")
        maker = Maker.this_process(user, serves=True)
        given = Options.read(**unattended(options), **_SETTLED).inheriting()
        cluster = CMLCluster.of_manager(
            lambda **more: Manager(given, maker=maker, **more), asynchronous=True, quiet=True
        )
        name = cluster.options.name
        if name in self._kept and self._kept[name].failure is None:
            await self._close(cluster)
            raise ClusterExists(name)
        kept = self._kept[name] = Kept(cluster, user)
        kept.starting = asyncio.create_task(self._start(kept))
        await asyncio.wait({kept.starting}, timeout=_PATIENCE)
        if kept.failure is not None:
            del self._kept[name]
            raise kept.failure
        return self._describe(name)

    async def _start(self, kept: Kept) -> None:
        try:
            await kept.cluster
        except Exception as error:
            if not isinstance(error, CMLError):
                logger.exception("Start of the cluster %s failed", kept.cluster.options.name)
            kept.failure = error
            with contextlib.suppress(CMLError):
                await self._close(kept.cluster)
        finally:
            kept.starting = None

    def scale(self, name: str, n: int, worker_group: str = DEFAULT_GROUP) -> None:
        """Scale a worker group; errors are those of `manager_of` and ``CMLCluster.scale``."""
        self.manager_of(name).scale(n, worker_group=worker_group)

    def adapt(
        self, name: str, minimum: int = 0, maximum: int | None = None, worker_group: str = DEFAULT_GROUP
    ) -> None:
        """Adapt a worker group; errors are those of `manager_of` and ``CMLCluster.adapt``."""
        most = math.inf if maximum is None else maximum
        self.manager_of(name).adapt(minimum, most, worker_group=worker_group)

    def stop_adapting(self, name: str, worker_group: str = DEFAULT_GROUP) -> None:
        """Keep the number of workers that there should be now."""
        cluster = self.manager_of(name)
        cluster.manager.wishes.stop_adapting(worker_group)

    async def delete(self, name: str) -> None:
        """Stop every session of a cluster, or forget one that has failed.

        Raises
        ------
        NoSuchCluster
            If there is none of this name.
        CMLError
            If sessions could not be stopped.
        """
        self._describe(name)
        if (kept := self._kept.get(name)) is not None:
            if kept.failure is None:
                await self._close(kept.cluster)
            self._kept.pop(name, None)
        elif (cluster := self._managers().get(name)) is not None and cluster.status == Status.running:
            await self._close(cluster)
        elif (record := self._record(name)) is not None:
            error = (await operations.end_all([record]))[name]
            if error is not None:
                raise error
