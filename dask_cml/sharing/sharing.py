"""A cluster that all processes of the project share: one is its keeper, the others follow."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta
from distributed.core import Status, rpc
from distributed.objects import SchedulerInfo
from distributed.utils import NoOpAwaitable

from dask_cml import compat, output
from dask_cml.cancellation import block_within, cancel, files_in_time, first_of, within
from dask_cml.core.ending import How, open_clusters
from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster, SchedulerTimeout
from dask_cml.layout import SCHEDULER, log_folder
from dask_cml.options import Options, check_new, limits
from dask_cml.output import get_logger
from dask_cml.private_files import NotPrivate, make_folder
from dask_cml.protocol import NO_ANSWER, BoardState, Rank, Report, Request, call
from dask_cml.records import store
from dask_cml.records.history import Usage, find_ended, kept_logs, stop_and_remove, usage_of
from dask_cml.records.operations import take_name
from dask_cml.records.store import VERSION, Maker, Record, SchedulerState, cluster_address
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions import here, tls
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.sharing.failover import Failover, SchedulerLost, refreshed_in_time
from dask_cml.sharing.keeper import Follower, Keeper, Link, launch_of
from dask_cml.timing import timing
from dask_cml.words import command, first_line, format_duration

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
    role : Keeper or Follower
        What this process does for the cluster: it follows nobody before the start and after the end.
    who : str
        Who uses the cluster here, for its history.
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
    unreached : str or None
        Why the scheduler is not reached. None if it is.
    unreached_since : float or None
        The monotonic time since when it is not.
    """

    keeper: Keeper
    _ending: asyncio.Task[None]

    def __init__(self, cluster: CMLCluster, given: Mapping[str, Any], maker: Maker | None = None) -> None:
        options = cluster.options
        self._cluster = cluster
        self.connects = False
        self.end: str | None = None
        self.lasted: float | None = None
        self.record: Record | None = None
        self.who = WHO if cluster._rank is Rank.RESIDENT else Maker.this_process().words
        self._given = given
        self.has_own_name = given.get("name") is not None or dask.config.get("cml.name", None) is not None
        self.new_record: Record = Record(
            options.name, maker=maker or Maker.this_process(), folder=cluster.place.folder
        )
        self.link = Link(secrets.token_hex(8), options.name, self.who)
        self.failover = Failover(self.link, cluster)
        self._begin_anew()
        #: A programming error at the last look at the board, as a clause.
        self._failure: str | None = None
        self.role: Keeper | Follower = Follower(cluster, self.link, Report())
        self._following: asyncio.Task[None] | None = None
        #: What posts the requests of this process's users, and what reports those that it carries out itself.
        self._posting: set[asyncio.Task[None]] = set()
        self._reporting: set[asyncio.Task[None]] = set()
        self._usage: Usage | None = None
        self._forwarder: DashboardForwarder | None = None

    # -- what is

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler answers."""
        return self.link.connected

    @property
    def is_keeper(self) -> bool:
        """Whether this process launches and stops the sessions, as far as it knows."""
        return isinstance(self.role, Keeper)

    def _rank(self, record: Record) -> Rank:
        """Return whether this process counts as a user of the cluster, and may keep it."""
        if self._cluster._rank is not None:
            return self._cluster._rank
        if here.is_inside(record.id):
            return Rank.OBSERVER
        return Rank.OWNER if record.owner == here.this_owner() else Rank.USER

    @property
    def problem(self) -> str | None:
        """The cluster's present problem, as a clause. None if there is none."""
        unreached = self._failure or self.unreached
        if unreached and self._cluster.status == Status.running:
            return unreached
        return self.end or self.role.view.problem or self.link.board.problem

    @property
    def address(self) -> str | None:
        """The address by which all processes find the scheduler. None: they find no keys by it."""
        has_keys = self._cluster.place.security is not None
        return cluster_address(self._cluster.options.name) if has_keys else None

    async def ends(self) -> Sequence[str]:
        """Return when the sessions end in any case, as phrases."""
        assert self.record is not None
        return (await refreshed_in_time(self.record)).ends

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
            except OSError as error:
                if error.errno and error.filename is None:  # of a full disk
                    error.filename = str(self._cluster.place.folder)
                raise
        await self._connect()
        return False

    async def _claim(self) -> None:
        """Claim the name of a new cluster, which this process keeps."""
        cluster, options = self._cluster, self._cluster.options
        security, keys = await asyncio.to_thread(tls.as_files, options.security, cluster.place.folder)
        record = replace(self.new_record, options=options.arguments(), security=tls.paths(security))
        self.record = record  # to remove it if this is cancelled
        keeper = Keeper(cluster, self.link, record, term=0)
        self.link.rank = Rank.OWNER
        orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
        board = keeper.first_board(SchedulerState(hours=limits().get("hours"), orphan_timeout=orphan_timeout))
        keeper.term = board["term"]
        try:
            await take_name(record, board, cluster.api)
        except NotPrivate:
            self.record = None  # it was not created, and cannot be read
            raise
        await asyncio.to_thread(fill_folder, options, cluster.place, keys)
        cluster._move(replace(cluster.place, record=record.id, security=security))
        if not record.maker.serves and not self.has_own_name:  # the web UI creates for several users
            name_others(cluster)
        self.keep(keeper)

    async def _connect(self) -> None:
        """Connect to a running cluster. If it starts, wait.

        Raises
        ------
        CMLError
            If its scheduler does not answer, or has ended.
        """
        self.connects = True
        cluster, given = self._cluster, self._given
        name = cluster.options.name
        record = await asyncio.to_thread(store.read, name)
        if record.scheduler.address is None:  # another process creates it
            cluster._tell(f"Cluster {name} is starting: waiting for its scheduler")
            record = await store.wait_until_running(record)
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
        # The worker groups in this process's configuration are for new clusters.
        own |= {"name": name, "create_mode": "connect", "worker_groups": {}}
        cluster._take_options(Options.read(record.options, **own))
        # As long as Dask's clients wait, for a busy scheduler. Without a scheduler this fails at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        following: Record | None = record
        try:
            while following is not None:  # or another scheduler takes its place meanwhile
                record = await store.wait_until_running(following)
                await self.enter(record)
                following = await first_of(self._join_within(patience), store.replaced(record, cluster.api))
        except SchedulerTimeout as error:
            advice = f"to stop its sessions, run {command('delete', name)}"
            raise CMLError(
                f"the scheduler of cluster {name!r} does not answer at {record.scheduler.address}: "
                f"{record.out_of_reach or advice}"
            ) from error

    def keep(self, keeper: Keeper) -> None:
        """Launch and stop the sessions from now on."""
        self.role = self.keeper = keeper

    async def enter(self, record: Record) -> None:
        """Take the place of the scheduler in a record, which another process has launched."""
        cluster = self._cluster
        await self.forget_scheduler()
        self.record = record
        self.link.rank = self._rank(record)
        number, security = record.scheduler.number, record.get_security()
        cluster._move(replace(cluster.place, number=number, record=record.id, security=security))
        scheduler = cluster.scheduler = CMLScheduler(cluster.api, cluster.options, cluster.place)
        scheduler.address = record.scheduler.address
        session = record.scheduler.session  # None if its file names none
        scheduler.adopt(session, record.launches.get(session or ""), record.scheduler.app_url)
        scheduler.begin(time.time())
        cluster.api.forget(session or "")

    async def join(self, scheduler: CMLScheduler) -> None:
        """Connect to the scheduler that this process has launched, as soon as it answers."""
        await scheduler
        await self._join_within(self._cluster.options.scheduler_timeout)
        try:
            await self._subscribe()
        except Exception as error:  # it is tried again at the next look at the board
            self._note_error(error, "reached")
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _join_within(self, timeout: float) -> None:
        """Connect to the present scheduler, which may be busy.

        Raises
        ------
        SchedulerTimeout
            If it does not answer within `timeout` seconds.
        CMLError
            If it belongs to another cluster, or has another protocol.
        """
        record, scheduler = self.record, self._cluster.scheduler
        assert record is not None
        assert scheduler is not None
        address, security = str(scheduler.address), self._cluster.place.security
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
        await self._connect_dask(address)
        self._begin_anew()

    async def follow(self) -> None:
        """Follow what other processes do, from now on."""
        try:
            await self._take_board(self.link.board)
        except NO_ANSWER as error:  # of files, too; it is tried again at the next look at the board
            self._note_error(error, "reached")
        self._following = asyncio.create_task(self._follow())

    @property
    def tasks(self) -> Sequence[asyncio.Task[None] | None]:
        """The tasks that follow the board, and post what users ask for."""
        return self._following, *self._posting, *self._reporting

    # -- what Dask's classes know of the scheduler

    async def _connect_dask(self, address: str) -> None:
        """Let Dask's classes talk to the scheduler at an address from now on."""
        cluster = self._cluster
        if cluster.scheduler_comm is not None:
            with contextlib.suppress(Exception):  # of Dask's comm, which may be broken in any way
                await within(timing.retry, cluster.scheduler_comm.close_rpc())
        cluster.scheduler_comm = rpc(address, connection_args=self.link.connection_args)
        for callback in cluster.periodic_callbacks.values():
            callback.start()
        cluster.status = Status.closing if cluster.ending.has_begun else Status.running

    @property
    def is_subscribed(self) -> bool:
        """Whether the scheduler describes its workers to this process."""
        task = self._cluster._watch_worker_status_task
        return task is not None and not task.done()

    async def _subscribe(self) -> None:
        """Follow the scheduler's workers, as Cluster._start (cluster.py:123) does, within a time limit.

        Cluster._start also writes the cluster's name and class into the scheduler every second. The record
        has them.
        """
        await self.unsubscribe()
        try:
            await within(timing.answer, self._begin_to_follow_workers())
        except BaseException:
            await self.unsubscribe()
            raise

    async def _begin_to_follow_workers(self) -> None:
        cluster = self._cluster
        assert cluster.scheduler_comm is not None
        cluster._watch_worker_status_comm = comm = await cluster.scheduler_comm.live_comm()
        cluster.scheduler_info = SchedulerInfo(await call(comm, "subscribe_worker_status"))
        cluster._watch_worker_status_task = asyncio.create_task(cluster._watch_worker_status(comm))

    async def unsubscribe(self) -> None:
        """Follow the scheduler's workers no more."""
        cluster = self._cluster
        if cluster._watch_worker_status_comm is not None:
            cluster._watch_worker_status_comm.abort()
        await cancel(cluster._watch_worker_status_task)
        cluster._watch_worker_status_comm = cluster._watch_worker_status_task = None

    async def forget_scheduler(self) -> None:
        """Forget the scheduler with its board and its Dask workers, because it is gone."""
        await self.unsubscribe()
        self.link.forget()
        known = self._cluster.scheduler_info
        self._cluster.scheduler_info = SchedulerInfo({**known, "workers": {}, "n_workers": 0})

    # -- the board

    async def _follow(self) -> None:
        """Follow the board until the cluster is over. Whoever does not answer may do so later."""
        cluster = self._cluster
        while True:
            try:
                if self.link.address is None:
                    await self._join_within(timing.answer)
                await self._take_board(await self.link.watch())
                self._note_reached()
                self._failure = None
            except Exception as error:  # perhaps a programming error, or of a subclass
                self._note_error(error, "reached")
            else:
                continue
            try:
                # A process that leaves launches no other scheduler.
                if not self.link.connected and self.record is not None and not cluster.ending.has_begun:
                    await self.failover.check(self.record)
            except SchedulerLost as lost:
                self.end = str(lost)
                cluster.ending.reason = f"its scheduler was lost: {lost}"
                cluster._tell(f"Cluster {cluster.options.name} shut down: {lost}")
                self._ending = asyncio.create_task(cluster.ending.end_again())
                return
            except Exception as error:  # of the failover: perhaps a programming error
                self._note_error(error, "checked")
            await asyncio.sleep(timing.retry)

    def _note_error(self, error: Exception, what: str) -> None:
        """Note why the scheduler is not reached or checked, and log that when it changes."""
        name = self._cluster.options.name
        if isinstance(error, (CMLError, ValueError)):
            words = str(error)
        elif isinstance(error, NO_ANSWER):
            words = f"its scheduler does not answer: {error!r}"
        else:  # a programming error, or of a subclass
            if self._failure is None:
                logger.error("Cannot follow cluster %s", name, exc_info=error)
            self._failure = f"cannot follow the cluster: {error!r}"
            return
        if words != self.unreached:
            logger.info("Scheduler of cluster %s not %s: %r", name, what, error)
        self.note_unreached(words)

    def _begin_anew(self) -> None:
        """Begin with another scheduler, which is connected."""
        self.unreached: str | None = None
        self.unreached_since: float | None = None
        self._is_told = False

    def note_unreached(self, why: str) -> None:
        """Note why the scheduler is not reached. Tell the user once, if that lasts."""
        self.unreached, now = why, time.monotonic()
        self.unreached_since = now if self.unreached_since is None else self.unreached_since
        if now - self.unreached_since > timing.unreachable and not self._is_told:
            self._is_told = True
            self._cluster._tell(
                f"Cluster {self._cluster.options.name} not connected for {now - self.unreached_since:.0f} s: "
                f"{first_line(why)}; it connects as soon as its scheduler answers"
            )

    def _note_reached(self) -> None:
        """Note that the scheduler is reached, and tell a user who was told of the outage."""
        if self._is_told and self.unreached_since is not None:
            duration = time.monotonic() - self.unreached_since
            self._cluster._tell(
                f"Cluster {self._cluster.options.name} connected again after {duration:.0f} s"
            )
        self._begin_anew()

    async def _take_board(self, board: BoardState) -> None:
        """Do what the board says, as the keeper or as a follower."""
        is_picked = board.keeper == self.link.id
        if self.is_keeper and not (is_picked and board.term == self.keeper.term):
            await self.yield_cluster()
        if not self.is_keeper:
            if self.link.unheard:  # else a post that is not answered would delay a takeover
                await self.link.post_unreported()
            if is_picked:
                await self._succeed(board)
            elif self._cluster.api.live:  # of a launch that was answered late
                await asyncio.to_thread(self.leave_sessions)
        await self.role.take()
        if not self.is_subscribed:  # last: if that fails, nothing else waits for it
            await self._subscribe()

    async def _succeed(self, board: BoardState) -> None:
        """Keep the cluster from now on, as the last report says."""
        assert self.record is not None
        cluster = self._cluster
        try:
            report = Report.read(board.report)
            record = await files_in_time(store.read_again, self.record)
            given = await files_in_time(store.given_names, record)
            keeper = Keeper(cluster, self.link, record, board.term)
            await self._subscribe()  # anew: a process that was frozen has not read the last changes yet
            async with cluster._lock:
                cluster.groups.given(given)
                await keeper.succeed(report, given)
                self.keep(keeper)
        except Exception:  # raised again: another process may be able to, for example to read the record
            with contextlib.suppress(CMLError):
                last = {"term": board.term, "report": board.report}
                await self.link.report(**last, asked=0, events=[], n_before=0, leaves=True)
            await self._let_go()
            assert isinstance(self.role, Follower)
            self.role.show()
            raise
        cluster._begin_looking(unheard_since=None)
        logger.info("Cluster %s managed by this process", record.name)

    async def yield_cluster(self) -> None:
        """Leave the cluster to the process that keeps it now, and stop nothing."""
        cluster = self._cluster
        logger.info("Cluster %s managed by another process", cluster.options.name)
        await cluster._stop_looking()
        cluster._note_changes_by_hand()
        self.role = Follower(cluster, self.link, self.keeper.report())
        await self._let_go()

    async def _let_go(self) -> None:
        """Know of no session any more, because another process launches and stops them."""
        cluster = self._cluster
        cluster.groups.yield_adapting()
        await cluster.processes.close()
        await asyncio.to_thread(self.leave_sessions)
        cluster.workers.clear()

    def request(self, request: Request) -> Awaitable[None]:
        """Carry out what is asked for in this process, or ask the keeper, in a task that nobody must await.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        cluster, group = self._cluster, request.group
        if cluster.is_remote or self._posting:  # earlier posts are not answered yet
            if request.kind not in ("close", "resize"):
                cluster.groups.adapt(group, None)
            return self._begin(self._post(self.link.next_number(), request), self._posting)
        if request.kind != "resize":
            if self.is_keeper:  # what other processes have asked for until now comes first
                self.keeper.carry_out(self.link.board.mail)
            cluster._carry_out(request)
            self.asked(request)
        else:
            cluster._resize(group, request.n)
        return NoOpAwaitable()

    def asked(self, request: Request, number: int | None = None) -> None:
        """Note what a user of this process has asked for and is carried out here. Report it soon."""
        if self._posting and number is None:  # a report of a later number would make repeats of them
            self._begin(self._post(self.link.next_number(), request), self._posting)
        elif self.is_keeper and self._following is not None:
            self.link.unreported[number or self.link.next_number()] = request
            self._begin(self.keeper.publish(), self._reporting)

    async def _post(self, number: int, request: Request) -> None:
        try:
            await self.link.post(number, request)
        except CMLError as error:
            # Only the keeper can carry it out if the scheduler does not answer.
            if not (self.is_keeper and isinstance(error, SchedulerTimeout)):
                raise
            self._cluster._carry_out(request, is_own=True)
            self.asked(request, number)
        # A takeover, which holds the lock, must not lose what it has found since the report.
        if isinstance(self.role, Follower) and not self._cluster._lock.locked():
            self.role.show()

    def _begin(
        self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
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
        if self.is_keeper:
            await self.keeper.publish()

    # -- end

    async def leave(self) -> None:
        """Let the scheduler have what users of this process have asked for, before it leaves.

        A cluster that its creator leaves runs on without a user, whatever ``shutdown_on_close`` was.
        """
        with self._warn_if_unwritten():
            if self.record is not None and not self.connects:
                await self.link.live_on()
            # A refused request, of which the user is told, does not end the others.
            await within(2 * timing.answer, asyncio.gather(*self._posting, return_exceptions=True))

    @contextlib.contextmanager
    def _warn_if_unwritten(self) -> Iterator[None]:
        """Warn of a request that the scheduler does not have when this process leaves."""
        try:
            yield
        except (*NO_ANSWER, CMLError, ValueError) as error:  # the scheduler refuses a change, for example
            name = self._cluster.options.name
            logger.warning("Cluster %s left before its last change was written: %s", name, error)

    async def close(self, how: How) -> None:
        """Write the record for the last time. If this process leaves, another one keeps the cluster."""
        if self.is_keeper:
            await self.keeper.journal.write(self._cluster.processes.launched)
        if how is How.LEAVE:
            # All in less than the time that Ending waits, so that the user is told if the scheduler hangs.
            if self.is_keeper:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(timing.files / 2, self.keeper.publish(leaves=True))
            with self._warn_if_unwritten():
                if self.record is not None and not self.link.connected:
                    await self.failover.give_up(self.record)
                await within(timing.files / 3, self.link.post_unreported())

    def leave_sessions(self) -> None:
        """Leave the sessions to other processes, which find them in the record. Blocks.

        Stop them if another process has deleted the cluster.
        """
        api, record = self._cluster.api, self.record or self.new_record
        if not (live := api.live.copy()):
            return
        try:
            latest = block_within(timing.files, store.read_again, record)
            new = [launch_of(session, live[session]) for session in live.keys() - latest.launches.keys()]
            block_within(timing.files, store.write_sessions, record, new)
        except NoSuchCluster:
            api.end()
        except (OSError, CMLError) as error:
            logger.warning("Record of cluster %s not written: %s", record.name, error)
        api.forget(*live)

    async def forget(self) -> None:
        """Forget all of the cluster, because this object is closed."""
        await self.forget_scheduler()
        self.role = Follower(self._cluster, self.link, Report())

    async def why_closed(self) -> str | None:
        """Return why the scheduler has closed for good, by its last answer or its file. None: it has not."""
        if self.record is None or self.link.board.closed is not None:
            return self.link.board.closed
        return (await refreshed_in_time(self.record)).scheduler.closed

    def stop_and_remove(self) -> None:
        """Stop all sessions of the cluster, from all processes, and remove the record. Blocks."""
        output.flush()  # the cluster's own log is kept with its history
        if self.record is None:
            self._cluster.api.end()
            return
        # For a record that nobody can read: a follower knows the sessions by the report, a keeper by its API.
        known = {}
        for session in self.role.sessions:
            key = SCHEDULER if session.role == SCHEDULER else session.name
            known[session.id] = Launch(session.id, key, None, 0)
        record = replace(self.record, launches=known)
        last = stop_and_remove(record, self._cluster.api, self._cluster.ending.reason)
        if last is not record:  # else another process has deleted it
            self._usage, self.lasted = usage_of(last, time.time()), last.age

    # -- what users ask for

    def usage(self) -> Usage:
        """Return what the cluster has used. Blocks.

        Raises
        ------
        NoSuchCluster
            If another process has deleted the cluster, and the history does not have it.
        """
        if self._usage is not None:
            return self._usage
        record = self.record or self.new_record
        try:
            return usage_of(store.read_again(record), time.time())
        except NoSuchCluster:
            if (ended := find_ended(record.id)) is None:
                raise
            return ended.usage

    def logs(self) -> SessionLogs:
        """Return the logs of the sessions. Those of a cluster that was shut down are in its history."""
        cluster, record = self._cluster, self.record or self.new_record
        was_shut_down = cluster.status == Status.closed and cluster.ending.how is How.SHUT_DOWN
        if was_shut_down and self.record is not None and not cluster.options.log_directory:
            return kept_logs(record)
        return record.logs()

    @property
    def dashboard_url(self) -> str:
        """The URL that leads to the dashboard's port. Empty: another program uses it, or it is not known."""
        if self._forwarder is not None:
            return f"http://127.0.0.1:{self._forwarder.port}"
        board, scheduler = self.link.board, self._cluster.scheduler
        session = scheduler and scheduler.session
        url = (session and session.app_url) or board.app_url
        return url if url and board.serves_dashboard else ""

    async def forward_dashboard(self) -> None:
        """Serve the dashboard on a port of this machine."""
        self._forwarder = DashboardForwarder(
            lambda: open_comm(str(self.link.address), self.link.connection_args)
        )

    async def close_dashboard(self) -> None:
        """Serve the dashboard no more."""
        if self._forwarder is not None:
            await self._forwarder.close()


def name_others(cluster: CMLCluster) -> None:
    """Name the user's other clusters in this process that have random names, as a new one has.

    A cell that runs again may have left them. Whoever gives names wants several clusters.
    """
    for other in open_clusters():
        if other is not cluster and not other.sharing.has_own_name and other.sessions:
            name, age = other.options.name, format_duration(other.sessions[0].age)
            shut_down = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).shutdown()"
            cluster._tell(
                f"This process has another cluster, open for {age}. To shut it down, run: {shut_down}"
            )


def fill_folder(options: Options, place: Place, keys: Mapping[Path, str]) -> None:
    """Write the keys of a new cluster into its folder, which belongs to it, and make the folder of its logs.

    Parameters
    ----------
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder.
    keys : mapping
        The files of keys with their contents, see :func:`dask_cml.sessions.tls.as_files`.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site, or the folder of the logs cannot be made.
    """
    check_new(options)  # only now it is known that no running cluster is to be connected to
    tls.write(keys)
    if options.log_directory is not None:
        make_folder(log_folder(place.folder, options.log_directory), "log_directory")
