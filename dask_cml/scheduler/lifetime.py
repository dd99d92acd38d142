"""When and why a scheduler ends: at its limit of hours, idle, without a user, or because it is asked to.

Users are processes that watch the board, and Dask's clients. An orphan has none of them.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from datetime import datetime

from distributed.comm.addressing import get_address_host
from distributed.comm.core import Comm
from distributed.scheduler import Scheduler

from dask_cml.protocol import TOPIC, USERS, Rank
from dask_cml.timing import timing

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Seconds before a cluster reaches its limit, when its scheduler warns its users.
NOTICE = 600
#: Seconds between two looks that count at most. During a longer pause of the process or its event loop,
#: nobody could connect or be heard.
_LONGEST_STEP = 2.0
#: Not users' programs: Dask's own clients of tasks in workers.
_NO_USERS = "Client-worker-"


class Lifetime:
    """The limit of a cluster's hours, and the end of its scheduler.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler.
    created : str
        When the cluster was created, in ISO 8601.
    hours : float or None
        The limit ``cml.limits.hours`` of its creator. None: no limit.

    Attributes
    ----------
    closed : str or None
        Why the cluster ended, if it was not lost: then, no other scheduler replaces this one.
    """

    def __init__(self, scheduler: Scheduler, created: str, hours: float | None) -> None:
        self.hours = hours
        self.closed: str | None = None
        self._scheduler = scheduler
        self._has_warned = False
        #: The monotonic time of the limit. The clock may be set until then.
        self._end = math.inf
        if hours is not None:
            age = max(0.0, time.time() - datetime.fromisoformat(created).timestamp())
            self._end = time.monotonic() + hours * 3600 - age

    @property
    def age(self) -> dict[str, int]:
        """The cluster's ``age`` and its limit ``most_age``, in seconds. Empty without a limit."""
        if self.hours is None:
            return {}
        most = self.hours * 3600
        return {"age": int(most - self._end + time.monotonic()), "most_age": int(most)}

    def check(self) -> str | None:
        """Return why the cluster must end now. Warn its users some time before."""
        left = self._end - time.monotonic()
        if self.hours is None or left > NOTICE:
            return None
        limit = f"its limit of {round(self.hours, 2):g} h"
        if left <= 0:
            return f"reached {limit}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning("Cluster shuts down in %.0f s, at %s", left, limit)
            self._scheduler.log_event(TOPIC, {"action": "shuts down", "session": None, "seconds": left})
        return None

    def note_idle(self) -> None:
        """Note why Dask closes the scheduler, if it was idle for too long."""
        timeout, since = self._scheduler.idle_timeout, self._scheduler.idle_since
        if timeout and since and time.time() - since > timeout:
            self.closed = self.closed or f"idle for {timeout:g} s"

    async def end(self, reason: str) -> None:
        """End the cluster. If Dask does not close its scheduler, the program of the session kills it."""
        logger.warning("Scheduler closed: %s", reason)
        self.closed = reason
        await self._scheduler.close(reason=reason)


@dataclass
class _Watcher:
    rank: Rank
    who: str
    comm: Comm
    #: Seconds since its last message, and since its first, without pauses of this process.
    silent: float = 0.0
    connected: float = 0.0


class Watchers:
    """Tracks who watches the board, which clients are connected, and for how long there has been nobody.

    An open connection is a sign of life, however silent: a long cell, or code in C that holds the
    interpreter, keeps a process from sending anything. If its machine or network is gone, the kernel here
    closes the connection after about 30 s, with TLS, too: distributed.comm.tcp.set_tcp_timeout, by Dask's
    setting ``distributed.comm.timeouts.tcp``. The sidecar of a mesh keeps its own connection to this process
    open until its idle time-out, an hour in Istio: there, an orphan whose machine is gone lives for as long.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler, with its clients.
    inside : str
        The name of clients in the cluster's own sessions. They are no users: what a task opens would keep
        the cluster for ever.
    timeout : float or None
        Time without a watcher and a client after which a cluster is an orphan, in seconds. None: never.
    patience : float
        Time for which the first of them may take to come, if that is longer.
    """

    def __init__(
        self, scheduler: Scheduler, inside: str, timeout: float | None, patience: float | None = None
    ) -> None:
        self.timeout = timeout
        self._scheduler = scheduler
        self._inside = f"-{inside}-"
        self._watchers: dict[str, _Watcher] = {}
        #: Seconds without a watcher and a client, without pauses of this process. Negative at first, if there
        #: is more patience.
        self._alone = min(0.0, (timeout or 0.0) - (patience or 0.0))
        self._updated = time.monotonic()

    def hear(self, watcher: str, rank: Rank, who: str, comm: Comm) -> None:
        """Record a watcher's message.

        Parameters
        ----------
        watcher : str
            The watcher's id.
        rank : Rank
            Whether it counts as a user, and may keep the cluster.
        who : str
            Who it is, for users.
        comm : Comm
            Its connection. When it closes, the watcher has left.
        """
        known = self._watchers.get(watcher)
        if known is None:
            logger.info("Process %s watches from %s", watcher, comm.peer_address)
        connected = 0.0 if known is None else known.connected
        self._watchers[watcher] = _Watcher(rank, who, comm, connected=connected)
        if rank in USERS:
            self._alone = 0.0

    def rank(self, watcher: str | None) -> Rank:
        """Return a watcher's rank."""
        known = self._watchers.get(watcher or "")
        return Rank.OBSERVER if known is None else known.rank

    def who(self, watcher: str | None) -> str | None:
        """Return who a watcher is, for users."""
        known = self._watchers.get(watcher or "")
        return None if known is None else known.who

    def pass_over(self, watcher: str) -> None:
        """Let a watcher keep nothing for a while, because it leaves, or cannot go on."""
        if watcher in self._watchers:
            self._watchers[watcher].connected = -timing.stay

    def answers(self, watcher: str) -> bool:
        """Return whether the watcher with this id is connected and has sent a message lately."""
        known = self._watchers.get(watcher)
        return known is not None and not known.comm.closed() and known.silent <= timing.lease

    def keeper_after(self, keeper: str | None, resident_can_launch: bool) -> str | None:
        """Return the id of the process that is to keep the cluster. None: nobody may.

        Parameters
        ----------
        keeper : str or None
            The id of the process that keeps it now.
        resident_can_launch : bool
            Whether the process in the scheduler's session can launch sessions.
        """
        rank = self.rank(keeper)
        if keeper is not None and rank not in (Rank.RESIDENT, Rank.USER):
            return keeper
        may_keep = [Rank.OWNER, Rank.RESIDENT]
        if rank is Rank.USER or not resident_can_launch:
            may_keep = [Rank.OWNER, Rank.USER, Rank.RESIDENT]
        candidates = []
        for name, watcher in self._watchers.items():
            # A process that passes by does not interrupt the resident or a notebook of another session.
            least = 0.0 if keeper is None else timing.stay
            is_here = name == keeper or watcher.connected >= least
            if watcher.rank in may_keep and is_here and self.answers(name):
                candidates.append((may_keep.index(watcher.rank), name != keeper, -watcher.connected, name))
        return min(candidates)[-1] if candidates else keeper

    @property
    def has_user(self) -> bool:
        """Whether a user's process is connected, however silent."""
        return any(watcher.rank in USERS and not watcher.comm.closed() for watcher in self._watchers.values())

    def update(self) -> float:
        """Forget the watchers that have left. Note for how long nobody has used the cluster.

        Return the seconds since the last update, without pauses of this process.
        """
        now = time.monotonic()
        step = min(now - self._updated, _LONGEST_STEP)
        self._updated = now
        for name, watcher in [*self._watchers.items()]:
            watcher.silent += step
            watcher.connected += step
            if watcher.comm.closed():
                logger.info("Process %s watches no more", name)
                del self._watchers[name]
        self._alone = 0.0 if self.has_user or self._has_client() else self._alone + step
        return step

    def _has_client(self) -> bool:
        """Return whether a user's client is connected, however silent."""
        comms = [(name, client.comm) for name, client in self._scheduler.client_comms.items()]
        return any(comm and not comm.closed() and not self._is_inside(name, comm) for name, comm in comms)

    def _is_inside(self, client: str, comm: Comm) -> bool:
        """Return whether a client is one of Dask's own, or in a worker session, by its name or its host.

        On a laptop, all programs share the scheduler's host, and in a mesh, all connections may have one.
        """
        if client.startswith(_NO_USERS) or self._inside in client:
            return True
        scheduler, host = self._scheduler, get_address_host(comm.peer_address)
        workers = scheduler.host_info.get(host, {}).get("addresses", ())
        has_workers = any("cml" in scheduler.workers[worker].extra for worker in workers)
        return has_workers and host != get_address_host(scheduler.address)

    @property
    def is_orphan(self) -> bool:
        """Whether the cluster has had neither a watcher nor a client for the whole time-out."""
        return self.timeout is not None and self._alone >= self.timeout
