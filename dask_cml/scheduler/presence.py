"""The managers and clients that are connected: which manager leads, and whether the cluster is an orphan."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from distributed.comm.core import Comm
from distributed.scheduler import ClientState

from dask_cml import protocol

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
    observes: bool
    lease: float
    comm: Comm
    heard: float

    def is_here(self, now: float) -> bool:
        return not self.comm.closed() and now - self.heard <= self.lease


class Presence:
    """Tracks which managers and clients are connected, and since when there are none.

    Parameters
    ----------
    clients : mapping of str to ClientState
        The scheduler's clients, which may change.
    timeout : float or None
        Time without a manager and a client after which a cluster is an orphan, in seconds. None: never.
    creator : str, optional
        The manager that launched the scheduler.
    """

    def __init__(
        self, clients: Mapping[str, ClientState], timeout: float | None, creator: str | None = None
    ) -> None:
        self.timeout = timeout
        self._scheduler_clients = clients
        self._managers: dict[str, _Manager] = {}
        #: Since when each client has been seen last, by the client's name and its time of that.
        self._clients: dict[tuple[str, float], float] = {}
        self._alone_since: float | None = None
        self._looked = time.monotonic()
        #: The creator leads at first. Until this time it may come later than others.
        self._creator, self._creator_until = creator, time.monotonic() + protocol.LEASE

    def hear(self, manager: str, observes: bool, lease: float, comm: Comm) -> None:
        """Record a manager's message.

        Parameters
        ----------
        manager : str
            The manager's id.
        observes : bool
            Whether it only observes: it keeps no orphan alive, and leads only if no other manager can.
        lease : float
            Time without a message after which the manager counts as disconnected, in seconds.
        comm : Comm
            The manager's connection. When it closes, the manager is disconnected.
        """
        if manager not in self._managers:
            logger.info("Manager %s connected from %s", manager, comm.peer_address)
        self._managers[manager] = _Manager(observes, lease, comm, time.monotonic())
        if manager == self._creator:
            self._creator = None
        if not observes:
            self._alone_since = None

    def has(self, manager: str | None) -> bool:
        """Return whether the manager with this id is connected."""
        return manager in self._managers and self._managers[manager].is_here(time.monotonic())

    @property
    def managers(self) -> int:
        """Number of connected managers."""
        return sum(each.is_here(time.monotonic()) for each in self._managers.values())

    def next_leader(self, leader: str | None) -> str | None:
        """Return the manager that should lead, given the current leader."""
        now = time.monotonic()
        if leader is not None and leader == self._creator and now < self._creator_until:
            return leader
        here = {key: each for key, each in self._managers.items() if each.is_here(now)}
        keepers = [key for key, each in here.items() if not each.observes]
        candidates = keepers or [*here]
        return leader if leader in candidates or not candidates else candidates[0]

    def look(self, now: float) -> None:
        """Forget the managers that have left. Note since when the cluster is an orphan.

        Parameters
        ----------
        now : float
            The monotonic time.
        """
        late = now - self._looked > _LATE
        self._looked = now
        # Not the age of last_seen, which would be wrong after the clock is set.
        seen = [(key, client.last_seen) for key, client in self._scheduler_clients.items()]
        before = {} if late else self._clients
        self._clients = {each: before.get(each, now) for each in seen if not each[0].startswith(_NO_USERS)}
        if late:
            # The process or its event loop was stopped: messages from that time arrive only now.
            self._alone_since = None
            for manager in self._managers.values():
                manager.heard = now
        left = [key for key, each in self._managers.items() if not each.is_here(now)]
        for key in left:
            logger.info("Manager %s disconnected", key)
            del self._managers[key]
        clients = [heard for heard in self._clients.values() if now - heard <= _CLIENT_SILENCE]
        if clients or not all(each.observes for each in self._managers.values()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now

    def is_orphan(self, now: float) -> bool:
        """Return whether the cluster has had neither a manager nor a client for the whole time-out."""
        return None not in (self.timeout, self._alone_since) and now - self._alone_since >= self.timeout  # type: ignore[operator]
