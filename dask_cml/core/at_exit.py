"""Shuts down clusters when the interpreter exits, in any way."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import os
import signal
import sys
import threading
import weakref
from typing import Any

from dask_cml import compat, output
from dask_cml.errors import CMLError

logger = output.get_logger(__name__)

#: Seconds. More than close() takes if the platform does not answer.
_TIMEOUT = 60.0

#: By default, these end the program at once. A terminal that is closed sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: The clusters that are to close, and the threads that created them.
_clusters: dict[Any, weakref.ref[threading.Thread]] = {}
#: Added to the number of a signal, it is the exit status of a program that the signal ended.
_BY_SIGNAL = 128
_is_over = False
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
    """Shut down all clusters at once."""
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
    for thread in threads:
        thread.join(2 * _TIMEOUT)
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
        cluster.ending.end_now(0 if is_held else _TIMEOUT)
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
