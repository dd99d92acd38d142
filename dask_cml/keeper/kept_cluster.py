"""A SpecCluster on CML sessions that one process keeps, and that any number of other processes follow."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import secrets
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from types import ModuleType
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.core import Status, rpc
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.security import Security

from dask_cml import output, protocol
from dask_cml.cancellation import cancel, end_of, within
from dask_cml.checks import message
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused, SchedulerTimeout, without_frames
from dask_cml.keeper.at_exit import end_at_exit, no_longer_end_at_exit, unclosed
from dask_cml.keeper.failover import Failover, SchedulerLost
from dask_cml.keeper.follower import Follower
from dask_cml.keeper.groups import Groups
from dask_cml.keeper.keeper import Keeper
from dask_cml.keeper.outbox import Change, Outbox
from dask_cml.keeper.retirement import connected_names
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import Options, state_directory
from dask_cml.options.limits import check_new, limits
from dask_cml.output import Logger
from dask_cml.records import liveness, store
from dask_cml.records.operations import stop_and_remove, take_name, wait_until_running
from dask_cml.records.record import VERSION, Maker, Record
from dask_cml.records.usage import Usage, usage_of
from dask_cml.remote import BoardState, Remote
from dask_cml.rpc import NO_ANSWER
from dask_cml.scheduler.board import BoardGroup
from dask_cml.sessions import here, tls
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.causes import find_cause
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.session import Session
from dask_cml.sessions.session_logs import OWN, log_folder, log_path
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.timing import timing
from dask_cml.validation import with_numbers
from dask_cml.words import first_line, format_duration, printable_lines
from dask_cml.wrapper import Log

logger = Logger(__name__)

#: The platform of a running cluster before its record is read.
_UNKNOWN = ModuleType("unknown")
#: What helps if a launch is refused when a cluster is created.
_WAY_OUT = (
    "Ask for fewer or smaller workers. Or create the cluster with n_workers=0 and call cluster.scale(n): it "
    "launches as many as there is room for. To see what runs, run `dask cml list`"
)
#: Seconds between two tries to stop the sessions of a cluster that has ended.
_STOP_AGAIN = 60.0


class KeptCluster(SpecCluster):
    """A SpecCluster whose sessions one process keeps.

    The process that launches the scheduler has the *lease* on the scheduler's board: it is the *keeper*, and
    SpecCluster's machinery runs in it. All other processes are *remotes*: they follow the board, and write on
    it. If the keeper vanishes, the next process gets the lease, and takes over the sessions.

    Parameters
    ----------
    options : Options
        The cluster's options, as far as they are known: a running cluster keeps its own.
    given : mapping
        The options that a user gave, unchecked, to name the options that a running cluster does not have.
    quiet : bool
        Whether to print no messages about the sessions.
    **arguments
        Arguments of SpecCluster: ``asynchronous``, ``loop`` and ``silence_logs``.

    Attributes
    ----------
    options : Options
        The cluster's options.
    groups : Groups
        The worker groups.
    keeper : Keeper or None
        Keeps the cluster. None in a remote.
    new_record : Record
        The record of a cluster that is created here, with its id.
    record : Record or None
        The cluster's record. None before the cluster is created or found.
    place : Place
        The cluster's folder and keys, and the number of its scheduler.
    end_reason : str
        Why the cluster ends if this process shuts it down, for its history.
    """

    #: Whether this process takes the lease if nobody has it. Also whether the cluster is no orphan meanwhile.
    takes_lease = True

    def __init__(self, options: Options, given: Mapping[str, Any], *, quiet: bool, **arguments: Any) -> None:
        self.options = options
        self._who = Maker.this_process().words
        self.end_reason = f"closed by {self._who}"
        self._given = given
        self._quiet = quiet
        self._is_asynchronous = bool(arguments.get("asynchronous"))
        self._pid = os.getpid()
        connects = options.create_mode == "connect"
        self._api = WorkersAPI(_UNKNOWN if connects else load_platform(options.platform))
        if not connects:
            self._check_launch_options(options)
        self.place = Place(state_directory() / options.name)
        self.new_record = Record(options.name, maker=self._maker(), folder=self.place.folder)
        self.record: Record | None = None
        self.groups = Groups(self, options, self._api, self.place)
        self._remote = Remote(secrets.token_hex(8), options.name, counts=self.takes_lease)
        self._outbox = Outbox(options.name, self._remote)
        self._role: Keeper | Follower = self._make_follower()
        self._failover = Failover(self, self._remote, self._api)
        #: Whether another process created the cluster.
        self._connects = False
        self._begun = False
        self._starting: asyncio.Task[None] | None = None
        #: How many tasks wait for the start.
        self._n_starting = 0
        self._following: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._steps: set[asyncio.Task[None]] = set()
        self._shuts_down = False
        #: Whether this process leaves, and does first what it was asked for.
        self._finishes = False
        self._writing: set[asyncio.Task[Any]] = set()
        self._sending: asyncio.Task[None] | None = None
        #: Whether the scheduler in :attr:`place` has answered.
        self._is_joined = False
        #: Why the cluster has ended, if this process did not ask for it.
        self._end_words: str | None = None
        self._usage: Usage | None = None
        self._lasted: float | None = None
        self._lock = asyncio.Lock()
        end_at_exit(self)
        super().__init__(
            scheduler=self._scheduler_spec(),
            worker=self.groups.spec(DEFAULT_GROUP),
            name=options.name,
            shutdown_on_close=options.shutdown_on_close,
            **arguments,
        )
        self._name = type(self).__name__  # for Dask's repr, which would show the cluster's name twice
        self._begin()

    def _scheduler_spec(self) -> dict[str, Any]:
        arguments = {"api": self._api, "options": self.options, "place": self.place}
        return {"cls": CMLScheduler, "options": arguments}

    def _check_launch_options(self, options: Options) -> None:
        self._api.check_options(options.scheduler_launch_options, "scheduler_launch_options")
        for group in (options, *options.groups().values()):
            self._api.check_options(group.launch_options)

    def _begin(self) -> None:
        """Want the first workers of all groups."""
        if self._begun:
            return
        self._begun = True
        if self.options.create_mode != "connect":
            self.groups.resize(DEFAULT_GROUP, self.options.n_workers, ())
            for name, options in self.options.groups().items():
                self.groups.add(name, options)
                self.groups.resize(name, options.n_workers, ())

    @property
    def keeper(self) -> Keeper | None:
        """Keeps the cluster. None in a remote."""
        return self._role if isinstance(self._role, Keeper) else None

    @property
    def keeps(self) -> bool:
        """Whether this process keeps the cluster, and acts for it."""
        return self.keeper is not None and self._remote.keeps

    @property
    def may_keep(self) -> bool:
        """Whether this process may keep the cluster. A process that only shows it may after a change."""
        return (self.takes_lease or self._remote.has_written) and not self.is_inside

    @property
    def is_inside(self) -> bool:
        """Whether this process runs in a session of the cluster. It is no user, and never the keeper."""
        return self.record is not None and here.is_inside(self.record.id)

    @property
    def is_forks_copy(self) -> bool:
        """Whether this process is a fork of the cluster's process. Its exit does not end the cluster."""
        return self._pid != os.getpid()

    def _check_running(self, what: str) -> None:
        """Refuse what a cluster cannot do that does not run.

        Raises
        ------
        CMLError
            If it does not run.
        """
        if self.status != Status.running or self.is_forks_copy:
            status = "of another process" if self.is_forks_copy else self.status.name
            why = f": {self._end_words}" if self._end_words else ""
            raise CMLError(f"{what}: cluster {self.options.name} is {status}{why}")

    # -- start

    async def __aenter__(self) -> Any:
        # SpecCluster.__aenter__ (spec.py:478) asserts that it runs. Another process may have shut it down.
        try:
            await self
            self._check_running("not connected")
        except (Exception, asyncio.CancelledError):
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        self.note_error(error)
        await super().__aexit__(kind, error, frames)

    async def _start(self) -> None:
        """Create the cluster or connect to it. Return when its scheduler answers.

        SpecCluster._start (spec.py:304) launches the workers after the scheduler has answered, turns every
        error into a RuntimeError, and lets a second caller poll.
        """
        if self.status not in (Status.created, Status.running):
            raise CMLError(f"cluster {self.options.name} is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_once())
        self._n_starting += 1
        try:
            await asyncio.wait([self._starting])  # which a cancelled caller does not cancel
            self._starting.result()
        except asyncio.CancelledError:
            closed_meanwhile = self._closing is not None
            if self._n_starting > 1 and not closed_meanwhile:  # another task still waits
                raise
            if not closed_meanwhile:
                self.note_interrupt()
            await self._close_failed_start()
            if closed_meanwhile:
                raise CMLError(f"cluster {self.options.name} was closed while it started") from None
            if self._is_asynchronous:  # otherwise, the interrupted constructor says it
                self._say_interrupted()
            raise
        except GeneratorExit:  # the event loop has ended, so nothing can be awaited; end_now() stops sessions
            raise
        except BaseException as error:
            self.end_reason = f"it did not start: {error}"
            await self._close_failed_start()
            if isinstance(error, LaunchRefused):
                # Sessions that are stopping must not keep the user from creating a smaller cluster at once.
                await self._api.wait_for_stopped()
            if isinstance(error, CMLError):
                raise without_frames(error) from None
            raise
        finally:
            self._n_starting -= 1

    async def _close_failed_start(self) -> None:
        """Stop what was launched. Log an error, which must not replace the reason of the failure."""
        try:
            await self._close(shutdown=not self._connects)
        except Exception as failed:  # also of Dask's code
            logger.error("Cluster %s not closed properly: %s", self.options.name, failed or repr(failed))

    def note_interrupt(self) -> None:
        """Note that its user has interrupted the start, for the cluster's history."""
        self.end_reason = f"interrupted while it started by {self._who}"

    def _say_interrupted(self) -> None:
        """Tell the user, after Ctrl-C, how many sessions were stopped."""
        n = len(self._api.launched - self._api.live.keys())
        noun = "session" if n == 1 else "sessions"
        output.say(f"Interrupted: {n} {noun} stopped", to_stderr=True)
        output.flush()

    async def _start_once(self) -> None:
        self.quiet = self._quiet
        self._begin()
        async with self._lock:
            mode = self.options.create_mode
            if mode == "connect":
                await self._connect()
            else:
                try:
                    await self._create()
                except ClusterExists:
                    if mode == "create":
                        raise
                    await self._connect()
        if self._connects:
            await self._take_board(self._remote.board)
            self._following = asyncio.create_task(self._follow())
        await asyncio.to_thread(output.flush)

    def _maker(self) -> Maker:
        """Return who creates a cluster here."""
        return Maker.this_process()

    async def _create(self) -> None:
        """Create the cluster: claim its name, and launch the scheduler and all workers at once."""
        options = self.options
        security, files = await asyncio.to_thread(tls.as_files, options.security, self.place.folder)
        record = replace(self.new_record, options=options.arguments(), security=tls.paths(security))
        self.record = record  # to remove it if this is cancelled
        keeper = await self._make_keeper(record)
        orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
        self._outbox.clear()  # the first board has what is wanted so far
        board = keeper.first_board(hours=limits().get("hours"), orphan_timeout=orphan_timeout)
        await take_name(record, board, self._api)
        check_new(options)  # only now it is known that no running cluster is to be connected to
        if not record.maker.serves:  # the web UI creates clusters for several users
            self._name_others()
        await asyncio.to_thread(self._write_files, files)
        self._set_place(replace(self.place, record=record.id, security=security))
        with self.groups.changing():
            keeper.note_own_changes()
            self._role = keeper
        try:
            await keeper.launch(self._join, strict=True, display=not self._quiet)
        except LaunchRefused as error:
            raise LaunchRefused(error.name, error.reason, error.by, _WAY_OUT) from None
        self._begin_keeping(keeper)
        if not any(self.target(group) or self.limits(group) for group in self.groups.names):
            self._log(f"Cluster {options.name} has no workers yet: call cluster.scale(n) or cluster.adapt()")
        if limits_of_session := here.session_limits():
            self._log(limits_of_session)
        if not options.shutdown_on_close:
            self._log(here.lifetime(options.name, options.idle_timeout))

    def _write_files(self, files: Mapping[Any, str]) -> None:
        tls.write(files)
        if self.options.log_directory is not None:
            logs = log_folder(self.place.folder, self.options.log_directory)
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _name_others(self) -> None:
        """Name the user's other clusters in this process. A cell that runs again may have left them."""
        for other in unclosed():
            if other is not self and getattr(other, "takes_lease", False) and other.sessions:
                name, age = other.options.name, format_duration(other.sessions[0].age)
                close = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).close()"
                self._log(f"This process has another cluster, open for {age}. To close it, run: {close}")

    def _set_place(self, place: Place) -> None:
        self.place = place
        self.security = place.security or Security()
        self.groups.move(place)
        self.scheduler_spec["options"]["place"] = place

    async def _make_keeper(self, record: Record) -> Keeper:
        """Return what keeps the cluster here from now on. It gives no name that a session has had before."""
        self.groups.given(await asyncio.to_thread(store.given_names, record))
        return Keeper(self, self.groups, self._remote, self._outbox, self._api, record, self._log)

    def _make_follower(self) -> Follower:
        return Follower(self, self.groups, self._remote, self._outbox)

    def _begin_keeping(self, keeper: Keeper) -> None:
        """Check the sessions and adapt from now on."""
        self.groups.begin_adapting()
        self._keeping = asyncio.create_task(keeper.run())

    # -- connections

    async def _connect(self) -> None:
        """Connect to a running cluster. If it starts, wait.

        Raises
        ------
        CMLError
            If its scheduler does not answer.
        """
        self._connects = True
        name, given = self.options.name, self._given
        record = await asyncio.to_thread(store.read, name, self.place.folder.parent)
        if record.scheduler.address is None:  # another process creates it
            self._log(f"Cluster {name} is starting: waiting for its scheduler")
            record = await wait_until_running(record)
        if record.version != VERSION:
            raise CMLError(
                f"cluster {name!r} was created by another dask-cml: manage it with that one, or run "
                f"`dask cml delete {shlex.quote(name)}`"
            )
        differing = self.options.differing(given, record.options)
        kept = f"; it keeps its {', '.join(differing)}" if differing else ""
        if self.options.create_mode != "connect" or kept:
            self._log(f"Connected to running cluster {name}{kept}")
        self.shutdown_on_close = shutdown = bool(given.get("shutdown_on_close"))
        own = {"shutdown_on_close": shutdown, "forward_dashboard": self.options.forward_dashboard}
        self.options = Options.of_running(name, record.options, **own)
        # What a user wanted of a cluster that was not created does not apply to the running cluster.
        self.groups.stop_adapting()
        self.worker_spec.clear()
        self._api = WorkersAPI(load_platform(record.options.get("platform", "auto")))
        self._failover = Failover(self, self._remote, self._api)
        self.groups = Groups(self, self.options, self._api, self.place)
        # A subclass may have chosen other classes.
        self.scheduler_spec = {**self._scheduler_spec(), "cls": self.scheduler_spec["cls"]}
        self.new_spec = {**self.groups.spec(DEFAULT_GROUP), "cls": self.new_spec["cls"]}
        self._role = self._make_follower()
        # As long as Dask's clients wait, for a busy scheduler. Without a scheduler this fails at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if why := await asyncio.to_thread(liveness.why_not_contacted, record):
            raise CMLError(f"not connected to cluster {name!r}: {why}")
        self._enter(record)
        try:
            await self._join_within(patience, str(record.scheduler.address))
        except SchedulerTimeout as error:
            advice = f"to stop its sessions, run `dask cml delete {shlex.quote(name)}`"
            raise CMLError(
                f"the scheduler of cluster {name!r} does not answer at {record.scheduler.address}: "
                f"{record.out_of_reach or advice}"
            ) from error

    def _enter(self, record: Record) -> None:
        """Take the place of the scheduler in a record, which another process has launched."""
        self.record, self._is_joined = record, False
        self._remote.counts = self.takes_lease and not self.is_inside
        number, security = record.scheduler.number, record.get_security()
        self._set_place(replace(self.place, number=number, record=record.id, security=security))
        scheduler = self.scheduler = CMLScheduler(self._api, self.options, self.place)
        scheduler.address = record.scheduler.address
        session = record.scheduler.session or ""
        scheduler.adopt(session, record.launches.get(session), record.scheduler.app_url)
        self._api.forget(session)

    async def _join(self, address: str) -> None:
        """Connect to the scheduler that this process has launched, and keep the lease from now on."""
        await self._join_within(self.options.scheduler_timeout, address)
        if self._remote.board.keeper == self._remote.id:
            await self._subscribe()
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
        record, security = self.record, self.place.security
        deadline = time.monotonic() + timeout
        while True:
            is_last = time.monotonic() > deadline  # before the try: a process may be stopped for long
            try:
                await self._remote.join(address, security, record.id)
                break
            except NO_ANSWER as error:
                if is_last:
                    raise SchedulerTimeout(
                        f"the scheduler of cluster {record.name!r} at {address} did not answer within "
                        f"{timeout:g} s: {error!r}"
                    ) from error
            await asyncio.sleep(timing.retry / 2)
        if self.scheduler_comm is not None:
            with contextlib.suppress(Exception):
                await within(timing.retry, self.scheduler_comm.close_rpc())
        self.scheduler_comm = rpc(address, connection_args=self._remote.connection_args)
        self._is_joined = True
        self._failover.begin_anew()
        if isinstance(self._role, Follower):
            self._role.forget_workers()
        for callback in self.periodic_callbacks.values():
            callback.start()
        self._note_running()

    def _note_running(self) -> None:
        """Note that the cluster runs, unless it is closing already."""
        self.status = Status.running if self._closing is None else Status.closing

    @property
    def _is_subscribed(self) -> bool:
        return self._watch_worker_status_task is not None and not self._watch_worker_status_task.done()

    async def _subscribe(self) -> None:
        """Follow the scheduler's workers by Cluster._start (cluster.py:123), within a time limit.

        The scheduler describes its workers to its last subscriber only. So only the keeper subscribes.
        """
        await self._unsubscribe()
        await within(timing.answer, self._start_dask())

    async def _start_dask(self) -> None:
        await super(SpecCluster, self)._start()
        workers = with_numbers(self.scheduler_info["workers"])
        self.scheduler_info = SchedulerInfo({**self.scheduler_info, "workers": workers})
        self._note_running()  # Cluster._start says so of an object that is closing, too

    async def _unsubscribe(self) -> None:
        if self._watch_worker_status_comm is not None:
            self._watch_worker_status_comm.abort()
        await cancel(self._watch_worker_status_task, self._sync_cluster_info_task)
        self._watch_worker_status_comm = self._watch_worker_status_task = None
        self._sync_cluster_info_task = None

    def _forget_workers(self) -> None:
        """Know of no Dask worker, because their scheduler is gone."""
        self.scheduler_info = SchedulerInfo({**self.scheduler_info, "workers": {}, "n_workers": 0})

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster._update_worker_status (spec.py:398) closes a worker that has been gone for some seconds,
        # and keeps its spec. The keeper finds out why a session's worker is gone, and replaces it.
        names = []
        if op == "add":
            msg = {**msg, "workers": with_numbers(msg["workers"])}
            names = [str(info["name"]) for info in msg["workers"].values()]
        gone = self.scheduler_info["workers"].get(msg) if op == "remove" else None
        if gone is not None and not isinstance(self.workers.get(gone["name"]), (CMLWorker, type(None))):
            super()._update_worker_status(op, msg)  # of a subclass
        elif gone is not None or op != "remove":
            super(SpecCluster, self)._update_worker_status(op, msg)
        if self.keeper is not None:
            self.keeper.note_connected(names)
            if op == "remove":
                self.keeper.woken.set()

    # -- the board

    async def _follow(self) -> None:
        """Follow the board until the cluster is over. Whoever does not answer may do so later."""
        while True:
            was_connected = self._remote.connected
            try:
                if not self._is_joined:
                    assert self.scheduler is not None
                    await self._join_within(timing.answer, str(self.scheduler.address))
                board = await self._remote.watch()
                if self._outbox.changes:
                    self._send_soon()
                await self._take_board(board)
                self._failover.note_connected()
                continue
            except (*NO_ANSWER, CMLError, ValueError) as error:
                if was_connected:
                    logger.info("Scheduler of cluster %s not reached: %r", self.options.name, error)
                self._failover.note(str(error) or repr(error))
            except Exception:
                logger.exception("Board of cluster %s not read", self.options.name)
            try:
                # A process that leaves launches no other scheduler.
                if not self._remote.connected and self.record is not None and self._closing is None:
                    await self._failover.check(self.record)
            except SchedulerLost as lost:
                self._end_by_itself(lost)
                return
            except (*NO_ANSWER, CMLError, ValueError) as error:
                logger.info("Scheduler of cluster %s not checked: %r", self.options.name, error)
                self._failover.note(str(error) or repr(error))
            except Exception:
                logger.exception("Scheduler of cluster %s not checked", self.options.name)
            await asyncio.sleep(timing.retry)

    async def _take_board(self, board: BoardState) -> None:
        """Do what the board says, as the keeper or as a remote."""
        if board.keeper is None and (self.keeper is not None or self.may_keep):
            await self._remote.lease(take=True)
            board = self._remote.board
            if board.keeper == self._remote.id and self.keeper is not None:
                await self._subscribe()  # another process may have subscribed meanwhile
        if board.keeper == self._remote.id and self.keeper is None:
            try:
                await self._succeed(board)
            except Exception:  # another process may be able to, for example to read the record
                await self._remote.lease(take=False)
                raise
        elif board.keeper != self._remote.id and self.keeper is not None:
            await self._yield(self.keeper)
        if self.keeper is not None and not self._is_subscribed:
            await self._subscribe()
        await self._role.take(self._remote.board)  # which may be newer by now

    async def _succeed(self, board: BoardState) -> None:
        """Keep the cluster from now on."""
        assert self.record is not None
        record = await asyncio.to_thread(store.read_again, self.record)
        self.groups.take(board.groups)
        await self._subscribe()
        keeper = await self._make_keeper(record)
        async with self._lock:
            await self._role.step()  # what was changed here is on the board then
            await keeper.succeed(record)
            self._role = keeper
        self._begin_keeping(keeper)
        logger.info("Cluster %s kept by this process", record.name)

    async def _yield(self, keeper: Keeper) -> None:
        """Leave the cluster to another process that keeps it now, and stop nothing."""
        logger.info("Cluster %s kept by another process", self.options.name)
        keeper.note_changes_by_hand()
        self._role = self._make_follower()
        self._send_soon()
        await self._stop_keeping()
        async with self._lock:
            await keeper.close(writes=False)
            self._api.forget(*self._api.live)
            self.workers.clear()
        self.groups.yield_adapting()
        await self._unsubscribe()

    def _ask(self, group: str, **change: Any) -> None:
        """Ask the board for a change of a group that is made here already, see ``GroupChange``.

        The caller holds the lock of the groups.
        """
        keeper = self.keeper
        if keeper is not None:
            keeper.ask(group, **change)
        else:
            self._outbox.add(groups={group: change})
        self._soon(self._send_soon)

    def _send_soon(self) -> None:
        """Write on the board what it does not have yet, in a task. :meth:`_follow` tries again."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            await self._outbox.send()
        except CMLError as error:
            logger.info("Board of cluster %s not written yet: %s", self.options.name, error)

    def _write(self, change: Change) -> Any:
        """Write a change on the board, see :meth:`Outbox.wait`. In the event loop, return a task.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        if not self.asynchronous:
            self.sync(self._outbox.wait, change)
            return None
        task = asyncio.ensure_future(self._outbox.wait(change))
        self._writing.add(task)
        task.add_done_callback(self._written)
        return task

    async def written(self) -> None:
        """Wait until the board has what was changed in this process.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await asyncio.gather(*self._writing)
        await self._outbox.send()
        if self.keeper is not None:
            await self.keeper.publish()

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps nobody awaits it
            logger.warning("Cluster %s not changed: %s", self.options.name, error)

    # -- the step

    def _correct_state(self) -> asyncio.Task[None]:
        """Take a step soon, and return a task that waits for its end.

        SpecCluster._correct_state (spec.py:343) returns the step itself, so a cancelled caller cancels the
        others, as does the end of the cluster. Its body retires workers by their names as addresses (359),
        waits for every launch and end (365, 389), and keeps what was refused as if it ran (390).
        """
        step = self._correct_state_waiting
        if step is None:
            step = self._correct_state_waiting = asyncio.create_task(self._take_step())
            self._steps.add(step)
            step.add_done_callback(self._steps.discard)
        return asyncio.create_task(end_of(step))

    async def _take_step(self) -> None:
        self._correct_state_waiting = None
        if self._starting is None or not self._starting.done():  # the start launches all
            return
        async with self._lock:
            if self.status == Status.running or self._finishes:
                await self._role.step()

    async def _stop_keeping(self) -> None:
        """Cancel the checks, the steps and the launches of this process."""
        self._correct_state_waiting = None  # a step that is cancelled before it begins does not do it
        await cancel(self._keeping, *self._steps)
        if self.keeper is not None:
            await self.keeper.stop_launching()

    # -- adaptive scaling and worker groups

    def stop_adapting(self, group: str) -> Any:
        """Keep a group's number of sessions. In a remote's event loop, return an awaitable."""
        with self.groups.changing():
            self.groups.adapt(group, None)
            if self.keeper is not None or self.status == Status.created:
                self._ask(group, adapt=None)
                return None
            if self.status != Status.running:
                return None
            change = self._outbox.add(is_awaited=True, groups={group: {"adapt": None}})
        return self._write(change)

    def _soon(self, function: Callable[[], Any]) -> None:
        """Call a function in the event loop."""
        assert self.loop is not None
        self.loop.add_callback(function)

    async def _add_group(self, name: str, options: Options) -> None:
        self._check_running(f"worker group {name!r} not added")
        if name in self.groups:
            raise ValueError(message("name", name, "a name that no worker group of the cluster has"))
        group = {"options": options.group_arguments(), "target": options.n_workers}
        await self._outbox.write(groups={name: group})
        await self._take_changes()

    async def _take_changes(self) -> None:
        """Do what the board says after this process has written on it."""
        await self._role.take(self._remote.board)
        await self._correct_state()

    async def _delete_group(self, name: str) -> None:
        self._check_running(f"worker group {name!r} not deleted")
        if name == DEFAULT_GROUP or name not in self.groups:
            raise ValueError(message("name", name, "a worker group of the cluster other than 'default'"))
        workers = {*self.workers_of(name)}
        await self._outbox.write(groups={name: None})
        await self._take_changes()
        deleted = f"worker group {name!r} of cluster {self.options.name} deleted, but"

        def left() -> list[str]:
            left = [worker for worker in self.workers_of(name) if worker in workers]
            if left:
                self._check_running(f"{deleted} {', '.join(left)} not stopped")
            return left

        if not_stopped := await self._wait_until_done(left):
            names = ", ".join(not_stopped)
            if {*not_stopped} <= {*self._role.staying}:
                until = "until other workers can take their data: cluster.scale(n) launches some"
                raise CMLError(f"{deleted} {names} stay {until}")
            raise CMLError(f"{deleted} {names} not stopped yet: {self._why_not_done}")

    async def _wait_until_done(self, left: Callable[[], list[str]]) -> list[str]:
        """Wait until no session is left to launch or to stop, or nothing gets on. Return what is left.

        Nothing gets on if all of these sessions stay until other workers can take their data, or if for
        ``timing.finish`` none was launched or stopped, and no data was moved.

        Parameters
        ----------
        left : callable
            Returns the names of the sessions that are still to be launched or stopped.
        """
        fewest, least, deadline = math.inf, math.inf, 0.0
        while (names := left()) and not {*names} <= {*self._role.staying}:
            now = time.monotonic()
            if len(names) < fewest:
                fewest, deadline = len(names), now + timing.finish
            elif now > deadline:
                moving = await self._data_to_move()
                if not 0 < moving < least:
                    break
                least, deadline = moving, now + timing.finish
            await asyncio.sleep(timing.collect)
        return names

    async def _data_to_move(self) -> int:
        """Return how many bytes are in Dask workers that are not wanted any more. 0 if it is not known."""
        wanted = {name for names in self.groups.dask_workers().values() for name in names}
        try:
            held = await self._remote.ask(protocol.HELD, names=sorted(connected_names(self) - wanted))
        except (*NO_ANSWER, CMLError):
            return 0
        return sum(state["nbytes"] for state in held.values())

    @property
    def _why_not_done(self) -> str:
        """Why sessions are not stopped or launched, as a clause."""
        known = self._role.not_stopped or self._failover.problem or self._role.problem
        return known or f"nothing has changed for {timing.finish:g} s"

    def workers_of(self, group: str) -> list[str]:
        """Return the names of a group's sessions, wanted or not."""
        return [session.name for session in self.sessions if session.group == group]

    # -- what the cluster is

    @property
    def board(self) -> BoardState:
        """The board, as this process knows it."""
        return self._remote.board

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler answers."""
        return self._remote.connected

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return self._role.sessions

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        return self._role.arrived(group)

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the queued worker sessions have waited, in seconds."""
        return self._role.waits(group)

    def target(self, group: str = DEFAULT_GROUP) -> int:
        """Return how many worker sessions of a group are requested."""
        return self._role.target(group)

    def limits(self, group: str = DEFAULT_GROUP) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling. None: it has a fixed size."""
        return self._role.limits(group)

    @property
    def gave_up(self) -> Mapping[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        return self._role.gave_up

    @property
    def shortages(self) -> Mapping[str, str]:
        """Why the platform has launched only some workers of some groups."""
        return self._role.shortages

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        if self.status == Status.running and self._failover.problem:
            return self._failover.problem
        return self._end_words or self._role.problem or self._remote.board.problem

    # -- another scheduler

    async def follow_other(self, record: Record) -> None:
        """Follow the last scheduler in the record as soon as it answers, which another process may keep."""
        if self.keeper is not None:
            await self._yield(self.keeper)
        if record.scheduler.number > self.place.number:
            self._log(f"Cluster {record.name} follows another scheduler, which another process has launched")
        self._enter(record)
        self._remote.forget()

    async def launch_next(self, record: Record, why: str, restarts: int, limit: int) -> bool:
        """Launch the next scheduler and all workers. Return False if another process does."""
        begin, last = time.monotonic(), record.scheduler
        groups = {name: BoardGroup(**group) for name, group in last.groups.items()}
        last_board = BoardState(revision=last.revision, groups=groups, closing=last.closing)
        self._outbox.drop(last.writers.get(self._remote.id, 0))
        keeper = self.keeper or await self._make_keeper(record)
        if self.keeper is not None:
            known = self._remote.board
            is_newer = last.number == self.place.number and last.revision > known.revision
            newest = last_board if is_newer else known
            if newest.groups:  # else this process has not joined that scheduler
                await keeper.take(newest)  # what it has answered to other processes
        board = keeper.first_board(
            # If the keeper has vanished, what the lost scheduler wrote last is wanted.
            last.groups if self.keeper is None else None,
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
        lost = self.scheduler
        if isinstance(lost, CMLScheduler) and last.number == self.place.number:
            log = await lost.last_lines()
            loss = find_cause(None, log, connected=True, noticed=False, closed=False, said=lost.reported)
            await lost.note_loss(loss)
            if lost.session_id == last.session:
                why = loss.words
        self._log(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
        self._log(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
        await self._stop_keeping()
        await self._unsubscribe()
        self._remote.close()
        self._forget_workers()
        async with self._lock:
            if self.keeper is None:
                keeper.want(last_board)
            await keeper.stop_all(record)
            self._set_place(replace(self.place, number=number))
            self._is_joined = False
            keeper.renew()
            self._role = keeper
            await keeper.launch(self._join, strict=False)
        self._begin_keeping(keeper)
        self._log(
            f"Cluster {record.name} connected to another scheduler after {time.monotonic() - begin:.0f} s"
        )
        return True

    # -- end

    def _end_by_itself(self, lost: SchedulerLost) -> None:
        """Close, because the cluster is over."""
        self._end_words = str(lost)
        self.end_reason = f"its scheduler was lost: {lost}"
        self._log(f"Cluster {self.options.name} shut down: {lost}")
        self._ending = asyncio.create_task(self._end_again())

    async def _end_again(self) -> None:
        """Close. Try again if sessions were not stopped."""
        while self.status != Status.closed:
            try:
                await self._close(shutdown=True)
            except Exception as error:
                logger.error("%s", error)
                await asyncio.sleep(_STOP_AGAIN)

    async def _close(self, shutdown: bool | None = None) -> None:
        """Close this object. By default, as at the end of an ``async with`` block.

        SpecCluster._close (spec.py:438) retires all workers, and asserts that all have ended. Without a
        scheduler, that waits for ever.
        """
        if shutdown is None:
            shutdown = self.shutdown_on_close
        if self.status == Status.closed and (self._shuts_down or not shutdown):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # as in a block that is collected, whose loop has ended: end_now() closes
            return
        closing = self._closing
        again = closing is not None and closing.done() and self.status == Status.failed
        if closing is None or again or (shutdown and not self._shuts_down):
            self._shuts_down = shutdown
            closing = self._closing = loop.create_task(self._close_once(shutdown, closing))
        await asyncio.shield(closing)

    async def _close_once(self, shutdown: bool, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and not earlier.done():  # this object leaves the cluster, which is to end
            await asyncio.wait([earlier])
        self.status = Status.closing
        not_done: str | None = None
        if not shutdown and earlier is None:
            await self._write_last()
        self.groups.stop_adapting()
        try:
            try:
                if not shutdown:
                    not_done = await self._finish()
            finally:
                await cancel(self._starting, self._following, self._sending)
                await self._stop_keeping()
            await (self._say_goodbye() if shutdown else self._hand_over())
            if not_done is not None and await self._is_succeeded():
                not_done = None
        except Exception:  # the sessions are stopped even so
            logger.exception("Cluster %s not closed properly", self.options.name)
        self._remote.close()
        try:
            if shutdown:
                await self._stop_sessions()
            else:
                self._forget_sessions()
                await self._api.close()
        except BaseException:
            self.status = Status.failed
            raise
        await self._close_dask()
        no_longer_end_at_exit(self)
        await asyncio.to_thread(output.flush)
        if not_done is not None and not self._shuts_down:
            raise CMLError(not_done)

    async def _finish(self) -> str | None:
        """Do what users have asked for, before this process leaves. Return what is not done."""
        self._finishes = True
        try:
            await self._wait_until_done(self._left_to_do)
        finally:
            self._finishes = False
            self.groups.stop_adapting()  # another process may have asked for it meanwhile
        return self.not_done

    def _left_to_do(self) -> list[str]:
        """Return the names of the sessions that this process has to launch or to stop before it leaves."""
        if self._shuts_down or self._following is None or self._following.done():
            return []
        if self.keeper is not None:
            return self.keeper.to_stop + self.keeper.to_launch
        return [self.options.name] if self._leaves_a_change else []

    @property
    def _leaves_a_change(self) -> bool:
        """Whether this process has changed the cluster, and nobody keeps it or has taken the change.

        A keeper that does not take it has ended, perhaps, and loses the lease. Then this process keeps it.
        """
        board = self._remote.board
        is_taken = board.keeper is not None and not board.closing and not self._untaken_groups
        return self._remote.has_written and self._remote.connected and not is_taken

    @property
    def _untaken_groups(self) -> list[str]:
        """The groups whose last change was asked for here, and that no other process has taken yet."""
        return self._role.untaken if isinstance(self._role, Follower) else []

    @property
    def not_done(self) -> str | None:
        """What is not carried out if this process leaves now, as a sentence. None if nothing is left."""
        if self._following is None:  # it has not started
            return None
        parts = []
        if self.keeper is not None and self.keeper.to_stop:
            parts.append(f"{', '.join(self.keeper.to_stop)} not stopped")
        if self.keeper is not None and self.keeper.to_launch:
            parts.append(f"{', '.join(self.keeper.to_launch)} not launched")
        if self.keeper is None and self._leaves_a_change:
            parts.append("no process that keeps the cluster has taken it")
        if not parts:
            return None
        commands = [
            f"`dask cml {shlex.join(self._scale_command(group))}`" for group in self._unfinished_groups
        ]
        return (
            f"cluster {self.options.name} left before its last change was carried out: {', '.join(parts)} "
            f"({self._why_not_done}). To carry it out, run {' and '.join(commands)}"
        )

    @property
    def _unfinished_groups(self) -> list[str]:
        """The groups of which sessions are still to be launched or stopped, at least one."""
        keeper = self.keeper
        names = [] if keeper is None else keeper.to_stop + keeper.to_launch
        groups = {self.groups.group_of(name) for name in names}.union(self._untaken_groups)
        return sorted(group for group in groups if group in self.groups) or [DEFAULT_GROUP]

    def _scale_command(self, group: str) -> list[str]:
        """Return the arguments of ``dask cml`` by which another process carries out what is wanted."""
        option = [] if group == DEFAULT_GROUP else ["--group", group]
        return ["scale", self.options.name, str(self.target(group)), *option]

    async def _is_succeeded(self) -> bool:
        """Return whether another process takes the lease of this one, which leaves."""
        deadline = time.monotonic() + timing.succeed
        try:
            while (await self._remote.watch()).keeper in (None, self._remote.id):
                if time.monotonic() > deadline:
                    return False
        except (*NO_ANSWER, CMLError, ValueError) as error:
            logger.info("Keeper of cluster %s not known: %r", self.options.name, error)
            return False
        return True

    async def _write_last(self) -> None:
        """Write on the board what users of this process have changed, before it leaves."""
        try:
            await self.written()
        except Exception as error:  # the scheduler does not answer, or refuses a change
            logger.warning("Cluster %s left before its last change was written: %s", self.options.name, error)

    async def _say_goodbye(self) -> None:
        """Let the scheduler inform its workers and clients of its end."""
        if self.keeper is not None:
            await self.keeper.close()
        if self._remote.address is not None:
            try:
                await self._remote.ask("terminate", timing.goodbye, reason=self.end_reason)
            except Exception as error:  # its workers may be frozen, and Dask's errors vary
                logger.debug("Scheduler of cluster %s gave no answer: %r", self.options.name, error)

    async def _hand_over(self) -> None:
        """Give the lease back."""
        if self.keeper is not None:
            await self.keeper.close()
            with contextlib.suppress(CMLError):
                await self._remote.lease(take=False)

    def _forget_sessions(self) -> None:
        """Leave the sessions to other processes. Sessions that no other process can find are stopped."""
        keeper = self.keeper
        if keeper is None:
            self._api.forget(*self._api.live)
        elif not keeper.gone:
            self._api.forget(*[str(process.session_id) for process in keeper.processes])

    async def _stop_sessions(self) -> None:
        """Stop all sessions of the cluster, from all processes, and then remove the record."""
        record = self.record
        if record is not None:
            with contextlib.suppress(OSError, CMLError):  # the usage is removed with the record
                last = await asyncio.to_thread(store.read_again, record)
                self._usage, self._lasted = usage_of(last, time.time()), record.age
        try:
            await self._api.close(self._stop_sessions_now)
        except CallFailed as error:
            latest = record and await asyncio.to_thread(store.refreshed, record)
            if latest and latest.scheduler.closed is not None:
                raise CallFailed(f"{error}. The scheduler has closed, so their programs exit") from error
            raise

    def _stop_sessions_now(self) -> None:
        """Stop all sessions and remove the record, like :meth:`_stop_sessions`. Blocks."""
        output.flush()  # the cluster's own log is kept with its history
        if self.record is None:
            self._api.end()
        else:
            stop_and_remove(replace(self.record, launches={}), self._api, self.end_reason)

    async def _close_dask(self) -> None:
        """Close what Dask's classes have opened, by their own code."""
        await self._unsubscribe()
        self.worker_spec.clear()
        if self.keeper is not None:
            await self.keeper.close_others()
        if isinstance(self.scheduler, CMLScheduler):
            self.scheduler.status = Status.closed
        for worker in [*self.workers.values()]:
            worker.status = Status.closed
        self.workers.clear()
        self._forget_workers()
        self._remote.board = BoardState()
        self._role = self._make_follower()
        # With this status, SpecCluster._close (spec.py:438) does only its last steps.
        self.status = Status.closing_gracefully
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timing.retry, super()._close())
        self.status = Status.closed
        for callback in self.periodic_callbacks.values():  # of the widget, which shows the end
            callback.callback()

    def end_now(self, timeout: float) -> None:
        """Close when the interpreter exits. Blocks.

        Parameters
        ----------
        timeout : float
            Maximum time to wait for the event loop, in seconds.

        Raises
        ------
        CMLError
            If the platform did not stop some sessions, or this process leaves before it has carried out the
            last change. The message names the sessions.
        """
        closing = self._close(self.shutdown_on_close)
        try:
            loop = None if self._starting is None else self._starting.get_loop()
            if loop is not None and loop.is_running():
                asyncio.run_coroutine_threadsafe(closing, loop).result(timeout)
        except CMLError:
            self.status = Status.closed  # so that Dask does not close it again
            raise
        except Exception as error:
            logger.info("Event loop of cluster %s not used to close it: %r", self.options.name, error)
        finally:
            if inspect.getcoroutinestate(closing) == inspect.CORO_CREATED:  # the loop has ended
                closing.close()
        try:
            self._close_without_loop(self.shutdown_on_close)
        finally:
            self.status = Status.closed

    def end_in_another_process(self, timeout: float) -> None:
        """Close when the interpreter exits and starts no threads, as the platform does. Blocks.

        Parameters
        ----------
        timeout : float
            Maximum time to wait for the process, in seconds.

        Raises
        ------
        OSError, subprocess.SubprocessError
            If the process does not start, or does not end in time.
        """
        record, status = self.record, self.status
        commands = [["delete", self.options.name, "--reason", self.end_reason]]
        if not self.shutdown_on_close:
            groups = [] if self.not_done is None else self._unfinished_groups
            commands = [self._scale_command(group) for group in groups if not self.limits(group)]
        self.status = Status.closed
        if self._starting is not None and self._starting.get_loop().is_running():
            loop = self._starting.get_loop()
            asyncio.run_coroutine_threadsafe(cancel(self._following), loop)
            asyncio.run_coroutine_threadsafe(self._stop_keeping(), loop)
        if record is None or status == Status.closed:
            return
        environment = {**os.environ, "DASK_CML__STATE_DIRECTORY": str(record.folder.parent)}
        for command in commands:
            program = [sys.executable, "-m", "dask", "cml", *command]
            subprocess.run(program, env=environment, stdout=subprocess.DEVNULL, timeout=timeout)

    def _close_without_loop(self, shutdown: bool) -> None:
        """Close when the event loop has ended, as after asyncio.run. Blocks."""
        if self.status == Status.closed and (self._shuts_down or not shutdown):
            return
        self._shuts_down = shutdown
        not_done = None if shutdown else self.not_done
        try:
            if shutdown:
                self._stop_sessions_now()
        except BaseException:
            self.status = Status.failed
            raise
        self.status = Status.closed
        no_longer_end_at_exit(self)
        if not_done is not None:
            raise CMLError(not_done)

    async def outlive_this_process(self) -> None:
        """Let the cluster run on when this process exits, until the session ends that launched it.

        Raises
        ------
        CMLError
            If the scheduler does not answer. The cluster is still shut down with this process.
        """
        await self._remote.set(orphan_timeout=None)
        self.shutdown_on_close = False

    # -- words

    def _write_log(self, now: datetime, text: str) -> None:
        """Write into the cluster's own log, for other processes and for the time after its end."""
        path = log_path(OWN, self.place.folder, self.options.log_directory)
        output.write(lambda: Log(str(path)).write(f"{now:%Y-%m-%d %H:%M:%S} - {text}\n".encode()))

    def note_exit(self, error: BaseException | None) -> None:
        """Note that the program exits, perhaps because of an exception, as :meth:`note_error` does."""
        is_kernel = "ipykernel" in sys.modules
        self.end_reason = f"{'the kernel' if is_kernel else 'the program'} of {self._who} ended"
        self.note_error(error)

    def note_error(self, error: BaseException | None) -> None:
        """Note the exception that ends the cluster's block or program, for its log and its history."""
        if error is None or isinstance(error, SystemExit) or not self.shutdown_on_close:
            return
        words = first_line("".join(traceback.format_exception_only(error)))
        self.end_reason = f"closed by {self._who} after {words}"
        if self.keeper is not None:
            self._write_log(datetime.now(), "".join(traceback.format_exception(error)).rstrip())

    def _log(self, log: str) -> None:
        # Cluster._log prints in the event loop, which a blocked or closed output would stop.
        now, text = datetime.now(), printable_lines(log)
        self._cluster_manager_logs.append((now, text))
        if not self.quiet:
            self._say(text)
        if self.keeper is not None:
            self._write_log(now, text)

    def _say(self, text: str) -> None:
        """Print a line for the user."""
        output.say(text)
