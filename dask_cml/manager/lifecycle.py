"""The lifecycle of a cluster: its start, its management and its shutdown, based on Dask's SpecCluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.security import Security
from distributed.utils import silence_logging_cmgr

from dask_cml.aio import cancel
from dask_cml.dashboard.connection import open_comm
from dask_cml.dashboard.forwarder import DashboardForwarder
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused
from dask_cml.frames import without_frames
from dask_cml.manager.adaptive import stop_adapting
from dask_cml.manager.at_exit import end_at_exit, no_longer_end_at_exit, unclosed
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.fleet_cluster import FleetCluster
from dask_cml.manager.launch import Launcher
from dask_cml.manager.leadership import Leadership
from dask_cml.manager.presence import Presence
from dask_cml.manager.reconciler import Outcome, Reconciler
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.role import ManagerRole
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import Options, state_directory
from dask_cml.records.operations import wait_until_running
from dask_cml.records.record import Record
from dask_cml.sessions import tls
from dask_cml.sessions.owner import lifetime
from dask_cml.sessions.process import CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI, load_platform
from dask_cml.wire import SERVES, WATCHES

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_GOODBYE_TIMEOUT = 3.0
#: Seconds between two looks of an observer, and between two of its heartbeats. A process may observe many
#: clusters, and asks each scheduler at most every two seconds on average.
_OBSERVER_INTERVAL, _OBSERVER_BEAT = 7.5, 10.0
#: Seconds. Dask keeps writing a cluster's name and class into the scheduler, which an observer need not do.
_SYNC_SECONDS, _OBSERVERS_SYNC_SECONDS = 1.0, 3600.0


class ManagedCluster(FleetCluster):
    """A cluster from its start to its shutdown, without the methods for users.

    Assembles the parts of the manager.

    Parameters
    ----------
    options : Options
        The cluster's options.
    given : mapping
        The options that are arguments of the constructor, unchecked.
    record : Record, optional
        The record of a running cluster to connect to. Default: create a cluster.
    role : ManagerRole or None
        The role of this process. None: the program of a user.
    asynchronous, loop, silence_logs, quiet
        As in :class:`dask_cml.CMLCluster`.
    """

    def __init__(
        self,
        options: Options,
        given: Mapping[str, Any],
        *,
        record: Record | None,
        role: ManagerRole | None,
        asynchronous: bool,
        loop: Any,
        silence_logs: int | str | bool | None,
        quiet: bool,
    ) -> None:
        # The attributes for a shutdown are needed even if this constructor fails.
        self.status = Status.closed
        self._pid = os.getpid()
        self.options = options
        self._given = given
        #: The adaptive scaling of each worker group, including stopped ones.
        self._adaptives: dict[str, Adaptive] = {}
        self._api = WorkersAPI(load_platform(self.options.platform))
        self._api.check_options(self.options.scheduler_launch_options, "scheduler_launch_options")
        for each in (self.options, *self.options.groups().values()):
            self._api.check_options(each.launch_options)
        self._client = SchedulerClient()
        self._role = role or ManagerRole()
        self._assemble(record)
        if record is None:  # otherwise, the fleet gets the sessions that other managers launched
            for group in self._fleet.states:
                self._fleet.resize(group.options.n_workers, group=group.name)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._forwarder: DashboardForwarder | None = None
        self._keeping: asyncio.Task[Outcome] | None = None
        self._close_lock = threading.Lock()
        self._silence = contextlib.ExitStack()
        if silence_logs:
            self._silence.enter_context(silence_logging_cmgr(level=silence_logs))
        self._quiet = quiet
        end_at_exit(self)
        try:
            super().__init__(
                worker=self._spec(options.processes),
                asynchronous=asynchronous,
                loop=loop,
                name=self.options.name,
                shutdown_on_close=self.options.shutdown_on_close,
                scheduler_sync_interval=_OBSERVERS_SYNC_SECONDS if self._role.observes else _SYNC_SECONDS,
            )
        except BaseException as error:  # also Ctrl-C must leave no session behind
            self._end(None, shutdown=not self._adopts)
            if isinstance(error, KeyboardInterrupt):
                self._show_interrupt()
            if isinstance(error, (CMLError, KeyboardInterrupt)):
                raise without_frames(error) from None
            raise

    # -- start

    def _assemble(self, record: Record | None) -> None:
        """Assemble the parts of the manager: for a new cluster, or for the cluster of a record."""
        self._adopts = record is not None
        self._folder = state_directory() / self.options.name
        groups = self.options.groups()
        if record is not None:
            groups = {name: self.options.of_group(given) for name, given in record.groups.items()}
        self._fleet: Fleet[CMLWorker] = Fleet(self.options, groups)
        self._launcher = Launcher(self._api, self.options, self._folder, self._fleet)
        self._record_keeper = RecordKeeper(
            self.options.name, self._api, self._fleet, lambda: self.scheduler, record, self._role
        )
        self._leadership = Leadership(
            self._fleet,
            self._client,
            self._launcher,
            self._record_keeper,
            leads=record is None,
            on_overruled=self._stop_overruled,
            on_unattended=self._go_on_adapting if self._role.serves else None,
        )
        self._reconciler = Reconciler(
            self._fleet,
            self._client,
            self._launcher,
            self._leadership,
            self._record_keeper,
            correct_state=self._correct_state,
            log=self._log,
            watch=not self._role.observes,
            interval=_OBSERVER_INTERVAL if self._role.observes else None,
        )

    async def _start(self) -> None:
        if self.status in (Status.closing, Status.closed):
            raise CMLError(f"cluster {self.name} is closed")
        if self._starting is None:
            self.status = Status.starting
            self._starting = asyncio.create_task(self._start_once())
        try:
            await self._starting
        except asyncio.CancelledError:
            closed_meanwhile = self._closing is not None
            await self._close(shutdown=not self._adopts)
            if closed_meanwhile:
                raise CMLError(f"cluster {self.name} was closed while it started") from None
            self._show_interrupt()
            raise
        except BaseException as error:
            # SpecCluster's `__await__` does not close a cluster whose start fails, and its `_start` replaces
            # every error by a RuntimeError.
            await self._close(shutdown=not self._adopts)
            if isinstance(error, LaunchRefused):
                # Sessions that are stopping must not keep the user from creating a smaller cluster at once.
                await self._api.wait_until_ended(self._api.names)
            if isinstance(error, CMLError):
                raise without_frames(error) from None
            raise

    def _show_interrupt(self) -> None:
        """Say how many sessions an interrupted start has stopped."""
        if self._launcher.display is not None:
            n = len(self._api.names.keys() - self._api.live)
            self._launcher.display.end_with(f"Interrupted: {n} session{'s' * (n != 1)} stopped")

    async def _start_once(self) -> None:
        self.quiet = self._quiet
        self._lock = asyncio.Lock()
        if self._adopts:
            await self._rebuild()
        else:
            await self._create_or_connect()
        self.security = self._launcher.security or Security()
        arguments = tls.connection_args(self.security)
        assert self.scheduler.address is not None
        self._client.connect(self.scheduler.address, arguments)
        await Cluster._start(self)
        self._client.listen(self._watch_worker_status_task)
        # From now on, other processes can connect.
        await self._record_keeper.write(scheduler_id=str(self.scheduler_info["id"]))
        if not (self._adopts or self.shutdown_on_close):
            self._log(lifetime(self.name))
        self._watch_worker_status_task.add_done_callback(self._reconciler.poke)
        await self._leadership.join(self._presence(arguments))
        if self.options.forward_dashboard:
            self._forwarder = DashboardForwarder(partial(open_comm, self.scheduler_comm.address, arguments))
            await self._forwarder.start()
        self._keeping = asyncio.create_task(self._reconciler.run())
        self._keeping.add_done_callback(self._end_with)

    def _presence(self, arguments: Mapping[str, Any]) -> Presence:
        patience: float | None = Presence.KEEP
        if not self._adopts:
            patience = self.options.orphan_timeout if self.shutdown_on_close else None
        # An observer does not keep an orphan running.
        info = {WATCHES: self._role.observes, SERVES: self._role.serves}
        interval = {"interval": _OBSERVER_BEAT} if self._role.observes else {}
        return Presence(
            self.scheduler_comm.address, arguments, orphan_timeout=patience, info=info, **interval
        )

    async def _create_or_connect(self) -> None:
        mode = self.options.create_mode
        if mode != "connect":
            try:
                await self._launcher.launch(self._take_name, show=not self.quiet)
                return
            except ClusterExists:
                if mode == "create":
                    raise
        name, given = self.options.name, self._given
        timeout = self.options.pending_timeout + self.options.scheduler_timeout
        record = await wait_until_running(name, timeout)
        differing = self.options.differing(given, record.options)
        kept = f"; it keeps its {', '.join(differing)}" if differing else ""
        self._log(f"Connected to running cluster {name}{kept}")
        self.options = self.options.of_running(record.options, bool(given["shutdown_on_close"]))
        self.shutdown_on_close = self.options.shutdown_on_close
        self.new_spec = self._spec(self.options.processes)
        # Requests to a cluster that was not created do not apply to the running one.
        self._assemble(record)
        await self._rebuild()

    async def _take_name(self) -> None:
        groups = {name: each.group_arguments() for name, each in self.options.groups().items()}
        options, keys = self.options.arguments(), tls.paths(self._launcher.security)
        await self._record_keeper.take_name(options, keys, groups)
        self._record_keeper.start()
        if others := [repr(each.options.name) for each in unclosed() if each is not self]:
            self._log(f"This process has other open clusters, with their own sessions: {', '.join(others)}")

    async def _rebuild(self) -> None:
        assert self._record_keeper.record is not None
        await self._launcher.rebuild(self._record_keeper.record)
        self._record_keeper.start()

    def __await__(self) -> Generator[Any, Any, Self]:
        return self._ready().__await__()

    async def _ready(self) -> Self:
        if self.status != Status.running:
            await self._start()
        await self._carry_out()
        if self.status != Status.running:
            raise CMLError(f"cluster {self.name} was closed meanwhile")
        return self

    # -- management

    def _stop_overruled(self, group: str) -> None:
        """Stop the adaptive scaling of a worker group, because another manager scales it."""
        if (adaptive := self._adaptives.get(group)) is not None:
            self._fleet.release(adaptive)
            stop_adapting(adaptive, "another manager scales the cluster")

    def _go_on_adapting(self, group: str, minimum: float, maximum: float) -> None:
        """Scale a worker group adaptively, because the manager that did has left."""
        logger.info("Adaptive scaling of group %s of cluster %s taken over", group, self.name)
        self.adapt(minimum=minimum, maximum=maximum, worker_group=group)

    # -- shutdown

    def _end(self, timeout: float | None, shutdown: bool) -> Awaitable[None] | None:
        if self.asynchronous:
            return self.sync(self._close, shutdown, callback_timeout=timeout)
        if self._is_a_forks_copy:
            return None
        with self._close_lock:  # a second thread would wait for a loop that the first one has stopped
            try:
                if self.status != Status.closed:
                    self.sync(self._close, shutdown, callback_timeout=timeout)
            finally:
                self._loop_runner.stop()
        return None

    def __exit__(self, *_: object) -> None:
        self._end(None, self.shutdown_on_close)

    async def __aexit__(self, *_: object) -> None:
        await self._close(self.shutdown_on_close)

    async def _close(self, shutdown: bool = True) -> None:
        if self._is_a_forks_copy or self.status == Status.closed:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_once(shutdown))
        await asyncio.shield(self._closing)

    async def _close_once(self, shutdown: bool) -> None:
        # Not SpecCluster's, which retires all workers first and waits long for a scheduler that has ended.
        for adaptive in self._adaptives.values():
            stop_adapting(adaptive, "the cluster closes")
        self.status = Status.closing
        self._fleet.close()
        await cancel(self._starting, self._keeping, self._correct_state_waiting, self._stepping)
        await self._reconciler.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._record_keeper.close()
        try:
            if not shutdown:
                await self._hand_over()
            # Before the goodbye, because a scheduler that shuts down does not answer, which takes time.
            # A cluster that keeps running is no orphan without its creator.
            stays = not (shutdown or self._adopts)
            await self._leadership.close(**({"orphan_timeout": None} if stays else {}))
            if shutdown:
                await self._say_goodbye()
                await self._record_keeper.end()
            else:
                await self._api.close()
        finally:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(Cluster._close(self), _GOODBYE_TIMEOUT)
            self.status = Status.closed
            self._silence.close()
            for process in (self.scheduler, *self.workers.values()):
                if process is not None:
                    process.status = Status.closed
            self._fleet.clear()
            no_longer_end_at_exit(self)

    async def _hand_over(self) -> None:
        """Leave the sessions to other managers. The sessions that these do not know are stopped."""
        if self._leadership.id:  # send the last request, and the sessions launched for it
            await self._leadership.sync()
        if self._record_keeper.gone:  # no other manager can take them over
            return
        processes = (self.scheduler, *self.workers.values())
        self._api.forget(*[p.session_id for p in processes if p is not None and p.session_id])

    async def _say_goodbye(self) -> None:
        """Ask the scheduler to inform its workers and clients of its end, if it answers."""
        if self.scheduler_comm is not None:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self.scheduler_comm.terminate(), _GOODBYE_TIMEOUT)

    def _end_with(self, keeping: asyncio.Task[Outcome]) -> None:
        """Close when the reconciler stops keeping the cluster."""
        if not keeping.cancelled() and keeping.exception() is None and self._closing is None:
            shutdown = keeping.result() == Outcome.ENDED
            self._closing = asyncio.create_task(self._close_once(shutdown))

    def _end_now(self, timeout: float) -> None:
        """Close when the interpreter exits."""
        try:
            if self.loop.asyncio_loop.is_running():
                self._end(timeout, self.shutdown_on_close)
        except CMLError as error:  # all retries have failed
            logger.error("%s", error)
        except Exception as error:
            logger.info("Sessions of cluster %s stopped without its event loop: %r", self.name, error)
        # The event loop may have ended, as after asyncio.run. Then this is enough.
        if self.status != Status.closed and self.shutdown_on_close:
            self._record_keeper.end_now()
        self._forget()

    def _forget(self) -> None:
        """Leave the cluster to other processes, after a fork."""
        self.status = Status.closed

    @property
    def _is_a_forks_copy(self) -> bool:
        """Whether this process is a fork of the cluster's process. Its exit does not end the cluster."""
        return self._pid != os.getpid()
