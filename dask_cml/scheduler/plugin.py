"""What runs in the scheduler: it ends a cluster that nobody has any more, and shows its dashboard.

A scheduler that ends with its maker preloads the plugin, for the maker may be killed before it
connects. A manager registers the plugin where it is not there, and says every few seconds that it is; see
:mod:`dask_cml.manager.presence`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from dask_cml.scheduler.shared_state import SharedState
from dask_cml.wire import FORWARD, GOODBYE, HEARTBEAT, MANAGERS, SYNC, WATCHES, Tunnel

# The scheduler's own logs, as cluster.get_logs() returns them, are those below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

NAME = "dask-cml"

_LOOK_INTERVAL = 0.5
_LATE = 2.0
#: A client whose network is silent rather than closed is gone after so long: it sends a heartbeat every 5 s,
#: or less often when there are very many.
_CLIENT_SILENCE = 60.0
#: These are no programs of users: Dask's own for tasks that nobody waits for, and those of tasks in workers.
_NO_USERS = ("fire-and-forget", "Client-worker-")


@dataclass
class _Manager:
    info: Mapping[str, Any]
    silence: float
    comm: Comm
    heard: float
    since: float = field(default_factory=time.time)

    @property
    def keeps(self) -> bool:
        """Whether the cluster is no orphan while this manager is there."""
        return not self.info.get(WATCHES)


class CMLSchedulerPlugin(SchedulerPlugin):
    """Ends a scheduler that has no manager and no client, and carries its dashboard's bytes.

    Parameters
    ----------
    orphan_timeout : float or None
        Seconds without a manager and without a client after which the scheduler closes. None: never.
    """

    name = NAME
    idempotent = True

    def __init__(self, orphan_timeout: float | None) -> None:
        self.orphan_timeout = orphan_timeout

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers to the scheduler, and begin to look who is there."""
        # Here nothing may wait: another registration would come in between.
        self._scheduler = scheduler
        self._managers: dict[str, _Manager] = {}
        self._clients: dict[str, tuple[float, float]] = {}
        self._forwards: set[Comm] = set()
        self._alone_since: float | None = None
        self._looked = time.monotonic()
        scheduler.handlers[HEARTBEAT] = self.heartbeat
        scheduler.handlers[GOODBYE] = self.goodbye
        scheduler.handlers[MANAGERS] = self.managers
        scheduler.handlers[SYNC] = SharedState(self._managers.__contains__).sync
        scheduler.handlers[FORWARD] = self.forward
        self._looking = PeriodicCallback(self._look, _LOOK_INTERVAL * 1000)
        self._looking.start()
        self._beating = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        """End with the scheduler."""
        self._looking.stop()
        await cancel(self._beating)
        for comm in [*self._forwards]:
            comm.abort()

    # -- managers

    def heartbeat(
        self, comm: Comm, manager: str, info: Mapping[str, Any], silence: float, **more: Any
    ) -> dict[str, Any]:
        """Note that a manager is there; return all that are.

        Parameters
        ----------
        comm : Comm
            When it closes, the manager is gone.
        manager : str
            Its id.
        info : mapping
            What it tells the others of itself.
        silence : float
            Seconds after which it is gone if nothing more is heard of it.
        **more
            ``orphan_timeout``, if it is to be changed.

        Raises
        ------
        ValueError
            If this is not what a manager sends. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_info(info)
        messages.check_seconds("silence", silence)
        messages.check_orphan_timeout(more.get("orphan_timeout"))
        now = time.monotonic()
        known = self._managers.get(manager)
        if known is None:
            logger.info("The manager %s has come: %s", manager, dict(info))
            known = self._managers[manager] = _Manager(info, silence, comm, now)
        known.info, known.silence, known.comm, known.heard = info, silence, comm, now
        if known.keeps:
            self._alone_since = None
        if "orphan_timeout" in more:
            self.orphan_timeout = more["orphan_timeout"]
        return self.managers()

    def goodbye(self, manager: str, **more: Any) -> None:
        """Forget a manager that leaves.

        Parameters
        ----------
        manager : str
            Its id.
        **more
            ``orphan_timeout``, if it is to be changed.

        Raises
        ------
        ValueError
            If this is not what a manager sends. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_orphan_timeout(more.get("orphan_timeout"))
        if self._managers.pop(manager, None):
            logger.info("The manager %s has left", manager)
        if "orphan_timeout" in more:
            self.orphan_timeout = more["orphan_timeout"]

    def managers(self, **more: Any) -> dict[str, Any]:
        """Return what the managers that are there tell of themselves, by their ids."""
        now = time.monotonic()
        return {
            "orphan_timeout": self.orphan_timeout,
            "managers": {
                key: {"info": each.info, "since": each.since, "silent_for": now - each.heard}
                for key, each in self._managers.items()
            },
        }

    async def _keep_beating(self) -> None:
        """Leave signs of life in the cluster's folder, where the scheduler has written its file."""
        while self._scheduler.scheduler_file:
            await asyncio.to_thread(pulse.beat, Path(self._scheduler.scheduler_file).parent)
            await asyncio.sleep(pulse.INTERVAL)

    # -- orphans

    async def _look(self) -> None:
        reason = self.look(time.monotonic())
        if reason is not None:
            logger.warning("The scheduler closes: %s", reason)
            await self._scheduler.close(reason=reason)

    def look(self, now: float) -> str | None:
        """Look who is there, and return why the scheduler must close, if it must.

        Parameters
        ----------
        now : float
            The monotonic time.
        """
        late = now - self._looked > _LATE
        self._looked = now
        seen = {key: client.last_seen for key, client in self._scheduler.clients.items()}
        seen = {key: each for key, each in seen.items() if not key.startswith(_NO_USERS)}
        # Not the age of last_seen: that would be wrong when the clock is set.
        old = self._clients
        self._clients = {
            key: old[key] if key in old and old[key][0] == each else (each, now) for key, each in seen.items()
        }
        if late:
            # The process or its loop stood still: what was sent meanwhile is heard only now.
            self._alone_since = None
            self._clients = {key: (each, now) for key, each in seen.items()}
            for manager in self._managers.values():
                manager.heard = now
        for key, each in [*self._managers.items()]:
            if each.comm.closed() or now - each.heard > each.silence:
                logger.info("The manager %s is gone without a goodbye", key)
                del self._managers[key]
        clients = [key for key, (_, heard) in self._clients.items() if now - heard <= _CLIENT_SILENCE]
        keepers = [key for key, each in self._managers.items() if each.keeps]
        if keepers or clients or self.orphan_timeout is None:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= self.orphan_timeout:
            return f"orphaned: no manager and no client for {self.orphan_timeout:g} s"
        return None

    # -- the dashboard

    async def forward(self, comm: Comm, **more: Any) -> Any:
        """Connect a comm with the dashboard, and carry bytes until both have ended.

        Parameters
        ----------
        comm : Comm
            It is used for nothing else any more.
        """
        try:
            # The dashboard and nothing else: whoever asks has no say in where this leads.
            reader, writer = await asyncio.open_connection("127.0.0.1", self._dashboard_port())
        except OSError as error:
            return {"status": "error", "message": f"its dashboard does not answer: {error}"}
        self._forwards.add(comm)
        try:
            await comm.write({"status": "OK"})
            await Tunnel(comm, reader, writer).run()
        except OSError as error:
            logger.debug("A connection to the dashboard ends: %r", error)
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
    """Have the plugin from the scheduler's first moment on, as ``dask scheduler --preload`` calls it."""
    plugin = CMLSchedulerPlugin(setting("orphan-timeout", seconds))
    await scheduler.register_scheduler_plugin(plugin, name=NAME, idempotent=True)
