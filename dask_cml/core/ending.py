"""The end of a process's part in a cluster: it shuts the cluster down, or leaves it to others.

When the interpreter exits, in any way, it shuts down the clusters that it has created.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread as executors
import contextlib
import enum
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from dask_cml import compat, output
from dask_cml.cancellation import cancel, within
from dask_cml.checks import seconds
from dask_cml.errors import CallFailed, CMLError
from dask_cml.protocol import Rank
from dask_cml.timing import timing
from dask_cml.words import counted, first_line

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = output.get_logger(__name__)

#: Seconds between two tries to stop the sessions of a cluster that has ended.
_STOP_AGAIN = 60.0
#: Seconds for which a process that leaves waits for the platform's answers to its launches.
_LAST_CALLS = 5.0
#: Seconds. More than close() takes if the platform does not answer.
_TIMEOUT = 60.0
#: By default, these end the program at once. A terminal that is closed sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: The clusters that are to close, and the threads that created them.
_clusters: dict[CMLCluster, weakref.ref[threading.Thread]] = {}
#: Added to the number of a signal, it is the exit status of a program that the signal ended.
_BY_SIGNAL = 128
_is_over = False
_fork = threading.local()


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
    reason : str
        Why the cluster ends if this process shuts it down, for its history.
    """

    def __init__(self, cluster: CMLCluster) -> None:
        self.how: How | None = None
        self.reason = f"closed by {cluster.sharing.who}"
        self._name = cluster.options.name
        self._pid = os.getpid()
        self._cluster = cluster
        self._task: asyncio.Task[None] | None = None
        #: Whether its user has interrupted the start.
        self._is_interrupted = False
        self._failure: Exception | None = None
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
        if (ending := self.begin(how)) is not None:
            await asyncio.shield(ending)

    def begin(self, how: How) -> asyncio.Task[None] | None:
        """Begin to end as :meth:`end` does. None: this object is closed, or no event loop runs here."""
        if self._has_ended(how):
            return None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # of a block that is collected after its loop: the exit closes it
            return None
        ending = self._task
        again = ending is not None and ending.done() and self._cluster.status == Status.failed
        if ending is None or again or (how is How.SHUT_DOWN and self.how is How.LEAVE):
            self.how = how
            ending = self._task = loop.create_task(self._end_once(how, ending))
            ending.add_done_callback(self._end_after_loop)
        return ending

    def _end_after_loop(self, ending: asyncio.Task[None]) -> None:
        """End without an event loop if that has ended, which cancels all tasks, as after asyncio.run."""
        if ending.cancelled():
            with contextlib.suppress(Exception):  # the exit of the interpreter tries again
                self._end_without_loop()

    async def _end_once(self, how: How, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and not earlier.done():  # this object leaves the cluster, which is to end
            await asyncio.wait([earlier])
        self._cluster.status = Status.closing
        try:
            try:
                if how is How.LEAVE and earlier is None:
                    await self._cluster.sharing.leave()
            finally:
                await self._wait_a_while(self._stop_working())
            await self._wait_a_while(self._cluster.sharing.close(how))  # with the limits of adaptive scaling
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
                await self._cluster.api.leave(self._cluster.sharing.leave_sessions)
            await self._cluster._close_dask()
        except BaseException:
            self._cluster.status = Status.failed
            raise
        no_longer_end_at_exit(self._cluster)
        if self._is_interrupted and how is How.SHUT_DOWN:
            n = len(self._cluster.api.launched - self._cluster.api.live.keys())
            output.say(f"Interrupted: {counted(n, 'session')} stopped", to_stderr=True)
        await asyncio.to_thread(output.flush)

    async def _stop_working(self) -> None:
        """Stop all tasks of this process for the cluster."""
        await cancel(self._cluster._starting, *self._cluster.sharing.tasks)
        # Others are to find the sessions that this process is launching.
        await self._cluster._stop_looking(_LAST_CALLS if self.how is How.LEAVE else 0.0)
        if self._cluster.sharing.is_keeper:
            await self._cluster.processes.close()

    async def _wait_a_while(self, awaitable: Awaitable[None]) -> None:
        """Wait for launches and files. If one hangs, go on: the sessions must be stopped."""
        try:
            await within(timing.files, asyncio.shield(awaitable))
        except asyncio.TimeoutError:
            logger.warning("Launches and files of cluster %s not done in %g s", self._name, timing.files)

    async def _say_goodbye(self) -> None:
        """Let the scheduler inform its workers and clients of its end."""
        if self._cluster._rank is Rank.RESIDENT:  # for which the scheduler waits, and closes already
            return
        try:
            await self._cluster.sharing.link.ask("terminate", timing.goodbye, reason=self.reason)
        except Exception as error:  # of Dask, which varies: its workers may be frozen
            logger.debug("Scheduler of cluster %s gave no answer: %r", self._name, error)

    async def _stop_sessions(self) -> None:
        """Stop all sessions of the cluster, from all processes, and then remove the record."""
        try:
            await self._cluster.api.close(self._cluster.sharing.stop_and_remove)
        except CallFailed as error:
            with contextlib.suppress(asyncio.TimeoutError):  # the error names sessions that may still run
                if await within(timing.files, self._cluster.sharing.why_closed()) is not None:
                    raise CallFailed(f"{error}. The scheduler has closed, so their programs exit") from error
            raise

    async def end_again(self) -> None:
        """Shut the cluster down, because it is over. Try again if sessions were not stopped."""
        while self._cluster.status != Status.closed:
            try:
                await self.end(How.SHUT_DOWN)
            except Exception as error:  # of Dask or the platform's library, for example
                logger.error("%s", error, exc_info=None if isinstance(error, CMLError) else error)
                await asyncio.sleep(_STOP_AGAIN)

    # -- from other threads, and without an event loop

    def end_from_outside(self, how: How, timeout: float | None = None) -> Any:
        """End as :meth:`end` does, for a user: return an awaitable in the event loop, and block elsewhere.

        Raises
        ------
        TimeoutError
            If it takes longer than `timeout` seconds.
        """
        timeout = timeout and seconds("timeout", timeout)
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
            self.end_blocking(how, timeout)
        finally:
            if not is_nested and self._cluster.status == Status.closed:
                self._cluster._loop_runner.stop()
            self._closes = is_nested
            self._close_lock.release()
        return None

    def end_blocking(self, how: How, timeout: float | None, *, in_any_case: bool = False) -> None:
        """End as :meth:`end` does, in the event loop or, if that has ended as after asyncio.run, without it.

        With `in_any_case`, end without it also if it is busy for longer than `timeout` seconds.
        """
        loop: Any = self._cluster.loop  # Tornado's types do not name its asyncio_loop
        if loop is not None and loop.asyncio_loop.is_running():
            try:
                asyncio.run_coroutine_threadsafe(self.end(how), loop.asyncio_loop).result(timeout)
            except CMLError:
                raise
            except Exception as error:  # of a loop that is busy or ends, or of Dask
                if not in_any_case:
                    if timeout is None or not isinstance(error, concurrent.futures.TimeoutError):
                        raise
                    raise TimeoutError(f"cluster {self._name} not closed within {timeout:g} s") from None
                logger.info("Event loop of cluster %s not used to close it: %r", self._name, error)
        if not self._has_ended(how):
            self.how = how
            self._end_without_loop()

    def _end_without_loop(self) -> None:
        try:
            if self.how is How.SHUT_DOWN:
                self._cluster.sharing.stop_and_remove()
        except BaseException:
            self._cluster.status = Status.failed
            raise
        self._cluster.status = Status.closed
        no_longer_end_at_exit(self._cluster)

    # -- starts that fail

    async def end_failed_start(self, error: BaseException) -> None:
        """Stop what was launched."""
        with self._failing(error) as how:
            await self.end(how)

    def end_failed_constructor(self, error: BaseException) -> None:
        """Stop what a failed constructor has launched."""
        if not hasattr(self._cluster, "_loop_runner"):  # Dask's classes have refused an argument
            no_longer_end_at_exit(self._cluster)
            return
        with self._failing(error) as how:
            self.end_from_outside(how)
        output.flush()

    @contextlib.contextmanager
    def _failing(self, error: BaseException) -> Iterator[How]:
        """Note why the start has failed. Log another error, which must not replace that one."""
        if not self.has_begun:
            self._is_interrupted = not isinstance(error, Exception)
            interrupted = f"interrupted while it started by {self._cluster.sharing.who}"
            why = interrupted if self._is_interrupted else f"it did not start: {error}"
            is_refused = isinstance(error, (TypeError, ValueError)) and not self._cluster.api.launched
            self.reason = "" if is_refused else why
        try:
            yield How.LEAVE if self._cluster.sharing.connects else How.SHUT_DOWN  # another's cluster runs on
        except Exception as failed:  # of Dask or the platform's library, for example
            if failed is not self._failure:  # the interrupted constructor may see it, and the start
                self._failure = failed
                logger.error("Cluster %s not closed properly: %s", self._name, failed or repr(failed))

    # -- why it ends

    def note_exit(self, error: BaseException | None) -> None:
        """Note that the program exits, perhaps because of an exception, as :meth:`note_error` does."""
        is_kernel = "ipykernel" in sys.modules
        self.reason = f"{'the kernel' if is_kernel else 'the program'} of {self._cluster.sharing.who} ended"
        self.note_error(error)

    def note_error(self, error: BaseException | None) -> None:
        """Note the exception that ends the cluster's block or program, for its log and its history."""
        if self.has_begun or error is None or isinstance(error, SystemExit):
            return
        if not self._cluster.shutdown_on_close or id(error) == self._handled:
            return
        words = first_line("".join(traceback.format_exception_only(error)))
        self.reason = f"closed by {self._cluster.sharing.who} after {words}"
        if self._cluster.sharing.is_keeper:
            self._cluster.sharing.keeper.log("".join(traceback.format_exception(error)).rstrip())

    @property
    def is_forks_copy(self) -> bool:
        """Whether this process is a fork of the cluster's process. Its exit does not end the cluster."""
        return self._pid != os.getpid()


def end_at_exit(cluster: CMLCluster) -> None:
    """Close a cluster when the interpreter exits, unless it is closed before.

    Raises
    ------
    CMLError
        If the interpreter is exiting already.
    """
    _clusters[cluster] = weakref.ref(threading.current_thread())
    if _is_over:
        _clusters.pop(cluster, None)
        raise CMLError(f"cluster {cluster.options.name} not started: the program is exiting")
    _handle_signals()


def no_longer_end_at_exit(cluster: CMLCluster) -> None:
    """Forget a cluster that is closed."""
    _clusters.pop(cluster, None)
    _handle_signals()


def unclosed() -> list[CMLCluster]:
    """Return the clusters of this process that are not closed."""
    return [*_clusters]


def open_clusters() -> list[CMLCluster]:
    """Return the clusters that users have started. Commands, lists and the scheduler's session have ranks."""
    return [cluster for cluster in unclosed() if cluster._rank is None and cluster._starting is not None]


def _handle_signals() -> None:
    """While clusters exist, let signals shut them down before the program ends, unless it handles them."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set handlers
    for signum in _SIGNALS:
        handler = signal.getsignal(signum)
        if _clusters and handler is signal.SIG_DFL:
            signal.signal(signum, _exit)
        elif not _clusters and handler is _exit:
            signal.signal(signum, signal.SIG_DFL)


def _exit(signum: int, _: Any) -> None:
    """Shut down all clusters, and end the program here, as the signal does by default."""
    # It may have interrupted code that holds a lock, and wait for it in vain.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 3 * _TIMEOUT)
    _end_all()
    # Another thread may hold a stream, and wait for a reader that never comes.
    output.write(lambda: sys.stdout.flush())
    output.write(lambda: sys.stderr.flush())
    output.flush()
    os._exit(_BY_SIGNAL + signum)


def _wait_and_end() -> None:
    try:
        _wait_for_makers()
    finally:  # also after Ctrl-C
        _end_all()


def _end_all() -> None:
    """Close all clusters at once."""
    global _is_over
    _is_over = True
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *_SIGNALS)}
    # Neither a second Ctrl-C nor a second SIGTERM interrupts it.
    raising = [signum for signum in handlers if handlers[signum] in (signal.default_int_handler, _exit)]
    for signum in raising:
        signal.signal(signum, _ask_for_patience)
    # The handler of a signal holds the event loop that it has interrupted, so nothing can run in it.
    held = asyncio._get_running_loop()  # asyncio/events.py, for event loops; no error without one
    threads = [threading.Thread(target=_end, args=(cluster, held), daemon=True) for cluster in unclosed()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * _TIMEOUT  # of all together, before SIGALRM
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    output.flush()
    for signum in raising:
        signal.signal(signum, handlers[signum])


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends this program. An interactive one goes on after an exception."""
    if hasattr(sys, "ps1") or "IPython" in sys.modules:
        return None
    return getattr(sys, "last_value", None)


def _end(cluster: Any, held: asyncio.AbstractEventLoop | None) -> None:
    try:
        cluster.ending.note_exit(_uncaught_error())
        is_held = held is not None and cluster.loop.asyncio_loop is held
        how, timeout = cluster.ending.usual_how, 0 if is_held else _TIMEOUT
        cluster.ending.end_blocking(how, timeout, in_any_case=True)
    except Exception as error:  # of the platform's library, for example: the others are shut down, too
        logger.error("%s", error, exc_info=None if isinstance(error, (CMLError, OSError)) else error)
    cluster.status = Status.closed  # so that Dask does not close it again
    _clusters.pop(cluster, None)


def _ask_for_patience(*_: Any) -> None:
    names = [cluster.options.name for cluster in unclosed() if cluster.ending.usual_how is not How.LEAVE]
    if names:
        logger.warning("Shutting down cluster %s first: please wait", ", ".join(names))


def _wait_for_makers() -> None:
    """Wait for the threads that created clusters and may still use them, as the interpreter does itself."""
    # Do not wait for threads of thread pools: they run until the interpreter informs them of the exit.
    # concurrent/futures/thread.py:17
    exempt = {threading.current_thread(), *executors._threads_queues}
    while makers := {ref() for ref in [*_clusters.values()]} - exempt:
        maker = makers.pop()
        exempt.add(maker)
        if maker and not maker.daemon:
            maker.join()


def _hold_signals() -> None:
    # Python drops signals that a new child gets before it is ready for its handlers, but they must end it.
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget_all() -> None:
    """Leave the clusters to the parent process, after a fork."""
    _clusters.clear()
    _handle_signals()
    _release_signals()


compat.exit_before_thread_pools(_wait_and_end)
os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_all)
