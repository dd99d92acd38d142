"""What a process does for a cluster: a keeper carries out mail and reports, a follower shows reports.

Both use the link to a cluster's scheduler. It watches the board, writes on it, and asks
questions. An answer has a time limit, which covers Dask's handshake, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from distributed.comm.core import Comm
from distributed.security import Security

from dask_cml import output, protocol
from dask_cml.cancellation import files_in_time, to_the_end, within
from dask_cml.checks import is_session_id, validate
from dask_cml.core.workers import connected_names
from dask_cml.errors import CMLError, NoSuchCluster, SchedulerTimeout
from dask_cml.layout import OWN_LOG, SCHEDULER, log_path
from dask_cml.output import get_logger
from dask_cml.private_files import append
from dask_cml.protocol import (
    NO_ANSWER,
    BoardState,
    Letter,
    Rank,
    Report,
    Request,
    View,
    after_mail,
    ask,
    call,
    connect_to,
)
from dask_cml.records import store
from dask_cml.records.store import Maker, Record, SchedulerState, end_file
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import this_owner
from dask_cml.sessions.process import CMLProcess, Session
from dask_cml.sessions.workers_api import WorkersAPI, time_of
from dask_cml.timing import timing
from dask_cml.words import shortened

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster


logger = get_logger(__name__)

#: Maximum number of events that the scheduler does not know yet.
_MOST_EVENTS = 10_000
#: Maximum number of characters of a line for clients.
_LONGEST_LINE = 2000


class Link:
    """Talks to the scheduler of one cluster.

    Parameters
    ----------
    id : str
        The id of this watcher.
    cluster : str
        The cluster's name.
    who : str
        Who it is, for users.

    Attributes
    ----------
    address : str or None
        The scheduler's address. None: it has not answered yet, and questions fail.
    connection_args : dict
        The result of :func:`dask_cml.protocol.connection_args`.
    board : BoardState
        The last known board.
    connected : bool
        Whether the scheduler answers.
    rank : Rank
        Whether this process counts as a user, and may keep the cluster.
    heard : float
        The monotonic time of the last question that the scheduler has answered. An answer may lie in the
        socket of a process that is stopped for minutes.
    """

    def __init__(self, id: str, cluster: str, who: str) -> None:
        self.id = id
        self.rank = Rank.OWNER
        self.address: str | None = None
        self.connection_args: dict[str, Any] = {}
        self.board = BoardState()
        self.connected = False
        self.heard = time.monotonic()
        self._cluster, self._who = cluster, who
        #: What users of this process have asked for, and no report is known to contain. A scheduler may end
        #: before it has written what it has answered: the next one gets that again. The scheduler takes a
        #: request for a repeat if it knows a later one of this process. So requests reach it in the order of
        #: their numbers: these before any later post, and all others, also the keeper's own, as posts as long
        #: as an earlier one is not answered (Sharing.request, Sharing.asked).
        self.unreported: dict[int, Request] = {}
        #: How many requests users of this process have made.
        self._n_asked = 0
        self._posting = asyncio.Lock()
        self._watching: Comm | None = None
        #: The id of the cluster's record.
        self._record = ""

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        return None if self.board.idle is None else self.board.idle + time.monotonic() - self.heard

    @property
    def unheard(self) -> dict[int, Request]:
        """What users of this process have asked for, and the scheduler is not known to have heard of."""
        return {number: request for number, request in self.unreported.items() if number > self.board.posted}

    async def join(self, address: str, security: Security | None, record: str) -> None:
        """Connect to the scheduler at an address, if it is this cluster's, and read the board.

        Parameters
        ----------
        address : str
            The scheduler's address.
        security : Security or None
            The cluster's keys, in files.
        record : str
            The id of the cluster's record.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        CMLError
            If the scheduler belongs to another cluster, or has another protocol.
        """
        self.forget()
        self.connection_args = await files_in_time(protocol.connection_args, security, address)
        self.address, self._record = address, record
        try:
            await self.watch()
        except BaseException:
            self.forget()
            raise

    def _check(self, hello: Mapping[str, Any]) -> None:
        if hello.get("record") != self._record:
            other = hello.get("cluster")
            raise CMLError(f"the scheduler at {self.address} belongs to another cluster, {other!r}")
        if hello.get("protocol") != protocol.PROTOCOL:
            raise CMLError(
                f"cluster {self._cluster!r} speaks protocol {hello.get('protocol')} of dask-cml, this "
                f"process {protocol.PROTOCOL}: install the dask-cml with which it was created, or delete it"
            )

    async def watch(self) -> BoardState:
        """Wait until the board changes, for a heartbeat at most, and return it.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        wait = timing.observer_heartbeat if self.rank is Rank.OBSERVER else timing.heartbeat
        since, asked = self.board.revision if self.connected else 0, time.monotonic()
        try:
            answer = await within(wait + timing.answer, self._watch(since, wait))
        except BaseException:
            self.close()
            raise
        self._take(answer, asked)
        return self.board

    async def _watch(self, since: int, wait: float) -> Any:
        if self._watching is None:
            # Dask tries to connect to a dead scheduler until its time limit. Only then this process finds out
            # that it is dead, so the first limits are short.
            limit = min(timing.answer, max(timing.listing, time.monotonic() - self.heard))
            # To the scheduler, this watcher has left when this connection ends.
            self._watching = await connect_to(self._known_address(), self.connection_args, limit)
            # Each time: without keys, a scheduler of another cluster may have the address of a lost one.
            hello = await call(self._watching, protocol.HELLO)
            self._check(hello if isinstance(hello, Mapping) else {})
        who = {"watcher": self.id, "rank": int(self.rank), "who": self._who}
        return await call(self._watching, protocol.WATCH, **who, since=since, wait=wait)

    def _take(self, answer: Mapping[str, Any], asked: float) -> BoardState:
        """Take the board of an answer, unless a newer board is known. Return the answer's board."""
        board = validate(dict(answer), BoardState, "board of a cluster")
        self.heard = max(self.heard, asked)
        if not self.connected or board.revision >= self.board.revision:
            self.board = board
            waiting = {letter.asked for letter in board.mail if letter.sender == self.id}
            for number in [*self.unreported]:
                if number <= board.posted and number not in waiting:
                    del self.unreported[number]
        self.connected = True
        return board

    def next_number(self) -> int:
        """Return the number of another request of this process, which the scheduler takes once."""
        self._n_asked += 1
        return self._n_asked

    async def post(self, number: int, request: Request) -> None:
        """Post what a user of this process asks for, unless the scheduler has it.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        async with self._posting:
            await self._post_unreported(number)
            try:
                await self._post(number, request)
            except SchedulerTimeout:
                if not (self.connected and self.board.keeper == self.id):
                    raise
                # In its order. Another scheduler answers by now, or only the answer was lost.
                await self._post(number, request)
            self.unreported[number] = request

    async def post_unreported(self) -> None:
        """Post what nobody may have heard of: of a term that is over, or of a scheduler that has ended.

        Raises
        ------
        CMLError
            If the scheduler does not answer. What it does not have yet is not forgotten.
        """
        async with self._posting:
            await self._post_unreported()

    async def _post_unreported(self, before: float = math.inf) -> None:
        # In their order: the scheduler takes a late one for a repeat.
        for number, request in [entry for entry in self.unheard.items() if entry[0] < before]:
            try:
                await self._post(number, request)
            except SchedulerTimeout:
                raise
            except CMLError as error:  # it refuses that
                logger.warning("Cluster %s not changed: %s", self._cluster, error)
                self.unreported.pop(number, None)

    async def _post(self, number: int, request: Request) -> None:
        try:
            await self._write(protocol.POST, sender=self.id, number=number, request=asdict(request))
        except SchedulerTimeout:
            if number > self.board.posted:  # else only its answer was lost
                raise

    async def live_on(self) -> None:
        """Let the cluster run on without a user.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await self._write(protocol.LIVE_ON, watcher=self.id)

    async def report(self, **values: Any) -> BoardState:
        """Tell what the keeper says, see :meth:`dask_cml.scheduler.plugin.CMLSchedulerPlugin.report`.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        async with self._posting:
            return await self._write(protocol.REPORT, keeper=self.id, **values)

    async def _write(self, op: str, **arguments: Any) -> BoardState:
        """Call a handler that changes the board, and return the board.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it. Another one that has replaced it meanwhile counts
            as no answer.
        """
        began, address = time.monotonic(), self.address
        try:
            try:
                return await self._ask_board(op, arguments)
            except NO_ANSWER:
                if time.monotonic() - began > timing.retry:
                    raise
                # The connection broke. If the scheduler has taken it, the repeat changes nothing.
                return await self._ask_board(op, arguments)
        except NO_ANSWER as error:
            raise SchedulerTimeout(
                f"the scheduler of cluster {self._cluster!r} at {address} does not answer: {error!r}"
            ) from error

    async def _ask_board(self, op: str, arguments: Mapping[str, Any]) -> BoardState:
        address, asked = self._known_address(), time.monotonic()
        answer = await self.ask(op, **arguments)
        if self.address != address:
            raise OSError(f"the scheduler at {address} is replaced")
        return self._take(answer, asked)

    async def ask(self, op: str, timeout: float | None = None, /, **arguments: Any) -> Any:
        """Call a handler of the scheduler, see :func:`ask`. Default time limit: ``timing.answer``."""
        limit = timing.answer if timeout is None else timeout
        return await ask(self._known_address(), self.connection_args, op, limit, **arguments)

    def _known_address(self) -> str:
        if self.address is None:
            raise OSError("the scheduler has not answered yet")
        return self.address

    def forget(self) -> None:
        """Forget the scheduler and its board, because another one is to be joined."""
        self.close()
        self.address, self.board = None, BoardState()

    def close(self) -> None:
        """Close the connection, by which the scheduler notices that this watcher has left."""
        self.connected = False
        if self._watching is not None:
            with contextlib.suppress(Exception):  # of Dask's comm, which may be broken in any way
                self._watching.abort()
        self._watching = None


class Journal:
    """Enters the sessions of a keeper into the cluster's record as soon as their ids are known.

    Parameters
    ----------
    api : WorkersAPI
        Knows all sessions that this process has launched or adopted, and has stopped.
    record : Record
        The cluster's record.

    Attributes
    ----------
    gone : bool
        Whether the record did not exist any more at the last write, because another process deleted the
        cluster or its folder.
    """

    def __init__(self, api: WorkersAPI, record: Record) -> None:
        self.gone = False
        self._api = api
        self._record = record
        self._written = {*record.launches}
        #: Launched processes that are not in the record yet.
        self._entering: list[CMLProcess] = []
        #: Sessions of no process at the last write.
        self._unused: set[str] = set()
        #: Why and when sessions ended by themselves, by their ids.
        self._ends: dict[str, tuple[int, str]] = {}
        #: Why the last write failed. The next one tries again, and only another reason is logged.
        self._failure: str | None = None
        self._lock = asyncio.Lock()

    async def enter(self, process: CMLProcess) -> None:
        """Write that a session was launched. Callers that wait for each other share one write."""
        self._entering.append(process)
        await self._locked(self._enter)

    async def write(self, processes: Iterable[CMLProcess]) -> None:
        """Write what has changed. Log an error once; the next call tries again.

        Parameters
        ----------
        processes : iterable of CMLProcess
            The scheduler and the workers.
        """
        await self._locked(self._write, {str(process.session_id): process for process in processes})

    async def _locked(self, write: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            async with self._lock:
                await write(*arguments)
        except NoSuchCluster:
            if not self.gone:
                words = "Cluster %s launches no more sessions: another process has deleted its folder %s"
                logger.warning(words, self._record.name, self._record.folder)
            self.gone = True
        except (OSError, CMLError) as error:
            before, self._failure = self._failure, str(error)
            if self._failure != before:
                logger.warning("Record of cluster %s not written: %s", self._record.name, error)

    async def _enter(self) -> None:
        entering, self._entering = self._entering, []
        if not entering:
            return
        launches = [launch_of(str(process.session_id), process.plan.key, process) for process in entering]
        await self._put(launches)
        self._written.update(launch.id for launch in launches)

    async def _write(self, processes: dict[str, CMLProcess]) -> None:
        sessions, now = self._api.live.copy(), int(time.time())
        new = {session: key for session, key in sessions.items() if session not in self._written}
        # A new session may get its process by the next write. An engine of a refused launch never gets one.
        unused = new.keys() - processes.keys()
        for session in unused - self._unused:
            del new[session]
        self._unused = unused
        launched = [launch_of(session, key, processes.get(session)) for session, key in new.items()]
        for session, process in processes.items():
            if process.loss is not None or process.info.get("finished_at"):
                finished = time_of(process.info, "finished_at")
                ended = now if finished is None else int(finished.timestamp())
                self._ends[session] = ended, process.loss or ""
        stopped = {*self._api.stopped}
        ends = []
        for session in stopped:
            ended, cause = self._ends.get(session, (now, ""))
            ends.append(end_file(session, min(now, ended), cause))
        if launched or ends or self.gone:
            await self._put(launched, ends)
        self._written = (self._written | new.keys()) - stopped
        # A late answer of the platform may enter a stopped session once more. Then it is stopped again.
        self._api.stopped.difference_update(stopped)
        for session in stopped:
            self._ends.pop(session, None)

    async def _put(self, launched: Iterable[Launch], ends: Iterable[str] = ()) -> None:
        # A cancellation waits: ends must not be written before these launches.
        await to_the_end(files_in_time(store.write_sessions, self._record, launched, ends))
        self.gone, self._failure = False, None


def launch_of(session: str, key: str, process: CMLProcess | None = None) -> Launch:
    """Return how a session was launched. None: nobody knows its process, or it has none."""
    owner = this_owner() if process is None else process.owner
    launched = time.time() if process is None else process.since.timestamp()
    return Launch(
        id=session,
        key=key,
        owner=owner if is_session_id(owner) else None,
        launched=int(launched),
        size=None if process is None else process.plan.size,
        group=None if process is None else process.group,
    )


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

    Attributes
    ----------
    journal : Journal
        Writes the record.
    taken : int
        The number of the last request that is carried out.
    """

    def __init__(self, cluster: CMLCluster, link: Link, record: Record, term: int) -> None:
        self.term, self.taken = term, 0
        #: The numbers of the last requests of processes that are carried out, by their ids.
        self._posted: dict[str, int] = {}
        self.journal = Journal(cluster.api, record)
        self._cluster, self._link, self._record = cluster, link, record
        self._maker = asdict(Maker.this_process())
        #: How many looks in a row have found a session that no process uses.
        self._strays: dict[str, int] = {}
        self._next_strays = 0.0
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] | None = None
        #: The sessions of the last report, and how it describes them.
        self._reported: tuple[list[Session], list[dict[str, Any]]] = [], []
        #: What has become of sessions, which the scheduler does not know yet.
        self._events: deque[dict[str, str]] = deque(maxlen=_MOST_EVENTS)
        #: How many there have been.
        self._n_events = 0
        #: The URL of the scheduler's session by the last keeper. The platform may not list it here.
        self._app_url: str | None = None

    # -- what is

    @property
    def keeps(self) -> bool:
        """Whether this process still keeps the cluster, by a question that is recent enough."""
        link = self._link
        is_recent = link.connected and time.monotonic() - link.heard < timing.lease
        return is_recent and (link.board.keeper, link.board.term) == (link.id, self.term)

    @property
    def may_launch(self) -> bool:
        """Whether this process launches sessions. Without the cluster's folder they would exit at once."""
        return self.keeps and not self.journal.gone

    @property
    def sessions(self) -> Iterator[Session]:
        """The sessions that this process launches and stops, the scheduler's first."""
        return self._cluster.processes.sessions

    @property
    def view(self) -> View:
        """What this process knows of the sessions."""
        return self._cluster.look.view

    # -- the mail

    async def take(self) -> None:
        """Carry out what users of other processes have asked for, in its order."""
        while self.carry_out(self._link.board.mail):
            self._cluster.look.woken.set()
            await self.publish()  # the answer may have more of it
        if self._link.board.leaving:
            self._cluster.look.woken.set()

    def carry_out(self, mail: Sequence[Letter]) -> bool:
        """Carry out the requests that are not carried out yet. Return whether there were any."""
        new = [letter for letter in mail if letter.number > self.taken]
        for letter in new:
            try:
                self._cluster._carry_out(letter.request, is_own=letter.sender == self._link.id)
            except Exception as error:  # of a subclass, or because its group was deleted meanwhile
                name = self._record.name
                logger.warning("Request for cluster %s refused: %r", name, error)
            self.taken = letter.number
            self._posted[letter.sender] = letter.asked
        return bool(new)

    # -- the report

    def event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        self._events.append({"action": action, "session": session, **fields})
        self._n_events += 1

    def log(self, text: str) -> None:
        """Write into the cluster's log, for other processes and after the cluster's end, without waiting."""
        path = log_path(OWN_LOG, self._cluster.place.folder, self._cluster.options.log_directory)
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} - {text}\n"
        output.write(lambda: append(path, line.encode()))

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line that :meth:`CMLCluster._tell` tells the user here."""
        # What this process says of its own connection is no news for others.
        if self._cluster.sharing.unreached is None:
            self.event("line", SCHEDULER, text=shortened(text, _LONGEST_LINE))

    def report(self) -> Report:
        """Return what this process knows and wants."""
        cluster, processes, view = self._cluster, self._cluster.processes, self.view
        app_url = None if cluster.scheduler is None else cluster.scheduler.info.get("app_url")
        backoffs, sessions = processes.backoffs.items(), [*processes.sessions]
        if sessions != self._reported[0]:
            self._reported = sessions, [session.to_json() for session in sessions]
        return Report(
            sessions=self._reported[1],
            taken=self.taken,
            groups=cluster.groups.described,
            wanted=cluster.groups.wanted(),
            failures={group: backoff.failures for group, backoff in backoffs if backoff.failures},
            ceilings={group: n for group, backoff in backoffs if (n := backoff.refused_at) is not None},
            start_times=processes.start_times,
            told=sorted(cluster.look.told),
            limited=[group for group, backoff in backoffs if backoff.is_limited],
            is_barred=self._is_barred(view),
            app_url=app_url or self._app_url,
            maker=self._maker,
            **vars(view),
        )

    def _is_barred(self, view: View) -> bool:
        """Return whether the platform refuses all launches of this process, and not because of a quota."""
        is_refused = any("quota" not in words.lower() for words in view.shortages.values())
        return is_refused and all(worker.adopted for worker in self._cluster.processes.workers())

    async def publish(self, *, leaves: bool = False) -> None:
        """Report what this process knows and wants, as far as it has changed. Log errors.

        With `leaves`, another process keeps the cluster from then on.
        """
        async with self._publishing:
            if not (self._link.connected or leaves):  # who leaves does not watch any more
                return
            # Others may be noted while the scheduler answers.
            report, events = self.report().to_json(), [*self._events]
            asked = max(self._link.unheard, default=0)
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
            while len(self._events) > self._n_events - n_before - len(events):
                self._events.popleft()

    @property
    def news(self) -> dict[str, str]:
        """Lines for the user, as far as they are true now, by their subjects."""
        board = self._link.board
        lines = {subject: f": {words}" for subject, words in board.news.items()}
        left = board.most_age - board.age
        if board.most_age and left <= timing.notice:
            age = f"{board.age / 3600:.1f} of {round(board.most_age / 3600, 2):g} h"
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
            record = await files_in_time(store.read_again, self._record)
        except CMLError as error:
            logger.info("Sessions of cluster %s not compared with its record: %s", self._record.name, error)
            return
        connected = self._cluster.processes.take_connected()
        processes = {str(process.session_id): process for process in self._cluster.processes.launched}
        for session in processes.keys() & record.launches.keys():
            processes[session].begin(record.launches[session].started)
        used = processes.keys() | self._cluster.processes.stopping | self._cluster.api.stopped
        known = record.sessions | {session: worker for worker, session in connected.items()}
        strays = {session: key for session, key in known.items() if session not in used}
        self._strays = {session: self._strays.get(session, 0) + 1 for session in strays}
        for session, key in strays.items():
            launch = record.launches.get(session)
            # Looks count and not time: in an outage, nobody could say that it was launched.
            lasts = (self._strays[session] - 1) * timing.strays
            if lasts < timing.stray or key in self._cluster.processes.launching:
                continue
            if await self._cluster.processes.claim(session, key, launch) is not False:
                continue
            logger.warning("Session %s of %s stopped: no process has launched it", session, key)
            if key == SCHEDULER or key in self._cluster.workers or key in self._cluster.worker_spec:
                self._cluster.api.adopt(session, key)  # the step stops what it knows and does not use
            else:
                self._cluster.processes.adopt(session, key, launch)

    # -- in place of another keeper, and for another scheduler

    async def succeed(self, last: Report, given: Collection[str]) -> None:
        """Go on where the last keeper has stopped, by its report.

        Sessions that it launched after the report fill the places of those that it wanted.

        Parameters
        ----------
        last : Report
            The last report.
        given : collection of str
            The names of workers that sessions have had.
        """
        cluster, record = self._cluster, self._record
        reported = {session["id"] for session in last.sessions}
        waits = {session["id"] for session in last.sessions if session["waits"]}
        launches = [launch for launch in record.launches.values() if launch.key != SCHEDULER]
        kept = {launch.key: last.wanted[launch.key] for launch in launches if launch.key in last.wanted}
        missing = Counter({name: group.target for name, group in last.groups.items()})
        missing.subtract(kept.values())
        new = [launch for launch in launches if launch.id not in reported]
        workers = [(launch.key, launch.worker_group(record.name)) for launch in new]
        # A name that no session has had may be launched just now.
        workers += [(name, group) for name, group in last.wanted.items() if name not in given]
        for name, group in workers:
            if name not in kept and missing[group] > 0:
                kept[name] = group
                missing[group] -= 1
        self.restore(last, kept)
        cluster.workers.clear()
        for launch in record.launches.values():
            if launch.key == SCHEDULER:
                if launch.id != record.scheduler.session:  # of a lost scheduler, so the step stops it
                    cluster.api.adopt(launch.id, launch.key)
            else:
                cluster.processes.adopt(launch.id, launch.key, launch, waits=launch.id in waits)
        names = [name for worker in cluster.processes.workers() for name in worker.dask_names]
        states = await self._link.ask(protocol.LAST, names=names)
        gone_for = {name: state.get("gone_for", 0.0) for name, state in states.items()}
        for worker in cluster.processes.workers():
            worker.note_connected(connected_names(cluster), gone_for)
            if worker.name in last.staying:  # its user knows that by now
                worker.cannot_move_to = set()

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
        self.taken = last.taken
        cluster.processes.take_over(last)
        cluster.look.told = {*last.told}
        self._app_url = last.app_url
        groups.given(last.wanted)
        groups.show(last.groups, wanted)
        for name, group in last.groups.items():
            groups.resize(name, group.target, ())

    def go_on(self, last: SchedulerState, *, anew: bool) -> None:
        """Want what is wanted after the mail of a lost scheduler, by its file or its last answer.

        Parameters
        ----------
        last : SchedulerState
            The lost scheduler.
        anew : bool
            Whether this process has only followed until now.
        """
        known, report, mail = self._link.board, Report.read(last.report), [*last.mail]
        posted = last.posted.get(self._link.id, 0)
        # The lost scheduler may have answered, and ended before it wrote that.
        if last.number == self._cluster.place.number and known.revision > last.revision:
            mail, posted = [*known.mail], known.posted
            if known.report:
                report = Report.read(known.report)
        if anew:
            self.restore(report, report.wanted)
            # What users of this process have asked for, and nobody has heard of.
            numbers = count(1 + (mail[-1].number if mail else report.taken))
            for asked, request in self._link.unreported.items():
                if asked > posted:
                    mail.append(Letter(next(numbers), request, self._link.id, asked))
        self.carry_out(mail)
        if self._link.unreported:  # all of it is wanted now: the next scheduler does not get it again
            self._posted[self._link.id] = max(self._link.unreported)

    def first_board(self, last: SchedulerState, restarts: int = 0) -> dict[str, Any]:
        """Return what the next scheduler begins with, see :mod:`dask_cml.scheduler.plugin`.

        Parameters
        ----------
        last : SchedulerState
            The last scheduler. Of a new cluster, only its limits.
        restarts : int
            How many schedulers in a row have replaced lost ones.
        """
        patience = self._cluster.options.scheduler_timeout
        return {
            "protocol": protocol.PROTOCOL,
            "cluster": self._record.name,
            "record": self._record.id,
            "keeper": self._link.id,
            "term": max(self.term, last.term) + 1,
            "manager": self._cluster.sharing.who,
            "maker": self._maker,
            "created": self._record.created.isoformat(),
            "hours": last.hours,
            "orphan_timeout": last.orphan_timeout,
            # The keeper connects after it has launched all workers.
            "patience": last.orphan_timeout and max(last.orphan_timeout, patience),
            "report": replace(self.report(), wanted={}, sessions=(), app_url=None).to_json(),
            "posted": {**last.posted, **self._posted},
            "restarts": restarts,
            "activity": dict(last.activity),
        }

    def renew(self) -> None:
        """Begin anew for another scheduler: no session is left, and all names are new."""
        self._cluster.workers.clear()
        self._cluster.groups.renew()
        self._published = None
        self._app_url = None


class Follower:
    """Shows what another process reports that keeps the cluster.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, whose ``worker_spec`` shows what the keeper wants.
    link : Link
        Talks to the scheduler.
    report : Report
        What is known of the cluster at first.
    """

    #: Whether this process keeps the cluster.
    keeps = False

    def __init__(self, cluster: CMLCluster, link: Link, report: Report) -> None:
        self._cluster, self._link = cluster, link
        self._report = report
        #: Whether ``worker_spec`` was changed by hand since the last step, which refuses that.
        self._is_changed = False

    # -- what is

    @property
    def sessions(self) -> Iterator[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return map(Session.from_json, self._report.sessions)

    @property
    def view(self) -> View:
        """What the keeper says of the sessions, since users scaled the cluster last."""
        return self._report.since(self._link.board.mail)

    # -- the board

    async def take(self) -> None:
        """Show what the board says, see :meth:`show`."""
        self.show()

    def show(self) -> None:
        """Show what is wanted.

        Raises
        ------
        ValueError
            If the keeper's report is invalid.
        """
        board = self._link.board
        if board.report:
            self._report = Report.read(board.report)
        groups = self._cluster.groups
        groups.given(self._report.wanted)
        self._is_changed |= any(groups.take_changes_by_hand())
        groups.show(after_mail(self._report.groups, board.mail), self._report.wanted)

    def refuse_changes_by_hand(self) -> None:
        """Undo what was changed by hand in ``worker_spec``.

        Raises
        ------
        CMLError
            If something was. The message says what to do instead.
        """
        self._is_changed |= any(self._cluster.groups.take_changes_by_hand())
        if not self._is_changed:  # a takeover may have carried out what the board does not show yet
            return
        self.show()
        self._is_changed = False
        name = self._cluster.options.name
        raise CMLError(
            f"worker_spec of cluster {name} not changed: another process manages it. To scale the cluster, "
            f"run `dask cml scale {shlex.quote(name)} N`"
        )
