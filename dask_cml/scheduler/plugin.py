"""The scheduler plugin: owns what is wanted, and tells managers what changes.

Each scheduler preloads it, see :func:`dask_setup`. It shuts down a cluster that has neither a manager nor a
client, or whose folder was removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributed.comm.core import Comm
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, WorkerState
from msgspec import UNSET, UnsetType
from tornado.ioloop import PeriodicCallback

from dask_cml import protocol
from dask_cml.cancellation import cancel, wait_until_set
from dask_cml.layout import FOLDER, NUMBER
from dask_cml.naming import read_name, session_name
from dask_cml.scheduler.activity import Activity
from dask_cml.scheduler.balance import relieve, spread
from dask_cml.scheduler.demand import is_full, known_demand
from dask_cml.scheduler.last_state import last_state
from dask_cml.scheduler.lifetime import Lifetime
from dask_cml.scheduler.messages import URL, Manager, Names, Number, Operations, Seconds, checked
from dask_cml.scheduler.presence import Presence
from dask_cml.scheduler.state_file import StateFile, unless_stale
from dask_cml.scheduler.wanted import Wanted
from dask_cml.validation import validate

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

NAME = "dask-cml"

_LOOK_INTERVAL, _ACTIVITY_INTERVAL = 0.5, 5.0
#: Seconds for which further changes are collected before managers are told.
_COLLECT = 0.1


class CMLSchedulerPlugin(SchedulerPlugin):
    """Owns what is wanted of one cluster.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    number : int
        The number of this scheduler in its cluster.
    """

    name = NAME
    idempotent = True

    def __init__(self, folder: Path, number: int = 0) -> None:
        self._file = StateFile(folder, number)
        self._app_url: str | None = None
        #: Set at the next change.
        self._change = asyncio.Event()
        self._retiring: set[asyncio.Future[Any]] = set()
        self._states: dict[str, WorkerState] = {}
        #: The addresses of paused Dask workers, and whether they are full.
        self._paused: set[tuple[str, bool]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers to the scheduler, and start to look for managers and clients."""
        begin = await unless_stale(self._file.begin)
        self._scheduler = scheduler
        self._record = begin["record"]
        self._presence = Presence(scheduler.clients, begin.get("patience"), begin["leader"])
        self._orphan_timeout = begin.get("orphan_timeout")
        self._wanted = Wanted(begin["cluster"], begin["leader"], begin["groups"])
        self._restarts = int(begin.get("restarts", 0))
        self._activity = validate(begin.get("activity", {}), Activity, "activity")
        self._lifetime = Lifetime(scheduler, begin.get("created", ""), begin.get("hours"))
        scheduler.handlers |= {
            protocol.HELLO: self.hello,
            protocol.WATCH: self.watch,
            protocol.APPLY: self.apply,
            protocol.SET: self.set,
            protocol.DEMAND: self.demand,
            protocol.HELD: self.held,
            protocol.NOTICE: self.notice,
            protocol.FORWARD: self.forward,
            "terminate": self.terminate,
        }
        await unless_stale(lambda: self._file.write(self._state()))
        looks = (self._look, self._find_paused, lambda: spread(scheduler), lambda: relieve(scheduler))
        self._periodic = [PeriodicCallback(each, _LOOK_INTERVAL * 1000) for each in looks]
        self._periodic.append(PeriodicCallback(self._note_activity, _ACTIVITY_INTERVAL * 1000))
        self._note_activity()
        for each in self._periodic:
            each.start()
        self._writing = asyncio.create_task(self._keep_file())

    async def before_close(self) -> None:
        """Note why the scheduler closes, if it closes by itself."""
        self._lifetime.note_idle()

    async def close(self) -> None:
        """Stop all tasks when the scheduler closes, and write its last state."""
        for each in self._periodic:
            each.stop()
        await cancel(self._writing, *self._retiring)
        self._note_activity()
        with contextlib.suppress(OSError, RuntimeError):  # the folder may be gone, or open to others
            await asyncio.to_thread(self._file.write, self._state())

    def _state(self) -> dict[str, Any]:
        """Return the content of the scheduler's file. Dask's workers and clients read the address."""
        return {
            "address": self._scheduler.address,
            "id": self._scheduler.id,
            "session": os.environ.get("CDSW_ENGINE_ID"),
            "app_url": self._app_url,
            "protocol": protocol.PROTOCOL,
            "revision": self._wanted.changes.revision,
            "orphan_timeout": self._orphan_timeout,
            "hours": self._lifetime.hours,
            "restarts": 0 if self._tasks_done() else self._restarts,
            "closed": self._lifetime.closed,
            "groups": self._wanted.to_json(),
            "activity": asdict(self._activity),
        }

    async def _keep_file(self) -> None:
        self._shut_down(await self._file.run(self._state))

    async def terminate(self, reason: str = "shut down by a client", **arguments: Any) -> None:
        """Close the scheduler for good, as ``Client.shutdown`` and managers ask for. These give a reason."""
        self._lifetime.closed = self._lifetime.closed or str(reason)
        await self._scheduler.close(reason=self._lifetime.closed, **arguments)

    # -- managers

    def hello(self) -> dict[str, Any]:
        """Return which cluster this scheduler belongs to, and its protocol."""
        return {
            "protocol": protocol.PROTOCOL,
            "cluster": self._wanted.cluster,
            "record": self._record,
            "number": self._file.number,
        }

    @checked
    async def watch(
        self, comm: Comm, manager: Manager, observes: bool, lease: Seconds, since: Number, wait: Seconds
    ) -> dict[str, Any]:
        """Record a manager's message, and return what has changed since a revision.

        Parameters
        ----------
        comm : Comm
            The manager's connection. When it closes, the manager is disconnected.
        manager : str
            The manager's id.
        observes : bool
            Whether it only observes.
        lease : float
            Time without a message after which the manager counts as disconnected, in seconds.
        since : int
            The revision that the manager knows.
        wait : float
            Time to wait for a change, in seconds.

        Raises
        ------
        ValueError
            If the message is invalid. Nothing changes then.
        """
        self._presence.hear(manager, observes, lease, comm)
        # An observer does not count at first: the creator may have died, or come later.
        if not observes or self._file.number > 0:
            self._presence.timeout = self._orphan_timeout
        self._choose_leader()
        if since == self._wanted.changes.revision:
            if await wait_until_set(self._change, min(wait, lease / 2)):
                await asyncio.sleep(_COLLECT)
            if not comm.closed():
                self._presence.hear(manager, observes, lease, comm)
        return self._since(since)

    @checked
    def apply(self, manager: Manager, operations: Operations, since: Number) -> dict[str, Any]:
        """Carry out a manager's operations, in their order, except invalid ones.

        Returns
        -------
        dict
            ``results``: for each operation its result, or ``{"error": message}``; and what has changed since
            a revision.

        Raises
        ------
        ValueError
            If the operations are no list, or the manager is not connected. Nothing changes then.
        """
        if not self._presence.has(manager):
            raise ValueError(f"invalid manager={manager!r}: expected a manager that is connected")
        results = [self._wanted.apply(manager, each, time.monotonic()) for each in operations]
        self._changed()
        return {"results": results, **self._since(since)}

    @checked
    def set(
        self, orphan_timeout: Seconds | UnsetType | None = UNSET, app_url: URL | UnsetType = UNSET
    ) -> None:
        """Change what the scheduler keeps of its cluster.

        Parameters
        ----------
        orphan_timeout : float, optional
            Time without a manager and a client after which the scheduler closes, in seconds. None: never.
        app_url : str, optional
            The URL of the scheduler's session.

        Raises
        ------
        ValueError
            If a value is invalid. Nothing changes then.
        """
        if orphan_timeout is not UNSET:
            self._presence.timeout = self._orphan_timeout = orphan_timeout
        if app_url is not UNSET:
            self._app_url = app_url
        self._file.changed()

    def demand(self) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the cluster's sessions, from ``known_demand``."""
        return known_demand(self._scheduler, self._wanted.cluster)

    @checked
    def held(self, names: Names) -> dict[str, dict[str, float]]:
        """Return when the scheduler heard of Dask workers, and the bytes they hold, by their names."""
        asked = {*names}
        return {
            str(worker.name): {"last_seen": worker.last_seen, "nbytes": worker.nbytes}
            for worker in self._scheduler.workers.values()
            if worker.name in asked
        }

    @checked
    def notice(self, names: Names) -> None:
        """Move the data of Dask workers whose session the platform is about to stop, and close them."""
        self._wanted.leave(names)
        self._changed()
        there = [worker.name for worker in self._scheduler.workers.values() if worker.name in names]
        retiring = asyncio.ensure_future(self._scheduler.retire_workers(names=there, close_workers=True))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retired)

    def _retired(self, retiring: asyncio.Future[Any]) -> None:
        self._retiring.discard(retiring)
        if not retiring.cancelled() and (error := retiring.exception()) is not None:
            logger.warning("Workers not retired: %r", error)

    async def forward(self, comm: Comm, **_: Any) -> Any:
        """Serve the dashboard, which listens on the loopback only, on a comm until one side closes it.

        When the scheduler closes, Dask cancels this.
        """
        # Dask's comms over asyncio lack it.
        if (stream := getattr(comm, "stream", None)) is None:
            return {"status": "error", "message": "the scheduler's comms cannot carry its dashboard"}
        try:
            await comm.write({"status": "OK"})
            self._scheduler.http_server.handle_stream(stream, ("127.0.0.1", 0))
            while not stream.closed():  # noqa: ASYNC110, Tornado's WebSockets tell nobody else of their end
                await asyncio.sleep(_LOOK_INTERVAL)
        finally:
            comm.abort()
        return Status.dont_reply

    def _since(self, revision: int) -> dict[str, Any]:
        """Return the state, as far as it has changed since a revision."""
        changes, workers = self._wanted.since(revision), self._scheduler.workers
        addresses = [*workers] if changes["whole"] else changes["workers"]
        changes["workers"] = {
            each: workers[each].identity() if each in workers else None for each in addresses
        }
        changes["tasks_done"] = self._tasks_done()
        changes["managers"] = self._presence.managers
        return changes | self._lifetime.age

    def _tasks_done(self) -> int:
        states = [prefix.state_counts for prefix in self._scheduler.task_prefixes.values()]
        return sum(counts["memory"] + counts["erred"] for counts in states)

    def _note_activity(self) -> None:
        busy: dict[str, bool] = {}
        for worker in self._scheduler.workers.values():
            if (found := read_name(self._wanted.cluster, str(worker.name))) is not None:
                name = session_name(self._wanted.cluster, *found)
                busy[name] = busy.get(name, False) or bool(worker.processing)
        n_wanted = sum(each.wanted for each in self._wanted.sessions.values())
        self._activity.look(time.time(), n_wanted, len(busy), sum(busy.values()), self._tasks_done())

    def _changed(self) -> None:
        """Tell managers, and write the scheduler's file."""
        while self._wanted.events:
            self._scheduler.log_event(protocol.TOPIC, self._wanted.events.popleft())
        self._file.changed()
        self._change.set()
        self._change = asyncio.Event()

    def _choose_leader(self) -> None:
        leader = self._presence.next_leader(self._wanted.leader)
        if leader != self._wanted.leader:
            self._wanted.lead(leader)
            self._changed()

    def _look(self) -> None:
        now = time.monotonic()
        self._presence.look(now)
        self._choose_leader()
        if self._presence.is_orphan(now):
            self._shut_down(f"orphaned: no manager and no client for {self._presence.timeout:g} s")
        elif (reason := self._lifetime.look(now)) is not None:
            self._shut_down(reason)

    def _shut_down(self, reason: str) -> None:
        for each in self._periodic:
            each.stop()
        self._closing = asyncio.create_task(self._lifetime.end(reason))

    # -- Dask workers

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Tell managers of a Dask worker that has connected."""
        state = self._states[worker] = scheduler.workers[worker]
        self._wanted.connected(str(state.name))
        self._wanted.changes.touch(("worker", worker))
        self._changed()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Tell managers of a Dask worker that has left."""
        if (state := self._states.pop(worker, None)) is not None:
            self._wanted.left(str(state.name), last_state(scheduler, state))
        self._wanted.changes.touch(("worker", worker))
        self._changed()

    def _find_paused(self) -> None:
        """Tell managers of Dask workers that have paused, are full then, or go on."""
        workers = self._scheduler.workers.values()
        paused = {(each.address, is_full(each)) for each in workers if each.status == Status.paused}
        if changed := paused ^ self._paused:
            self._paused = paused
            for worker, _ in changed:
                self._wanted.changes.touch(("worker", worker))
            self._changed()


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin when the scheduler starts, for ``dask scheduler --preload``."""
    plugin = CMLSchedulerPlugin(Path(os.environ[FOLDER]), int(os.environ[NUMBER]))
    try:
        await scheduler.register_scheduler_plugin(plugin, name=NAME, idempotent=True)
    except FileNotFoundError:
        logger.warning("Scheduler not started: its cluster was deleted")
        scheduler.loop.add_callback(_close, scheduler, "its cluster was deleted")
    except Exception:
        # Nothing else ends a scheduler without managers.
        scheduler.loop.add_callback(_close, scheduler, "its preload module failed")
        raise


async def _close(scheduler: Scheduler, reason: str) -> None:
    await scheduler  # it is starting
    await scheduler.close(reason=reason)
