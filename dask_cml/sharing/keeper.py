"""What the keeper of a cluster does for the others: it carries out their mail, and reports."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from dask_cml import protocol
from dask_cml.core.view import View, own_sessions, own_view
from dask_cml.core.workers import connected_names, said_by
from dask_cml.errors import CMLError
from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.output import get_logger
from dask_cml.records import store
from dask_cml.records.record import Record
from dask_cml.scheduler.board import Letter, WantedGroup
from dask_cml.scheduler.lifetime import NOTICE
from dask_cml.sharing.journal import Journal
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.report import Report
from dask_cml.timing import timing
from dask_cml.words import printable_lines, shortened

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

#: Maximum number of events that the scheduler does not know yet.
_MOST_EVENTS = 10_000
#: Maximum number of characters of a line for clients.
_LONGEST_LINE = 2000


class Keeper:
    """Tells the other processes what the keeper does, and does what they ask for, for one term.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, which this process keeps.
    link : Link
        Talks to the scheduler.
    record : Record
        The cluster's record.
    term : int
        The term in which this process keeps it.
    taken : int
        The number of the last request that is carried out.

    Attributes
    ----------
    journal : Journal
        Writes the record.
    """

    def __init__(self, cluster: CMLCluster, link: Link, record: Record, term: int, taken: int) -> None:
        self.term, self.taken = term, taken
        self.journal = Journal(cluster.api, record)
        self._cluster, self._link, self._record = cluster, link, record
        self._strays: dict[str, float] = {}
        self._next_strays = 0.0
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] | None = None
        #: What has become of sessions, which the scheduler does not know yet.
        self._events: deque[dict[str, str]] = deque(maxlen=_MOST_EVENTS)
        #: How many there have been.
        self._n_events = 0
        #: The number of the last restart of a Dask worker that is logged.
        self._last_restart = 0
        #: The last known URL of the scheduler's session. The platform may not list it for a while.
        self._app_url: str | None = None

    # -- the mail

    async def take(self, board: BoardState) -> None:
        """Carry out what users of other processes have asked for, in its order."""
        has_mail = self.carry_out(board.mail)
        if has_mail or board.leaving:
            self._cluster.woken.set()
        if has_mail:
            await self.publish()

    def carry_out(self, mail: Sequence[Letter]) -> bool:
        """Carry out the requests that are not carried out yet. Return whether there were any."""
        new = [letter for letter in mail if letter.number > self.taken]
        for letter in new:
            request, name = letter.request, self._record.name
            try:
                self._cluster._carry_out(**msgspec.structs.asdict(request))
            except (ValueError, TypeError) as error:  # its group was deleted meanwhile, for example
                logger.warning("Request of another process for cluster %s refused: %s", name, error)
            self.taken = letter.number
        return bool(new)

    # -- the report

    def event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        self._events.append({"action": action, "session": session, **fields})
        self._n_events += 1

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line."""
        self.event("line", SCHEDULER, text=shortened(printable_lines(text), _LONGEST_LINE))

    def report(self) -> Report:
        """Return what this process knows and wants."""
        cluster, processes, view = self._cluster, self._cluster.processes, own_view(self._cluster)
        scheduler = cluster.scheduler
        if scheduler is not None and not scheduler.adopted:
            self._app_url = scheduler.info.get("app_url") or self._app_url
        return Report(
            sessions=[session.as_json for session in own_sessions(cluster)],
            taken=self.taken,
            groups=self._groups(),
            wanted=cluster.groups.wanted(),
            failures=processes.failures,
            start_times=processes.start_times,
            is_barred=self._is_barred(view),
            app_url=self._app_url,
            **vars(view),
        )

    def _is_barred(self, view: View) -> bool:
        """Return whether the platform refuses all launches of this process, and not because of a quota."""
        has_launched = not all(worker.adopted for worker in self._cluster.processes.workers())
        return any("quota" not in words.lower() for words in view.shortages.values()) and not has_launched

    def _groups(self) -> dict[str, WantedGroup]:
        groups, wanted = self._cluster.groups, {}
        for name in groups.names:
            options = {} if name == DEFAULT_GROUP else groups.options(name).group_arguments()
            wanted[name] = WantedGroup(options, groups.target(name), groups.limits(name))
        return wanted

    async def publish(self, *, leaves: bool = False) -> None:
        """Report what this process knows and wants, as far as it has changed. Log errors.

        With `leaves`, another process keeps the cluster from then on.
        """
        async with self._publishing:
            if not (self._link.connected or leaves):  # who leaves does not watch any more
                return
            # Others may be noted while the scheduler answers.
            report, events, asked = (
                self.report().to_json(),
                [*self._events],
                max(self._link.unreported, default=0),
            )
            n_before = self._n_events - len(events)
            if report == self._published and not (events or asked or leaves):
                return
            message = {"report": report, "asked": asked, "events": events, "n_before": n_before}
            try:
                await self._link.report(term=self.term, leaves=leaves, **message)
            except CMLError as error:
                logger.info("Report on cluster %s not taken: %s", self._record.name, error)
                return
            self._published = report
            for number in [number for number in self._link.unreported if number <= asked]:
                del self._link.unreported[number]
            while len(self._events) > self._n_events - n_before - len(events):
                self._events.popleft()

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
                self._cluster._tell(f"Cluster {self._record.name}: {restart}")
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
            if await self._cluster.processes.claim(session, key, launch):
                continue
            logger.warning("Session %s of %s stopped: no process has launched it", session, key)
            if key == SCHEDULER or key in self._cluster.workers or key in self._cluster.worker_spec:
                self._cluster.api.adopt(session, key)  # the step stops what it knows and does not use
            else:
                self._cluster.processes.adopt_unwanted(session, key, groups[session], launch)

    # -- in place of another keeper, and for another scheduler

    async def succeed(self, record: Record, last: Report, given: Collection[str]) -> None:
        """Go on where the last keeper has stopped, by its report.

        Sessions that it launched after the report fill the places of those that it wanted.

        Parameters
        ----------
        record : Record
            The cluster's record, as it is now.
        last : Report
            The last report.
        given : collection of str
            The names of workers that sessions have had.
        """
        cluster = self._cluster
        reported = {session["id"] for session in last.sessions}
        waits = {session.id for session in last.known_sessions() if session.waits_for is not None}
        launches = [launch for launch in record.launches.values() if launch.key != SCHEDULER]
        kept = {launch.key: last.wanted[launch.key] for launch in launches if launch.key in last.wanted}
        missing = Counter({name: group.target for name, group in last.groups.items()})
        missing.subtract(kept.values())
        for launch in launches:
            group = launch.worker_group(self._record.name)
            if launch.key not in kept and launch.id not in reported and missing[group] > 0:
                kept[launch.key] = group
                missing[group] -= 1
        for name, group in last.wanted.items():  # which may be launched just now
            if name not in given and missing[group] > 0:
                kept[name] = group
                missing[group] -= 1
        self.restore(last, kept)
        cluster.workers.clear()
        for launch in record.launches.values():
            if launch.key == SCHEDULER:
                if launch.id != record.scheduler.session:  # of a lost scheduler, so the step stops it
                    cluster.api.adopt(launch.id, launch.key)
            elif launch.key in cluster.worker_spec:
                worker = cluster.processes.make(launch.key)
                runs_for = None if launch.started is None else max(0.0, time.time() - launch.started)
                worker.adopt(launch.id, launch, runs_for=runs_for, waits=launch.id in waits)
                cluster.workers[launch.key] = worker
            else:
                group = launch.worker_group(self._record.name)
                cluster.processes.adopt_unwanted(launch.id, launch.key, group, launch)
        names = [name for worker in cluster.processes.workers() for name in worker.dask_names]
        states = await cluster._ask_scheduler(protocol.LAST, names=names)
        gone_for = {name: state.get("gone_for", 0.0) for name, state in states.items()}
        for worker in cluster.processes.workers():
            worker.take_over(connected_names(cluster), gone_for)
        self._last_restart = max([0, *(restart.number for restart in self._link.board.restarts)])

    def restore(self, last: Report, wanted: Mapping[str, str]) -> None:
        """Know what the last keeper has learned, and want some of its workers and as many as it has wanted.

        Parameters
        ----------
        last : Report
            Its last report.
        wanted : mapping of str to str
            The groups of these workers by their names.
        """
        cluster, groups = self._cluster, self._cluster.groups
        cluster.processes.take_over(last.failures, last.gave_up, last.start_times)
        self._app_url = last.app_url
        groups.given(last.wanted)
        groups.take(last.groups, wanted)
        for name, group in last.groups.items():
            groups.resize(name, group.target, ())

    def first_board(self, *, orphan_timeout: float | None, **fields: Any) -> dict[str, Any]:
        """Return what the next scheduler begins with, see :mod:`dask_cml.scheduler.plugin`.

        Parameters
        ----------
        orphan_timeout : float or None
            Time without a user after which the cluster ends, in seconds. None: never.
        **fields
            Other fields of the scheduler's file.
        """
        scheduler_timeout = self._cluster.options.scheduler_timeout
        report = replace(self.report(), wanted={}, sessions=()).to_json()
        return {
            "protocol": protocol.PROTOCOL,
            "cluster": self._record.name,
            "record": self._record.id,
            "keeper": self._link.id,
            "term": self.term,
            "manager": self._cluster.sharing.who,
            "created": self._record.created.isoformat(),
            "orphan_timeout": orphan_timeout,
            # The keeper connects after it has launched all workers.
            "patience": None if orphan_timeout is None else max(orphan_timeout, scheduler_timeout),
            "report": report,
            "groups": report["groups"],
            **fields,
        }

    def renew(self) -> None:
        """Begin anew for another scheduler: no session is left, and all names are new."""
        self._cluster.workers.clear()
        self._cluster.groups.renew()
        self._published = None
        self._app_url = None
        self._last_restart = 0
