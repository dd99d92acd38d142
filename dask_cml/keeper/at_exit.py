"""Shuts down clusters when the interpreter exits, in any way."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import logging
import os
import signal
import threading
import weakref
from typing import Any, NoReturn

from dask_cml.errors import CMLError

logger = logging.getLogger(__name__)

#: Seconds. More than close() takes if the platform does not answer.
_TIMEOUT = 60.0
#: Seconds for a step of a task, after which SIGTERM interrupts it.
_STEP_TIMEOUT = 1.0

#: The managers that are to close, each with the thread that created it.
_clusters: dict[Any, weakref.ref[threading.Thread]] = {}
_is_over = False
#: Repeats the signal to exit if the event loop does not come to it.
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
    _mind_sigterm()


def no_longer_end_at_exit(cluster: Any) -> None:
    """Forget a cluster that is closed."""
    _clusters.pop(cluster, None)
    _mind_sigterm()


def unclosed() -> list[Any]:
    """Return the clusters of this process that are not closed."""
    return [*_clusters]


def _mind_sigterm() -> None:
    """While clusters exist, let SIGTERM exit the program like sys.exit, unless the program handles it."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set handlers
    handler = signal.getsignal(signal.SIGTERM)
    if _clusters and handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    elif not _clusters and handler is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(signum: int, _: Any) -> None:
    global _leaving
    if not _clusters:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    loop = asyncio._get_running_loop()
    if loop is None or _leaving is not None:
        _leave(signum)
    # Between two steps of tasks: asyncio would complain of a task that it interrupts.
    loop.call_soon_threadsafe(_leave, signum)
    _leaving = threading.Timer(_STEP_TIMEOUT, os.kill, (os.getpid(), signum))
    _leaving.daemon = True
    _leaving.start()


def _leave(signum: int) -> NoReturn:
    if _leaving is not None:
        _leaving.cancel()
    # By default, no exit function would run. This is a shell's exit code for a program ended by a signal.
    raise SystemExit(128 + signum)


def _wait_and_end() -> None:
    terminated = False
    try:
        _wait_for_makers()
    except SystemExit:  # if it propagated, the interpreter would not inform thread pools of the exit
        terminated = True
    finally:  # also after Ctrl-C
        _end_all()
    if terminated:  # otherwise, the interpreter would wait for the threads
        os.kill(os.getpid(), signal.SIGTERM)


def _end_all() -> None:
    global _is_over
    _is_over = True
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    # Neither a second Ctrl-C nor a second SIGTERM interrupts it.
    raising = [each for each in before if before[each] in (signal.default_int_handler, _exit)]
    for each in raising:
        signal.signal(each, _ask_for_patience)
    for cluster in [*_clusters]:
        try:
            cluster.end_now(_TIMEOUT)
        except Exception as error:  # the other clusters are shut down nevertheless
            logger.error("%s", error)
        _clusters.pop(cluster, None)
    for each in raising:
        signal.signal(each, before[each])


def _ask_for_patience(*_: Any) -> None:
    logger.warning("Shutting down %s first: please wait", ", ".join(each.options.name for each in _clusters))


def _wait_for_makers() -> None:
    """Wait for the threads that created clusters and may still use them, as the interpreter does itself."""
    # Do not wait for threads of thread pools: they run until the interpreter informs them of the exit.
    exempt = {threading.current_thread(), *executors._threads_queues}
    while makers := {ref() for ref in [*_clusters.values()]} - exempt:
        maker = makers.pop()
        exempt.add(maker)
        if maker and not maker.daemon:
            maker.join()


def _hold_sigterm() -> None:
    # Python drops signals that a new child gets before it is ready for its handlers, but SIGTERM must end it.
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget_all() -> None:
    """Leave the clusters to the parent process, after a fork."""
    _clusters.clear()
    _mind_sigterm()
    _release_sigterm()


# Thread pools shut down before atexit functions run, also the platform's own, so those functions could stop
# nothing. Functions registered here run in reverse order of registration, so this one runs before the pools'.
threading._register_atexit(_wait_and_end)  # type: ignore[attr-defined]
os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_forget_all)
