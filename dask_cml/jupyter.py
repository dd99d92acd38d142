"""A Jupyter server extension: all clusters of the project in dask-labextension's sidebar.

By itself the sidebar lists what it has made. This adds those of the project's records, made in a notebook, by
``dask cml`` or by another Jupyter server, each with a manager of its own in the Jupyter server.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from distributed.core import Status
from jupyter_server.extension.application import ExtensionApp
from tornado.ioloop import IOLoop
from traitlets import Float

from dask_cml.cluster import CMLCluster
from dask_cml.observers import Observed, Observers
from dask_cml.records.record import Record

#: So long a cluster that was closed stays in the list: whoever has pressed SHUTDOWN takes it out himself.
_GRACE = 1.0
#: So long one that the sidebar has made stays there when it has ended otherwise, for SHUTDOWN to find it.
_ENDED = 30.0
#: The sidebar knows a cluster by its id, which should be the same after the server has started again.
_IDS = uuid.UUID("c1a8f7d2-3f0e-5b3c-9a53-6f0c0d5f4e1b")


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


class Sidebar(Observers):
    """Keep what dask-labextension lists in step with the records of the project's clusters.

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
        super().__init__(interval)
        self._manager = manager
        self._ended_since: dict[str, float] = {}

    def manager(self, record: Record, **arguments: Any) -> CMLCluster:
        """Return a manager that carries the dashboard to a port of this machine, where the sidebar looks."""
        return super().manager(record, forward_dashboard=True, **arguments)

    def joined(self, observed: Observed) -> None:
        """List a cluster."""
        listed = _id(observed.record)
        self._manager._clusters[listed] = observed.cluster
        self._manager._cluster_names[listed] = observed.record.name

    async def left(self, observed: Observed, at_end: bool) -> None:
        """Take a cluster out of the list."""
        if self._manager._clusters.get(_id(observed.record)) is observed.cluster:
            await asyncio.sleep(0 if at_end else _GRACE)
            self._drop(_id(observed.record))

    def looked(self) -> None:
        """Take out of the list what has ended otherwise."""
        self._drop_ended()
        self._drop_stopped()

    def _drop_ended(self) -> None:
        """Take out of the list what the sidebar has made and what has ended otherwise."""
        listed = self._manager._clusters
        added = {_id(each.record) for each in self.observed.values()}
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


def _id(record: Record) -> str:
    """Return the id by which the sidebar knows a cluster."""
    return str(uuid.uuid5(_IDS, record.id))
