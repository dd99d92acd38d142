"""The scheduler plugin of a shared cluster: holds its board, and ends a cluster that nobody uses.

Each scheduler preloads it, see :func:`dask_setup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from distributed.comm.addressing import get_address_host
from distributed.comm.core import Comm
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler, WorkerState, WorkerStatusPlugin
from tornado.ioloop import PeriodicCallback

from dask_cml import compat, protocol
from dask_cml.cancellation import cancel, to_the_end, wait_until_set
from dask_cml.checks import validate
from dask_cml.layout import (
    DASHBOARD_PORT,
    FOLDER,
    NUMBER,
    board_file,
    find_modules,
    inside_name,
    scheduler_file,
)
from dask_cml.naming import DEFAULT_GROUP, session_of
from dask_cml.private_files import read_file, write_file
from dask_cml.protocol import USERS, Letter, Rank, Request, WantedGroup, after, after_mail
from dask_cml.scheduler import dashboard_guard
from dask_cml.scheduler.balance import balance, unload_full_workers
from dask_cml.scheduler.demand import known_demand
from dask_cml.scheduler.health import Health, bound, last_state
from dask_cml.scheduler.resident import Resident, logger
from dask_cml.timing import timing

NAME = "dask-cml"
#: Seconds between two changes of the scheduler's file.
_REST = 1.0
#: Maximum number of failed tasks that are remembered, and of characters for one.
_MOST_FAILURES, _LONGEST_FAILURE = 5, 200
_WORKERS_DIED = "the workers that ran it died"
#: Maximum number of requests that no keeper has carried out, and of processes whose last one is remembered.
_MOST_LETTERS = _MOST_SENDERS = 1000
#: Seconds for which a scheduler that starts waits for a file system whose handles are stale.
_STALE_FOR = 30.0
#: The longest time in seconds for which a process that could not keep the cluster is passed over.
_LONGEST_PASS = 300.0
#: Seconds between two looks that count at most. During a longer pause of the process or its event loop,
#: nobody could connect or be heard.
_LONGEST_STEP = 2.0
#: Not users' programs: Dask's own clients of tasks in workers.
_NO_USERS = "Client-worker-"

T = TypeVar("T")


class CMLSchedulerPlugin(SchedulerPlugin):
    """Holds the board of one cluster, knows its Dask workers, and moves tasks away from those that are full.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    number : int
        The number of this scheduler in its cluster.
    foreign_sockets : ForeignSockets
        The WebSockets that the dashboard refuses.
    """

    name = NAME
    idempotent = True

    def __init__(self, folder: Path, number: int, foreign_sockets: dashboard_guard.ForeignSockets) -> None:
        self._foreign_sockets = foreign_sockets
        self._file = StateFile(folder, number)
        self._has_started = False
        #: Whether the dashboard listens at the port that the platform serves. If the port was taken, Dask has
        #: chosen another one, and the platform's URL leads to what another program serves.
        self._serves_dashboard = True
        #: Counts the changes of what watchers are told. The event is set at the next one.
        self._revision, self._changed = 1, asyncio.Event()
        #: What is in the scheduler's file.
        self._saved: dict[str, Any] = {}
        #: The monotonic time since when no task has waited or run. Infinite: some do.
        self._idle_since = time.monotonic()
        #: All that watchers know of the Dask workers.
        self._known: tuple[Any, ...] = (None, {}, 0, False)
        #: The names of Dask workers whose session the platform is about to stop.
        self.leaving: list[str] = []
        #: The names of which notice was given, also those that are not connected then.
        self._noticed: set[str] = set()
        #: Counts the Dask workers that have connected or left.
        self.moves = 0
        #: The number of calls of `Client.scatter` under way, to any worker.
        self._scatters = 0
        self._states: dict[str, WorkerState] = {}
        #: Seconds for which tasks have waited without a worker, and no process of a user could launch one.
        self._in_vain = 0.0
        #: The term in which the last report came, and how many events were reported in it.
        self._reported_term = 0
        self._n_events = 0

    async def start(self, scheduler: Scheduler) -> None:
        """Add the handlers to the scheduler, and start to track watchers and clients."""
        # Scheduler.start_unsafe (scheduler.py:4471) starts once more what a preload module has registered.
        if self._has_started:
            return
        self._has_started = True
        begin = await unless_stale(self._file.begin)
        if begin.get("protocol", protocol.PROTOCOL) != protocol.PROTOCOL:
            raise RuntimeError(
                f"its cluster speaks protocol {begin['protocol']} of dask-cml, and this session "
                f"{protocol.PROTOCOL}: install one release for the whole project, and restart the kernels"
            )
        self._scheduler = scheduler
        self.health = Health(scheduler)
        port = os.environ.get(DASHBOARD_PORT)
        self._serves_dashboard = port is None or port == str(scheduler.services["dashboard"].port)
        if not self._serves_dashboard:
            logger.warning("Dashboard not linked: another program uses its port %s", port)
        self._cluster, self._record = begin["cluster"], begin["record"]
        report, keeper, term = begin.get("report", {}), begin.get("keeper"), begin.get("term", 1)
        self._board = Board(report, keeper, term, begin.get("posted"))
        #: Who the keeper is, for users, and its rank, also while its connection is broken.
        self._manager: str | None = begin.get("manager")
        self._rank = Rank.OBSERVER
        self._resident = Resident(self._cluster, self._file.folder)
        #: Whether the last keeper has left the cluster on purpose: the next one goes on with its requests.
        self._was_left = False
        #: Until this time the keeper may be away: the process that launched this scheduler connects first.
        self._keeper_until = time.monotonic() + timing.first_lease
        timeouts = begin.get("orphan_timeout"), begin.get("patience")
        self._watchers = Watchers(scheduler, inside_name(self._record), *timeouts)
        self._restarts = int(begin.get("restarts", 0))
        #: Sums over the cluster's life, for its history, and before the tasks that Dask's scheduler knows.
        sums = {"most_workers": 0, "tasks_done": 0, "tasks_failed": 0, "failures": []}
        self._activity = self._before = {**sums, **begin.get("activity", {})}
        self._lifetime = Lifetime(scheduler, begin.get("created", ""), begin.get("hours"))
        names = (*protocol.HANDLERS, "scatter", "subscribe_worker_status", "terminate")
        scheduler.handlers |= {name: getattr(self, name.removeprefix("cml_")) for name in names}
        scheduler.handlers |= self.health.handlers
        scheduler.handlers["restart"] = self._restart
        await self._save()
        checks = [self._check_watchers, self._check_workers]
        checks += [functools.partial(move, scheduler) for move in (balance, unload_full_workers)]
        self._periodic = [PeriodicCallback(check, timing.scheduler_look * 1000) for check in checks]
        for callback in self._periodic:
            callback.start()
        self._writing = asyncio.create_task(self._keep_file())

    async def before_close(self) -> None:
        """Note why the scheduler closes, if it closes by itself, and tell the clients if the cluster ends."""
        self._note_activity()  # the workers are still connected
        self._lifetime.note_idle()
        if self._lifetime.closed is not None:
            self._scheduler.log_event(protocol.END, {"reason": self._lifetime.closed})
            # Watchers must know it although the file may not be written: another scheduler would follow.
            self._publish()
            await asyncio.sleep(timing.collect)  # `watch` answers by then

    async def close(self) -> None:
        """Stop all tasks when the scheduler closes, and write its last state."""
        for callback in self._periodic:
            callback.stop()
        await cancel(self._writing)
        self._note_activity()
        with contextlib.suppress(OSError):  # the folder may be gone
            await unless_stale(functools.partial(self._file.write, self._state()))
        await self._resident.close()  # it reads in the file whether the cluster has ended

    def _state(self) -> dict[str, Any]:
        """Return the content of the scheduler's file. Dask's workers and clients read the address."""
        board = self._board.to_json()
        # In the file of a scheduler that begins, "keeper" is the process that launches it.
        is_users = board.pop("keeper") is not None and self._rank is not Rank.RESIDENT
        return {
            **board,
            "revision": self._revision,
            "address": self._scheduler.address,
            "id": self._scheduler.id,
            "session": os.environ.get("CDSW_ENGINE_ID"),
            "app_url": self._app_url,
            "protocol": protocol.PROTOCOL,
            "orphan_timeout": self._watchers.timeout,
            "hours": self._lifetime.hours,
            "restarts": self._restarts,
            "manager": self._manager,
            "maker": self._board.report.get("maker") if is_users else None,
            "manages_soon": self._is_to_be_kept and self._resident.problem is None,
            "rank": self._rank,
            "closed": self._lifetime.closed,
            "posted": dict(self._board.posted),
            "activity": self._activity,
            "workers": self._present(),
        }

    def _present(self) -> dict[str, Any]:
        """Return how many Dask workers are connected, for processes that only read the file."""
        workers = [*self._scheduler.workers.values()]
        sessions = [*map(self._session_of, workers)]
        groups = Counter(DEFAULT_GROUP if session is None else session[0] for session in sessions)
        return {
            "workers": len(workers),
            "groups": dict(groups),
            "sessions": sorted({session[1] for session in sessions if session is not None}),
            "threads": sum(worker.nthreads for worker in workers),
            "memory": sum(worker.memory_limit for worker in workers),
            "problem": self._board.report.get("problem") or self._problem,
            "idle_since": None if self._idle is None else round(self._file.now() - self._idle),
        }

    @property
    def _problem(self) -> str | None:
        """What is wrong with the Dask workers or with the process here that is to keep the cluster."""
        unkept = self._resident.problem if self._board.keeper is None else None
        return self.health.problem or unkept

    async def _keep_file(self) -> None:
        """Write the scheduler's file when something changes. Not all of that is told to watchers at once."""
        while True:
            await asyncio.sleep(_REST)
            if self._saved.get("revision") == self._revision:
                await wait_until_set(self._changed, timing.save)
            await self._save()

    async def _save(self) -> None:
        state = self._state()
        if state == self._saved:
            return
        try:
            # A cancellation waits: the scheduler's last state must not be written before this state.
            await to_the_end(asyncio.to_thread(self._file.write, state))
            self._saved = state
        except OSError as error:
            logger.warning("State of the cluster not written: %s", error)

    def _session_of(self, worker: WorkerState) -> tuple[str, str] | None:
        """Return the group and the name of the session in which a Dask worker runs."""
        return session_of(self._cluster, str(worker.name), worker.extra.get("cml"))

    async def terminate(self, comm: Comm, reason: str = "", **arguments: Any) -> None:
        """Close the scheduler for good, as ``Client.shutdown`` asks for, and processes with a reason."""
        reason = str(reason) or f"shut down by a client at {get_address_host(comm.peer_address)}"
        await self._lifetime.end(reason, **arguments)

    async def _restart(self, **arguments: Any) -> None:
        """Forget all tasks, as ``Client.restart`` asks for, but not how many were done."""
        self._note_activity()
        self._before = self._activity
        await self._scheduler.restart(**arguments)

    # -- the board

    def hello(self) -> dict[str, Any]:
        """Return which cluster this scheduler belongs to, its session, and its protocol."""
        return {
            "protocol": protocol.PROTOCOL,
            "cluster": self._cluster,
            "record": self._record,
            "number": self._file.number,
            # of several that were launched, see ``dask_cml/sessions/process.py``
            "session": os.environ.get("CDSW_ENGINE_ID"),
        }

    async def watch(
        self, comm: Comm, watcher: str, rank: int, who: str, since: int, wait: float
    ) -> dict[str, Any]:
        """Return the board as soon as it differs from a revision, or after some time.

        Parameters
        ----------
        comm : Comm
            The watcher's connection. When it closes, the watcher has left.
        watcher : str
            The watcher's id.
        rank : int
            Whether it counts as a user, and may keep the cluster, see :class:`dask_cml.protocol.Rank`.
        who : str
            Who it is, for users.
        since : int
            The revision that the watcher knows.
        wait : float
            Time to wait for a change, in seconds.
        """
        self._watchers.hear(watcher, Rank(rank), who, comm)
        if watcher == self._board.keeper:
            self._keeper_until = time.monotonic() + timing.reconnect
        self._pick_keeper()
        is_changed = since == self._revision and await wait_until_set(self._changed, wait)
        if is_changed and self._lifetime.closed is None:
            await asyncio.sleep(timing.collect)
        return self._answer(watcher)

    def post(self, sender: str, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Add a user's request to the mail, and return the board. One that is repeated changes nothing.

        The answer to one that cannot be carried out, and changes nothing, is ``{"refused": why}``.

        Parameters
        ----------
        sender : str
            The id of the process whose user asks.
        number : int
            Counts the requests of that process.
        request : mapping
            The :class:`Request`.
        """
        try:
            self._board.post(sender, number, validate(request, Request, "request"))
        except ValueError as error:
            return {"refused": str(error)}
        self._publish()
        return self._answer(sender)

    def live_on(self, watcher: str) -> dict[str, Any]:
        """Let the cluster run on without a user, and return the board."""
        self._watchers.timeout = None
        self._publish()
        return self._answer(watcher)

    def report(
        self,
        keeper: str,
        term: int,
        report: Mapping[str, Any],
        asked: int,
        events: Sequence[Mapping[str, str]],
        n_before: int,
        leaves: bool,
    ) -> dict[str, Any]:
        """Take what the keeper says of the cluster. Return the board.

        A process that does not keep it any more is refused, such as a keeper that was frozen.

        Parameters
        ----------
        keeper : str
            The id of the process that reports.
        term : int
            The term in which it keeps the cluster.
        report : mapping
            What it says, see :class:`dask_cml.protocol.Report`.
        asked : int
            The number of the last request of its users that the report contains. 0: nothing new.
        events : sequence of mapping
            What has become of sessions, and the lines for clients, for Dask's log of events.
        n_before : int
            How many events the keeper has reported before these. It repeats some if it got no answer.
        leaves : bool
            Whether it keeps the cluster no more.
        """
        if (keeper, term) != (self._board.keeper, self._board.term):
            return {"refused": "another process manages the cluster"}
        self._board.take_report(report)
        if asked:
            self._board.note_posted(keeper, asked)
        known = self._n_events if term == self._reported_term else 0
        for event in events[max(0, known - n_before) :]:
            topic = protocol.LINES if event.get("action") == "line" else protocol.TOPIC
            self._scheduler.log_event(topic, dict(event))
        self._reported_term, self._n_events = term, max(known, n_before + len(events))
        self._was_left = leaves
        if self._app_url is not None:
            self._foreign_sockets.allow(self._app_url)
        if leaves:
            self._watchers.pass_over(keeper)
            self._keep(None)
            self._pick_keeper()
        self._publish()
        return self._answer(keeper)

    def _keep(self, keeper: str | None) -> None:
        self._rank, self._manager = self._watchers.rank_and_who(keeper)
        logger.info("Cluster %s", f"kept by {self._manager}" if keeper else "without a keeper")
        self._board.keep(keeper)
        self._publish()

    def _pick_keeper(self) -> None:
        """Let another process keep the cluster if the watchers choose one, as if its keeper is gone."""
        keeper, now = self._board.keeper, time.monotonic()
        if keeper is not None and not self._watchers.answers(keeper) and now > self._keeper_until:
            self._keep(None)
        is_barred = self._rank is Rank.RESIDENT and self._board.report.get("is_barred")
        can_launch = self._resident.problem is None and not is_barred
        chosen = self._watchers.keeper_after(self._board.keeper, can_launch)
        if chosen != self._board.keeper:
            self._keep(chosen)

    @property
    def _app_url(self) -> str | None:
        """The URL of the scheduler's session, if its dashboard answers there."""
        url: str | None = self._board.report.get("app_url")
        return url if self._serves_dashboard else None

    def _answer(self, watcher: str) -> dict[str, Any]:
        """Return the board. The keeper gets it without its own report, but with the last keeper's."""
        board = self._board.to_json()
        if watcher == self._board.keeper and self._board.term == self._reported_term:
            board["report"] = {}
        return {
            **board,
            "revision": self._revision,
            "posted": self._board.posted.get(watcher, 0),
            "leaving": [*self.leaving],
            "moves": self.moves,
            "problem": self._problem,
            "news": self.health.news,
            "idle": self._idle,
            "app_url": self._app_url,
            "serves_dashboard": self._serves_dashboard,
            "closed": self._lifetime.closed,
            **self._lifetime.age,
        }

    def _publish(self) -> None:
        """Answer the watchers, and write the scheduler's file."""
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def forward(self, comm: Comm, **_: Any) -> Any:
        """Serve the dashboard, which listens on the loopback only, on a comm until one side closes it.

        When the scheduler closes, Dask cancels this.
        """
        stream = getattr(comm, "stream", None)
        if stream is None:  # a comm of Dask over asyncio
            return {"status": "error", "message": "the scheduler's comms cannot carry its dashboard"}
        try:
            await comm.write({"status": "OK"})
            self._scheduler.http_server.handle_stream(stream, ("127.0.0.1", 0))
            while not stream.closed():  # noqa: ASYNC110, Tornado's WebSockets have no other sign of their end
                await asyncio.sleep(timing.scheduler_look)
        finally:
            comm.abort()
        return Status.dont_reply

    # -- Dask workers

    async def scatter(self, **arguments: Any) -> Any:
        """Send data of a client to workers, and count the call: Scheduler.scatter may wait for a worker."""
        is_to_any = arguments.get("workers") is None
        self._scatters += is_to_any
        try:
            return await self._scheduler.scatter(**arguments)
        finally:
            self._scatters -= is_to_any

    def demand(self) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the cluster's sessions, from ``known_demand``."""
        return known_demand(self._scheduler, self._cluster, self._scatters)

    def subscribe_worker_status(self, comm: Comm) -> dict[str, Any]:
        """Describe the workers to one more process. Dask's own plugin does so to the last one only."""
        scheduler = self._scheduler
        for name, plugin in [*scheduler.plugins.items()]:
            if isinstance(plugin, WorkerStatusPlugin) and plugin.bcomm.closed():
                plugin.bcomm.abort()
                scheduler.remove_plugin(name)
        workers = scheduler.subscribe_worker_status(comm)
        plugin = scheduler.plugins.pop(WorkerStatusPlugin.name)
        # By which it removes itself once the process has left.
        plugin.name = f"{WorkerStatusPlugin.name} {comm.peer_address}"  # type: ignore[attr-defined]
        scheduler.add_plugin(plugin)
        return workers

    def notice(self, names: Collection[str]) -> None:
        """Let Dask workers leave whose session the platform is about to stop, and tell the watchers.

        Parameters
        ----------
        names : collection of str
            Their names. Some may have left, and some may connect later, as after a restart.
        """
        self._noticed |= {*names}
        # The keeper retires a worker before it stops the session, which then gives notice, too.
        connected = [name for name in names if name in self._scheduler.aliases]
        self.leaving += [name for name in connected if name not in self.leaving]
        for name in connected:
            self._scheduler.log_event(protocol.TOPIC, {"action": "evicted", "session": name})
        self._scheduler.loop.add_callback(self._scheduler.retire_workers, names=connected, close_workers=True)
        self._publish()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a Dask worker that has connected."""
        self.moves += 1
        state = self._states[worker] = scheduler.workers[worker]
        self.health.note_connected(str(state.name), time.monotonic())
        scheduler.log_event(protocol.TOPIC, {"action": "connected", "session": str(state.name)})
        if str(state.name) in self._noticed:
            self.notice([str(state.name)])

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Note what was known last of a Dask worker that has left."""
        self.moves += 1
        state = self._states.pop(worker, None)
        if state is None:
            return
        name = str(state.name)
        noticed = name in self.leaving
        if noticed:
            self.leaving.remove(name)
        self.health.note_left(name, worker, {**last_state(scheduler, state), "noticed": noticed})

    def log_event(self, topic: str, msg: Any) -> None:
        """Note what nannies say of their workers."""
        self.health.note_event(topic, msg)

    # -- checks

    def _check_watchers(self) -> None:
        seconds = self._watchers.update()
        self._pick_keeper()
        self._resident.check(seconds, self._is_to_be_kept, keeps=self._rank is Rank.RESIDENT)
        reason = self._lifetime.check()
        if self._watchers.is_orphan:
            reason = f"orphaned: no process and no client has used it for {self._watchers.timeout:g} s"
        elif self._scheduler.idle_timeout and self._waits_in_vain(seconds) >= self._scheduler.idle_timeout:
            reason = (
                f"its tasks have waited for {self._scheduler.idle_timeout:g} s without a worker, and no "
                "process of a user has managed it"
            )
        if reason is not None:
            for callback in self._periodic:
                callback.stop()
            self._closing = asyncio.create_task(self._lifetime.end(reason))

    @property
    def _is_to_be_kept(self) -> bool:
        """Whether nobody keeps the cluster, and users want more of it than its present workers."""
        lives_on = self._watchers.timeout is None and self._lifetime.closed is None
        is_wanted = lives_on or self._watchers.has_user or bool(self._board.mail) or self._was_left
        return is_wanted and self._board.keeper is None

    def _waits_in_vain(self, seconds: float) -> float:
        """Return for how long tasks have waited, and no worker is here or about to come, in seconds."""
        sessions = () if self._board.keeper is None else self._board.report.get("sessions", ())
        launched = any(session.get("role") == "worker" for session in sessions)
        has_help = launched or self._watchers.has_user or self._scheduler.workers
        self._in_vain = 0.0 if math.isfinite(self._idle_since) or has_help else self._in_vain + seconds
        return self._in_vain

    def _check_workers(self) -> None:
        """Note what is done. Tell watchers what is wrong with Dask workers, and whether any have moved."""
        self._note_activity()
        now, workers = time.monotonic(), self._scheduler.workers.values()
        self.health.look(workers, now)
        waiting = self._scheduler.queued or self._scheduler.unrunnable
        is_busy = waiting or any(worker.processing for worker in workers)
        self._idle_since = math.inf if is_busy else min(self._idle_since, now)
        news = (self._problem, self.health.news, self.moves, self._idle is not None)
        if news != self._known:
            self._known = news
            self._publish()

    @property
    def _idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        idle = time.monotonic() - self._idle_since
        return idle if idle >= (timing.idle if self._activity["tasks_done"] else 0) else None

    def _note_activity(self) -> None:
        sessions = map(self._session_of, self._scheduler.workers.values())
        names = {name for _, name in filter(None, sessions)}
        before, erred = self._before, self._scheduler.erred_tasks
        states = [prefix.state_counts for prefix in self._scheduler.task_prefixes.values()]
        n_failed = sum(counts["erred"] for counts in states)
        n_done = n_failed + sum(counts["memory"] for counts in states)
        if n_done:
            self._restarts = 0
        # Dask notes no text if the workers died.
        lines = [f"{task.key}: {task.exception_text or _WORKERS_DIED}" for task in [*erred][:_MOST_FAILURES]]
        self._activity = {
            "most_workers": max(self._activity["most_workers"], len(names)),
            "tasks_done": before["tasks_done"] + n_done,
            "tasks_failed": before["tasks_failed"] + n_failed,
            "failures": [line[:_LONGEST_FAILURE] for line in reversed(lines)] or self._activity["failures"],
        }


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin when the scheduler starts, for ``dask scheduler --preload``."""
    compat.limit_handshakes()
    find_modules()
    foreign_sockets = dashboard_guard.protect(scheduler)
    if FOLDER not in os.environ:  # without a record: dask_utils has launched it, and nobody watches it
        session = os.environ.get("CDSW_ENGINE_ID")
        scheduler.handlers |= {
            protocol.HELLO: lambda: {"record": None, "number": 0, "session": session},
            protocol.NOTICE: lambda names: scheduler.retire_workers(names=names, close_workers=True),
        }
        return
    plugin = CMLSchedulerPlugin(Path(os.environ[FOLDER]), int(os.environ[NUMBER]), foreign_sockets)
    try:
        await scheduler.register_scheduler_plugin(plugin, name=NAME, idempotent=True)
    except Exception as error:  # nothing else ends a scheduler that nobody watches
        is_deleted = isinstance(error, FileNotFoundError)
        why = "its cluster was deleted" if is_deleted else f"its preload module failed: {error}"
        logger.warning("Scheduler not started: %s", why, exc_info=not is_deleted)
        scheduler.loop.add_callback(_close, scheduler, why)


async def _close(scheduler: Scheduler, reason: str) -> None:
    await scheduler  # it is starting
    await scheduler.close(reason=reason)


class Board:
    """The board of one cluster.

    Parameters
    ----------
    report : mapping
        The last report of a keeper, see :class:`Report`.
    keeper : str, optional
        The id of the process that keeps the cluster at first.
    term : int
        Counts the keepers of the cluster.
    posted : mapping of str to int
        The numbers of the last requests of processes, by their ids.

    Examples
    --------
    >>> board = Board({"groups": {"default": {"target": 2}}}, keeper="me")
    >>> board.post("you", 1, Request(kind="scale", n=3))
    >>> board.groups["default"].target
    3
    >>> board.take_report({"groups": {"default": {"target": 3}}, "taken": 1})
    >>> board.mail
    []
    """

    def __init__(
        self,
        report: Mapping[str, Any],
        keeper: str | None = None,
        term: int = 1,
        posted: Mapping[str, int] | None = None,
    ) -> None:
        self.keeper, self.term = keeper, term
        self.posted = dict([*(posted or {}).items()][-_MOST_SENDERS:])
        self.mail: list[Letter] = []
        self.take_report(report)

    @property
    def groups(self) -> dict[str, WantedGroup]:
        """The worker groups as they are after the mail is carried out."""
        return after_mail(self.report.get("groups", {}), self.mail)

    def to_json(self) -> dict[str, Any]:
        """Return the whole board, for JSON and for messages."""
        return {
            "keeper": self.keeper,
            "term": self.term,
            "mail": [asdict(letter) for letter in self.mail],
            "report": dict(self.report),
        }

    def post(self, sender: str, number: int, request: Request) -> None:
        """Add a request to the mail. One that a process repeats changes nothing.

        Parameters
        ----------
        sender : str
            The id of the process whose user asks.
        number : int
            Counts the requests of that process.
        request : Request
            The request.

        Raises
        ------
        ValueError
            If it cannot be carried out, or the mail is full.
        """
        if number <= self.posted.get(sender, 0):
            return
        if len(self.mail) >= _MOST_LETTERS:
            raise ValueError(
                f"no process manages the cluster: {len(self.mail)} requests wait to be carried out"
            )
        after(self.groups, request)
        last = self.mail[-1].number if self.mail else self.report.get("taken", 0)
        self.mail.append(Letter(last + 1, request, sender, number))
        self.note_posted(sender, number)

    def note_posted(self, sender: str, number: int) -> None:
        """Note the number of the last request of a process that is in the mail or in its own report."""
        self.posted[sender] = max(number, self.posted.pop(sender, 0))
        bound(self.posted, _MOST_SENDERS)

    def keep(self, keeper: str | None) -> None:
        """Let a process keep the cluster, or nobody, in a new term."""
        self.keeper, self.term = keeper, self.term + 1

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Take what the keeper says, and drop the requests that it has carried out."""
        self.report = report
        self.mail = [letter for letter in self.mail if letter.number > report.get("taken", 0)]


@dataclass
class _Watcher:
    rank: Rank
    who: str
    comm: Comm
    #: Seconds since its last message, and since its first, without pauses of this process.
    silent: float = 0.0
    connected: float = 0.0
    #: Seconds for which it was passed over last.
    passed_over: float = 0.0


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
        times = {} if known is None else {"connected": known.connected, "passed_over": known.passed_over}
        self._watchers[watcher] = _Watcher(rank, who, comm, **times)
        if rank in USERS:
            self._alone = 0.0

    def rank_and_who(self, watcher: str | None) -> tuple[Rank, str | None]:
        """Return a watcher's rank, and who it is, for users."""
        known = self._watchers.get(watcher or "")
        return (Rank.OBSERVER, None) if known is None else (known.rank, known.who)

    def pass_over(self, watcher: str) -> None:
        """Let a watcher keep nothing for a while, because it leaves, or cannot go on. Twice as long again."""
        if (known := self._watchers.get(watcher)) is not None:
            if known.connected > timing.silence:  # it has kept the cluster meanwhile
                known.passed_over = 0.0
            known.passed_over = max(timing.stay, min(2 * known.passed_over, _LONGEST_PASS))
            known.connected = -known.passed_over

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
        rank, _ = self.rank_and_who(keeper)
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
        if self.hours is None or left > timing.notice:
            return None
        limit = f"its limit of {round(self.hours, 2):g} h"
        if left <= 0:
            return f"reached {limit}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning("Cluster shuts down in %.0f s, at %s", left, limit)
            event = {"action": "shuts down", "session": None, "seconds": left}
            self._scheduler.log_event(protocol.TOPIC, event)
        return None

    def note_idle(self) -> None:
        """Note why Dask closes the scheduler, if it was idle for too long."""
        timeout, since = self._scheduler.idle_timeout, self._scheduler.idle_since
        if timeout and since and time.time() - since > timeout:
            self.closed = self.closed or f"idle for {timeout:g} s"

    async def end(self, reason: str, **arguments: Any) -> None:
        """End the cluster. If Dask does not close its scheduler, the program of the session kills it."""
        self.closed = self.closed or reason
        await self._scheduler.close(reason=self.closed, **arguments)


class StateFile:
    """The file in which a scheduler says how to reach it, and the one with which it begins.

    Workers and other processes find the scheduler by it. Another scheduler begins with it if this one is
    lost. Its time is the scheduler's sign of life for processes that cannot reach the scheduler. The program
    of its session dates it, because a large graph keeps the event loop busy for minutes. This program also
    ends a scheduler whose cluster is deleted or has another scheduler, see :mod:`dask_cml.wrapper`.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    number : int
        The number of this scheduler in its cluster.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self._board, self._file = folder / board_file(number), folder / scheduler_file(number)
        #: The file with which the scheduler began. Another cluster of this name has another file.
        self._begun: bytes | None = None
        #: By how many seconds the file system's clock is ahead. Other machines see ages by it.
        self._ahead = 0.0

    def now(self) -> float:
        """Return the time by the file system's clock, in seconds since 1970."""
        return time.time() + self._ahead

    def begin(self) -> Mapping[str, Any]:
        """Return what the process that launched this scheduler has written for it. Blocks.

        Raises
        ------
        OSError, ValueError
            If the file cannot be read.
        """
        self._begun = read_file(self._board)
        content: Mapping[str, Any] = json.loads(self._begun)
        return content

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file atomically. Blocks.

        Raises
        ------
        OSError
            If it cannot be written, or the folder is another cluster's.
        """
        os.listdir(self.folder)  # NFS may cache the file of a cluster that was deleted
        if self._begun is not None and read_file(self._board) != self._begun:
            raise FileExistsError("another cluster has its name")
        write_file(self._file, json.dumps(content).encode())
        with contextlib.suppress(OSError):  # it is written even so
            ahead = self._file.stat().st_mtime - time.time()
            if abs(ahead - self._ahead) > 1:  # less would only make it write again
                self._ahead = ahead


async def unless_stale(action: Callable[[], T]) -> T:
    """Run a blocking action. Repeat it while the file system answers that a handle is stale."""
    deadline = time.monotonic() + _STALE_FOR
    while True:
        try:
            return await asyncio.to_thread(action)
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)
