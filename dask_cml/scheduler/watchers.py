"""Who uses the cluster: processes that watch the board, and Dask's clients. An orphan has none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distributed.batched import BatchedSend
from distributed.comm.addressing import get_address_host
from distributed.comm.core import Comm
from distributed.scheduler import Scheduler

from dask_cml.timing import timing

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Seconds between two looks that count at most. During a longer pause of the process or its event loop,
#: nobody could connect or be heard.
_LONGEST_STEP = 2.0
#: Not users' programs: Dask's own clients of tasks in workers.
_NO_USERS = "Client-worker-"


@dataclass
class _Watcher:
    counts: bool
    comm: Comm
    #: Seconds since its last message, without pauses of this process.
    silent: float = 0.0


class Watchers:
    """Tracks who watches the board, which clients are connected, and for how long there has been nobody.

    An open connection is a sign of life, however silent: a long cell, or code in C that holds the
    interpreter, keeps a process from sending anything. If its machine or network is gone, the kernel here
    closes the connection after about 30 s, with TLS, too: distributed.comm.tcp.set_tcp_timeout, by Dask's
    setting ``distributed.comm.timeouts.tcp``. The sidecar of a mesh keeps its own connection to this process
    open until its idle time-out, an hour in Istio: there, an orphan whose machine is gone lives for as long.

    Parameters
    ----------
    client_comms : mapping of str to BatchedSend
        The connections of the scheduler's clients, which may change.
    timeout : float or None
        Time without a watcher and a client after which a cluster is an orphan, in seconds. None: never.
    inside : str
        The name of clients in the cluster's own sessions. They are no users: what a task opens would keep
        the cluster for ever.
    """

    def __init__(self, client_comms: Mapping[str, BatchedSend], timeout: float | None, inside: str) -> None:
        self.timeout = timeout
        self._client_comms = client_comms
        self._inside = f"-{inside}-"
        self._watchers: dict[str, _Watcher] = {}
        #: Seconds without a watcher and a client, without pauses of this process.
        self._alone = 0.0
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
        self._watchers[watcher] = _Watcher(counts, comm)
        if counts:
            self._alone = 0.0

    def answers(self, watcher: str) -> bool:
        """Return whether the watcher with this id is connected and has sent a message lately."""
        return watcher in self._watchers and self._answers(self._watchers[watcher])

    def _answers(self, watcher: _Watcher) -> bool:
        return not watcher.comm.closed() and watcher.silent <= timing.lease

    @property
    def n_users(self) -> int:
        """How many users' processes answer, and so can keep the cluster."""
        return sum(watcher.counts and self._answers(watcher) for watcher in self._watchers.values())

    @property
    def has_user(self) -> bool:
        """Whether a user's process is connected, however silent."""
        return any(watcher.counts and not watcher.comm.closed() for watcher in self._watchers.values())

    def update(self, now: float, in_sessions: Collection[str] = ()) -> None:
        """Forget the watchers that have left. Note for how long nobody has used the cluster.

        Parameters
        ----------
        now : float
            The monotonic time.
        in_sessions : collection of str
            The names of more clients in the cluster's own sessions.
        """
        step = min(now - self._updated, _LONGEST_STEP)
        self._updated = now
        for name, watcher in [*self._watchers.items()]:
            watcher.silent += step
            if watcher.comm.closed():
                logger.info("Process %s watches no more", name)
                del self._watchers[name]
        if self.has_user or self._has_client(in_sessions):
            self._alone = 0.0
        else:
            self._alone += step

    def _has_client(self, in_sessions: Collection[str]) -> bool:
        """Return whether a user's client is connected, however silent."""
        for name, client in self._client_comms.items():
            is_inside = name.startswith(_NO_USERS) or self._inside in name or name in in_sessions
            if not is_inside and client.comm is not None and not client.comm.closed():
                return True
        return False

    @property
    def is_orphan(self) -> bool:
        """Whether the cluster has had neither a watcher nor a client for the whole time-out."""
        return self.timeout is not None and self._alone >= self.timeout


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
