"""Calls of functions that may never return, each in a thread of its own and with a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.sessions import answers
from dask_cml.sessions.answers import CallFailed, NoAnswer

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0

#: So many calls may hang. More are not made until one of them returns.
_MOST_HANGING = 64


class Calls:
    """Make calls in threads. What does not return in time stays in its thread, which is given up.

    Given-up threads hold up nobody: another one takes their place, and the interpreter's end does not wait
    for them.

    Parameters
    ----------
    at_once : int
        So many calls of :meth:`run` may be under way; one that was given up does not count.
    limit : float
        Seconds for a call.
    retries : int
        So often :meth:`do` tries again what may pass.
    modules : collection of str
        Names of the modules whose functions are called. They may have thread pools of their own, in which
        they hang.
    """

    def __init__(self, at_once: int, limit: float, retries: int, modules: Collection[str]) -> None:
        self.limit = limit
        self.retries = retries
        #: What fails, in words, by what was to be done, until it is done again.
        self.troubles: dict[str, str] = {}
        self._slots = asyncio.Semaphore(at_once)
        self._modules = frozenset(modules)
        self._hanging: set[Future[Any]] = set()

    async def do(self, what: str, function: Callable[[], Any], limit: float | None = None) -> Any:
        """Call a function, again while what is wrong may pass, and wait without blocking the event loop.

        Parameters
        ----------
        what : str
            What it does, in words that begin with a verb.
        function : callable
            What is called.
        limit : float, optional
            Seconds for each try, if not those for every call.

        Raises
        ------
        CallFailed
            If the platform fails at every try, or for good. Errors of other kinds are raised as they are.
        """
        begin = time.monotonic()
        verb = what.partition(" ")[0]
        for pause in [*self.pauses(), None]:
            try:
                result = await self._run(function, limit or self.limit)
            except Exception as error:
                if not answers.is_of_the_platform(error):
                    self.troubles.pop(verb, None)
                    raise
                words = answers.in_words(error)
                if pause is None or not answers.may_pass(error):
                    tries = f" in {self.retries + 1} tries, {time.monotonic() - begin:.0f} s"
                    self.troubles[verb] = f"CML did not {what}{tries if pause is None else ''}: {words}"
                    raise CallFailed(self.troubles[verb]) from error
                logger.info("CML did not %s, next try in %.1f s: %s", what, pause, words)
            else:
                self.troubles.pop(verb, None)
                return result
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def pauses(self) -> list[float]:
        """Return the seconds between one try and the next."""
        steps = [min(_FIRST_PAUSE * 2**i, _LONGEST_PAUSE) for i in range(self.retries)]
        return [step * random.uniform(0.8, 1.2) for step in steps]

    async def _run(self, function: Callable[[], Any], limit: float) -> Any:
        async with self._slots:
            if len(self._hanging) >= _MOST_HANGING:
                raise NoAnswer(f"{len(self._hanging)} earlier calls hang")
            future = self.start(function)
            # Not wait_for: when the awaiting task is cancelled the thread goes on, and may fail unheard.
            wrapped = asyncio.wrap_future(future)
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([wrapped], timeout=limit)
        return self._result(future, limit)

    def run_all(self, functions: Collection[Callable[[], Any]], limit: float) -> list[Exception]:
        """Call functions at the same time by plain calls, and return the errors of those that fail."""
        futures = [self.start(function) for function in functions]
        wait(futures, timeout=max(0.0, limit))
        errors = []
        for future in futures:
            try:
                self._result(future, limit)
            except Exception as error:
                errors.append(error)
        return errors

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Begin a call.

        Raises
        ------
        CMLError
            If the interpreter ends.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        try:
            # Threads of the platform's own pools are daemons like the one that makes them.
            threading.Thread(target=call, name="cml-api", daemon=True).start()
        except RuntimeError as error:
            raise CMLError(f"the Workers API is not called any more: {error}") from error
        return future

    def _result(self, future: Future[Any], limit: float) -> Any:
        if future.done():
            return future.result()
        self._hanging.add(future)
        future.add_done_callback(self._hanging.discard)
        self._leave_behind()
        raise NoAnswer(f"no answer within {limit:g} s")

    def _leave_behind(self) -> None:
        """Keep the interpreter's end from waiting for the platform's own pools, whose threads hang."""
        # It joins every thread of a ThreadPoolExecutor, daemons too.
        frames = sys._current_frames()
        for thread in [*executors._threads_queues]:
            if thread.daemon and self._is_called_in(frames.get(thread.ident or 0)):
                executors._threads_queues.pop(thread, None)  # type: ignore[attr-defined]

    def _is_called_in(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_globals.get("__name__") in self._modules:
                return True
            frame = frame.f_back
        return False
