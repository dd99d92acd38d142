"""Calls of functions that may never return. A call runs in a thread of its own, with a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import functools
import random
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from dask_cml import compat
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.sessions import answers
from dask_cml.sessions.answers import CallFailed, NoAnswer

logger = get_logger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0

#: Maximum number of hanging calls with one verb, in addition to those that are made at once. At this number,
#: new calls with this verb fail until one returns.
_MOST_HANGING = 64
#: Maximum number of calls under way that make one thing, such as the session of a worker: all of them may
#: still come true, long after their time limit. After so many seconds, a call is lost.
_MOST_FOR_ONE, _LOST_AFTER = 2, 3600.0


class Calls:
    """Makes calls in threads, and abandons calls that do not return in time.

    Abandoned threads block nothing: new calls get new threads, and the interpreter exits without waiting for
    them.

    Parameters
    ----------
    at_once : int
        Maximum number of concurrent calls of :meth:`do` with one verb. Abandoned calls do not count.
    limit : float
        Time limit of one call, in seconds.
    retries : int
        Maximum number of retries of :meth:`do`.
    modules : collection of str
        Names of the modules that define the functions. Their own thread pools may hang, too.
    """

    def __init__(self, at_once: int, limit: float, retries: int, modules: Collection[str]) -> None:
        self.at_once = at_once
        self.limit = limit
        self.retries = retries
        #: The current failure of each operation, by its verb, until the operation succeeds.
        self.failures: dict[str, str] = {}
        #: Whether the platform has refused this session's key in all tries of the last operation.
        self.key_refused = False
        #: The calls of :meth:`do` that have not returned, including abandoned ones: their verb, what they
        #: make, and when they began.
        self._under_way: dict[Future[Any], tuple[str, Hashable, float]] = {}
        #: By verbs, so that launches that hang delay no stop.
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(at_once))
        self._modules = frozenset(modules)

    async def do(
        self,
        verb: str,
        what: Callable[[], str],
        function: Callable[[], Any],
        limit: float | None = None,
        made: Hashable = None,
    ) -> Any:
        """Call a function without blocking the event loop. Retry while the error is temporary.

        If too many calls that make one thing hang, a retry makes no call, but waits for these.

        Parameters
        ----------
        verb : str
            The operation for messages, such as ``"list"``.
        what : callable
            Returns the object of the operation for messages, such as ``"sessions"``.
        function : callable
            The function, which may block.
        limit : float, optional
            Time limit of one try, in seconds. Default: the limit of all calls.
        made : hashable, optional
            What the function makes. Default: nothing.

        Raises
        ------
        CallFailed
            If all tries fail because of the platform. Other errors are raised unchanged.
        """
        # By hand: tenacity would be no shorter, and only one of CML's images has it.
        begin = time.monotonic()
        for pause in [*self.pauses(), None]:
            try:
                result = await self._run(verb, made, function, limit or self.limit)
            except Exception as error:  # of the function, which is the platform's
                if not answers.is_of_the_platform(error):
                    self.failures.pop(verb, None)
                    raise
                words = answers.in_words(error)
                if pause is None or not answers.may_pass(error):
                    failure = f"CML did not {verb} {what()}"
                    if pause is None:
                        n = self.retries + 1
                        noun = "try" if n == 1 else "tries"
                        failure += f" in {n} {noun}, {time.monotonic() - begin:.0f} s"
                    self.failures[verb] = f"{failure}: {words}"
                    self.key_refused = answers.refuses_key(error)
                    raise CallFailed(self.failures[verb]) from error
                logger.info("CML did not %s %s, next try in %.1f s: %s", verb, what(), pause, words)
                await asyncio.sleep(pause)
            else:
                self.failures.pop(verb, None)
                self.key_refused = False
                return result
        raise AssertionError("unreachable")

    def pauses(self) -> list[float]:
        """Return the pauses between tries, in seconds."""
        steps = [min(_FIRST_PAUSE * 2**i, _LONGEST_PAUSE) for i in range(self.retries)]
        return [step * random.uniform(0.8, 1.2) for step in steps]

    async def _run(self, verb: str, made: Hashable, function: Callable[[], Any], limit: float) -> Any:
        under_way, since = self._under_way, time.monotonic() - _LOST_AFTER
        hanging = [future for future, call in under_way.copy().items() if call[1] == made and call[2] > since]
        if made is not None and len(hanging) >= _MOST_FOR_ONE:
            return await self._first_answer(hanging, limit)
        async with self._slots[verb]:
            n_under_way = [call[0] for call in under_way.copy().values()].count(verb)
            if n_under_way >= self.at_once - 1 + _MOST_HANGING:
                raise NoAnswer(f"{n_under_way} earlier calls have not returned")
            future = start(function)
            under_way[future] = verb, made, time.monotonic()
            future.add_done_callback(under_way.pop)
            return await self._first_answer([future], limit)

    async def _first_answer(self, futures: Collection[Future[Any]], limit: float) -> Any:
        # Not wait_for: if the waiting task is cancelled, the threads go on, and nobody may see their errors.
        waiting = [asyncio.wrap_future(future) for future in futures]
        for wrapped in waiting:
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        answered, _ = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if answered:
            return answered.pop().result()
        self.leave_behind()
        raise _no_answer(limit)

    def wait_for(self, verb: str, limit: float) -> None:
        """Block until no call of :meth:`do` with this verb is under way, for some seconds at most."""
        futures = [future for future, call in self._under_way.copy().items() if call[0] == verb]
        wait(futures, timeout=max(0.0, limit))
        self.leave_behind()

    def run_all(self, functions: Collection[Callable[[], Any]], limit: float) -> list[BaseException]:
        """Call functions concurrently, block until they return, and return the errors."""
        futures = [start(function) for function in functions]
        wait(futures, timeout=max(0.0, limit))
        if not all(future.done() for future in futures):
            self.leave_behind()
        errors = [future.exception() if future.done() else _no_answer(limit) for future in futures]
        return [error for error in errors if error is not None]

    def leave_behind(self) -> None:
        """Let the interpreter exit without waiting for the platform's own thread pools, if they hang."""
        frames = sys._current_frames()
        for thread in [*executors._threads_queues]:  # concurrent/futures/thread.py:17
            frame = frames.get(thread.ident or 0)
            stack = traceback.walk_stack(frame) if frame else ()
            modules = {caller.f_globals.get("__name__") for caller, _ in stack}
            if thread.daemon and modules & self._modules:
                compat.leave_pool_thread(thread)


def start(function: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, for which the interpreter does not wait when it exits.

    Raises
    ------
    CMLError
        If the interpreter is shutting down.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:  # of the function
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        # Threads of the platform's own pools inherit that they are daemons.
        threading.Thread(target=call, name="cml-api", daemon=True).start()
    except RuntimeError as error:
        raise CMLError(f"Workers API not called: {error}") from error
    return future


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may hang, and block until it returns, for some seconds at most.

    Raises
    ------
    NoAnswer
        If it takes longer. Its thread is left behind.
    """
    future = start(functools.partial(function, *arguments))
    wait([future], timeout=seconds)
    if not future.done():
        raise _no_answer(seconds)
    return future.result()


def _no_answer(seconds: float) -> NoAnswer:
    return NoAnswer(f"no answer within {seconds:g} s")
