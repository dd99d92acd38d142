"""The end of a process's part in a cluster: it shuts the cluster down, or leaves it to other processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Mapping
from typing import Any

from distributed.core import Status

from dask_cml import output
from dask_cml.cancellation import cancel, within
from dask_cml.core.at_exit import no_longer_end_at_exit
from dask_cml.core.messages import write_own_log
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.protocol import Rank
from dask_cml.sessions.answers import CallFailed
from dask_cml.timing import timing
from dask_cml.words import first_line

logger = get_logger(__name__)

#: Seconds between two tries to stop the sessions of a cluster that has ended.
_STOP_AGAIN = 60.0
#: Seconds for which a process that leaves waits for the platform's answers to its launches.
_LAST_CALLS = 5.0


class How(enum.Enum):
    """How a process ends its part in a cluster."""

    #: All sessions are stopped.
    SHUT_DOWN = "shut down"
    #: The sessions run on, for other processes.
    LEAVE = "leave"


class Ending:
    """Ends a process's part in a cluster.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.

    Attributes
    ----------
    how : How or None
        How it ends or has ended. None: it has not begun.
    """

    def __init__(self, cluster: Any) -> None:
        self.how: How | None = None
        self._name = cluster.options.name
        self._pid = os.getpid()
        self._cluster = cluster
        self._task: asyncio.Task[None] | None = None
        #: The id of an exception that the caller handles. It ends no block of this cluster.
        self._handled = id(sys.exc_info()[1])
        self._close_lock = threading.RLock()
        #: Whether the thread that has the lock closes.
        self._closes = False

    @property
    def usual_how(self) -> How:
        """How this object closes at the end of its block or program."""
        return How.SHUT_DOWN if self._cluster.shutdown_on_close else How.LEAVE

    @property
    def has_begun(self) -> bool:
        """Whether this object is being closed, or is closed."""
        return self._task is not None

    def _has_ended(self, how: How) -> bool:
        """Return whether this object is closed so. A cluster that was left may still be shut down."""
        is_done = self.how is How.SHUT_DOWN or how is How.LEAVE
        return self._cluster.status == Status.closed and is_done

    async def end(self, how: How) -> None:
        """Shut the cluster down, or leave it to other processes.

        Raises
        ------
        CMLError
            If sessions are not stopped.
        """
        if self._has_ended(how):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # as in a block that is collected, whose loop has ended: end_now() closes
            return
        ending = self._task
        again = ending is not None and ending.done() and self._cluster.status == Status.failed
        if ending is None or again or (how is How.SHUT_DOWN and self.how is How.LEAVE):
            self.how = how
            ending = self._task = loop.create_task(self._end_once(how, ending))
        await asyncio.shield(ending)

    async def _end_once(self, how: How, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and not earlier.done():  # this object leaves the cluster, which is to end
            await asyncio.wait([earlier])
        self._cluster.status = Status.closing
        try:
            try:
                if how is How.LEAVE and earlier is None:
                    await self._cluster.sharing.leave()
            finally:
                await self._in_time(self._stop_working())
            await self._in_time(self._cluster.sharing.close(how))  # with the limits of adaptive scaling
            self._cluster.groups.stop_adapting()
            if how is How.SHUT_DOWN:
                await self._say_goodbye()
        except Exception:  # of Dask, the platform or a subclass: the sessions are stopped even so
            logger.exception("Cluster %s not closed properly", self._name)
        self._cluster.sharing.link.close()
        try:
            if how is How.SHUT_DOWN:
                await self._stop_sessions()
            else:
                await self._leave_sessions()
            await self._cluster._close_dask()
        except BaseException:
            self._cluster.status = Status.failed
            raise
        no_longer_end_at_exit(self._cluster)
        await asyncio.to_thread(output.flush)

    async def _stop_working(self) -> None:
        """Stop all tasks of this process for the cluster."""
        await cancel(self._cluster.starting, *self._cluster.sharing.tasks)
        # Others are to find the sessions that this process is launching.
        await self._cluster._stop_looking(_LAST_CALLS if self.how is How.LEAVE else 0.0)
        if self._cluster._is_keeper:
            await self.stop_waiting()

    async def _in_time(self, awaitable: Awaitable[None]) -> None:
        """Wait for what may write files. If the file system hangs, go on: the sessions must be stopped."""
        try:
            await within(timing.files, asyncio.shield(awaitable))
        except asyncio.TimeoutError:
            logger.warning("Files of cluster %s not written within %g s", self._name, timing.files)

    async def _say_goodbye(self) -> None:
        """Let the scheduler inform its workers and clients of its end."""
        # The scheduler waits for a process in its session, and closes already.
        if self._cluster.scheduler_comm is not None and self._cluster._rank is not Rank.RESIDENT:
            try:
                await self._cluster._ask_scheduler(
                    "terminate", timing.goodbye, reason=self._cluster.end_reason
                )
            except Exception as error:  # of Dask, which varies: its workers may be frozen
                logger.debug("Scheduler of cluster %s gave no answer: %r", self._name, error)

    async def stop_waiting(self) -> None:
        """Stop waiting for launches, workers and sessions."""
        await self._cluster.processes.close()
        await self._cluster.retirements.close()

    async def _leave_sessions(self) -> None:
        """Leave the sessions to other processes. Sessions that no other process can find are stopped."""
        if self._cluster._is_keeper and self._cluster.sharing.keeper.journal.gone:
            await self._cluster.api.close()
        else:
            self._cluster.api.leave()

    async def _stop_sessions(self) -> None:
        """Stop all sessions of the cluster, from all processes, and then remove the record."""
        await self._in_time(self._cluster.sharing.remember_usage())
        try:
            await self._cluster.api.close(self._stop_sessions_now)
        except CallFailed as error:
            has_closed = False
            with contextlib.suppress(asyncio.TimeoutError):  # the error names sessions that may still run
                has_closed = await within(timing.files, self._cluster.sharing.why_closed()) is not None
            if has_closed:
                raise CallFailed(f"{error}. The scheduler has closed, so their programs exit") from error
            raise

    def _stop_sessions_now(self) -> None:
        """Stop all sessions and remove the record, like :meth:`_stop_sessions`. Blocks."""
        output.flush()  # the cluster's own log is kept with its history
        self._cluster.sharing.stop_and_remove()

    async def end_again(self) -> None:
        """Shut the cluster down, because it is over. Try again if sessions were not stopped."""
        while self._cluster.status != Status.closed:
            try:
                await self.end(How.SHUT_DOWN)
            except Exception as error:  # of Dask or the platform's library, for example
                logger.error("%s", error, exc_info=None if isinstance(error, CMLError) else error)
                await asyncio.sleep(_STOP_AGAIN)

    async def stop_all(self, sessions: Mapping[str, str]) -> None:
        """Stop all sessions, among them these, for another scheduler. The next step tries again."""
        await self._cluster.processes.close_others()
        await self._cluster.retirements.close()
        for session, name in sessions.items():
            self._cluster.api.adopt(session, name)
        await self._cluster.processes.stop({*self._cluster.api.live})

    async def yield_sessions(self) -> None:
        """Leave the sessions to another process that keeps the cluster now, and stop nothing."""
        async with self._cluster._lock:
            await self.stop_waiting()
            self._cluster.api.forget(*self._cluster.api.live)
            self._cluster.workers.clear()
        self._cluster.groups.yield_adapting()
        await self._cluster.connection.unsubscribe()

    async def outlive_this_process(self) -> None:
        """Let the cluster run on when this process exits, until the session ends that launched it.

        Raises
        ------
        CMLError
            If the scheduler does not answer. The cluster is still shut down with this process.
        """
        await self._cluster.sharing.link.live_on()
        self._cluster.shutdown_on_close = False

    # -- from other threads, and without an event loop

    def end_from_outside(self, how: How, timeout: float | None = None) -> Any:
        """End as :meth:`end` does, for a user: return an awaitable in the event loop, and block elsewhere.

        Raises
        ------
        TimeoutError
            If it takes longer than `timeout` seconds.
        """
        if self._cluster.asynchronous:
            return self._cluster.sync(self.end, how, callback_timeout=timeout)
        if self.is_forks_copy:
            return None
        # A second thread would wait for a loop that the first thread has stopped.
        if not self._close_lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"cluster {self._name} not closed within {timeout:g} s by another thread")
        # A signal handler of the program may interrupt this thread while it closes, and close, too.
        is_nested, self._closes = self._closes, True
        try:
            if is_nested and self._cluster.status == Status.closed:
                return None
            self._end_blocking(how, timeout)
        finally:
            if not is_nested and self._cluster.status == Status.closed:
                self._cluster._loop_runner.stop()
            self._closes = is_nested
            self._close_lock.release()
        return None

    def end_now(self, timeout: float) -> None:
        """Close when the interpreter exits, also if the event loop does not in time. Blocks.

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
            self._end_blocking(self.usual_how, timeout, in_any_case=True)
        finally:
            self._cluster.status = Status.closed  # so that Dask does not close it again

    def _end_blocking(self, how: How, timeout: float | None, *, in_any_case: bool = False) -> None:
        """End as :meth:`end` does, in the event loop or, if that has ended as after asyncio.run, without it.

        With `in_any_case`, end without it also if it is busy for longer than `timeout` seconds.
        """
        loop = self._cluster.loop
        if loop is not None and loop.asyncio_loop.is_running():
            ending = self.end(how)
            try:
                asyncio.run_coroutine_threadsafe(ending, loop.asyncio_loop).result(timeout)
            except CMLError:
                raise
            except Exception as error:  # of a loop that is busy or ends, or of Dask
                if not in_any_case:
                    if timeout is None or not isinstance(error, concurrent.futures.TimeoutError):
                        raise
                    raise TimeoutError(f"cluster {self._name} not closed within {timeout:g} s") from None
                logger.info("Event loop of cluster %s not used to close it: %r", self._name, error)
                if inspect.getcoroutinestate(ending) == inspect.CORO_CREATED:
                    ending.close()
        if self._has_ended(how):
            return
        self.how = how
        try:
            if how is How.SHUT_DOWN:
                self._stop_sessions_now()
        except BaseException:
            self._cluster.status = Status.failed
            raise
        self._cluster.status = Status.closed
        no_longer_end_at_exit(self._cluster)

    # -- starts that fail

    @property
    def _how_after_failure(self) -> How:
        """How a start ends that has failed: the cluster of another process runs on."""
        return How.LEAVE if self._cluster.sharing.connects else How.SHUT_DOWN

    async def end_failed_start(self) -> None:
        """Stop what was launched. Log an error, which must not replace the reason of the failure."""
        try:
            await self.end(self._how_after_failure)
        except Exception as failed:  # of Dask or the platform's library, for example
            logger.error("Cluster %s not closed properly: %s", self._name, failed or repr(failed))

    def end_failed_constructor(self, error: BaseException) -> None:
        """Stop what a failed constructor has launched. Log an error, which must not replace the first."""
        if not hasattr(self._cluster, "_loop_runner"):  # Dask's classes have refused an argument
            no_longer_end_at_exit(self._cluster)
            return
        if isinstance(error, KeyboardInterrupt):
            self.note_interrupt()
        try:
            self.end_from_outside(self._how_after_failure)
        except Exception as failed:  # of Dask or the platform's library, for example
            logger.error("Cluster %s not closed properly: %s", self._name, failed or repr(failed))
        if isinstance(error, KeyboardInterrupt):
            self.say_interrupted()

    def note_interrupt(self) -> None:
        """Note that its user has interrupted the start, for the cluster's history."""
        self._cluster.end_reason = f"interrupted while it started by {self._cluster.sharing.who}"

    def say_interrupted(self) -> None:
        """Tell the user, after Ctrl-C, how many sessions were stopped."""
        n = len(self._cluster.api.launched - self._cluster.api.live.keys())
        noun = "session" if n == 1 else "sessions"
        output.say(f"Interrupted: {n} {noun} stopped", to_stderr=True)
        output.flush()

    # -- why it ends

    def note_exit(self, error: BaseException | None) -> None:
        """Note that the program exits, perhaps because of an exception, as :meth:`note_error` does."""
        is_kernel = "ipykernel" in sys.modules
        self._cluster.end_reason = (
            f"{'the kernel' if is_kernel else 'the program'} of {self._cluster.sharing.who} ended"
        )
        self.note_error(error)

    def note_error(self, error: BaseException | None) -> None:
        """Note the exception that ends the cluster's block or program, for its log and its history."""
        if self.has_begun or error is None or isinstance(error, SystemExit):
            return
        if not self._cluster.shutdown_on_close or id(error) == self._handled:
            return
        words = first_line("".join(traceback.format_exception_only(error)))
        self._cluster.end_reason = f"closed by {self._cluster.sharing.who} after {words}"
        if self._cluster._is_keeper:
            write_own_log(self._cluster, "".join(traceback.format_exception(error)).rstrip())

    @property
    def is_forks_copy(self) -> bool:
        """Whether this process is a fork of the cluster's process. Its exit does not end the cluster."""
        return self._pid != os.getpid()
