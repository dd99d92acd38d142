"""What the keeper of a shared cluster writes on the board and in the record, and takes from there."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dask_cml import protocol
from dask_cml.core.adaptive import CMLAdaptive
from dask_cml.core.workers import connected_names, said_by
from dask_cml.errors import CMLError
from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.output import get_logger
from dask_cml.records import store
from dask_cml.records.record import Record
from dask_cml.scheduler.board import BoardGroup, are_equal
from dask_cml.scheduler.lifetime import NOTICE
from dask_cml.scheduler.messages import LONGEST_LINE
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import CMLWorker
from dask_cml.sharing.journal import Journal
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.outbox import Outbox
from dask_cml.sharing.report import Report
from dask_cml.timing import timing
from dask_cml.words import printable_lines, shortened

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

#: Maximum number of events that the scheduler does not know yet.
_MOST_EVENTS = 10_000


class Keeper:
    """Tells the other processes what the keeper does, and does what they ask for.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, which this process keeps.
    link : Link
        Talks to the scheduler.
    outbox : Outbox
        Writes on the board what users of this process ask for.
    record : Record
        The cluster's record.

    Attributes
    ----------
    requests : dict of str to int
        How many changes of a worker group users have asked for, as far as they are carried out here.
    journal : Journal
        Writes the record.
    """

    def __init__(self, cluster: CMLCluster, link: Link, outbox: Outbox, record: Record) -> None:
        self.requests: dict[str, int] = dict.fromkeys(cluster.groups.names, 0)
        self.journal = Journal(cluster.api, record)
        self._cluster, self._link, self._outbox, self._record = cluster, link, outbox, record
        self._strays: dict[str, float] = {}
        self._next_strays = 0.0
        #: The numbers of the last changes that users of this process have asked for, by their groups. They
        #: are carried out here, and the board may not have them yet.
        self._own_changes: dict[str, int] = {}
        self._closed: set[str] = set()
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] | None = None
        #: What has become of sessions, which the scheduler does not know yet.
        self._events: deque[dict[str, str]] = deque(maxlen=_MOST_EVENTS)
        #: How many there have been.
        self._n_events = 0
        #: The number of the last restart of a Dask worker that is logged.
        self._last_restart = 0
        self._sent_url: str | None = None

    # -- requests of users

    async def take(self, board: BoardState) -> None:
        """Want what other processes have written on the board.

        A group that users of this process have changed meanwhile is left alone: the last change to reach the
        board wins.
        """
        changed = False
        with self._cluster.groups.changing():
            for name in self._cluster.groups.take(board.groups):
                self._cluster.processes.begin_anew(name)
                self.requests.pop(name, None)
                self._own_changes.pop(name, None)
                changed = True
            for name, group in board.groups.items():
                if self._has_own(name, group) or self.requests.get(name) == group.request:
                    continue
                self.requests[name] = group.request
                self._cluster.processes.begin_anew(name)
                self._cluster.groups.add_own(name, group.own)
                self._cluster.groups.resize(name, group.target, self._cluster.processes.absent(name))
                self._adapt(name, group)
                self._cluster.groups.begin_adapting()
                changed = True
        closing = [name for name in board.closing if name not in self._closed]
        if closing:
            self._cluster.processes.drop(closing)
            self._closed.update(closing)
        if changed or closing or board.leaving:
            self._cluster.woken.set()
        if changed or closing:  # a process that leaves waits until its change is taken
            await self.publish()

    def _has_own(self, name: str, group: BoardGroup) -> bool:
        """Whether the last change of a group was made here, or one made here is on its way to the board."""
        number = self._own_changes.get(name)
        if number is None:
            return False
        if self._outbox.has(number):
            return True
        del self._own_changes[name]
        if (group.writer, group.number) != (self._link.id, number):  # somebody else was later
            return False
        self.requests[name] = group.request
        return True

    def _adapt(self, name: str, group: BoardGroup) -> None:
        """Let a group adapt between the limits on the board, or keep its size."""
        if group.adapt is not None:
            self._cluster.groups.adapt(name, CMLAdaptive.of(self._cluster, name, group.adapt))
        # An Adaptive of another class scales it here by what this process writes.
        elif group.writer != self._link.id or self._cluster.groups.limits(name) is not None:
            self._cluster.groups.adapt(name, None)

    def asked(self, group: str, **change: Any) -> None:
        """Ask the board for what a user of this process wants and is carried out here, see ``GroupChange``.

        The caller holds the lock of the groups.
        """
        self._own_changes[group] = self._outbox.add(groups={group: change}).number

    def note_own_changes(self) -> None:
        """Note that the changes in the outbox, which were made during the start, are carried out here."""
        for change in self._outbox.changes:
            for group in change.content.get("groups", ()):
                self._own_changes[group] = change.number

    # -- the board

    def event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        self._events.append({"action": action, "session": session, **fields})
        self._n_events += 1

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line."""
        self.event("line", SCHEDULER, text=shortened(printable_lines(text), LONGEST_LINE))

    async def publish(self) -> None:
        """Write on the board what this process knows and wants, as far as it has changed. Log errors."""
        async with self._publishing:
            if not self._link.connected:
                return
            board, changes, view = self._link.board, {}, self._cluster.view
            processes = self._cluster.processes
            for group in self._cluster.groups.names:
                request = self.requests.get(group)
                if group in self._own_changes or group not in board.groups or request is None:
                    continue
                target, own, known = (
                    self._cluster.groups.target(group),
                    self._cluster.groups.own(group),
                    board.groups[group],
                )
                if target != known.target or not are_equal(own, known.own):
                    changes[group] = {"target": target, "own": own, "request": request}
            closed = [name for name in board.closing if name in self._closed]
            report = Report.of(
                view.sessions,
                wanted=self._cluster.groups.wanted(),
                problem=view.problem,
                gave_up=view.gave_up,
                failures=processes.failures,
                start_times=processes.start_times,
                shortages=view.shortages,
                requests={**self.requests},
                staying=view.staying,
                not_stopped=view.not_stopped,
            ).to_json()
            events = [*self._events]
            n_before = self._n_events - len(events)  # others may be noted while the scheduler answers
            is_known = report == self._published and self._url == self._sent_url
            if is_known and not (changes or closed or events):
                return
            try:
                await self._send_url()
                answer = await self._link.report(report, closed, changes, events, n_before)
            except CMLError as error:
                logger.info("Board of cluster %s not written: %s", self._record.name, error)
                return
            if answer.keeper != self._link.id:  # it has lost the lease, and the board has taken nothing
                return
            self._published = report
            while len(self._events) > self._n_events - n_before - len(events):
                self._events.popleft()
            self._closed.intersection_update(answer.closing)

    async def _send_url(self) -> None:
        """Send the scheduler the URL of its session, for processes to which the platform does not list it."""
        url = self._url
        if url != self._sent_url:
            await self._link.set(app_url=url)
            self._sent_url = url

    @property
    def _url(self) -> str | None:
        """The URL of the scheduler's session. As long as the platform does not list it, the last URL sent."""
        scheduler = self._cluster.scheduler
        url = None if scheduler is None or scheduler.adopted else scheduler.info.get("app_url")
        return url or self._sent_url

    def news(self) -> dict[str, str]:
        """Return lines for the user, as far as they are true now, by their subjects."""
        board, lines = self._link.board, {}
        restarts = {restart.number: str(restart) for restart in board.restarts}
        if board.problem and board.problem not in restarts.values():
            lines["memory"] = f": {board.problem}"
        if board.without_gpus:
            lines["gpus"] = f": {board.without_gpus}"
        for number, restart in restarts.items():
            if number > self._last_restart:
                self._cluster.tell(f"Cluster {self._record.name}: {restart}")
                self._last_restart = number
        left = board.most_age - board.age
        if board.most_age and left <= NOTICE:
            age = f"{board.age / 3600:.1f} of {board.most_age / 3600:g} h"
            lines["end"] = f" shuts down in {math.ceil(left / 60)} min: its age is {age}"
        return lines

    # -- strays

    async def find_strays(self) -> None:
        """Take over or stop sessions of the cluster that no process of it uses, as after a crash.

        A session enters itself into the record, and a Dask worker says in which session it runs.
        """
        now = time.monotonic()
        if now < self._next_strays:
            return
        self._next_strays = now + timing.strays
        try:
            record = await asyncio.to_thread(store.read_again, self._record)
        except CMLError as error:
            logger.info("Sessions of cluster %s not compared with its record: %s", self._record.name, error)
            return
        used = {str(process.session_id) for process in self._cluster.processes.launched}
        used |= self._cluster.processes.stopping | self._cluster.api.stopped
        strays = {session: key for session, key in record.sessions.items() if session not in used}
        groups = {session: record.launches[session].worker_group(self._record.name) for session in strays}
        for info in [*self._cluster.scheduler_info["workers"].values()]:
            said = said_by(info)
            session, name = said.get("session"), said.get("name")
            if session and name and session not in used:
                strays[session] = name
                groups[session] = said.get("group") or DEFAULT_GROUP
        self._strays = {session: self._strays.get(session, now) for session in strays}
        date = time.time()
        for session, key in strays.items():
            launch = record.launches.get(session)
            age = now - self._strays[session]
            # A session that was launched long ago is late at once: a command may keep the cluster shortly.
            if launch is not None:
                age = max(age, date - launch.launched)
            if age < timing.stray:
                continue
            if key in self._cluster.processes.launching:  # it may be the session of this launch
                continue
            if await self._adopt_stray(session, key, launch):
                continue
            logger.warning("Session %s of %s stopped: no process has launched it", session, key)
            if key == SCHEDULER or key in self._cluster.workers or key in self._cluster.worker_spec:
                self._cluster.api.adopt(session, key)  # the step stops what it knows and does not use
            else:
                self._cluster.processes.adopt_unwanted(session, key, groups[session], launch)

    async def _adopt_stray(self, session: str, name: str, launch: Launch | None) -> bool:
        """Let a wanted worker be a session that no process uses, unless another session is the worker."""
        spec = self._cluster.worker_spec.get(name)
        if spec is None:
            return False
        known = self._cluster.workers.get(name)
        worker = self._cluster.processes.make(name) if known is None else known
        if not isinstance(worker, CMLWorker):
            return False
        started = await worker.started_session()
        if started != session and not (started is None and known is None):
            return False
        await self._cluster.processes.adopt(worker, session, launch)
        return True

    # -- in place of another keeper, and for another scheduler

    async def succeed(self, record: Record) -> None:
        """Take over the recorded sessions from a keeper that has vanished, and want what the board says."""
        report = self._link.board.report
        sessions = Report.read(report).known_sessions() if report else []
        waits = {session.id for session in sessions if session.waits_for is not None}
        self._cluster.workers.clear()
        self._cluster.groups.drop(self._cluster.groups.workers())
        for launch in record.launches.values():
            if launch.key == SCHEDULER:
                if launch.id != record.scheduler.session:
                    self._cluster.api.adopt(
                        launch.id, launch.key
                    )  # of a lost scheduler, so the step stops it
                continue
            group = launch.worker_group(self._record.name)
            if group not in self._cluster.groups:
                self._cluster.processes.adopt_unwanted(launch.id, launch.key, group, launch)
                continue
            board_group = self._link.board.groups.get(group, BoardGroup())
            spec = self._cluster.groups.spec(group, board_group.own.get(launch.key))
            with self._cluster.groups.changing():
                self._cluster.worker_spec[launch.key] = spec
            worker = self._cluster.processes.make(launch.key)
            runs_for = None if launch.started is None else max(0.0, time.time() - launch.started)
            worker.adopt(launch.id, launch, runs_for=runs_for, waits=launch.id in waits)
            self._cluster.workers[launch.key] = worker
        names = [name for worker in self._cluster.processes.workers() for name in worker.dask_names]
        last = await self._cluster.ask(protocol.LAST, names=names)
        gone_for = {name: state.get("gone_for", 0.0) for name, state in last.items()}
        for worker in self._cluster.processes.workers():
            worker.take_over(connected_names(self._cluster), gone_for)
        self._last_restart = max([0, *(restart.number for restart in self._link.board.restarts)])
        self._want_all(self._link.board.groups)
        self.journal = Journal(self._cluster.api, record)

    def first_board(
        self,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        orphan_timeout: float | None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return what the next scheduler begins with, see :mod:`dask_cml.scheduler.plugin`.

        Parameters
        ----------
        groups : mapping of str to mapping, optional
            The worker groups, see :class:`dask_cml.scheduler.board.BoardGroup`. Default: the groups here.
        orphan_timeout : float or None
            Time without a user after which the cluster ends, in seconds. None: never.
        **fields
            Other fields of the scheduler's file.
        """
        scheduler_timeout = self._cluster.options.scheduler_timeout
        return {
            "protocol": protocol.PROTOCOL,
            "cluster": self._record.name,
            "record": self._record.id,
            "keeper": self._link.id,
            "manager": self._cluster.sharing.who,
            "created": self._record.created.isoformat(),
            "orphan_timeout": orphan_timeout,
            # The keeper connects after it has launched all workers.
            "patience": None if orphan_timeout is None else max(orphan_timeout, scheduler_timeout),
            "groups": self._groups_to_json() if groups is None else groups,
            **fields,
        }

    def _groups_to_json(self) -> dict[str, dict[str, Any]]:
        """Return the groups for a board, see :class:`~dask_cml.scheduler.board.BoardGroup`."""
        known, groups = self._cluster.groups, {}
        for name in known.names:
            board_group = BoardGroup(
                options={} if name == DEFAULT_GROUP else known.options(name).group_arguments(),
                target=known.target(name),
                adapt=known.limits(name),
                request=self.requests.get(name, 0),
                created=known.created(name),
                own=known.own(name),
            )
            groups[name] = asdict(board_group)
        return groups

    def want(self, board: BoardState) -> None:
        """Want what the last scheduler has written, because its keeper has vanished."""
        with self._cluster.groups.changing():
            self._cluster.groups.drop(self._cluster.groups.workers())
            self._cluster.groups.take(board.groups)
            self._want_all(self._without_closing(board))

    def _without_closing(self, board: BoardState) -> dict[str, BoardGroup]:
        """Return the groups of a board without the workers that its keeper was still to close."""
        launches = (*self._record.launches.values(), *self._record.ended.values())
        by_name = {launch.key: launch.worker_group(self._record.name) for launch in launches}
        # A name may be that of one of several Dask workers.
        closing = {name if name in by_name else name.rpartition("-")[0] for name in board.closing}
        groups = {}
        for name, group in board.groups.items():
            n = sum(by_name.get(worker) == name for worker in closing)
            own = {worker: options for worker, options in group.own.items() if worker not in closing}
            groups[name] = replace(group, target=max(0, group.target - n), own=own)
        return groups

    def _want_all(self, groups: Mapping[str, BoardGroup]) -> None:
        """Want what another keeper has left of all groups."""
        for name, group in groups.items():
            self.requests[name] = group.request
            self._cluster.groups.add_own(name, group.own, again=True)
            self._cluster.groups.resize(name, group.target, ())
            self._adapt(name, group)

    def renew(self) -> None:
        """Begin anew for another scheduler: no session is left, and all names are new."""
        self._cluster.workers.clear()
        self._cluster.groups.renew()
        self._published = None
        self._sent_url = None
        self._last_restart = 0
