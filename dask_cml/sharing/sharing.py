"""A cluster that all processes of the project share: one is its keeper, the others follow."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm.core import Comm
from distributed.core import Status

from dask_cml import compat
from dask_cml.core.at_exit import unclosed
from dask_cml.core.ending import How
from dask_cml.core.folder import fill_folder
from dask_cml.core.start import start
from dask_cml.core.view import View, own_sessions, own_view
from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.errors import ClusterExists, CMLError, SchedulerTimeout
from dask_cml.options import Options
from dask_cml.options.limits import limits
from dask_cml.output import get_logger
from dask_cml.protocol import Rank, Role
from dask_cml.records import liveness, store
from dask_cml.records.history import kept_logs
from dask_cml.records.operations import stop_and_remove, take_name, wait_until_running
from dask_cml.records.record import VERSION, Maker, Record, cluster_address
from dask_cml.records.usage import Usage, usage_of
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.board import Letter, Request
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions import here, tls
from dask_cml.sessions.causes import find_cause
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session import Session
from dask_cml.sessions.session_logs import SessionLogs, log_folder
from dask_cml.sharing.failover import Failover, SchedulerLost
from dask_cml.sharing.follower import Follower
from dask_cml.sharing.keeper import Keeper
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.report import Report
from dask_cml.timing import timing
from dask_cml.validation import validate
from dask_cml.words import command, format_duration

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)


class Sharing:
    """Shares a cluster with all processes of the project.

    The scheduler picks the *keeper*: the process that launches and stops the sessions, at first the one that
    has launched the scheduler. All other processes follow its reports, and post what their users ask for.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    given : mapping
        The options that a user gave, unchecked, to name the options that a running cluster does not have.
    maker : Maker, optional
        Who creates the cluster. Default: this process.

    Attributes
    ----------
    new_record : Record
        The record of a cluster that is created here, with its id.
    record : Record or None
        The cluster's record. None before the cluster is created or found.
    role : Role
        What this process does for the cluster.
    who : str
        Who uses the cluster here, for its history.
    is_joined : bool
        Whether the scheduler in the cluster's place has answered. Another one may have just replaced it.
    lasted : float or None
        Seconds for which a closed cluster has lasted.
    link : Link
        Talks to the scheduler.
    connects : bool
        Whether another process created the cluster.
    keeper : Keeper
        What this process does as the keeper, or did last.
    end : str or None
        Why the cluster has ended, if this process did not ask for it.
    """

    keeper: Keeper
    _ending: asyncio.Task[None]

    def __init__(self, cluster: CMLCluster, given: Mapping[str, Any], maker: Maker | None = None) -> None:
        options = cluster.options
        self._cluster = cluster
        self.role = Role.NONE
        self.connects = False
        self.end: str | None = None
        self.lasted: float | None = None
        self.record: Record | None = None
        self.who = WHO if cluster._rank is Rank.RESIDENT else Maker.this_process().words
        self._given = given
        self._has_own_name = given.get("name") is not None or dask.config.get("cml.name", None) is not None
        self.new_record: Record = Record(
            options.name, maker=maker or Maker.this_process(), folder=cluster.place.folder
        )
        self.link = Link(secrets.token_hex(8), options.name, self.who)
        self.failover = Failover(self.link, cluster)
        #: A programming error at the last look at the board, as a clause.
        self._failure: str | None = None
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        #: What posts the requests of this process's users.
        self._posting: set[asyncio.Task[None]] = set()
        self.is_joined = False
        self._usage: Usage | None = None
        self._forwarder: DashboardForwarder | None = None

    # -- what is

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler answers."""
        return self.link.connected

    @property
    def keeps(self) -> bool:
        """Whether this process is the keeper, by an answer of the board that is recent enough."""
        return self.role is Role.KEEPER and self.link.keeps(self.keeper.term)

    def _rank(self, record: Record) -> Rank:
        """Return whether this process counts as a user of the cluster, and may keep it."""
        if self._cluster._rank is not None:
            return self._cluster._rank
        if here.is_inside(record.id):
            return Rank.OBSERVER
        return Rank.OWNER if record.owner == here.this_owner() else Rank.USER

    @property
    def board(self) -> BoardState:
        """The board, as this process knows it."""
        return self.link.board

    @property
    def view(self) -> View:
        """What the keeper knows of the sessions, or has said."""
        return own_view(self._cluster) if self._follower is None else self._follower.view

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return own_sessions(self._cluster) if self._follower is None else self._follower.sessions

    @property
    def problem(self) -> str | None:
        """Why the scheduler is not reached, or why this process cannot follow it. None if it does."""
        return self._failure or self.failover.problem

    @property
    def workers_problem(self) -> str | None:
        """What is wrong with the Dask workers, as a clause."""
        return self.link.board.problem or self.link.board.without_gpus

    @property
    def address(self) -> str | None:
        """The address by which all processes find the scheduler. None: they find no keys by it."""
        has_keys = self._cluster.place.security is not None
        return cluster_address(self._cluster.options.name) if has_keys else None

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        idle = self.link.board.idle
        return None if idle is None else idle + time.monotonic() - self.link.heard

    async def ends(self) -> Sequence[str]:
        """Return when the sessions end in any case, as phrases."""
        assert self.record is not None
        return (await asyncio.to_thread(store.refreshed, self.record)).ends

    # -- start

    async def open(self) -> bool:
        """Claim the cluster's name, or connect to the cluster that has it. Return whether it is claimed."""
        compat.find_keys_by_address()
        mode = self._cluster.options.create_mode
        if mode != "connect":
            try:
                await self._claim()
                return True
            except ClusterExists:
                if mode == "create":
                    raise
        await self._connect()
        return False

    async def _claim(self) -> None:
        """Claim the name of a new cluster, which this process keeps."""
        cluster, options = self._cluster, self._cluster.options
        security, keys = await asyncio.to_thread(tls.as_files, options.security, cluster.place.folder)
        record = replace(self.new_record, options=options.arguments(), security=tls.paths(security))
        self.record = record  # to remove it if this is cancelled
        keeper = Keeper(cluster, self.link, record, term=1, taken=0)
        self.link.rank = Rank.OWNER
        orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
        board = keeper.first_board(hours=limits().get("hours"), orphan_timeout=orphan_timeout)
        await take_name(record, board, cluster.api)
        await asyncio.to_thread(fill_folder, options, cluster.place, keys)
        cluster._move(replace(cluster.place, record=record.id, security=security))
        if not record.maker.serves and not self._has_own_name:  # the web UI creates for several users
            self._name_others()
        self._keep(keeper)

    def _name_others(self) -> None:
        """Name the user's other clusters in this process that have random names, too.

        A cell that runs again may have left them. Whoever gives names wants several clusters.
        """
        for other in unclosed():
            if other is self._cluster or other.starting is None or other._rank is not None:
                continue
            if other.sharing._has_own_name:
                continue
            if other.sessions:
                name, age = other.options.name, format_duration(other.sessions[0].age)
                shut_down = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).shutdown()"
                self._cluster._tell(
                    f"This process has another cluster, open for {age}. To shut it down, run: {shut_down}"
                )

    async def _connect(self) -> None:
        """Connect to a running cluster. If it starts, wait.

        Raises
        ------
        CMLError
            If its scheduler does not answer.
        """
        self.connects = True
        cluster, given = self._cluster, self._given
        name = cluster.options.name
        record = await asyncio.to_thread(store.read, name, cluster.place.folder.parent)
        if record.scheduler.address is None:  # another process creates it
            cluster._tell(f"Cluster {name} is starting: waiting for its scheduler")
            record = await wait_until_running(record)
        if record.version != VERSION:
            raise CMLError(
                f"cluster {name!r} was created by another dask-cml: manage it with that one, or run "
                f"{command('delete', name)}"
            )
        differing = cluster.options.differing(given, record.options)
        kept = f"; it runs with its own {', '.join(differing)}" if differing else ""
        cluster.shutdown_on_close = shutdown = bool(given.get("shutdown_on_close"))
        if cluster.options.create_mode != "connect" or kept:
            how = "shuts it down" if shutdown else "leaves it running; to end it, call cluster.shutdown()"
            cluster._tell(
                f"Connected to running cluster {name} of {record.maker.words}{kept}. cluster.close() {how}"
            )
        own = {"shutdown_on_close": shutdown, "forward_dashboard": cluster.options.forward_dashboard}
        cluster._take_options(Options.of_running(name, record.options, **own))
        # As long as Dask's clients wait, for a busy scheduler. Without a scheduler this fails at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        finding = (await liveness.judge([record], api=cluster.api))[name]
        if finding.state is liveness.State.DEAD:
            raise CMLError(
                f"not connected to cluster {name!r}, which has ended: {finding.why}. To remove what is "
                f"left of it, run {command('delete', name)}"
            )
        self._follow_role(Report())
        self._enter(record)
        try:
            await self._join_within(patience, str(record.scheduler.address))
        except SchedulerTimeout as error:
            advice = f"to stop its sessions, run {command('delete', name)}"
            raise CMLError(
                f"the scheduler of cluster {name!r} does not answer at {record.scheduler.address}: "
                f"{record.out_of_reach or advice}"
            ) from error

    def _keep(self, keeper: Keeper) -> None:
        """Launch and stop the sessions from now on."""
        self.keeper, self._follower, self.role = keeper, None, Role.KEEPER

    def _follow_role(self, known: Report) -> None:
        """Show what another process does from now on."""
        self.role = Role.FOLLOWER
        self._follower = Follower(self._cluster, self.link, known)

    def _enter(self, record: Record) -> None:
        """Take the place of the scheduler in a record, which another process has launched."""
        cluster = self._cluster
        self.record, self.is_joined = record, False
        self.link.rank = self._rank(record)
        number, security = record.scheduler.number, record.get_security()
        cluster._move(replace(cluster.place, number=number, record=record.id, security=security))
        scheduler = cluster.scheduler = CMLScheduler(cluster.api, cluster.options, cluster.place)
        scheduler.address = record.scheduler.address
        session = record.scheduler.session  # None if its file names none
        scheduler.adopt(session, record.launches.get(session or ""), record.scheduler.app_url)
        cluster.api.forget(session or "")

    async def join(self, address: str) -> None:
        """Connect to the scheduler that this process has launched."""
        await self._join_within(self._cluster.options.scheduler_timeout, address)
        if self.link.board.keeper == self.link.id:
            await self._cluster.connection.subscribe()
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _join_within(self, timeout: float, address: str) -> None:
        """Connect to a scheduler, which may be busy.

        Raises
        ------
        SchedulerTimeout
            If it does not answer within `timeout` seconds.
        CMLError
            If it belongs to another cluster, or has another protocol.
        """
        assert self.record is not None
        record, security = self.record, self._cluster.place.security
        deadline = time.monotonic() + timeout
        while True:
            is_last = time.monotonic() > deadline  # before the try: a process may be stopped for long
            try:
                await self.link.join(address, security, record.id)
                break
            except NO_ANSWER as error:
                if is_last:
                    raise SchedulerTimeout(
                        f"the scheduler of cluster {record.name!r} at {address} did not answer within "
                        f"{timeout:g} s: {error!r}"
                    ) from error
            await asyncio.sleep(timing.retry / 2)
        await self._cluster.connection.connect(address)
        self.is_joined = True
        self.failover.begin_anew()

    async def follow(self) -> None:
        """Follow what other processes do, from now on."""
        await self._take_board(self.link.board)
        self._following = asyncio.create_task(self._follow())

    @property
    def tasks(self) -> Sequence[asyncio.Task[None] | None]:
        """The tasks that follow the board, and post what users ask for."""
        return self._following, *self._posting

    # -- the board

    async def _follow(self) -> None:
        """Follow the board until the cluster is over. Whoever does not answer may do so later."""
        cluster = self._cluster
        while True:
            with self._noted("reached"):
                if not self.is_joined:
                    assert cluster.scheduler is not None
                    await self._join_within(timing.answer, str(cluster.scheduler.address))
                await self._take_board(await self.link.watch())
                self.failover.note_connected()
                self._failure = None
                continue
            try:
                # A process that leaves launches no other scheduler.
                if not self.link.connected and self.record is not None and not cluster.ending.has_begun:
                    with self._noted("checked"):
                        await self.failover.check(self.record)
            except SchedulerLost as lost:
                self.end = str(lost)
                cluster.end_reason = f"its scheduler was lost: {lost}"
                cluster._tell(f"Cluster {cluster.options.name} shut down: {lost}")
                self._ending = asyncio.create_task(cluster.ending.end_again())
                return
            await asyncio.sleep(timing.retry)

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Note why the scheduler is not reached or checked, and log that when it changes."""
        name = self._cluster.options.name
        try:
            yield
        except SchedulerLost:
            raise
        except (*NO_ANSWER, CMLError, ValueError) as error:
            if isinstance(error, (CMLError, ValueError)):
                words = str(error)
            else:
                words = f"its scheduler does not answer: {error!r}"
            if words != self.failover.problem:
                logger.info("Scheduler of cluster %s not %s: %r", name, what, error)
            self.failover.note(words)
        except Exception as error:  # a programming error, or of a subclass
            if self._failure is None:
                logger.exception("Cannot follow cluster %s", name)
            self._failure = f"cannot follow the cluster: {error!r}"

    async def _take_board(self, board: BoardState) -> None:
        """Do what the board says, as the keeper or as a follower."""
        keeps, is_picked = self.role is Role.KEEPER, board.keeper == self.link.id
        if keeps and not (is_picked and board.term == self.keeper.term):
            await self._yield()
        if self._follower is not None:
            await self.link.post_unreported()
            if is_picked:
                await self._succeed(board)
        if self._follower is None and not self._cluster.connection.is_subscribed:
            await self._cluster.connection.subscribe()
        await (self._follower or self.keeper).take(self.link.board)

    async def _succeed(self, board: BoardState) -> None:
        """Keep the cluster from now on, as the last report says."""
        assert self.record is not None
        cluster, report = self._cluster, Report.read(board.report)
        keeper = Keeper(cluster, self.link, self.record, board.term, report.taken)
        try:
            record = await asyncio.to_thread(store.read_again, self.record)
            given = await asyncio.to_thread(store.given_names, record)
            await cluster.connection.subscribe()
            async with cluster._lock:
                cluster.groups.given(given)
                await keeper.succeed(record, report, given)
                self._keep(keeper)
        except Exception:  # raised again: another process may be able to, for example to read the record
            with contextlib.suppress(CMLError):
                last = {"term": board.term, "report": board.report}
                await self.link.report(**last, asked=0, events=[], n_before=0, leaves=True)
            raise
        cluster._begin_looking(unheard_since=None)
        logger.info("Cluster %s managed by this process", record.name)

    async def _yield(self) -> None:
        """Leave the cluster to the process that keeps it now, and stop nothing."""
        logger.info("Cluster %s managed by another process", self._cluster.options.name)
        await self._cluster._stop_looking()  # a launch that is answered meanwhile is entered into the record
        self._cluster._note_changes_by_hand()
        self._follow_role(self.keeper.report())
        await self._cluster.ending.yield_sessions()

    def carry_out_mail(self) -> None:
        """Carry out what other processes have asked for until now, as far as this process knows it."""
        if self.role is Role.KEEPER:
            self.keeper.carry_out(self.link.board.mail)

    def asked(self, kind: str, **arguments: Any) -> None:
        """Note what a user of this process has asked for and is carried out here. Report it soon."""
        if self.role is Role.KEEPER and self._following is not None:
            self.link.unreported[self.link.next_number()] = _request(kind, arguments)
            self._keep_task(self.keeper.publish())

    def post(self, kind: str, **arguments: Any) -> asyncio.Task[None]:
        """Ask the keeper for what a user of this process wants, in a task. It goes on if nobody awaits it.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        return self._keep_task(self._post(self.link.next_number(), _request(kind, arguments)))

    async def _post(self, number: int, request: Request) -> None:
        await self.link.post(number, request)
        if self._follower is not None:
            self._follower.show(self.link.board)

    def _keep_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._posting.add(task)
        task.add_done_callback(self._posted)
        return task

    def _posted(self, task: asyncio.Task[None]) -> None:
        self._posting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps nobody awaits it
            logger.warning("Cluster %s not changed: %s", self._cluster.options.name, error)

    async def written(self) -> None:
        """Wait until the scheduler has what was changed in this process.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        await asyncio.gather(*self._posting)
        await self.stepped()

    # -- what is done

    def step(self) -> None:
        """Refuse what was changed by hand in ``worker_spec`` of a follower."""
        if self._follower is not None:
            self._follower.refuse_changes_by_hand()

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line that :meth:`CMLCluster._tell` tells the user here."""
        # What this process says of its own connection is no news for others.
        if self.role is Role.KEEPER and self.failover.problem is None:
            self.keeper.tell_clients(text)

    async def stepped(self) -> None:
        """Write on the board what this process knows and wants."""
        if self.role is Role.KEEPER:
            await self.keeper.publish()

    # -- another scheduler

    async def follow_other(self, record: Record) -> None:
        """Follow the last scheduler in the record as soon as it answers, which another process may keep."""
        if self.role is Role.KEEPER:
            await self._yield()
        if record.scheduler.number > self._cluster.place.number:
            self._cluster._tell(
                f"Cluster {record.name} follows another scheduler, which another process has launched"
            )
        self._enter(record)
        self.link.forget()

    async def launch_next(self, record: Record, why: str, restarts: int, limit: int) -> bool:
        """Launch the next scheduler and all workers. Return False if another process does."""
        cluster, begin, last = self._cluster, time.monotonic(), record.scheduler
        cluster.groups.given(await asyncio.to_thread(store.given_names, record))
        known, report, mail = self.link.board, Report.read(last.report), [*last.mail]
        # The lost scheduler may have answered, and ended before it wrote that.
        if last.number == cluster.place.number and known.revision > last.revision:
            mail = [*known.mail]
            if known.report:
                report = Report.read(known.report)
        if self.role is Role.KEEPER:
            keeper = self.keeper
        else:
            keeper = Keeper(cluster, self.link, record, last.term, report.taken)
            keeper.restore(report, report.wanted)
            # What this process has carried out in a term that is over, and nobody has heard of.
            last_number, posted = mail[-1].number if mail else report.taken, last.posted.get(self.link.id, 0)
            unheard = [request for asked, request in self.link.unreported.items() if asked > posted]
            mail += map(Letter, count(last_number + 1), unheard)
        keeper.term = max(keeper.term, last.term) + 1
        keeper.carry_out(mail)
        board = keeper.first_board(
            posted=dict(last.posted),
            hours=last.hours,
            orphan_timeout=last.orphan_timeout,
            restarts=restarts,
            activity=dict(last.activity),
            maker=asdict(Maker.this_process()),
        )
        number = last.number + 1
        if not await asyncio.to_thread(store.claim_scheduler, record, number, board):
            return False
        lost = cluster.scheduler
        if isinstance(lost, CMLScheduler) and last.number == cluster.place.number:
            log = await lost.last_lines()
            loss = find_cause(None, log, connected=True, noticed=False, closed=False, said=lost.reported)
            await lost.note_loss(loss)
            if lost.session_id is not None and lost.session_id == last.session:
                why = loss.words
        cluster._tell(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
        cluster._tell(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
        await cluster._stop_looking()
        await cluster.connection.unsubscribe()
        self.link.close()
        cluster.connection.forget_workers()
        async with cluster._lock:
            await self._stop_all(record, keeper)
            cluster._move(replace(cluster.place, number=number))
            self.link.rank = Rank.OWNER  # the next sessions belong to this one
            self.is_joined = False
            keeper.renew()
            self._keep(keeper)
            await start(cluster, strict=False)
        cluster._begin_looking()
        cluster._tell(
            f"Cluster {record.name} connected to another scheduler after {time.monotonic() - begin:.0f} s"
        )
        return True

    async def _stop_all(self, record: Record, keeper: Keeper) -> None:
        """Stop the sessions of a lost scheduler, and of earlier attempts to replace it."""
        cluster = self._cluster
        processes = cluster.processes.launched
        await keeper.journal.write(processes)
        latest = await asyncio.to_thread(store.refreshed, record)
        await cluster.ending.stop_all(latest.sessions)
        await keeper.journal.write(processes)

    # -- end

    async def leave(self) -> None:
        """Let the scheduler have what users of this process have asked for, before it leaves.

        A cluster that its creator leaves runs on without a user, whatever ``shutdown_on_close`` was.
        """
        try:
            if self.record is not None and not self.connects:
                await self.link.live_on()
            await asyncio.gather(*self._posting)
        except (*NO_ANSWER, CMLError, ValueError) as error:  # the scheduler refuses a change, for example
            name = self._cluster.options.name
            logger.warning("Cluster %s left before its last change was written: %s", name, error)

    async def close(self, how: How) -> None:
        """Write the record for the last time. If this process leaves, another one keeps the cluster."""
        if self.role is not Role.KEEPER:
            return
        await self.keeper.journal.write(self._cluster.processes.launched)
        if how is How.LEAVE:
            await self.keeper.publish(leaves=True)
            # Another process keeps it, or nobody answers.
            with contextlib.suppress(CMLError):
                await self.link.post_unreported()

    def forget(self) -> None:
        """Forget the board, because this object is closed."""
        self.link.board = BoardState()
        self._follow_role(Report())
        self.role = Role.NONE

    async def why_closed(self) -> str | None:
        """Return why the scheduler has closed for good, by its last answer or its file. None: it has not."""
        if self.record is None or self.link.board.closed is not None:
            return self.link.board.closed
        return (await asyncio.to_thread(store.refreshed, self.record)).scheduler.closed

    def stop_and_remove(self) -> None:
        """Stop all sessions of the cluster, from all processes, and remove the record. Blocks."""
        if self.record is None:
            self._cluster.api.end()
        else:
            record = replace(self.record, launches={})
            stop_and_remove(record, self._cluster.api, self._cluster.end_reason)

    # -- what users ask for

    async def remember_usage(self) -> None:
        """Remember what the cluster has used, before its record is removed."""
        if self.record is not None:
            with contextlib.suppress(OSError, CMLError):
                last = await asyncio.to_thread(store.read_again, self.record)
                self._usage, self.lasted = usage_of(last, time.time()), self.record.age

    def usage(self) -> Usage:
        """Return what the cluster has used. Blocks.

        Raises
        ------
        NoSuchCluster
            If another process has deleted the cluster.
        """
        if self._usage is not None:
            return self._usage
        return usage_of(store.read_again(self.record or self.new_record), time.time())

    def logs(self) -> SessionLogs:
        """Return the logs of the sessions. Those of a closed cluster are in its history."""
        cluster = self._cluster
        if cluster.status == Status.closed and self.record is not None and not cluster.options.log_directory:
            return kept_logs(self.record)
        return SessionLogs(
            cluster.options.name, log_folder(cluster.place.folder, cluster.options.log_directory)
        )

    @property
    def dashboard_url(self) -> str | None:
        """The URL that leads to the dashboard's port, unless it is that of the scheduler's session."""
        if self._forwarder is not None:
            return f"http://127.0.0.1:{self._forwarder.port}"
        board = self.link.board
        if not board.serves_dashboard:
            return ""
        scheduler = self._cluster.scheduler
        session = scheduler and scheduler.session
        if session and session.app_url:
            return None
        return board.app_url or ""

    async def forward_dashboard(self) -> None:
        """Serve the dashboard on a port of this machine."""
        if self._forwarder is None:
            self._forwarder = DashboardForwarder(self.open_dashboard)

    async def open_dashboard(self) -> Comm:
        """Open a comm on which the scheduler serves its dashboard.

        Raises
        ------
        OSError
            If the scheduler does not accept the connection, or has no dashboard.
        """
        return await open_comm(str(self.link.address), self.link.connection_args)

    async def close_dashboard(self) -> None:
        """Serve the dashboard no more."""
        if self._forwarder is not None:
            await self._forwarder.close()


def _request(kind: str, arguments: Mapping[str, Any]) -> Request:
    return validate({"kind": kind, **arguments}, Request, "request")
