"""Who uses the cluster: processes that watch the board, and Dask's clients. An orphan has none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distributed.comm.addressing import get_address_host
from distributed.comm.core import Comm
from distributed.scheduler import ClientState, Scheduler

from dask_cml.timing import timing

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

_LATE = 2.0
#: Seconds after which a client with a silent network counts as disconnected. Clients send a heartbeat every
#: 5 s, or less often if there are very many.
_CLIENT_SILENCE = 60.0
#: Not users' programs: Dask's own client for tasks that nobody waits for, and clients of tasks in workers.
_NO_USERS = ("fire-and-forget", "Client-worker-")


@dataclass
class _Watcher:
    counts: bool
    comm: Comm
    heard: float

    def is_here(self, now: float) -> bool:
        return not self.comm.closed() and now - self.heard <= timing.lease


class Watchers:
    """Tracks who watches the board, which clients are connected, and since when there is nobody.

    Parameters
    ----------
    clients : mapping of str to ClientState
        The scheduler's clients, which may change.
    timeout : float or None
        Time without a watcher and a client after which a cluster is an orphan, in seconds. None: never.
    inside : str
        The name of clients in the cluster's own sessions. They are no users: what a task opens would keep
        the cluster for ever.
    """

    def __init__(self, clients: Mapping[str, ClientState], timeout: float | None, inside: str) -> None:
        self.timeout = timeout
        self._scheduler_clients = clients
        self._inside = f"-{inside}-"
        self._watchers: dict[str, _Watcher] = {}
        #: When a client's last message was first seen, by the client's name and the time of that message.
        self._clients: dict[tuple[str, float], float] = {}
        self._alone_since: float | None = None
        self._updated = time.monotonic()

    def hear(self, watcher: str, counts: bool, comm: Comm) -> None:
        """Record a watcher's message.

        Parameters
        ----------
        watcher : str
            The watcher's id.
        counts : bool
            Whether the cluster is no orphan while it is here.
        comm : Comm
            Its connection. When it closes, the watcher has left.
        """
        if watcher not in self._watchers:
            logger.info("Process %s watches from %s", watcher, comm.peer_address)
        self._watchers[watcher] = _Watcher(counts, comm, time.monotonic())
        if counts:
            self._alone_since = None

    def has(self, watcher: str) -> bool:
        """Return whether the watcher with this id is here."""
        return watcher in self._watchers and self._watchers[watcher].is_here(time.monotonic())

    @property
    def n_users(self) -> int:
        """How many of the watchers are users' processes, as long as one of which the cluster is no orphan."""
        now = time.monotonic()
        return sum(watcher.counts and watcher.is_here(now) for watcher in self._watchers.values())

    def update(self, now: float, in_sessions: Collection[str] = ()) -> None:
        """Forget the watchers that have left. Note since when the cluster is an orphan.

        Parameters
        ----------
        now : float
            The monotonic time.
        in_sessions : collection of str
            The names of more clients in the cluster's own sessions.
        """
        is_late = now - self._updated > _LATE
        self._updated = now
        before = {} if is_late else self._clients
        self._clients = {}
        for name, client in self._scheduler_clients.items():
            if not name.startswith(_NO_USERS) and self._inside not in name and name not in in_sessions:
                # Not the age of last_seen, which would be wrong after the clock is set.
                message = name, client.last_seen
                self._clients[message] = before.get(message, now)
        if is_late:
            # The process or its event loop was stopped: messages from that time arrive only now.
            self._alone_since = None
            for watcher in self._watchers.values():
                watcher.heard = now
        for name in [name for name, watcher in self._watchers.items() if not watcher.is_here(now)]:
            logger.info("Process %s watches no more", name)
            del self._watchers[name]
        has_clients = any(now - heard <= _CLIENT_SILENCE for heard in self._clients.values())
        if has_clients or any(watcher.counts for watcher in self._watchers.values()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now

    def is_orphan(self, now: float) -> bool:
        """Return whether the cluster has had neither a watcher nor a client for the whole time-out."""
        if self.timeout is None or self._alone_since is None:
            return False
        return now - self._alone_since >= self.timeout


def clients_in_sessions(scheduler: Scheduler) -> set[str]:
    """Return the names of the clients in the cluster's worker sessions, by the hosts of Dask workers.

    On a laptop, all programs share the scheduler's host, so this finds none.
    """
    own_host = get_address_host(scheduler.address)
    found = set()
    for name, client in scheduler.client_comms.items():
        host = own_host if client.comm is None else get_address_host(client.comm.peer_address)
        workers = scheduler.host_info.get(host, {}).get("addresses", ())
        if host != own_host and any("cml" in scheduler.workers[worker].extra for worker in workers):
            found.add(name)
    return found
