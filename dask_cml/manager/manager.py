"""One cluster's life: from its creation, or its adoption by another process, to its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from distributed.core import Status

from dask_cml.cancellation import cancel
from dask_cml.errors import ClusterExists, CMLError, LaunchRefused
from dask_cml.manager.at_exit import end_at_exit, no_longer_end_at_exit
from dask_cml.manager.losses import SchedulerLost
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.startup import adopt, check_version, create, insist, replace_scheduler
from dask_cml.manager.state import ClusterState
from dask_cml.manager.wishes import Wishes
from dask_cml.options import Options
from dask_cml.options.limits import check_new
from dask_cml.protocol import SET
from dask_cml.records.operations import wait_until_running
from dask_cml.records.record import Record

logger = logging.getLogger(__name__)

_GOODBYE_TIMEOUT = 3.0
#: Seconds between two tries to stop the sessions of a cluster that has ended.
_RETRY_INTERVAL = 60.0


class Manager:
    """Creates or adopts one cluster, keeps it as its users wish, and closes it.

    Its methods are coroutines, or may be called from any thread. A process that uses a cluster without a
    :class:`~dask_cml.CMLCluster`, such as ``dask cml`` or the page, uses this class.

    Parameters
    ----------
    options : Options
        The cluster's options.
    given : mapping, optional
        The options that a user gave, unchecked, to name those that a running cluster does not have.
    record : Record, optional
        The record of a running cluster to adopt. Default: create a cluster.
    observes : bool
        Whether this manager only observes: it keeps no orphan alive, and leads only if no other manager can.
    new : Record, optional
        The record of a cluster to create, as far as it is known. Default: one of this process's user.
    show : bool
        Whether to show the progress of the start.

    Attributes
    ----------
    status : distributed.core.Status
        ``created``, ``starting``, ``running``, ``closing``, ``closed``, or ``failed`` if sessions could not
        be stopped. Then, :meth:`close` tries again.
    state : ClusterState
        What the cluster is now.
    wishes : Wishes
        Takes the wishes of users: to scale, to adapt, to add a worker group.
    fleet : Fleet
        What is wanted, and which sessions exist.
    shutdown_on_close : bool
        Whether the cluster is shut down when this process exits.
    log : callable
        Gets each line for the user. Default: the log.

    Examples
    --------
    >>> async def scale(name, n):
    ...     manager = Manager.adopt(store.read(name))
    ...     await manager.start()
    ...     manager.wishes.scale(n)
    ...     await manager.wishes.settle()
    ...     await manager.close(shutdown=False)
    """

    def __init__(
        self,
        options: Options,
        given: Mapping[str, Any] | None = None,
        *,
        record: Record | None = None,
        observes: bool = False,
        new: Record | None = None,
        show: bool = False,
    ) -> None:
        self.options = options
        self._observes = observes
        self.shutdown_on_close = options.shutdown_on_close
        self._given = given or {}
        self._new = new
        self._show = show
        self.log: Callable[[str], None] = logger.info
        self._pid = os.getpid()
        if record is None and options.create_mode == "create":
            check_new(options)
        #: Why the cluster ends if this manager shuts it down, for its history.
        self.end_reason = "closed"
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._assemble(record, Status.created)
        self.state.api.check_options(options.scheduler_launch_options, "scheduler_launch_options")
        for each in (options, *options.groups().values()):
            self.state.api.check_options(each.launch_options)
        end_at_exit(self)

    @classmethod
    def adopt(cls, record: Record, **arguments: Any) -> Manager:
        """Return a manager for the running cluster of a record, without reading files.

        Parameters
        ----------
        record : Record
            The cluster's record.
        **arguments
            Arguments of the class. ``shutdown_on_close``: as in :meth:`dask_cml.CMLCluster.from_name`.

        Raises
        ------
        CMLError
            If another release of dask-cml has created the cluster.
        """
        check_version(record)
        shutdown_on_close = arguments.pop("shutdown_on_close", False)
        forward_dashboard = arguments.pop("forward_dashboard", None)
        own = {"shutdown_on_close": shutdown_on_close, "forward_dashboard": forward_dashboard}
        return cls(Options.of_running(record.name, record.options, **own), record=record, **arguments)

    def _assemble(self, record: Record | None, status: Status) -> None:
        """Assemble the parts of the manager: for a new cluster, or for the cluster of a record."""
        self.adopts = record is not None
        self.state = ClusterState(
            self.options,
            record,
            observes=self._observes,
            log=lambda line: self.log(line),
            changed=self._changed,
        )
        self.state.status = status
        self.fleet = self.state.fleet
        self._reconciler = Reconciler(self.state)
        self.wishes = Wishes(self.state, self._reconciler)
        if record is None:
            self.fleet.begin(self.options.first_groups())

    # -- start

    async def start(self) -> None:
        """Create or adopt the cluster. Return when its scheduler answers. A second call waits for the first.

        Raises
        ------
        CMLError
            As in :class:`dask_cml.CMLCluster`. A cluster that could not be created is shut down. One that
            could not be adopted runs on.
        """
        if self.status not in (Status.created, Status.starting, Status.running):
            raise CMLError(f"cluster {self.options.name} is closed")
        if self._starting is None:
            self.state.status = Status.starting
            self._starting = asyncio.create_task(self._start_once())
        try:
            await self._starting
        except asyncio.CancelledError:
            closed_meanwhile = self._closing is not None
            await self.close(shutdown=not self.adopts)
            if closed_meanwhile:
                raise CMLError(f"cluster {self.options.name} was closed while it started") from None
            self.show_interrupt()
            raise
        except GeneratorExit:  # the event loop has ended, so nothing can be awaited; end_now() stops sessions
            raise
        except BaseException as error:
            self.end_reason = f"it did not start: {error}"
            await self.close(shutdown=not self.adopts)
            if isinstance(error, LaunchRefused):
                # Sessions that are stopping must not keep the user from creating a smaller cluster at once.
                await self.state.api.wait_until_ended(self.state.api.names)
            raise

    def show_interrupt(self) -> None:
        """Say how many sessions an interrupted start has stopped."""
        display = self.state.launcher.display
        if display is not None:
            n = len(self.state.api.names.keys() - self.state.api.live)
            display.end_with(f"Interrupted: {n} session{'s' * (n != 1)} stopped")

    async def _start_once(self) -> None:
        if (record := self.state.record_keeper.record) is not None:
            await adopt(self.state, record)
        else:
            await self._create_or_connect()
        self.state.status = Status.running
        self._keeping = asyncio.create_task(self._keep())

    async def _create_or_connect(self) -> None:
        mode = self.options.create_mode
        if mode != "connect":
            try:
                await create(self.state, self._new or Record(self.options.name), self._show)
                return
            except ClusterExists:
                if mode == "create":
                    raise
        name, given = self.options.name, self._given
        timeout = self.options.pending_timeout + self.options.scheduler_timeout
        record = await wait_until_running(name, timeout)
        check_version(record)
        differing = self.options.differing(given, record.options)
        kept = f"; it keeps its {', '.join(differing)}" if differing else ""
        self.log(f"Connected to running cluster {name}{kept}")
        self.shutdown_on_close = shutdown = bool(given.get("shutdown_on_close"))
        own = {"shutdown_on_close": shutdown, "forward_dashboard": self.options.forward_dashboard}
        self.options = Options.of_running(name, record.options, **own)
        # Requests to a cluster that was not created do not apply to the running one.
        self._assemble(record, self.status)
        await adopt(self.state, record)

    async def outlive_this_process(self) -> None:
        """Let the cluster run on when this process exits, until the session ends that launched it.

        Raises
        ------
        CMLError
            If the scheduler does not answer. The cluster is still shut down with this process.
        """
        state, patience = self.state, self.options.scheduler_timeout
        await insist(state, patience, lambda: state.client.call(SET, orphan_timeout=None))
        self.shutdown_on_close = False

    @property
    def status(self) -> Status:
        """The status of the manager. A fork's copy is closed."""
        return Status.closed if self.is_forks_copy else self.state.status

    def _changed(self, urgent: bool) -> None:
        """React to an answer of the scheduler."""
        self._reconciler.poke(urgent)
        if self.status == Status.running:
            self.wishes.tend_adaptives()

    # -- end

    async def close(self, shutdown: bool) -> None:
        """Close this manager. If an earlier call failed, try again.

        Parameters
        ----------
        shutdown : bool
            Whether to stop all sessions of the cluster. Otherwise, they run on.

        Raises
        ------
        CMLError
            If the platform did not stop some sessions. The message names them.
        """
        if self.status == Status.closed:
            return
        if self._closing is None or (self._closing.done() and self.status == Status.failed):
            self._closing = asyncio.create_task(self._close_once(shutdown))
        await asyncio.shield(self._closing)

    async def _close_once(self, shutdown: bool) -> None:
        self.wishes.close()
        self.state.status = Status.closing
        try:
            await cancel(self._starting, self._keeping)
            await self._reconciler.close()
            if not shutdown:
                await self._hand_over()
            self.fleet.close()
            if shutdown:
                await self.state.record_keeper.close()
                await self.state.client.terminate(_GOODBYE_TIMEOUT, self.end_reason)
            await self.state.client.close()
        except Exception:  # whatever fails before, the sessions are stopped
            logger.exception("Cluster %s not closed properly", self.options.name)
        try:
            if shutdown:
                await self.state.record_keeper.end(self.end_reason)
            else:
                await self.state.api.close()
        except BaseException:
            self.state.status = Status.failed
            raise
        self.state.status = Status.closed
        for process in self.state.launcher.processes:
            process.status = Status.closed
        self.fleet.clear()
        no_longer_end_at_exit(self)
        await cancel(self._ending)

    async def _hand_over(self) -> None:
        """Leave the sessions to other managers. The sessions that these cannot find are stopped."""
        try:
            if self.state.client.connected and (wishes := self.fleet.wishes):
                await self.state.client.apply(*wishes)
            await self._reconciler.report()
        except Exception as error:
            logger.info("Last wishes for cluster %s not sent: %r", self.options.name, error)
        record_keeper = self.state.record_keeper
        await record_keeper.close()  # before it finds no sessions
        # Without the record, no other manager can take over what was launched here.
        left = [each for each in self.state.launcher.processes if each.adopted or not record_keeper.gone]
        self.state.api.forget(*[str(each.session_id) for each in left])

    async def _keep(self) -> None:
        """Keep the cluster, with other schedulers instead of lost ones. If it cannot be kept, close."""
        lost: SchedulerLost | None = None
        while lost is None:
            try:
                await self._reconciler.run()
            except SchedulerLost as why:
                lost = why if not why.ended else await replace_scheduler(self.state, str(why))
        self.end_reason = f"its scheduler was lost: {lost}"
        self.log(f"Cluster {self.options.name} {'shut down' if lost.ended else 'disconnected'}: {lost}")
        self._ending = asyncio.create_task(self._end(shutdown=lost.ended))

    async def _end(self, shutdown: bool) -> None:
        """Close. Try again if sessions were not stopped."""
        while self.status != Status.closed:
            try:
                await self.close(shutdown)
            except Exception as error:
                logger.error("%s", error)
                await asyncio.sleep(_RETRY_INTERVAL)

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
                closing = self.close(self.shutdown_on_close)
                asyncio.run_coroutine_threadsafe(closing, loop).result(timeout)
        except CMLError:
            self.state.status = Status.closed  # so that Dask does not close it again
            raise
        except Exception as error:
            logger.info("Event loop of cluster %s not used to close it: %r", self.options.name, error)
        # The event loop may have ended, as after asyncio.run.
        left, self.state.status = self.status != Status.closed, Status.closed
        if left and self.shutdown_on_close:
            self.state.record_keeper.end_now(self.end_reason)

    @property
    def is_forks_copy(self) -> bool:
        """Whether this process is a fork of the cluster's process. Its exit does not end the cluster."""
        return self._pid != os.getpid()
