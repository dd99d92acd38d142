"""The sessions that a process has launched for a cluster, or adopted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dask_cml.cancellation import within
from dask_cml.core.interface import Cluster
from dask_cml.output import Logger
from dask_cml.sessions.process import CMLWorker
from dask_cml.sessions.session import CMLProcess, Phase
from dask_cml.timing import timing

logger = Logger(__name__)


def connected_names(cluster: Cluster) -> set[str]:
    """Return the names of all Dask workers that are connected to a cluster's scheduler."""
    return {str(info["name"]) for info in [*cluster.scheduler_info["workers"].values()]}


def said_by(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a Dask worker says of itself, see :mod:`dask_cml.worker.process`."""
    return worker.get("cml") or {}


class Processes:
    """The scheduler and the workers of a cluster that this process keeps.

    Parameters
    ----------
    cluster : Cluster
        The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def launched(self) -> list[CMLProcess]:
        """The scheduler and the workers that were launched."""
        scheduler = self._cluster.scheduler
        processes: list[CMLProcess] = [scheduler] if isinstance(scheduler, CMLProcess) else []
        processes += self.workers()
        return [process for process in processes if process.info.get("id")]

    def workers(self) -> list[CMLWorker]:
        """Return the workers on sessions of the platform, wanted or not."""
        return [worker for worker in [*self._cluster.workers.values()] if isinstance(worker, CMLWorker)]

    @property
    def others(self) -> list[str]:
        """The names of a subclass's workers that are no sessions of the platform."""
        workers = [*self._cluster.workers.items()]
        return [name for name, worker in workers if not isinstance(worker, CMLWorker)]

    def wanted(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that were launched, of one group or of all."""
        spec = self._cluster.worker_spec
        names = spec if group is None else {*self._cluster.groups.workers(group)}
        return [worker for worker in self.workers() if worker.name in names]

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        return self._cluster.groups.arrived(connected_names(self._cluster), group)

    def absent(self, group: str) -> list[str]:
        """Return the wanted workers that are not connected: queued workers first, then the newest."""
        arrived = self.arrived(group)
        workers = self._cluster.workers
        absent = [name for name in reversed(self._cluster.groups.workers(group)) if name not in arrived]
        queued = [name for name in absent if getattr(workers.get(name), "waits_for", None) is not None]
        return queued + [name for name in absent if name not in queued]

    def queued(self, group: str | None = None) -> list[CMLWorker]:
        """Return the wanted workers that are queued."""
        workers = self.wanted(group)
        return [worker for worker in workers if not worker.seen and worker.phase is Phase.QUEUED]

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the wanted workers that are queued have waited, in seconds."""
        return [worker.waits_for for worker in self.queued(group) if worker.waits_for is not None]

    async def close_others(self, names: Sequence[str]) -> None:
        """Close a subclass's workers that are no sessions of the platform."""
        if not names:
            return
        closing = asyncio.gather(
            *(self._cluster.workers.pop(name).close() for name in names), return_exceptions=True
        )
        try:
            results = await within(timing.stop, closing)
        except asyncio.TimeoutError as error:
            results = [error] * len(names)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("Worker %s not closed: %r", name, result)

    def drop(self, names: Iterable[str]) -> None:
        """Want fewer workers, without these names of sessions or Dask workers."""
        sessions = {name: worker.name for worker in self.workers() for name in worker.dask_names}
        self._cluster.groups.drop(sessions.get(name, name) for name in names)
