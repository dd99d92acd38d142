"""A Jupyter server extension that lists all clusters of the project in dask-labextension's sidebar.

By itself, the sidebar lists the clusters that it created. This adds the clusters in the project's records:
from notebooks, ``dask cml`` and other Jupyter servers. The Jupyter server is connected to all of them.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import dask
from distributed.core import Status
from jupyter_server.extension.application import ExtensionApp
from tornado.ioloop import IOLoop
from traitlets import Float

from dask_cml import compat
from dask_cml.cluster import CMLCluster
from dask_cml.core.adaptive import CMLAdaptive
from dask_cml.errors import CMLError
from dask_cml.observers import Observed, ObservedCluster, Observers
from dask_cml.records.record import Record
from dask_cml.sessions.here import this_session, this_user
from dask_cml.words import command

#: The sidebar identifies a cluster by an id, which should not change when the server restarts.
_IDS = uuid.UUID("c1a8f7d2-3f0e-5b3c-9a53-6f0c0d5f4e1b")

#: The options of clusters that NEW creates, as dask-labextension has them in its configuration.
_OF_NEW = {"forward-dashboard": True}


class SidebarExtension(ExtensionApp):
    """The extension that the Jupyter server loads and stops."""

    name = "dask_cml"
    interval = Float(2.0, help="Time between two reads of the clusters' records, in seconds.").tag(
        config=True
    )

    def initialize_handlers(self) -> None:
        """Start when the server runs and has loaded all other extensions."""
        self._sidebar: Sidebar | None = None
        IOLoop.current().add_callback(self._begin)

    def _begin(self) -> None:
        assert self.serverapp is not None
        manager = find_manager(self.serverapp.web_app.settings)
        if manager is None:
            self.log.info(
                "dask-labextension is missing, disabled or unsupported; the sidebar lists only clusters that "
                "it created. To check it, run `dask cml doctor`"
            )
            return
        make_cml_clusters()
        self._sidebar = Sidebar(manager, self.interval)
        self._sidebar.start()

    async def stop_extension(self) -> None:
        """Stop with the server. Clusters of other creators keep running."""
        if self._sidebar is not None:
            await self._sidebar.close()


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    return [{"module": __name__, "app": SidebarExtension}]


def find_manager(settings: Mapping[str, Any]) -> Any:
    """Return dask-labextension's ``DaskClusterManager``. Return None if it is missing or unsupported.

    Parameters
    ----------
    settings : mapping
        Settings of the server's web application.
    """
    # Newer releases keep it in the settings, others in a module. Importing that module would create the
    # clusters of `labextension.initial`, even if the extension is disabled.
    module = sys.modules.get("dask_labextension.manager")
    manager = settings.get("dask_cluster_manager", getattr(module, "manager", None))
    return None if compat.sidebar_lists(manager) is None else manager


def make_cml_clusters() -> None:
    """Let NEW create a CMLCluster where it can, unless the user has configured another cluster.

    Otherwise dask-labextension creates a LocalCluster in the session of the Jupyter server.
    """
    can_launch = this_session() is not None or dask.config.get("cml.platform", None) == "local"
    is_configured = dask.config.get("labextension.factory", None, config=dask.config.collect())
    if can_launch and not is_configured:
        factory = {"module": "dask_cml", "class": "CMLCluster", "args": [], "kwargs": _OF_NEW}
        dask.config.set({"labextension.factory": factory})


class ListedCluster(ObservedCluster):
    """A cluster of another process. SHUTDOWN calls :meth:`close` without asking the user."""

    def close(self, timeout: float | None = None) -> Any:
        """Shut the cluster down.

        Raises
        ------
        CMLError
            If another user created the cluster.
        """
        record, user = self.sharing.record, this_user()
        if record is not None and record.maker.user not in (None, user):
            raise CMLError(
                f"user {record.maker.user} created cluster {record.name!r}: to shut it down, run "
                f"{command('delete', record.name)}"
            )
        self.end_reason = f"shut down in JupyterLab's sidebar by {self.sharing.who}"
        return self.shutdown(timeout)


class Sidebar(Observers):
    """Keeps dask-labextension's list in step with the records of the project's clusters.

    Parameters
    ----------
    manager : DaskClusterManager
        The result of `find_manager`.
    interval : float
        Time between two reads of the records, in seconds.

    Examples
    --------
    >>> sidebar = Sidebar(manager)  # doctest: +SKIP
    >>> sidebar.start()  # doctest: +SKIP
    >>> await sidebar.close()  # doctest: +SKIP
    """

    def __init__(self, manager: Any, interval: float = 2.0) -> None:
        super().__init__(interval)
        lists = compat.sidebar_lists(manager)
        assert lists is not None
        self._listed, self._names, self._adaptives = lists
        #: The clusters that were closed at the last poll. They stay listed until the next poll, because the
        #: sidebar removes them itself after SHUTDOWN.
        self._closed: set[str] = set()

    def connect(self, record: Record) -> CMLCluster:
        """Return an object that forwards the dashboard to a port of this machine, for the sidebar."""
        return ListedCluster(
            name=record.name, create_mode="connect", forward_dashboard=True, asynchronous=True, quiet=True
        )

    def joined(self, observed: Observed) -> None:
        """Add a cluster to the list."""
        id = _sidebar_id(observed.record)
        self._listed[id] = observed.cluster
        self._names[id] = observed.record.name

    async def close(self) -> None:
        """Stop observing. Clusters that the sidebar created stay listed, so that the server ends them."""
        for observed in self.observed.values():
            self._drop(_sidebar_id(observed.record))
        await super().close()

    async def polled(self) -> None:
        """Remove closed clusters, and adaptive scaling that has stopped because another process scales."""
        clusters = {id: cluster for id, cluster in self._listed.items() if isinstance(cluster, CMLCluster)}
        closed = {id for id, cluster in clusters.items() if cluster.status == Status.closed}
        for id in self._closed & closed:
            self._drop(id)
        self._closed = closed
        for id, adaptive in [*self._adaptives.items()]:
            if id in clusters and isinstance(adaptive, CMLAdaptive):
                with contextlib.suppress(CMLError):
                    await clusters[id].sharing.written()
                if clusters[id].groups.limits("default") is None:
                    self._adaptives.pop(id, None)

    def _drop(self, id: str) -> None:
        for listing in (self._listed, self._names, self._adaptives):
            listing.pop(id, None)


def _sidebar_id(record: Record) -> str:
    """Return the id of a cluster in the sidebar."""
    return str(uuid.uuid5(_IDS, record.id))
