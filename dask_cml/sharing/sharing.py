"""A cluster that all processes of the project share: one is its keeper, the others follow."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm.core import Comm
from distributed.core import Status

from dask_cml import compat
from dask_cml.core.alone import Alone, How, Role
from dask_cml.core.at_exit import unclosed
from dask_cml.core.folder import fill_folder, make_keys
from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.errors import ClusterExists, CMLError, SchedulerTimeout
from dask_cml.options import Options
from dask_cml.options.limits import limits
from dask_cml.output import get_logger
from dask_cml.records import liveness, store
from dask_cml.records.history import kept_logs
from dask_cml.records.operations import stop_and_remove, take_name, wait_until_running
from dask_cml.records.record import VERSION, Maker, Record, cluster_address
from dask_cml.records.usage import Usage, usage_of
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.board import BoardGroup
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions import here, tls
from dask_cml.sessions.causes import find_cause
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session import CMLProcess
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.sharing.failover import Failover, SchedulerLost
from dask_cml.sharing.follower import Follower
from dask_cml.sharing.keeper import Keeper
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.outbox import Change, Outbox
from dask_cml.sharing.report import Report
from dask_cml.timing import timing
from dask_cml.words import command, format_duration

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)


class Sharing(Alone):
    """Shares a cluster with all processes of the project.

    The process that launches the scheduler has the *lease* on the scheduler's board: it is the *keeper*, and
    launches and stops the sessions. All other processes follow the board, and write on it. If the keeper
    vanishes, the next process gets the lease, and takes over the sessions.

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
    link : Link
        Talks to the scheduler.
    connects : bool
        Whether another process created the cluster.
    end : str or None
        Why the cluster has ended, if this process did not ask for it.
    """

    _cluster: CMLCluster

    def __init__(self, cluster: CMLCluster, given: Mapping[str, Any], maker: Maker | None = None) -> None:
        super().__init__(cluster)
        options = cluster.options
        self.who = WHO if cluster.is_resident else Maker.this_process().words
        self._given = given
        self._has_own_name = given.get("name") is not None or dask.config.get("cml.name", None) is not None
        self.new_record: Record = Record(
            options.name, maker=maker or Maker.this_process(), folder=cluster.place.folder
        )
        self.link = Link(secrets.token_hex(8), options.name, counts=cluster.takes_lease)
        self.outbox = Outbox(options.name, self.link)
        self.failover = Failover(self, self.link, cluster)
        #: A programming error at the last look at the board, as a clause.
        self._failure: str | None = None
        self._keeper: Keeper | None = None
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
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
        return self._keeper is not None and self.link.keeps

    @property
    def may_keep(self) -> bool:
        """Whether this process may become the keeper. One that only shows a cluster may after a change."""
        if self.is_inside:
            return self._cluster.is_resident
        return self._cluster.takes_lease or self.link.has_written

    @property
    def is_inside(self) -> bool:
        """Whether this process runs in a session of the cluster. It is no user."""
        return self.record is not None and here.is_inside(self.record.id)

    @property
    def board(self) -> BoardState:
        """The board, as this process knows it."""
        return self.link.board

    @property
    def view(self) -> Follower | None:
        """What the keeper says of the sessions. None in the keeper."""
        return self._follower

    @property
    def leaving(self) -> Sequence[str]:
        """Dask workers whose session the platform is about to stop, by its notice."""
        return self.link.board.leaving

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
    def age(self) -> tuple[float, float]:
        """The cluster's age and its limit, in seconds. 0: no limit."""
        return self.link.board.age, self.link.board.most_age

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        idle = self.link.board.idle
        return None if idle is None else idle + time.monotonic() - self.link.heard

    @property
    def folder(self) -> Path | None:
        """The cluster's folder. None before the cluster is created or found."""
        return None if self.record is None else self.record.folder

    def news(self) -> Mapping[str, str]:
        """Return lines for the user, as far as they are true now, by their subjects."""
        return {} if self._keeper is None else self._keeper.news()

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
        keys = await asyncio.to_thread(make_keys, options, cluster.place)
        record = replace(self.new_record, options=options.arguments(), security=tls.paths(keys.security))
        self.record = record  # to remove it if this is cancelled
        keeper = await self._make_keeper(record, self.link.board)
        orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
        self.outbox.clear()  # the first board has what is wanted so far
        board = keeper.first_board(hours=limits().get("hours"), orphan_timeout=orphan_timeout)
        await take_name(record, board, cluster.api)
        await asyncio.to_thread(fill_folder, options, cluster.place, keys)
        cluster.move(replace(cluster.place, record=record.id, security=keys.security))
        if not record.maker.serves and not self._has_own_name:  # the web UI creates for several users
            self._name_others()
        with cluster.groups.changing():
            keeper.note_own_changes()
            self._keeper, self.role = keeper, Role.KEEPER

    def _name_others(self) -> None:
        """Name the user's other clusters in this process that have random names, too.

        A cell that runs again may have left them. Whoever gives names wants several clusters.
        """
        for other in unclosed():
            if other is self._cluster or other.starting is None or not other.takes_lease:
                continue
            if other.sharing._has_own_name:
                continue
            if other.sessions:
                name, age = other.options.name, format_duration(other.sessions[0].age)
                shut_down = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).shutdown()"
                self._cluster.tell(
                    f"This process has another cluster, open for {age}. To shut it down, run: {shut_down}"
                )

    async def _make_keeper(self, record: Record, board: BoardState) -> Keeper:
        """Return what keeps the cluster here from now on, by the board that the last keeper has left.

        It gives no name that a session has had before.
        """
        self._cluster.groups.given(await asyncio.to_thread(store.given_names, record))
        if board.report:
            report = Report.read(board.report)
            failures = report.current(report.failures, board.groups)
            self._cluster.processes.take_over(failures, report.gave_up, report.start_times)
        return Keeper(self._cluster, self.link, self.outbox, record)

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
            cluster.tell(f"Cluster {name} is starting: waiting for its scheduler")
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
            cluster.tell(
                f"Connected to running cluster {name} of {record.maker.words}{kept}. cluster.close() {how}"
            )
        own = {"shutdown_on_close": shutdown, "forward_dashboard": cluster.options.forward_dashboard}
        cluster.take_options(Options.of_running(name, record.options, **own))
        # As long as Dask's clients wait, for a busy scheduler. Without a scheduler this fails at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if why := await asyncio.to_thread(liveness.why_not_contacted, record):
            raise CMLError(f"not connected to cluster {name!r}: {why}")
        if record.security is not None:
            finding = (await liveness.judge([record], api=cluster.api))[name]
            if finding.state is liveness.State.DEAD:
                raise CMLError(
                    f"not connected to cluster {name!r}, which has ended: {finding.why}. To remove what is "
                    f"left of it, run {command('delete', name)}"
                )
        self._follow_role()
        self._enter(record)
        try:
            await self._join_within(patience, str(record.scheduler.address))
        except SchedulerTimeout as error:
            advice = f"to stop its sessions, run {command('delete', name)}"
            raise CMLError(
                f"the scheduler of cluster {name!r} does not answer at {record.scheduler.address}: "
                f"{record.out_of_reach or advice}"
            ) from error

    def _follow_role(self) -> None:
        """Show what another process does from now on."""
        self._keeper, self.role = None, Role.FOLLOWER
        self._follower = Follower(self._cluster, self.link, self.outbox)

    def _enter(self, record: Record) -> None:
        """Take the place of the scheduler in a record, which another process has launched."""
        cluster = self._cluster
        self.record, self.is_joined = record, False
        self.link.counts = cluster.takes_lease and not self.is_inside
        number, security = record.scheduler.number, record.get_security()
        cluster.move(replace(cluster.place, number=number, record=record.id, security=security))
        scheduler = cluster.scheduler = CMLScheduler(cluster.api, cluster.options, cluster.place)
        scheduler.address = record.scheduler.address
        session = record.scheduler.session or ""
        scheduler.adopt(session, record.launches.get(session), record.scheduler.app_url)
        cluster.api.forget(session)

    async def join(self, address: str) -> None:
        """Connect to the scheduler that this process has launched, and keep the lease from now on."""
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
        if self._follower is not None:
            self._follower.forget_workers()

    async def follow(self) -> None:
        """Follow what other processes do, from now on."""
        await self._take_board(self.link.board)
        self._following = asyncio.create_task(self._follow())

    @property
    def tasks(self) -> Sequence[asyncio.Task[None] | None]:
        """The tasks that follow the board, and write on it."""
        return self._following, self.outbox.task

    @property
    def has_followed(self) -> bool:
        """Whether this process has followed the board."""
        return self._following is not None

    @property
    def follows(self) -> bool:
        """Whether this process follows the board."""
        return self._following is not None and not self._following.done()

    # -- the board

    async def _follow(self) -> None:
        """Follow the board until the cluster is over. Whoever does not answer may do so later."""
        cluster = self._cluster
        while True:
            was_connected = self.link.connected
            try:
                if not self.is_joined:
                    assert cluster.scheduler is not None
                    await self._join_within(timing.answer, str(cluster.scheduler.address))
                board = await self.link.watch()
                if self.outbox.changes:
                    self.outbox.send_soon()
                await self._take_board(board)
                self.failover.note_connected()
                self._failure = None
                continue
            except (*NO_ANSWER, CMLError, ValueError) as error:
                if was_connected:
                    logger.info("Scheduler of cluster %s not reached: %r", cluster.options.name, error)
                self.failover.note(str(error) or repr(error))
            except Exception as error:  # a programming error, or of a subclass
                self._note_failure(error)
            try:
                # A process that leaves launches no other scheduler.
                if not self.link.connected and self.record is not None and not cluster.ending.has_begun:
                    await self.failover.check(self.record)
            except SchedulerLost as lost:
                self._end_by_itself(str(lost))
                return
            except (*NO_ANSWER, CMLError, ValueError) as error:
                logger.info("Scheduler of cluster %s not checked: %r", cluster.options.name, error)
                self.failover.note(str(error) or repr(error))
            except Exception as error:  # a programming error, or of a subclass
                self._note_failure(error)
            await asyncio.sleep(timing.retry)

    def _note_failure(self, error: Exception) -> None:
        """Log an error of :meth:`_follow` once, and show it until that succeeds."""
        if self._failure is None:
            logger.exception("Cannot follow cluster %s", self._cluster.options.name)
        self._failure = f"cannot follow the cluster: {error!r}"

    async def _take_board(self, board: BoardState) -> None:
        """Do what the board says, as the keeper or as a follower."""
        # A keeper that was away begins anew if another process has kept the cluster meanwhile.
        if self._keeper is not None and (board.keeper or board.last_keeper) not in (None, self.link.id):
            await self._yield(self._keeper)
        if board.keeper is None and (self._keeper is not None or self.may_keep):
            await self.link.lease(take=True, who=self.who)
            board = self.link.board
        if board.keeper == self.link.id and self._keeper is None:
            try:
                await self._succeed(board)
            except Exception:  # raised again: another process may be able to, for example to read the record
                await self.link.lease(take=False)
                raise
        if self._keeper is not None and not self._cluster.connection.is_subscribed:
            await self._cluster.connection.subscribe()
        await self._take_last_board()

    async def _take_last_board(self) -> None:
        """Do what the board says that is known last."""
        taker = self._keeper or self._follower
        assert taker is not None
        await taker.take(self.link.board)

    async def _succeed(self, board: BoardState) -> None:
        """Keep the cluster from now on."""
        assert self.record is not None
        assert self._follower is not None
        cluster = self._cluster
        record = await asyncio.to_thread(store.read_again, self.record)
        cluster.groups.take(board.groups)
        await cluster.connection.subscribe()
        keeper = await self._make_keeper(record, board)
        async with cluster._lock:
            await self._follower.step()  # what was changed here is on the board then
            await keeper.succeed(record)
            self._keeper, self._follower, self.role = keeper, None, Role.KEEPER
        cluster.begin_looking(unheard_since=None)
        logger.info("Cluster %s managed by this process", record.name)

    async def _yield(self, keeper: Keeper) -> None:
        """Leave the cluster to another process that keeps it now, and stop nothing."""
        logger.info("Cluster %s managed by another process", self._cluster.options.name)
        await self._cluster.stop_looking()  # a launch that is answered meanwhile is entered into the record
        self._cluster.note_changes_by_hand()
        self._follow_role()
        self.outbox.send_soon()
        await self._cluster.ending.yield_sessions()

    def asked(self, group: str, *, here: bool, **change: Any) -> Change | None:
        """Write on the board what a user of this process has asked for: soon, or by :meth:`wait`."""
        super().asked(group, here=here, **change)
        if not here:  # even if this process has become the keeper just now
            return self.outbox.add(is_awaited=True, groups={group: change})
        if self._keeper is not None:
            self._keeper.asked(group, **change)
        else:
            self.outbox.add(groups={group: change})
        self._cluster.loop.add_callback(self.outbox.send_soon)  # type: ignore[union-attr]
        return None

    def wait(self, asked: Change | None) -> Any:
        """Wait until the board has a change, see :meth:`Outbox.wait`. In the event loop, return a task."""
        cluster = self._cluster
        if asked is None:
            return super().wait(asked)
        if not cluster.asynchronous:
            cluster.sync(self.outbox.wait, asked)
            return None
        return self.outbox.wait_in_task(asked)

    async def written(self) -> None:
        """Wait until the board has what was changed in this process.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await self.outbox.flush()
        await self.stepped()

    async def add_group(self, name: str, options: Options) -> None:
        """Add a worker group for all processes."""
        group = {"options": options.group_arguments(), "target": options.n_workers}
        await self.outbox.write(groups={name: group})
        await self._take_last_board()

    async def delete_group(self, name: str) -> None:
        """Delete a worker group for all processes."""
        await self.outbox.write(groups={name: None})
        await self._take_last_board()

    async def never_orphan(self) -> None:
        """Let the cluster run on without a user.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await self.link.set(orphan_timeout=None)

    # -- what is done

    async def step(self) -> None:
        """Ask the keeper for what was changed by hand in ``worker_spec`` of a follower."""
        if self._follower is not None:
            await self._follower.step()

    async def launched(self, process: CMLProcess) -> None:
        """Enter a launched session into the record."""
        if self._keeper is not None:
            await self._keeper.journal.enter(process)

    async def note(self, processes: Iterable[CMLProcess]) -> None:
        """Write the state of all sessions into the record."""
        if self._keeper is not None:
            await self._keeper.journal.write(processes)

    def event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session, for the scheduler's log of events."""
        if self._keeper is not None:
            self._keeper.event(action, session, **fields)

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line that :meth:`CMLCluster.tell` tells the user here."""
        # What this process says of its own connection is no news for others.
        if self._keeper is not None and self.failover.problem is None:
            self._keeper.tell_clients(text)

    async def look(self) -> None:
        """Take over or stop sessions of the cluster that no process of it uses, as after a crash."""
        if self._keeper is not None:
            await self._keeper.find_strays()

    async def stepped(self) -> None:
        """Write on the board what this process knows and wants."""
        if self._keeper is not None:
            await self._keeper.publish()

    # -- another scheduler

    async def follow_other(self, record: Record) -> None:
        """Follow the last scheduler in the record as soon as it answers, which another process may keep."""
        if self._keeper is not None:
            await self._yield(self._keeper)
        if record.scheduler.number > self._cluster.place.number:
            self._cluster.tell(
                f"Cluster {record.name} follows another scheduler, which another process has launched"
            )
        self._enter(record)
        self.link.forget()

    async def launch_next(self, record: Record, why: str, restarts: int, limit: int) -> bool:
        """Launch the next scheduler and all workers. Return False if another process does."""
        cluster, begin, last = self._cluster, time.monotonic(), record.scheduler
        groups = {name: BoardGroup(**group) for name, group in last.groups.items()}
        written, known = BoardState(last.revision, groups=groups, closing=last.closing), self.link.board
        self.outbox.drop(last.writers.get(self.link.id, 0))
        keeper = self._keeper or await self._make_keeper(record, replace(known, groups=groups))
        newest = written if self._keeper is None else known
        # The lost scheduler may have answered a change, and ended before it wrote that.
        if last.number == cluster.place.number:
            newest = max(written, known, key=lambda board: board.revision)
        if self._keeper is not None and newest.groups:  # else this process has not joined that scheduler
            await keeper.take(newest)
        board = keeper.first_board(
            # If the keeper has vanished, what the lost scheduler said last is wanted.
            {name: asdict(group) for name, group in newest.groups.items()} if self._keeper is None else None,
            writers=dict(last.writers),
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
            if lost.session_id == last.session:
                why = loss.words
        cluster.tell(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
        cluster.tell(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
        await cluster.stop_looking()
        await cluster.connection.unsubscribe()
        self.link.close()
        cluster.connection.forget_workers()
        async with cluster._lock:
            if self._keeper is None:
                keeper.want(newest)
            await self._stop_all(record, keeper)
            cluster.move(replace(cluster.place, number=number))
            self.is_joined = False
            keeper.renew()
            self._keeper, self._follower, self.role = keeper, None, Role.KEEPER
            await cluster.start.run(strict=False)
        cluster.begin_looking()
        cluster.tell(
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

    @property
    def left_to_do(self) -> Sequence[str]:
        """The cluster, if this process has changed it, and nobody keeps it or has taken the change.

        A keeper that does not take it has ended, perhaps, and loses the lease. Then this process keeps it.
        """
        board = self.link.board
        is_taken = board.keeper is not None and not board.closing and not self.untaken
        is_left = self.link.has_written and self.link.connected and not is_taken
        return [self._cluster.options.name] if is_left else []

    @property
    def untaken(self) -> Sequence[str]:
        """The groups whose last change was asked for here, and that no other process has taken yet."""
        return [] if self._follower is None else self._follower.untaken

    async def write_last(self) -> None:
        """Write on the board what users of this process have changed, before it leaves.

        A cluster that its creator leaves runs on without a user, whatever ``shutdown_on_close`` was.
        """
        try:
            if self.record is not None and not self.connects:
                await self.never_orphan()
            await self.written()
        except (*NO_ANSWER, CMLError, ValueError) as error:  # the scheduler refuses a change, for example
            name = self._cluster.options.name
            logger.warning("Cluster %s left before its last change was written: %s", name, error)

    async def close(self, how: How) -> None:
        """Write the record for the last time. If this process leaves, give the lease back."""
        if self._keeper is None:
            return
        await self._keeper.journal.write(self._cluster.processes.launched)
        if how is How.LEAVE:
            with contextlib.suppress(CMLError):
                await self.link.lease(take=False)

    async def is_succeeded(self) -> bool:
        """Return whether another process takes the lease of this one, which leaves."""
        if self.link.board.lives_on:  # the process in the scheduler's session does so later
            return True
        deadline = time.monotonic() + timing.succeed
        try:
            while (await self.link.watch()).keeper in (None, self.link.id):
                if time.monotonic() > deadline:
                    return False
        except (*NO_ANSWER, CMLError, ValueError) as error:
            logger.info("Keeper of cluster %s not known: %r", self._cluster.options.name, error)
            return False
        return True

    def disconnect(self) -> None:
        """Follow the board no more, by which the scheduler notices that this process has left."""
        self.link.close()

    def forget(self) -> None:
        """Forget the board, because this object is closed."""
        self.link.board = BoardState()
        self._follow_role()
        self.role = Role.NONE

    @property
    def is_gone(self) -> bool:
        """Whether another process has removed the record."""
        return self._keeper is not None and self._keeper.journal.gone

    async def has_scheduler_closed(self) -> bool:
        """Return whether the scheduler has closed, by the record."""
        if self.record is None:
            return False
        latest = await asyncio.to_thread(store.refreshed, self.record)
        return latest.scheduler.closed is not None

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
        return super().logs()

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
