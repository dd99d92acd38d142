"""Shuts down clusters when the interpreter exits, in any way."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import contextlib
import os
import signal
import sys
import threading
import weakref
from typing import Any, NoReturn

from dask_cml import compat, output
from dask_cml.errors import CMLError

logger = output.get_logger(__name__)

#: Seconds. More than close() takes if the platform does not answer.
_TIMEOUT = 60.0
#: Seconds for a program that got a signal to begin to exit.
_GOODBYE = 3.0
#: Seconds for a step of a task, after which a signal interrupts it.
_STEP_TIMEOUT = 1.0

#: By default, these end the program at once. A terminal that is closed sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: The clusters that are to close, and the threads that created them.
_clusters: dict[Any, weakref.ref[threading.Thread]] = {}
#: Added to the number of a signal, it is the exit status of a program that the signal ended.
_BY_SIGNAL = 128
_is_over = False
#: Set when the interpreter exits.
_exits = threading.Event()
#: Held by the thread that shuts down the clusters.
_ending = threading.Lock()
#: Repeats the signal to exit if the event loop does not handle it in time.
_leaving: threading.Timer | None = None
_fork = threading.local()


def end_at_exit(cluster: Any) -> None:
    """Shut down a cluster when the interpreter exits, unless it is closed before.

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


def no_longer_end_at_exit(cluster: Any) -> None:
    """Forget a cluster that is closed."""
    _clusters.pop(cluster, None)
    _handle_signals()


def unclosed() -> list[Any]:
    """Return the clusters of this process that are not closed."""
    return [*_clusters]


def _handle_signals() -> None:
    """While clusters exist, let signals exit the program like sys.exit, unless the program handles them."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set handlers
    for signum in _SIGNALS:
        handler = signal.getsignal(signum)
        if _clusters and handler is signal.SIG_DFL:
            signal.signal(signum, _exit)
        elif not _clusters and handler is _exit:
            signal.signal(signum, signal.SIG_DFL)


def _exit(signum: int, _: Any) -> None:
    global _leaving
    if not _clusters:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    loop = asyncio._get_running_loop()  # asyncio/events.py, for event loops; no error without one
    if not _exits.is_set():
        threading.Thread(target=_end_by_signal, args=(signum,), daemon=True).start()
    if loop is None or _leaving is not None:
        _leave(signum)
    # Between two steps of tasks: asyncio would complain of a task that it interrupts.
    loop.call_soon_threadsafe(_leave, signum)
    _leaving = threading.Timer(_STEP_TIMEOUT, os.kill, (os.getpid(), signum))
    _leaving.daemon = True
    _leaving.start()


def _end_by_signal(signum: int) -> None:
    """Shut down all clusters, and end a program that catches SystemExit and goes on, as pytest does."""
    global _is_over
    if _exits.wait(_GOODBYE):
        return
    _is_over = True
    _end_clusters()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # of a stream of the program, of any class
            stream.flush()
    os._exit(_BY_SIGNAL + signum)


def _leave(signum: int) -> NoReturn:
    if _leaving is not None:
        _leaving.cancel()
    # By default, no exit function would run.
    raise SystemExit(_BY_SIGNAL + signum)


def _wait_and_end() -> None:
    _exits.set()
    status: int | None = None
    try:
        _wait_for_makers()
    except SystemExit as exit_by_signal:  # if it propagated, thread pools would not be informed of the exit
        status = int(str(exit_by_signal.code))
    finally:  # also after Ctrl-C
        _end_all()
    if status is not None:  # otherwise, the interpreter would wait for the threads
        os.kill(os.getpid(), status - _BY_SIGNAL)


def _end_all() -> None:
    """Shut down all clusters at once."""
    global _is_over
    _is_over = True
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *_SIGNALS)}
    # Neither a second Ctrl-C nor a second SIGTERM interrupts it.
    raising = [signum for signum in handlers if handlers[signum] in (signal.default_int_handler, _exit)]
    for signum in raising:
        signal.signal(signum, _ask_for_patience)
    _end_clusters()
    for signum in raising:
        signal.signal(signum, handlers[signum])


def _end_clusters() -> None:
    with _ending:
        threads = [threading.Thread(target=_end, args=(cluster,), daemon=True) for cluster in unclosed()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output.flush()


def _uncaught_error() -> BaseException | None:
    """Return the exception that ends this program. An interactive one goes on after an exception."""
    if hasattr(sys, "ps1") or "IPython" in sys.modules:
        return None
    return getattr(sys, "last_value", None)


def _end(cluster: Any) -> None:
    try:
        cluster.ending.note_exit(_uncaught_error())
        cluster.ending.end_now(_TIMEOUT)
    except Exception as error:  # of the platform's library, for example: the others are shut down, too
        logger.error("%s", error, exc_info=None if isinstance(error, (CMLError, OSError)) else error)
    _clusters.pop(cluster, None)


def _ask_for_patience(*_: Any) -> None:
    names = ", ".join(cluster.options.name for cluster in unclosed())
    if names:
        logger.warning("Shutting down cluster %s first: please wait", names)


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
