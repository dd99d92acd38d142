"""The end of clusters with the interpreter, whichever way that ends."""

from __future__ import annotations

import concurrent.futures.thread as executors
import logging
import os
import signal
import threading
import weakref
from typing import Any, Protocol

from dask_cml.errors import CMLError
from dask_cml.options import Options

logger = logging.getLogger(__name__)

#: More than close() takes if the platform does not answer.
_TIMEOUT = 60.0


class Endable(Protocol):
    """A cluster, as the interpreter's end sees it."""

    options: Options

    def _end_now(self, timeout: float) -> None:
        """Close the cluster, or stop its sessions by plain calls where its event loop is gone."""

    def _forget(self) -> None:
        """Leave the cluster to the process that this one was forked from."""


_clusters: dict[Endable, weakref.ref[threading.Thread]] = {}
_is_over = False
_fork = threading.local()


def end_at_exit(cluster: Endable) -> None:
    """End this cluster with the interpreter, if it is not closed before.

    Raises
    ------
    CMLError
        If the interpreter is ending already.
    """
    _clusters[cluster] = weakref.ref(threading.current_thread())
    if _is_over:
        _clusters.pop(cluster, None)
        raise CMLError(f"the cluster {cluster.options.name} is not started: the program ends")
    _mind_sigterm()


def no_longer_end_at_exit(cluster: Endable) -> None:
    """Forget a cluster that is closed."""
    _clusters.pop(cluster, None)
    _mind_sigterm()


def unclosed() -> list[Any]:
    """Return the clusters of this process, as far as they are not closed."""
    return [*_clusters]


def _mind_sigterm() -> None:
    """Let SIGTERM end the program as sys.exit does while there are clusters, unless it is minded already."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other set handlers
    handler = signal.getsignal(signal.SIGTERM)
    if _clusters and handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    elif not _clusters and handler is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(signum: int, _: Any) -> None:
    if _clusters:
        # By default no exit function would run. What a shell tells of a program that a signal ended:
        raise SystemExit(128 + signum)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _end_all() -> None:
    global _is_over
    terminated = False
    try:
        _wait_for_makers()
    except SystemExit:  # if it went further, the interpreter would not tell thread pools that this is the end
        terminated = True
    _is_over = True
    if minded := signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for cluster in [*_clusters]:
        _end(cluster)
    if minded:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if terminated:  # the interpreter would go on to wait for the threads
        os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_makers() -> None:
    """Wait for the threads that made clusters and may still use them; the interpreter waits for them, too."""
    # But not for those of thread pools: they wait to be told that this is the end.
    exempt = {threading.current_thread(), *executors._threads_queues}
    while makers := {ref() for ref in [*_clusters.values()]} - exempt:
        maker = makers.pop()
        exempt.add(maker)
        if maker and not maker.daemon:
            maker.join()


def _end(cluster: Endable) -> None:
    try:
        cluster._end_now(_TIMEOUT)
    except CMLError as error:  # it has tried all that there is to try
        logger.error("%s", error)
    _clusters.pop(cluster, None)


def _hold_sigterm() -> None:
    # Python drops what a new child gets before it is ready for its handlers, but the child is to end.
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _forget_all() -> None:
    """Leave the clusters to the process that this one was forked from."""
    for cluster in _clusters:
        cluster._forget()
    _clusters.clear()
    _mind_sigterm()
    _release_sigterm()


# Thread pools are shut down before atexit functions run, the platform's own as well as ours: nothing
# could be stopped from there. Of these functions the last registered runs first, so ours runs before those.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_forget_all)
