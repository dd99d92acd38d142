"""Finds out when a cluster is an orphan: its scheduler has neither a manager nor a client."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed.comm.core import Comm
from distributed.scheduler import ClientState

from dask_cml.wire import SERVES, WATCHES

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

_LATE = 2.0
#: Seconds after which a client with a silent network counts as disconnected. Clients send a heartbeat every
#: 5 s, or less often if there are very many.
_CLIENT_SILENCE = 60.0
#: Not users' programs: Dask's own client for tasks that nobody waits for, and clients of tasks in workers.
_NO_USERS = ("fire-and-forget", "Client-worker-")


@dataclass
class _Manager:
    info: Mapping[str, Any]
    silence: float
    comm: Comm
    heard: float

    @property
    def keeps(self) -> bool:
        """Whether this manager keeps the cluster from being an orphan."""
        return not self.info.get(WATCHES)


class OrphanWatch:
    """Tracks which managers and clients are connected, and since when there are none.

    Parameters
    ----------
    clients : mapping of str to ClientState
        The scheduler's clients, which may change.
    timeout : float or None
        Time without a manager and a client after which a cluster is an orphan, in seconds. None: never.
    """

    def __init__(self, clients: Mapping[str, ClientState], timeout: float | None) -> None:
        self.timeout = timeout
        self._scheduler_clients = clients
        self._managers: dict[str, _Manager] = {}
        self._clients: dict[str, tuple[float, float]] = {}
        self._alone_since: float | None = None
        self._looked = time.monotonic()

    def hear(self, manager: str, info: Mapping[str, Any], silence: float, comm: Comm) -> None:
        """Record a manager's heartbeat.

        Parameters
        ----------
        manager : str
            The manager's id.
        info : mapping
            The manager's description of itself.
        silence : float
            Time without a heartbeat after which the manager counts as disconnected, in seconds.
        comm : Comm
            The manager's connection. When it closes, the manager is disconnected.
        """
        if manager not in self._managers:
            logger.info("Manager %s connected: %s", manager, dict(info))
        known = self._managers[manager] = _Manager(info, silence, comm, time.monotonic())
        if known.keeps:
            self._alone_since = None

    def has(self, manager: str) -> bool:
        """Return whether the manager with this id is connected."""
        return manager in self._managers and not self._managers[manager].comm.closed()

    @property
    def served(self) -> bool:
        """Whether a manager is connected that stays when others leave, and continues to adapt."""
        return any(each.info.get(SERVES) and not each.comm.closed() for each in self._managers.values())

    def look(self, now: float) -> bool:
        """Check which managers and clients are connected. Return whether the cluster is an orphan.

        Parameters
        ----------
        now : float
            The monotonic time.
        """
        late = now - self._looked > _LATE
        self._looked = now
        seen = {key: client.last_seen for key, client in self._scheduler_clients.items()}
        seen = {key: each for key, each in seen.items() if not key.startswith(_NO_USERS)}
        # Not the age of last_seen, which would be wrong after the clock is set.
        old = self._clients
        self._clients = {
            key: old[key] if key in old and old[key][0] == each else (each, now) for key, each in seen.items()
        }
        if late:
            # The process or its event loop was stopped: heartbeats from that time arrive only now.
            self._alone_since = None
            self._clients = {key: (each, now) for key, each in seen.items()}
            for manager in self._managers.values():
                manager.heard = now
        for key, each in [*self._managers.items()]:
            if each.comm.closed() or now - each.heard > each.silence:
                logger.info("Manager %s disconnected", key)
                del self._managers[key]
        clients = [key for key, (_, heard) in self._clients.items() if now - heard <= _CLIENT_SILENCE]
        keepers = [key for key, each in self._managers.items() if each.keeps]
        if keepers or clients or self.timeout is None:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        else:
            return now - self._alone_since >= self.timeout
        return False
