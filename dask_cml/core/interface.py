"""What the parts of the core use of their cluster."""

from __future__ import annotations

import asyncio
import enum
from typing import Any, Protocol

from distributed.core import Status

from dask_cml.core.groups import Groups
from dask_cml.options import Options
from dask_cml.sessions.plan import Place
from dask_cml.sessions.workers_api import WorkersAPI


class Role(enum.Enum):
    """What a process does for a cluster."""

    #: It has not started, or is closed.
    NONE = "none"
    #: It launches and stops the sessions.
    KEEPER = "keeper"
    #: It shows what another process does, and asks it for changes.
    FOLLOWER = "follower"


class How(enum.Enum):
    """How a process ends its part in a cluster."""

    #: All sessions are stopped.
    SHUT_DOWN = "shut down"
    #: The sessions run on, for other processes.
    LEAVE = "leave"


class Cluster(Protocol):
    """A SpecCluster on sessions, see :class:`dask_cml.CMLCluster`.

    Attributes
    ----------
    options : Options
        The cluster's options.
    api : WorkersAPI
        Launches, lists and stops sessions.
    groups : Groups
        The worker groups, and the wanted workers.
    sharing : dask_cml.sharing.sharing.Sharing
        The other processes that use the cluster.
    woken : asyncio.Event
        Set to look at the sessions again at once.
    """

    options: Options
    api: WorkersAPI
    groups: Groups
    sharing: Any
    woken: asyncio.Event
    status: Status
    starting: asyncio.Task[None] | None
    shutdown_on_close: bool
    rank: Any
    end_reason: str
    place: Place
    connection: Any
    ending: Any
    periodic_callbacks: dict[str, Any]
    _lock: asyncio.Lock
    _watch_worker_status_comm: Any
    _watch_worker_status_task: Any
    _sync_cluster_info_task: Any
    _loop_runner: Any
    scheduler: Any
    scheduler_spec: dict[str, Any]
    scheduler_comm: Any
    scheduler_info: Any
    worker_spec: dict[Any, Any]
    workers: dict[Any, Any]
    _created: Any

    @property
    def asynchronous(self) -> bool:
        """Whether a user calls in the event loop."""

    @property
    def loop(self) -> Any:
        """The event loop."""

    @property
    def keeps(self) -> bool:
        """Whether this process may launch and stop sessions now."""

    async def ask(self, op: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        """Call a handler of the scheduler, see :func:`dask_cml.rpc.ask`."""

    async def start_dask(self) -> None:
        """Follow the scheduler's workers by Dask's own code."""

    async def _stop_looking(self, patience: float = 0.0) -> None:
        """Cancel the looks, the steps and the launches of this process."""

    async def close_dask(self) -> None:
        """Close what Dask's classes have opened."""

    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function in the event loop."""

    @property
    def is_keeper(self) -> bool:
        """Whether this process launches and stops the cluster's sessions."""

    @property
    def view(self) -> Any:
        """What this process knows of the sessions, or has heard of them from the keeper."""

    def tell(self, text: str) -> None:
        """Tell the user a line."""
