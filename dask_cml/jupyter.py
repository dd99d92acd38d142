"""A Jupyter server extension: all clusters of the project in dask-labextension's sidebar.

By itself the sidebar lists what it has made. This adds those of the project's records, made in a notebook, by
``dask cml`` or by another Jupyter server, each with a manager of its own in the Jupyter server.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed.core import Status
from jupyter_server.extension.application import ExtensionApp
from tornado.ioloop import IOLoop
from traitlets import Float

from dask_cml.aio import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.errors import CMLError
from dask_cml.manager.at_exit import unclosed
from dask_cml.records import probe, store
from dask_cml.records.record import Record

logger = logging.getLogger(__name__)

#: A scheduler that did not answer is asked again after so long, or when its record changes.
_RETRY = 15.0
#: So long a cluster that was closed stays in the list: whoever has pressed SHUTDOWN takes it out himself.
_GRACE = 1.0
#: So long one that the sidebar has made stays there when it has ended otherwise, for SHUTDOWN to find it.
_ENDED = 30.0
#: One whose scheduler is gone is ended by its managers, if they can see it; after so long it is left.
_LOST = 30.0
#: The sidebar knows a cluster by its id, which should be the same after the server has started again.
_IDS = uuid.UUID("c1a8f7d2-3f0e-5b3c-9a53-6f0c0d5f4e1b")
#: What becomes of clusters that end meanwhile, or of records that are wrong, is no error of the server.
_EXPECTED = (CMLError, OSError, asyncio.TimeoutError, ValueError, TypeError)


class SidebarExtension(ExtensionApp):
    """What the Jupyter server loads and stops."""

    name = "dask_cml"
    interval = Float(2.0, help="Seconds between two looks at the records of the clusters.").tag(config=True)

    def initialize_handlers(self) -> None:
        """Begin as soon as the server runs, when all other extensions are loaded."""
        self._sidebar: Sidebar | None = None
        IOLoop.current().add_callback(self._begin)

    def _begin(self) -> None:
        assert self.serverapp is not None
        manager = find_manager(self.serverapp.web_app.settings)
        if manager is None:
            self.log.info(
                "dask-cml: dask-labextension is not loaded, or not as it is known here, so that it lists no "
                "more clusters than it makes itself"
            )
            return
        self._sidebar = Sidebar(manager, self.interval)
        self._sidebar.start()

    async def stop_extension(self) -> None:
        """End with the server; the clusters that others have made run on."""
        if self._sidebar is not None:
            await self._sidebar.close()


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    return [{"module": __name__, "app": SidebarExtension}]


def find_manager(settings: Mapping[str, Any]) -> Any:
    """Return dask-labextension's ``DaskClusterManager``; None if there is none that is known here.

    Parameters
    ----------
    settings : mapping
        Of the server's web application.
    """
    # Newer releases keep it in the settings, the others in a module; to import that would make the clusters
    # of `labextension.initial`, also where the extension is disabled.
    module = sys.modules.get("dask_labextension.manager")
    manager = settings.get("dask_cluster_manager", getattr(module, "manager", None))
    parts = [getattr(manager, name, None) for name in ("_clusters", "_cluster_names", "_adaptives")]
    return manager if all(isinstance(part, dict) for part in parts) else None


@dataclass
class _Entry:
    """A cluster of the records that nobody else in this process manages."""

    record: Record
    cluster: CMLCluster | None = None
    task: asyncio.Task[None] | None = None
    not_before: float = 0.0
    lost_since: float | None = None

    @property
    def id(self) -> str:
        return str(uuid.uuid5(_IDS, self.record.id))


class Sidebar:
    """Keep what dask-labextension lists in step with the records of the project's clusters.

    Each cluster is looked after by a task of its own, so that none waits for another's scheduler.

    Parameters
    ----------
    manager : DaskClusterManager
        As `find_manager` returns it.
    interval : float
        Seconds between two looks at the records.

    Examples
    --------
    >>> sidebar = Sidebar(manager)  # doctest: +SKIP
    >>> sidebar.start()  # doctest: +SKIP
    >>> await sidebar.close()  # doctest: +SKIP
    """

    def __init__(self, manager: Any, interval: float = 2.0) -> None:
        self._manager = manager
        self._interval = interval
        self._entries: dict[str, _Entry] = {}
        self._ended_since: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. To be called in the event loop."""
        self._looking = asyncio.create_task(self._look_for_ever())

    async def close(self) -> None:
        """Take what was added out of the list again, and leave these clusters as they are."""
        await cancel(self._looking)
        entries = self._entries.values()
        await cancel(*[entry.task for entry in entries])
        await asyncio.gather(*[self._leave(entry, grace=0) for entry in entries], return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
            except _EXPECTED as error:
                logger.warning("The records of the clusters cannot be read: %s", error)
            except Exception:
                logger.exception("The list of clusters is not kept")
            await asyncio.sleep(self._interval)

    async def _look(self) -> None:
        records = {record.id: record for record in await asyncio.to_thread(store.records)}
        managed = {cluster.options.name for cluster in unclosed()}
        for key, record in records.items():
            if key not in self._entries and record.name not in managed:
                self._entries[key] = _Entry(record)
        for key, entry in [*self._entries.items()]:
            if entry.task is not None and not entry.task.done():
                continue
            if key not in records and entry.cluster is None:
                del self._entries[key]
                continue
            if key in records and entry.record != records[key]:
                entry.record, entry.not_before = records[key], 0.0
            entry.task = asyncio.create_task(self._tend(entry, there=key in records))
        self._drop_ended()
        self._drop_stopped()

    async def _tend(self, entry: _Entry, there: bool) -> None:
        """List a cluster or take it out of the list, as it is now."""
        try:
            cluster = entry.cluster
            if cluster is None:
                if there and time.monotonic() >= entry.not_before:
                    await self._list(entry)
            elif not there or cluster.status == Status.closed or await _is_lost(entry):
                await self._leave(entry)
        except _EXPECTED as error:
            logger.info("The cluster %s is not listed: %s", entry.record.name, error)
        except Exception:
            logger.exception("The cluster %s is not listed", entry.record.name)

    async def _list(self, entry: _Entry) -> None:
        entry.not_before = time.monotonic() + _RETRY
        if not await probe.is_alive(entry.record):
            return
        cluster = CMLCluster._from_record(
            entry.record,
            shutdown_on_close=False,
            forward_dashboard=True,
            asynchronous=True,
            quiet=True,
            _observes=True,
        )
        entry.cluster = cluster
        await cluster
        self._manager._clusters[entry.id] = cluster
        self._manager._cluster_names[entry.id] = cluster.options.name

    async def _leave(self, entry: _Entry, grace: float = _GRACE) -> None:
        cluster = entry.cluster
        if cluster is None:
            return
        ends = cluster.leave()
        if ends is not None:
            await ends
        if self._manager._clusters.get(entry.id) is cluster:
            await asyncio.sleep(grace)
            self._drop(entry.id)
        entry.cluster, entry.not_before = None, time.monotonic() + _RETRY

    def _drop_ended(self) -> None:
        """Take out of the list what the sidebar has made and what has ended otherwise."""
        listed = self._manager._clusters
        added = {entry.id for entry in self._entries.values()}
        now = time.monotonic()
        for cluster_id, cluster in [*listed.items()]:
            ended = isinstance(cluster, CMLCluster) and cluster.status == Status.closed
            if not ended or cluster_id in added:
                self._ended_since.pop(cluster_id, None)
            elif now - self._ended_since.setdefault(cluster_id, now) > _ENDED:
                self._drop(cluster_id)
        self._ended_since = {key: since for key, since in self._ended_since.items() if key in listed}

    def _drop_stopped(self) -> None:
        """Forget adaptive scaling that has ended because another manager scales."""
        adaptives = self._manager._adaptives
        for cluster_id, adaptive in [*adaptives.items()]:
            cluster = self._manager._clusters.get(cluster_id)
            if isinstance(cluster, CMLCluster) and getattr(adaptive, "state", None) == "stopped":
                del adaptives[cluster_id]

    def _drop(self, cluster_id: str) -> None:
        manager = self._manager
        for part in (manager._clusters, manager._cluster_names, manager._adaptives):
            part.pop(cluster_id, None)


async def _is_lost(entry: _Entry) -> bool:
    """Whether a cluster's scheduler has been gone for long, though the cluster's record is there."""
    assert entry.cluster is not None
    if entry.cluster._client.connected or await probe.is_alive(entry.record):
        entry.lost_since = None
        return False
    entry.lost_since = entry.lost_since or time.monotonic()
    return time.monotonic() - entry.lost_since > _LOST
