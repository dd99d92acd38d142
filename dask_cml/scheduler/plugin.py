"""The scheduler plugin: it shuts down orphans, shares state among managers, and forwards the dashboard.

A scheduler that ends with its creator preloads the plugin, because the creator may be killed before it
connects. Managers register the plugin otherwise, and send a heartbeat every few seconds; see
:mod:`dask_cml.manager.presence`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.comm.core import Comm
from distributed.comm.utils import get_tcp_server_addresses
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler
from tornado.ioloop import PeriodicCallback

from dask_cml import pulse
from dask_cml.aio import cancel
from dask_cml.checks import seconds
from dask_cml.options import setting
from dask_cml.scheduler import messages
from dask_cml.scheduler.balance import spread
from dask_cml.scheduler.demand import known_demand
from dask_cml.scheduler.orphans import OrphanWatch
from dask_cml.scheduler.shared_state import SharedState
from dask_cml.tunnel import Tunnel
from dask_cml.wire import DEMAND, FORWARD, HEARTBEAT, SYNC

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

NAME = "dask-cml"

_LOOK_INTERVAL = 0.5


class CMLSchedulerPlugin(SchedulerPlugin):
    """Shuts down an orphan, reports the known work, and forwards the dashboard.

    Parameters
    ----------
    orphan_timeout : float or None
        Time without a manager and a client after which the scheduler closes, in seconds. None: never.
    """

    name = NAME
    idempotent = True

    def __init__(self, orphan_timeout: float | None) -> None:
        self._orphan_timeout = orphan_timeout

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers to the scheduler, and start to look for managers and clients."""
        # Without an await, because another registration could come in between.
        self._scheduler = scheduler
        self._watch = OrphanWatch(scheduler.clients, self._orphan_timeout)
        self._state = SharedState(self._watch.has)
        self._forwards: set[Comm] = set()
        scheduler.handlers[HEARTBEAT] = self.heartbeat
        scheduler.handlers[SYNC] = self.sync
        scheduler.handlers[DEMAND] = self.demand
        scheduler.handlers[FORWARD] = self.forward
        self._looking = PeriodicCallback(self._look, _LOOK_INTERVAL * 1000)
        self._looking.start()
        self._spreading = PeriodicCallback(lambda: spread(scheduler), _LOOK_INTERVAL * 1000)
        self._spreading.start()
        self._beating = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        """Stop all tasks when the scheduler closes."""
        self._looking.stop()
        self._spreading.stop()
        await cancel(self._beating)
        for comm in [*self._forwards]:
            comm.abort()

    # -- managers

    def heartbeat(
        self, comm: Comm, manager: str, info: Mapping[str, Any], silence: float, **more: Any
    ) -> dict[str, Any]:
        """Record a manager's heartbeat. Return ``orphan_timeout``.

        Parameters
        ----------
        comm : Comm
            The manager's connection. When it closes, the manager is disconnected.
        manager : str
            The manager's id.
        info : mapping
            The manager's description of itself.
        silence : float
            Time without a heartbeat after which the manager counts as disconnected, in seconds.
        **more
            ``orphan_timeout``, to change it.

        Raises
        ------
        ValueError
            If the message is invalid. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_info(info)
        messages.check_seconds("silence", silence)
        messages.check_orphan_timeout(more.get("orphan_timeout"))
        self._watch.hear(manager, info, silence, comm)
        if "orphan_timeout" in more:
            self._watch.timeout = more["orphan_timeout"]
        return {"orphan_timeout": self._watch.timeout}

    def demand(self, cluster: str) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the sessions of a cluster, from ``known_demand``.

        Parameters
        ----------
        cluster : str
            The cluster's name, with which its workers' names begin.

        Raises
        ------
        ValueError
            If the message is invalid.
        """
        messages.check_cluster(cluster)
        return known_demand(self._scheduler, cluster)

    def sync(self, **message: Any) -> dict[str, Any]:
        """Take a manager's changes, and return the current state.

        Parameters
        ----------
        **message
            Arguments of ``SharedState.sync``.

        Returns
        -------
        dict
            The result of ``SharedState.sync``; ``served``, whether a manager is connected that continues to
            adapt when others leave; and ``tasks_done``, a number that only increases.

        Raises
        ------
        TypeError, ValueError
            If the message is invalid.
        """
        state = self._state.sync(**message)
        prefixes = self._scheduler.task_prefixes.values()
        done = sum(prefix.state_counts["memory"] + prefix.state_counts["erred"] for prefix in prefixes)
        return {**state, "served": self._watch.served, "tasks_done": done}

    async def _look(self) -> None:
        if self._watch.look(time.monotonic()):
            reason = f"orphaned: no manager and no client for {self._watch.timeout:g} s"
            logger.warning("Scheduler closed: %s", reason)
            await self._scheduler.close(reason=reason)

    async def _keep_beating(self) -> None:
        """Leave signs of life in the cluster's folder, if the scheduler writes its scheduler file there."""
        while self._scheduler.scheduler_file:
            await asyncio.to_thread(pulse.beat, Path(self._scheduler.scheduler_file).parent)
            await asyncio.sleep(pulse.INTERVAL)

    # -- the dashboard

    async def forward(self, comm: Comm, **more: Any) -> Any:
        """Connect a comm to the dashboard, and carry bytes until both directions have ended.

        Parameters
        ----------
        comm : Comm
            The connection, which is then used for nothing else.
        """
        try:
            # Only to the dashboard: the message cannot choose another port.
            reader, writer = await asyncio.open_connection("127.0.0.1", self._dashboard_port())
        except OSError as error:
            return {"status": "error", "message": f"the scheduler's dashboard does not answer: {error}"}
        self._forwards.add(comm)
        try:
            await comm.write({"status": "OK"})
            await Tunnel(comm, reader, writer).run()
        except OSError as error:
            logger.debug("Connection to the dashboard ended: %r", error)
        finally:
            self._forwards.discard(comm)
            comm.abort()
            writer.transport.abort()
        return Status.dont_reply

    def _dashboard_port(self) -> int:
        with contextlib.suppress(AttributeError, RuntimeError):
            for host, port, *_ in get_tcp_server_addresses(self._scheduler.http_server):
                if host in ("127.0.0.1", "0.0.0.0"):
                    return int(port)
        raise OSError("it does not listen on 127.0.0.1")


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin when the scheduler starts, for ``dask scheduler --preload``."""
    plugin = CMLSchedulerPlugin(setting("orphan-timeout", seconds))
    await scheduler.register_scheduler_plugin(plugin, name=NAME, idempotent=True)
