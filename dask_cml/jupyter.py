"""A Jupyter server extension that lists all clusters of the project in dask-labextension's sidebar.

By itself, the sidebar lists the clusters that it created. This adds the clusters in the project's records:
from notebooks, ``dask cml`` and other Jupyter servers. It shows them by their files.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import dask
from distributed.core import Status
from jupyter_server.extension.application import ExtensionApp
from tornado.ioloop import IOLoop
from traitlets import Float

from dask_cml import compat
from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.dashboard.proxy import DashboardForwarder
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.observers import EXPECTED, Observers, changing, open_dashboard
from dask_cml.output import get_logger
from dask_cml.records import operations, store
from dask_cml.records.store import Maker, Record, State, cluster_address
from dask_cml.sessions.here import this_session, this_user
from dask_cml.words import command

logger = get_logger(__name__)

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
        lists = find_lists(self.serverapp.web_app.settings)
        if lists is None:
            self.log.info(
                "dask-labextension is missing, disabled or unsupported; the sidebar lists only clusters that "
                "it created. To check it, run `dask cml doctor`"
            )
            return
        make_cml_clusters()
        self._sidebar = Sidebar(lists, self.interval)
        self._sidebar.start()

    async def stop_extension(self) -> None:
        """Stop with the server. Clusters of other creators keep running."""
        if self._sidebar is not None:
            await self._sidebar.close()


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    return [{"module": __name__, "app": SidebarExtension}]


def find_lists(settings: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """Return the dicts from which the sidebar shows clusters, names and adaptive scaling.

    Return None if dask-labextension is missing or unsupported.

    Parameters
    ----------
    settings : mapping
        Settings of the server's web application.
    """
    # Newer releases keep it in the settings, others in a module. Importing that module would create the
    # clusters of `labextension.initial`, even if the extension is disabled.
    module = sys.modules.get("dask_labextension.manager")
    return compat.sidebar_lists(settings.get("dask_cluster_manager", getattr(module, "manager", None)))


def make_cml_clusters() -> None:
    """Let NEW create a CMLCluster where it can, unless the user has configured another cluster.

    Otherwise dask-labextension creates a LocalCluster in the session of the Jupyter server.
    """
    can_launch = this_session() is not None or dask.config.get("cml.platform", None) == "local"
    is_configured = dask.config.get("labextension.factory", None, config=dask.config.collect())
    if can_launch and not is_configured:
        factory = {"module": "dask_cml", "class": "CMLCluster", "args": [], "kwargs": _OF_NEW}
        dask.config.set({"labextension.factory": factory})


class ListedCluster:
    """A cluster of another process, with what the sidebar uses of Dask's clusters.

    It is shown by its files. Only a change, and a pane of the dashboard, connects to it.

    Parameters
    ----------
    record : Record
        Its record.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        #: Whether :meth:`close` is under way. The sidebar removes the cluster itself after that.
        self.is_closing = False
        self._adapting: asyncio.Task[None] | None = None
        #: Changes are made in their order.
        self._changing = asyncio.Lock()
        self._forwarder = DashboardForwarder(lambda: open_dashboard(self.record))

    def show(self, record: Record) -> None:
        """Show a record, unless a newer one is known. A read may have begun before a change."""
        new, known = record.scheduler, self.record.scheduler
        if (new.number, new.revision) >= (known.number, known.revision):
            self.record = record

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """The workers. The sidebar counts them, and sums up their threads and their memory."""
        present = self.record.scheduler.workers
        workers = [{"nthreads": 0, "memory_limit": 0} for _ in range(present.workers)]
        if workers:
            workers[0] = {"nthreads": present.threads, "memory_limit": present.memory}
        return {"workers": dict(enumerate(workers))}

    @property
    def scheduler_address(self) -> str:
        """The address for clients."""
        return cluster_address(self.record.name)

    @property
    def dashboard_link(self) -> str:
        """The URL of the dashboard on this machine: the sidebar reaches no other one."""
        return self._forwarder.link

    async def scale(self, n: int) -> None:
        """Scale the default worker group."""
        async with self._changing, changing(self.record) as cluster:
            scaling: Any = cluster.scale(n)
            await scaling

    def adapt(self, minimum: int, maximum: int) -> Any:
        """Let the default worker group adapt soon. Return its bounds, as the sidebar shows them."""
        self._adapting = asyncio.create_task(self._adapt(minimum, maximum))
        return SimpleNamespace(minimum=minimum, maximum=maximum)

    async def _adapt(self, minimum: int, maximum: int) -> None:
        try:
            async with self._changing, changing(self.record) as cluster:
                cluster.adapt(minimum, maximum)
            self.show(await asyncio.to_thread(store.refreshed, self.record))
        except EXPECTED as error:  # the sidebar waits for none
            logger.warning("Cluster %s not changed: %s", self.record.name, error)

    @property
    def adapts(self) -> bool:
        """Whether the default worker group adapts, or is about to."""
        is_asked = self._adapting is not None and not self._adapting.done()
        return is_asked or DEFAULT_GROUP in self.record.bounds

    async def close(self) -> None:
        """Shut the cluster down. SHUTDOWN calls this without asking the user.

        Raises
        ------
        CMLError
            If another user created the cluster, or CML did not stop some sessions.
        """
        record, user = self.record, this_user()
        if record.maker.user not in (None, user):
            raise CMLError(
                f"user {record.maker.user} created cluster {record.name!r}: to shut it down, run "
                f"{command('delete', record.name)}"
            )
        reason = f"shut down in JupyterLab's sidebar by {Maker.this_process().words}"
        self.is_closing = True
        try:
            error = (await operations.end_all([record], reason=reason))[record.name]
        finally:
            self.is_closing = False
        if error is not None:
            raise error
        await self.leave()

    async def leave(self) -> None:
        """Serve the dashboard no more."""
        await cancel(self._adapting)
        await self._forwarder.close()


class Sidebar(Observers):
    """Keeps dask-labextension's list in step with the records of the project's clusters.

    Parameters
    ----------
    lists : tuple of dict
        The result of `find_lists`.
    interval : float
        Time between two reads of the records, in seconds.

    Examples
    --------
    >>> sidebar = Sidebar(lists)  # doctest: +SKIP
    >>> sidebar.start()  # doctest: +SKIP
    >>> await sidebar.close()  # doctest: +SKIP
    """

    def __init__(self, lists: tuple[dict[str, Any], ...], interval: float = 2.0) -> None:
        super().__init__(interval)
        self._listed, self._names, self._adaptives = lists
        #: What had ended at the last poll. It stays listed until the next one, because the sidebar removes it
        #: itself after SHUTDOWN.
        self._ended: set[str] = set()

    async def close(self) -> None:
        """Stop reading. Clusters that the sidebar created stay listed, so that the server ends them."""
        await super().close()
        for id, cluster in [*self._listed.items()]:
            if isinstance(cluster, ListedCluster):
                await self._drop(id)

    async def polled(self) -> None:
        """List clusters from when they run until they end, and drop adaptive scaling that has ended."""
        running = {str(uuid.uuid5(_IDS, record.id)): record for record in self.running_elsewhere()}
        for id, record in running.items():
            if id in self._listed:
                self._listed[id].show(record)
            else:
                self._listed[id], self._names[id] = ListedCluster(record), record.name
        ended = {id for id, cluster in self._listed.items() if self._has_ended(cluster)}
        for id in self._ended & ended:
            await self._drop(id)
        self._ended = ended
        for id in [*self._adaptives]:
            if not await _adapts(self._listed.get(id)):
                self._adaptives.pop(id, None)

    def _has_ended(self, cluster: Any) -> bool:
        if isinstance(cluster, CMLCluster):
            return cluster.status == Status.closed
        if not isinstance(cluster, ListedCluster) or cluster.is_closing:
            return False
        finding = self.findings.get(cluster.record.id)
        return finding is None or finding.state is State.DEAD

    async def _drop(self, id: str) -> None:
        cluster = self._listed.pop(id, None)  # SHUTDOWN may have removed it meanwhile
        self._names.pop(id, None)
        self._adaptives.pop(id, None)
        if isinstance(cluster, ListedCluster):
            await cluster.leave()


async def _adapts(cluster: Any) -> bool:
    """Return whether a cluster in the sidebar adapts, unless another process has ended that."""
    if isinstance(cluster, CMLCluster):
        with contextlib.suppress(CMLError):
            await cluster.sharing.written()
        return cluster.groups.limits(DEFAULT_GROUP) is not None
    return cluster.adapts if isinstance(cluster, ListedCluster) else True
