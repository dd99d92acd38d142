"""A SpecCluster on CML sessions that one process keeps, and that any number of other processes follow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.core import Status, rpc
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo
from distributed.security import Security

from dask_cml import output, protocol
from dask_cml.cancellation import cancel, within
from dask_cml.checks import message
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused, without_frames
from dask_cml.keeper.adaptive import CMLAdaptive
from dask_cml.keeper.at_exit import end_at_exit, no_longer_end_at_exit, unclosed
from dask_cml.keeper.groups import Groups
from dask_cml.keeper.keeper import Keeper
from dask_cml.keeper.losses import SchedulerLost
from dask_cml.keeper.report import Report
from dask_cml.keeper.retirement import connected_names
from dask_cml.naming import DEFAULT_GROUP, dask_names
from dask_cml.options import Options, setting, state_directory
from dask_cml.options.limits import check_new, limits
from dask_cml.output import Logger
from dask_cml.records import liveness, store
from dask_cml.records.operations import stop_and_remove, take_name, wait_until_running
from dask_cml.records.record import VERSION, Maker, Record
from dask_cml.records.usage import Usage, usage_of
from dask_cml.remote import BoardState, Remote
from dask_cml.rpc import NO_ANSWER
from dask_cml.sessions import here, tls
from dask_cml.sessions.causes import find_cause
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.session import Session
from dask_cml.sessions.session_logs import log_path
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.timing import timing
from dask_cml.words import printable_lines, span

logger = Logger(__name__)

#: Seconds before the first, the second and each later scheduler in a row.
_PAUSES = (0.0, 10.0, 30.0)
#: Seconds for which a scheduler waits for its first watcher, if it is never an orphan later.
_FIRST_PATIENCE = 300.0
#: Seconds for which a record may be unreadable while the cluster's folder exists.
_UNREADABLE_FOR = 30.0
#: Seconds between two tries to stop the sessions of a cluster that has ended.
_STOP_AGAIN = 60.0


class KeptCluster(SpecCluster):
    """A SpecCluster whose sessions one process keeps.

    The process that launches the scheduler has the *lease* on the scheduler's board: it is the *keeper*, and
    SpecCluster's machinery runs in it. All others are *remotes*: they follow the board, and write on it. If
    the keeper vanishes, the next process gets the lease, and takes over the sessions.

    Parameters
    ----------
    options : Options
        The cluster's options, as far as they are known: a running cluster keeps its own.
    given : mapping
        The options that a user gave, unchecked, to name those that a running cluster does not have.
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
    end_reason : str
        Why the cluster ends if this process shuts it down, for its history.
    """

    #: Whether this process takes the lease if nobody has it. Also whether the cluster is no orphan meanwhile.
    takes_lease = True

    def __init__(self, options: Options, given: Mapping[str, Any], *, quiet: bool, **arguments: Any) -> None:
        self.options = options
        self.keeper: Keeper | None = None
        self.end_reason = "closed"
        self.report = Report()
        self._given = given
        self._quiet = quiet
        self._pid = os.getpid()
        self._api = WorkersAPI(load_platform(options.platform))
        self._check_launch_options(options)
        self._place = Place(state_directory() / options.name, preload="dask_cml.scheduler.plugin")
        self._record: Record | None = None
        self._remote = Remote(secrets.token_hex(8), options.name, counts=self.takes_lease)
        spec = {"cls": CMLWorker, "options": {"api": self._api, "place": self._place}}
        self.groups = Groups(self, options, spec)
        #: Whether another process created the cluster.
        self._connects = False
        self._begun = False
        self._starting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._shuts_down = False
        self._writing: set[asyncio.Task[Any]] = set()
        #: The names in `worker_spec` as the board has them, and how many moves of workers are known.
        self._mirrored: set[str] = set()
        self._moves = 0
        self._looked_at_workers = 0.0
        self._why_not_connected: str | None = None
        #: Why the cluster has ended, if this process did not ask for it.
        self._end_words: str | None = None
        self._usage: Usage | None = None
        self._lasted: float | None = None
        self._lock = asyncio.Lock()
        end_at_exit(self)
        super().__init__(
            scheduler={"cls": CMLScheduler, "options": {"api": self._api, "options": options}},
            worker=self.groups.spec(DEFAULT_GROUP),
            name=options.name,
            shutdown_on_close=options.shutdown_on_close,
            **arguments,
        )
        self._name = type(self).__name__  # for Dask's repr, which would show the cluster's name twice
        self._begin()

    def _check_launch_options(self, options: Options) -> None:
        self._api.check_options(options.scheduler_launch_options, "scheduler_launch_options")
        for group in (options, *options.groups().values()):
            self._api.check_options(group.launch_options)

    def _begin(self) -> None:
        """Want the first workers of all groups."""
        if not self._begun and self.options.create_mode != "connect":
            self._begun = True
            self.groups.resize(DEFAULT_GROUP, self.options.n_workers, ())
            for name, options in self.options.groups().items():
                self.groups.add(name, options)
                self.groups.resize(name, options.n_workers, ())

    @property
    def keeps(self) -> bool:
        """Whether this process keeps the cluster, and acts for it."""
        return self.keeper is not None and self._remote.keeps

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

    async def _start(self) -> None:
        """Create the cluster or connect to it. Return when its scheduler answers.

        SpecCluster._start (spec.py:304) launches the workers after the scheduler has answered, turns each
        error into a RuntimeError, and lets a second caller look again and again.
        """
        if self.status not in (Status.created, Status.running):
            raise CMLError(f"cluster {self.options.name} is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_once())
        try:
            await self._starting
        except asyncio.CancelledError:
            closed_meanwhile = self._closing is not None
            await self._close(shutdown=not self._connects)
            if closed_meanwhile:
                raise CMLError(f"cluster {self.options.name} was closed while it started") from None
            raise
        except GeneratorExit:  # the event loop has ended, so nothing can be awaited; end_now() stops sessions
            raise
        except BaseException as error:
            self.end_reason = f"it did not start: {error}"
            await self._close(shutdown=not self._connects)
            if isinstance(error, LaunchRefused):
                # Sessions that are stopping must not keep the user from creating a smaller cluster at once.
                await self._api.wait_for_stopped()
            if isinstance(error, CMLError):
                raise without_frames(error) from None
            raise

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

    def _new_record(self) -> Record:
        """Return the record of a cluster that this process creates."""
        return Record(self.options.name)

    async def _create(self) -> None:
        """Create the cluster: claim its name, and launch the scheduler and all workers at the same moment."""
        options, record = self.options, self._new_record()
        security, files = await asyncio.to_thread(tls.as_files, options.security, self._place.folder)
        record = replace(record, options=options.arguments(), security=tls.paths(security))
        self._record = record  # to remove it if this is cancelled
        orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
        groups = self._groups_on_board({})
        board = self._first_board(record, groups, hours=limits().get("hours"), orphan_timeout=orphan_timeout)
        await take_name(record, board, self._api)
        check_new(options)  # only now it is known that no running cluster is to be connected to
        if not record.maker.serves:  # the page creates clusters for several users
            self._name_others()
        await asyncio.to_thread(self._write_files, files)
        self._set_place(replace(self._place, record=record.id, security=security))
        keeper = self.keeper = self._make_keeper(record)
        keeper.requests = dict.fromkeys(self.groups.names, 0)
        await keeper.launch(self._join, strict=True, display=not self._quiet)
        self._begin_keeping()
        if not options.shutdown_on_close:
            self._log(here.lifetime(options.name))

    def _write_files(self, files: Mapping[Any, str]) -> None:
        tls.write(files)
        if self.options.log_directory is not None:
            log = log_path(self.options.name, self._place.folder, self.options.log_directory)
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _name_others(self) -> None:
        """Name the user's other clusters in this process. A cell that runs again may have left them."""
        for other in unclosed():
            if other is not self and getattr(other, "takes_lease", False) and other.sessions:
                name, age = other.options.name, span(other.sessions[0].age)
                close = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).close()"
                self._log(f"This process has another cluster, open for {age}. To close it, run: {close}")

    def _first_board(
        self, record: Record, groups: Mapping[str, Mapping[str, Any]], **more: Any
    ) -> dict[str, Any]:
        """Return what the next scheduler begins with.

        Parameters
        ----------
        record : Record
            The cluster's record.
        groups : mapping of str to mapping
            The worker groups, see :class:`dask_cml.scheduler.board.BoardGroup`.
        **more
            What else it is to know.
        """
        return {
            "cluster": record.name,
            "record": record.id,
            "keeper": self._remote.id,
            "created": record.created.isoformat(),
            # The keeper connects after it has launched all workers.
            "patience": max(self.options.orphan_timeout or _FIRST_PATIENCE, self.options.scheduler_timeout),
            "groups": groups,
            **more,
        }

    def _groups_on_board(self, requests: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return the worker groups for a board, after so many changes that users have asked for."""
        groups = {}
        for name in self.groups.names:
            adaptive = self.groups.adaptives.get(name)
            groups[name] = {
                "options": {} if name == DEFAULT_GROUP else self.groups.options(name).group_arguments(),
                "target": self.groups.target(name),
                "adapt": adaptive.limits if isinstance(adaptive, CMLAdaptive) else None,
                "request": requests.get(name, 0),
            }
        return groups

    def _set_place(self, place: Place) -> None:
        self._place = place
        self.security = place.security or Security()
        self.groups.place(place=place)

    def _make_keeper(self, record: Record) -> Keeper:
        return Keeper(self, self.groups, self._remote, self._api, record, self._place, self._log)

    def _begin_keeping(self) -> None:
        """Look at the sessions and adapt from now on."""
        assert self.keeper is not None
        for adaptive in self.groups.adaptives.values():
            if isinstance(adaptive, CMLAdaptive):
                adaptive.begin()
        self._keeping = asyncio.create_task(self.keeper.run())

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
        record = await asyncio.to_thread(store.read, name)
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
        # What was asked of a cluster that was not created does not apply to the running one.
        self._stop_adapting_here()
        self.groups = Groups(self, self.options, {"cls": CMLWorker, "options": {"api": self._api}})
        self.worker_spec.clear()
        # As long as Dask's clients wait, for a busy scheduler. Without a scheduler this fails at once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if why := await asyncio.to_thread(liveness.why_not_contacted, record):
            raise CMLError(f"not connected to cluster {name!r}: {why}")
        self._enter(record)
        try:
            await self._join_within(patience, str(record.scheduler.address))
        except CMLError as error:
            address = record.scheduler.address or "an unknown address"
            raise CMLError(
                f"the scheduler of cluster {name!r} does not answer at {address}: to stop its "
                f"sessions, run `dask cml delete {shlex.quote(name)}`"
            ) from error

    def _enter(self, record: Record) -> None:
        """Take the place of the scheduler in a record, which another process has launched."""
        self._record = record
        number, security = record.scheduler.number, record.get_security()
        self._set_place(replace(self._place, number=number, record=record.id, security=security))
        scheduler = self.scheduler = CMLScheduler(self._api, self.options, self._place)
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
        CMLError
            If it does not answer within so many seconds.
        """
        assert self._record is not None
        record, security = self._record, self._place.security
        deadline = time.monotonic() + timeout
        while True:
            try:
                await self._remote.join(address, security, record.id)
                break
            except NO_ANSWER as error:
                if time.monotonic() > deadline:
                    raise CMLError(
                        f"the scheduler of cluster {record.name!r} at {address} did not answer within "
                        f"{timeout:g} s: {error!r}"
                    ) from error
            await asyncio.sleep(timing.retry / 2)
        if self.scheduler_comm is not None:
            with contextlib.suppress(Exception):
                await within(timing.retry, self.scheduler_comm.close_rpc())
        self.scheduler_comm = rpc(address, connection_args=self._remote.connection_args)
        self._why_not_connected = None
        self._moves = -1  # another scheduler counts anew
        for callback in self.periodic_callbacks.values():
            callback.start()
        self.status = Status.running

    async def _subscribe(self) -> None:
        """Follow the scheduler's workers as Dask's clusters do (cluster.py:123), within a time limit.

        The scheduler tells its workers to the last one that subscribes. So only the keeper does.
        """
        await self._unsubscribe()
        await within(timing.answer, super(SpecCluster, self)._start())

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
        # SpecCluster._update_worker_status (spec.py:398) closes a worker that has gone for some seconds, and
        # keeps its spec. The keeper finds out why it has gone, and replaces it.
        names = [str(info["name"]) for info in msg["workers"].values()] if op == "add" else []
        if op != "remove" or msg in self.scheduler_info["workers"]:
            super(SpecCluster, self)._update_worker_status(op, msg)
        if self.keeper is not None:
            self.keeper.note_connected(names)
            if op == "remove":
                self.keeper.woken.set()

    # -- the board

    async def _follow(self) -> None:
        """Follow the board until the cluster is over."""
        while True:
            was_connected = self._remote.connected
            try:
                await self._take_board(await self._remote.watch())
                self._why_not_connected = None
                continue
            except (*NO_ANSWER, CMLError, ValueError) as error:
                if was_connected:
                    logger.info("Scheduler of cluster %s not reached: %r", self.options.name, error)
                self._why_not_connected = str(error) or repr(error)
            except Exception:
                logger.exception("Board of cluster %s not read", self.options.name)
            try:
                if not self._remote.connected:
                    await self._check_scheduler()
            except SchedulerLost as lost:
                self._end_by_itself(lost)
                return
            except (*NO_ANSWER, CMLError, ValueError) as error:
                logger.info("Scheduler of cluster %s not checked: %r", self.options.name, error)
            except Exception:
                logger.exception("Scheduler of cluster %s not checked", self.options.name)
            await asyncio.sleep(timing.retry)

    async def _take_board(self, board: BoardState) -> None:
        """Do what the board says, as the keeper or as a remote."""
        if board.keeper is None and (self.keeper is not None or self.takes_lease):
            await self._remote.lease(take=True)
            board = self._remote.board
            if board.keeper == self._remote.id and self.keeper is not None:
                await self._subscribe()  # somebody else may have been told of the workers meanwhile
        if board.keeper == self._remote.id and self.keeper is None:
            await self._succeed(board)
        elif board.keeper != self._remote.id and self.keeper is not None:
            await self._yield()
        if self.keeper is None:
            await self._mirror(board)
            return
        if self._watch_worker_status_task is None or self._watch_worker_status_task.done():
            await self._subscribe()
        self._apply(board)

    async def _succeed(self, board: BoardState) -> None:
        """Keep the cluster from now on."""
        assert self._record is not None
        record = await asyncio.to_thread(store.read, self._record.name, id=self._record.id)
        self._mirror_groups(board)
        await self._subscribe()
        keeper = self._make_keeper(record)
        async with self._lock:
            await keeper.succeed(record)
            self.keeper = keeper
        for group, about in board.groups.items():
            if about.adapt is not None and group in self.groups:
                self.groups.adaptives[group] = CMLAdaptive.of(self, group, about.adapt)
        self._show_adaptive()
        self._begin_keeping()
        logger.info("Cluster %s kept by this process", record.name)

    async def _yield(self) -> None:
        """Leave the cluster to another process that keeps it now, and stop nothing."""
        assert self.keeper is not None
        logger.info("Cluster %s kept by another process", self.options.name)
        keeper, self.keeper = self.keeper, None
        await cancel(self._keeping)
        async with self._lock:
            await keeper.close(writes=False)
            self._api.forget(*self._api.live)
            self.workers.clear()
        self._stop_adapting_here()
        await self._unsubscribe()
        self._moves = -1
        self._mirrored = {*self.worker_spec}

    def _apply(self, board: BoardState) -> None:
        """Want what others have written on the board."""
        assert self.keeper is not None
        for group in self.keeper.apply(board):
            before = self.groups.adaptives.pop(group, None)
            if isinstance(before, CMLAdaptive):
                before.release()
            about = board.groups.get(group)
            if about is not None and about.adapt is not None:
                adaptive = self.groups.adaptives[group] = CMLAdaptive.of(self, group, about.adapt)
                adaptive.begin()
        self._show_adaptive()

    def _show_adaptive(self) -> None:
        """Let Dask's widget show the adaptive scaling of the default group."""
        self._adaptive = self.groups.adaptives.get(DEFAULT_GROUP)

    def _mirror_groups(self, board: BoardState) -> None:
        for name, group in board.groups.items():
            if name not in self.groups:
                self.groups.add(name, self.options.of_group(group.options))
        for name in [name for name in self.groups.names if name not in board.groups]:
            self.groups.remove(name)

    async def _mirror(self, board: BoardState) -> None:
        """Show what the board says, in a remote."""
        self._mirror_groups(board)
        self.report = Report.read(board.report) if board.report else Report()
        if {*self.worker_spec} == self._mirrored:  # a user has changed nothing that is not written yet
            self.worker_spec.clear()
            for name in self.report.wanted:
                group = self.groups.group_of(name)
                self.worker_spec[name] = self.groups.spec(group if group in self.groups else DEFAULT_GROUP)
            self._mirrored = {*self.worker_spec}
        n = len(self.scheduler_info["workers"])
        # Their description takes time with their number.
        if board.moves != self._moves and time.monotonic() - self._looked_at_workers > n / 500:
            self._looked_at_workers = time.monotonic()
            self.scheduler_info = SchedulerInfo(await self._remote.ask("identity"))
            self._moves = board.moves

    def _write(self, **changes: Any) -> Any:
        """Write on the board, from any thread; see :meth:`Remote.set`. In the event loop, return a task.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        if not self.asynchronous:
            self.sync(self._remote.set, **changes)
            return None
        task = asyncio.ensure_future(self._remote.set(**changes))
        self._writing.add(task)
        task.add_done_callback(self._written)
        return task

    async def written(self) -> None:
        """Wait until the board has what was asked for in this event loop.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        if self.keeper is not None:
            await self.keeper.publish()
        await asyncio.gather(*self._writing)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps nobody awaits it
            logger.warning("Cluster %s not changed: %s", self.options.name, error)

    # -- the step

    async def _correct_state_internal(self) -> None:
        # SpecCluster._correct_state_internal (spec.py:352) retires workers by their names as addresses
        # (359), waits for each launch and end (365, 389), and keeps what was refused as if it ran (390).
        self._correct_state_waiting = None
        if self._starting is None or not self._starting.done():  # the start launches all
            return
        async with self._lock:
            if self.keeper is not None:
                await self.keeper.step()
            elif self.status == Status.running:
                await self._write_differences()

    async def _write_differences(self) -> None:
        """Write on the board how the spec of a remote was changed, as the keeper would take it."""
        closed = self._mirrored - self.worker_spec.keys()
        new = self.worker_spec.keys() - self._mirrored
        groups = {self.groups.group_of(name) for name in new}
        changes: dict[str, Any] = {}
        if closed:
            changes["close"] = sorted(closed)
        if groups:
            changes["groups"] = {group: {"target": len(self.groups.workers(group))} for group in groups}
        if changes:
            await self._remote.set(**changes)
            self._mirrored = {*self.worker_spec}

    # -- adaptive scaling and worker groups

    def stop_adapting(self, group: str) -> Any:
        """Keep a group's number of sessions. In a remote's event loop, return an awaitable."""
        self._release_adaptive(group)
        if self.keeper is not None:
            self.keeper.ask(group, adapt=None)
            self._soon(self.keeper.publish)
        elif self.status == Status.running:
            return self._write(groups={group: {"adapt": None}})
        return None

    def _soon(self, function: Callable[[], Any]) -> None:
        """Call a function in the event loop."""
        assert self.loop is not None
        self.loop.add_callback(function)

    def _release_adaptive(self, group: str) -> None:
        adaptive = self.groups.adaptives.pop(group, None)
        if isinstance(adaptive, CMLAdaptive):
            adaptive.release()

    def _stop_adapting_here(self) -> None:
        for group in [*self.groups.adaptives]:
            self._release_adaptive(group)
        self._adaptive = None

    async def _add_group(self, name: str, options: Options) -> None:
        self._check_running(f"worker group {name!r} not added")
        if name in self.groups:
            raise ValueError(message("name", name, "a name that no worker group of the cluster has"))
        about = {"options": options.group_arguments(), "target": options.n_workers}
        await self._remote.set(groups={name: about})
        await self._take_changes()

    async def _take_changes(self) -> None:
        """Do what the board says after this process has written on it."""
        if self.keeper is not None:
            self._apply(self._remote.board)
            await self._correct_state()
        else:
            await self._mirror(self._remote.board)

    async def _delete_group(self, name: str) -> None:
        self._check_running(f"worker group {name!r} not deleted")
        if name == DEFAULT_GROUP or name not in self.groups:
            raise ValueError(message("name", name, "a worker group of the cluster other than 'default'"))
        await self._remote.set(groups={name: None})
        await self._take_changes()
        what = f"worker group {name!r} of cluster {self.options.name} deleted, but"
        while left := self.workers_of(name):
            self._check_running(f"{what} {', '.join(left)} not stopped")
            if staying := [worker for worker in left if worker in self._staying]:
                words = "until other workers can take their data: cluster.scale(n) launches some"
                raise CMLError(f"{what} {', '.join(staying)} stay {words}")
            if self._api.problem and self.keeper is not None:
                raise CMLError(f"{what} {', '.join(left)} not stopped yet: {self._api.problem}")
            await self._correct_state()
            await asyncio.sleep(timing.collect)

    def workers_of(self, group: str) -> list[str]:
        """Return the names of a group's sessions, wanted or not."""
        names = [session.name for session in self.sessions if session.role == "worker"]
        return [name for name in names if self.groups.group_of(name) == group]

    @property
    def gave_up(self) -> Mapping[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        return self.report.gave_up if self.keeper is None else self.keeper.gave_up

    @property
    def _staying(self) -> list[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        if self.keeper is None:
            return [*self.report.staying]
        return self.keeper.staying

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
        if self.keeper is None and self.status == Status.running:
            return self.report.known_sessions()
        processes = [] if self.keeper is None else self.keeper.sessions
        if not processes and isinstance(self.scheduler, CMLScheduler):
            processes = [self.scheduler]
        return [session for process in processes if (session := process.session) is not None]

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        if self.keeper is not None:
            return self.keeper.arrived(group)
        connected, found = connected_names(self), set()
        for name in self.groups.workers(group):
            processes = self.groups.options(self.groups.group_of(name)).processes
            if not connected.isdisjoint(dask_names(name, processes)):
                found.add(name)
        return found

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the queued worker sessions have waited for room, in seconds."""
        if self.keeper is not None:
            return self.keeper.waits(group)
        arrived = self.arrived(group)
        names = {*self.groups.workers(group)} - arrived
        return [
            session.waits_for
            for session in self.sessions
            if session.name in names and session.waits_for is not None
        ]

    def target(self, group: str = DEFAULT_GROUP) -> int:
        """Return how many worker sessions of a group are requested."""
        if self.keeper is None and group in self._remote.board.groups and self.status == Status.running:
            return self._remote.board.groups[group].target
        return self.groups.target(group)

    def limits(self, group: str = DEFAULT_GROUP) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling. None: it has a fixed size."""
        if self.keeper is None:
            about = self._remote.board.groups.get(group)
            return None if about is None else about.adapt
        adaptive = self.groups.adaptives.get(group)
        return adaptive.limits if isinstance(adaptive, CMLAdaptive) else None

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        if self.status == Status.running and not self._remote.connected and self._why_not_connected:
            return self._why_not_connected
        own = self.report.problem if self.keeper is None else self.keeper.problem
        return self._end_words or own or self._remote.board.full

    # -- the scheduler is lost

    async def _check_scheduler(self) -> None:
        """Find out whether a scheduler that does not answer has ended. Connect to another one then.

        Raises
        ------
        SchedulerLost
            If the cluster has no other scheduler, or this process leaves it alone.
        """
        why = await self._why_lost()
        if why is not None and not self._remote.connected:
            await self._connect_to_next(why)

    async def _why_lost(self) -> str | None:
        """Return why the scheduler has ended. Return None if it may answer again."""
        record = await self._read_record()
        if record is None:
            raise SchedulerLost("another process shut it down", over=True)
        last, scheduler = record.scheduler, self.scheduler
        if last.closed is not None:
            raise SchedulerLost(last.closed, over=True)
        if last.number > self._place.number:
            return "another process replaces it"
        listing: Mapping[str, Any] = {}
        with contextlib.suppress(CMLError):
            listing = await self._api.sessions()
        if isinstance(scheduler, CMLScheduler) and scheduler.update(listing):
            return await self._why_it_ended(scheduler)
        silent = time.monotonic() - self._remote.heard
        if silent > timing.silence + timing.answer:
            if not await asyncio.to_thread(liveness.spoke_lately, record):
                return f"its scheduler has been silent for {timing.silence:g} s"
            raise SchedulerLost(
                f"the scheduler at {self._remote.address} has not answered for {silent:.0f} s, although it "
                "runs; to check it, run `dask cml list`",
                over=True,
                ended=False,
            )
        return None

    async def _why_it_ended(self, scheduler: CMLScheduler) -> str:
        if scheduler.info.get("status") in ("succeeded", "stopped"):
            for _ in range(10):  # another process that deletes the cluster removes its record next
                record = await self._read_record()
                if record is None:
                    raise SchedulerLost("another process shut it down", over=True)
                if record.scheduler.closed is not None:
                    raise SchedulerLost(record.scheduler.closed, over=True)
                await asyncio.sleep(timing.goodbye / 10)
        return await scheduler.failure("ended")

    async def _read_record(self) -> Record | None:
        """Return the cluster's record. The file system may fail for a while."""
        assert self._record is not None
        deadline = time.monotonic() + _UNREADABLE_FOR
        while True:
            record = await asyncio.to_thread(store.find, self._record.name, id=self._record.id)
            if record is not None:
                return record
            with contextlib.suppress(OSError):
                exists = await asyncio.to_thread(self._place.folder.is_dir)
                if not exists or time.monotonic() > deadline:
                    return None
            await asyncio.sleep(timing.retry)

    async def _connect_to_next(self, why: str) -> None:
        """Connect to the scheduler that replaces the lost one. The keeper launches it, with all workers.

        Each scheduler of a cluster has a number, and the process that creates the file for a number launches
        it. If the keeper has vanished, too, another process does so after some time.

        Raises
        ------
        SchedulerLost
            If there is none.
        """
        limit, number, refused = setting("scheduler-restarts"), -1, False
        begun = since = time.monotonic()
        patience = 0.0 if self.keeper is not None else timing.succession
        while True:
            record = await self._read_record()
            if record is None:
                raise SchedulerLost(why, over=True)
            last = record.scheduler
            if last.closed is not None:
                raise SchedulerLost(last.closed, over=True)
            if last.number != number:
                number, since = last.number, time.monotonic()
            if last.protocol not in (None, protocol.PROTOCOL) and number > self._place.number:
                words = (
                    f"its next scheduler speaks protocol {last.protocol} of dask-cml, not {protocol.PROTOCOL}"
                )
                raise SchedulerLost(words, over=True, ended=False)
            try:
                if number > self._place.number and await self._may_answer(record, since):
                    if last.address is not None:
                        await self._join_other(record)
                        return
                elif not self.takes_lease and self.keeper is None:
                    if time.monotonic() - since > 2 * timing.succession:
                        raise SchedulerLost(why, over=True, ended=False)
                elif time.monotonic() - since < patience:
                    pass  # the keeper does it
                elif last.restarts >= limit and not refused:
                    why += f"; it was the last of {limit} schedulers in a row" if limit else ""
                    raise SchedulerLost(why, over=True)
                else:
                    pause = (
                        setting("quota-retry") if refused else _PAUSES[min(last.restarts, len(_PAUSES) - 1)]
                    )
                    await asyncio.sleep(pause)
                    # A refused scheduler was not lost.
                    restarts = last.restarts if refused else last.restarts + 1
                    if await self._launch_next(record, why, restarts, limit):
                        return
                    refused = False
            except LaunchRefused as error:
                why, refused = str(error), time.monotonic() - begun < self.options.pending_timeout
            except CMLError as error:
                why, refused = str(error), False
                logger.info("Scheduler %d of cluster %s not reached: %s", number + 1, record.name, why)
            except SchedulerLost:
                raise
            except Exception as error:  # the platform's library may raise anything
                why, refused = repr(error), False
                logger.info("Scheduler %d of cluster %s not launched: %s", number + 1, record.name, why)
            await asyncio.sleep(timing.retry)

    async def _may_answer(self, record: Record, since: float) -> bool:
        """Return whether the scheduler that another process launches answers, or has time left to begin."""
        last = record.scheduler
        if last.address is not None:
            return await liveness.is_alive(record)
        patience = self.options.pending_timeout + self.options.scheduler_timeout
        return time.monotonic() - since < patience and (last.maker is None or last.maker.lives() is not False)

    async def _join_other(self, record: Record) -> None:
        """Follow the scheduler that another process has launched."""
        if self.keeper is not None:
            await self._yield()
        self._enter(record)
        self._log(f"Cluster {record.name} follows another scheduler, which another process has launched")
        await self._join_within(self.options.scheduler_timeout, str(record.scheduler.address))

    async def _launch_next(self, record: Record, why: str, restarts: int, limit: int) -> bool:
        """Launch the next scheduler and all workers. Return False if another process does."""
        begun, last = time.monotonic(), record.scheduler
        keeper = self.keeper
        # If the keeper has vanished, what the lost scheduler wrote last is wanted.
        groups: Mapping[str, Mapping[str, Any]] = last.groups
        if keeper is not None:
            groups = self._groups_on_board(keeper.requests)
        board = self._first_board(
            record,
            groups,
            hours=last.hours,
            orphan_timeout=last.orphan_timeout,
            restarts=restarts,
            activity=dict(last.activity),
            maker=asdict(Maker.this_process()),
        )
        number = last.number + 1
        if not await asyncio.to_thread(store.claim_scheduler, record, number, board):
            return False
        if isinstance(lost := self.scheduler, CMLScheduler) and last.number == self._place.number:
            log = await lost.last_lines()
            loss = find_cause(None, log, connected=True, noticed=False, closed=False, said=lost.reported)
            await lost.note_loss(loss)
            if lost.session_id == last.session:
                why = loss.words
        self._log(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
        self._log(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
        await cancel(self._keeping)
        await self._unsubscribe()
        self._remote.close()
        self._forget_workers()
        async with self._lock:
            if keeper is None:
                keeper = self._make_keeper(record)
                self._want(keeper, groups)
            await keeper.stop_all(record)
            self._set_place(replace(self._place, number=number))
            keeper.renew(self._place)
            self.keeper = keeper
            await keeper.launch(self._join, strict=False)
        self._begin_keeping()
        self._log(
            f"Cluster {record.name} connected to another scheduler after {time.monotonic() - begun:.0f} s"
        )
        return True

    def _want(self, keeper: Keeper, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Want what the last scheduler has written of the groups."""
        self.worker_spec.clear()
        for name, group in groups.items():
            if name not in self.groups:
                self.groups.add(name, self.options.of_group(group["options"]))
            if group.get("adapt"):
                self.groups.adaptives[name] = CMLAdaptive.of(self, name, group["adapt"])
            keeper.requests[name] = int(group.get("request", 0))
            self.groups.resize(name, int(group.get("target", 0)), ())

    # -- end

    def _end_by_itself(self, lost: SchedulerLost) -> None:
        """Close, because the cluster is over, or cannot be reached any more."""
        self._end_words = str(lost)
        self.end_reason = f"its scheduler was lost: {lost}"
        self._log(f"Cluster {self.options.name} {'shut down' if lost.ended else 'disconnected'}: {lost}")
        self._ending = asyncio.create_task(self._end_again(shutdown=lost.ended))

    async def _end_again(self, shutdown: bool) -> None:
        """Close. Try again if sessions were not stopped."""
        while self.status != Status.closed:
            try:
                await self._close(shutdown)
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
        closing = self._closing
        again = closing is not None and closing.done() and self.status == Status.failed
        if closing is None or again or (shutdown and not self._shuts_down):
            self._shuts_down = shutdown
            closing = self._closing = asyncio.create_task(self._close_once(shutdown, closing))
        await asyncio.shield(closing)

    async def _close_once(self, shutdown: bool, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():  # this object leaves the cluster, which is to end
            await asyncio.wait([before])
        self.status = Status.closing
        self._stop_adapting_here()
        try:
            await cancel(self._starting, self._following, self._keeping, self._correct_state_waiting)
            await (self._say_goodbye() if shutdown else self._hand_over())
        except Exception:  # whatever fails before, the sessions are stopped
            logger.exception("Cluster %s not closed properly", self.options.name)
        self._remote.close()
        try:
            if shutdown:
                await self._stop_sessions()
            else:
                await self._api.close()
        except BaseException:
            self.status = Status.failed
            raise
        await self._close_dask()
        no_longer_end_at_exit(self)
        await asyncio.to_thread(output.flush)

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
        """Leave the sessions to other processes. Those that nobody can find are stopped."""
        keeper = self.keeper
        if keeper is None:
            self._api.forget(*self._api.live)
            return
        await keeper.publish()
        await keeper.close()
        left = [str(process.session_id) for process in keeper.sessions]
        if not keeper.gone:
            self._api.forget(*left)
        with contextlib.suppress(CMLError):
            await self._remote.lease(take=False)

    async def _stop_sessions(self) -> None:
        """Stop all sessions of the cluster, from all processes, and then remove the record."""
        record = self._record
        if record is not None:
            with contextlib.suppress(OSError, CMLError):  # the usage is removed with the record
                last = await asyncio.to_thread(store.read, record.name, id=record.id)
                self._usage, self._lasted = usage_of(last, time.time()), record.age
        await self._api.close(self._stop_sessions_now)

    def _stop_sessions_now(self) -> None:
        """Do the same as :meth:`_stop_sessions` by blocking calls."""
        if self._record is None:
            self._api.end()
        else:
            stop_and_remove(replace(self._record, launches={}), self._api, self.end_reason)

    async def _close_dask(self) -> None:
        """Close what Dask's classes have opened, by their own code."""
        await self._unsubscribe()
        if isinstance(self.scheduler, CMLScheduler):
            self.scheduler.status = Status.closed
        for worker in [*self.workers.values()]:
            worker.status = Status.closed
        self.keeper = None
        self.workers.clear()
        self.worker_spec.clear()
        self._forget_workers()
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
            If the platform did not stop some sessions. The message names them.
        """
        try:
            if self._starting is not None and (loop := self._starting.get_loop()).is_running():
                closing = self._close(self.shutdown_on_close)
                asyncio.run_coroutine_threadsafe(closing, loop).result(timeout)
        except CMLError:
            self.status = Status.closed  # so that Dask does not close it again
            raise
        except Exception as error:
            logger.info("Event loop of cluster %s not used to close it: %r", self.options.name, error)
        # The event loop may have ended, as after asyncio.run.
        left = self.status != Status.closed
        self.status = Status.closed
        if left and self.shutdown_on_close:
            self._stop_sessions_now()

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

    def _log(self, log: str) -> None:
        # Cluster._log prints in the event loop, which a blocked or closed output would stop.
        text = printable_lines(log)
        self._cluster_manager_logs.append((datetime.now(), text))
        if not self.quiet:
            output.say(text)
