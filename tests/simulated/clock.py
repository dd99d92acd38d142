"""An event loop whose clock jumps to the next timer when nothing else is to do.

A wait of five minutes takes no time, and a busy machine makes nothing late: what is slow there only makes the
clock stand still for longer. The time limits, leases and pauses of the package are those of real life.

The clock stands still while a thread works that the loop has started, by :meth:`VirtualLoop.run_in_executor`
or as a :class:`Thread`. In such threads ``time.sleep`` waits for the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import selectors
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

#: Seconds of real time without anything to wait for, after which a loop counts as stuck.
_STUCK = 10.0
#: Steps of a loop within a millisecond of its clock, after which something in it counts as restless.
_MOST_STEPS = 50_000
#: The shortest pause, in seconds.
_RESOLUTION = 1e-6
_REAL = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=time.sleep)
#: Packages whose modules have bound the functions of the module `time` to names of their own.
_BOUND = ("dask_cml", "distributed", "tornado")


class Stuck(AssertionError):
    """Nothing can happen any more, because all that could wait for each other."""


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Waits on the loop's clock instead of the machine's."""

    loop: VirtualLoop
    _since, _steps = 0.0, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        self._steps += 1
        if self.loop.now - self._since > 0.001:
            self._since, self._steps = self.loop.now, 0
        elif self._steps == _MOST_STEPS:
            raise Stuck("something goes on and on without a pause")
        if timeout is not None and timeout <= 0:
            return super().select(0)
        idle_since = _REAL.monotonic()
        while True:
            # In this order: a thread tells the loop what it has done before it counts as idle.
            busy = self.loop.busy
            if events := super().select(0):
                return events
            if not busy and timeout is not None:
                self.loop.now += timeout
                return []
            if events := super().select(0.02):
                return events
            if not busy and _REAL.monotonic() - idle_since > _STUCK:
                raise Stuck("nothing can happen any more")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 1000.0
        self.busy = 0
        self._busy_lock = threading.Lock()
        self._began = _REAL.time() - self.now
        self._thread = threading.get_ident()
        self._works = threading.local()
        self._executor = ThreadPoolExecutor(32, thread_name_prefix="virtual")
        #: Wraps what is to be called later, such as to drop what a dead process would do.
        self.guard: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda callback: callback
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def wall_time(self) -> float:
        return self._began + self.now

    def set_clock(self, seconds: float) -> None:
        """Set the clock that says the time since 1970 ahead, as another machine's may be."""
        self._began += seconds

    def call_at(self, when: float, callback: Any, *args: Any, **context: Any) -> asyncio.TimerHandle:
        # A pause that is too short for the clock to advance would last for ever.
        return super().call_at(max(when, self.now + _RESOLUTION), self.guard(callback), *args, **context)

    def close(self) -> None:
        super().close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    # -- threads that work for the loop

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        running: Future[Any] = (executor or self._executor).submit(self.counted, func, *args)
        self.add_busy(1)
        result = asyncio.wrap_future(running, loop=self)
        # After the loop was told, because callbacks are called in their order.
        running.add_done_callback(lambda _: self.add_busy(-1))
        return result

    def counted(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread that is counted as working."""
        self._works.here = True
        try:
            return function(*args)
        finally:
            self._works.here = False

    def add_busy(self, n: int) -> None:
        """Count a thread that works for the loop, or one that does so no more."""
        with self._busy_lock:
            self.busy += n

    def sleep(self, seconds: float) -> None:
        if self.is_here() or self.is_closed():
            return
        woken = threading.Event()
        works = getattr(self._works, "here", False)

        def wake() -> None:
            if works:
                self.add_busy(1)
            woken.set()

        # Without a context: the clock does not belong to the process that waits.
        later = contextvars.Context().run
        self.call_soon_threadsafe(later, self.call_later, max(0.0, seconds), wake)
        if works:
            self.add_busy(-1)
        while not woken.wait(1.0):
            if self.is_closed():
                raise SystemExit("the simulation is over")

    def wait(self, futures: Collection[Future[Any]], timeout: float | None = None) -> None:
        deadline = None if timeout is None else self.now + timeout
        while not all(future.done() for future in futures):
            if deadline is not None and self.now >= deadline:
                return
            self.sleep(0.05)

    # -- in place of the module `time`

    @contextlib.contextmanager
    def installed(self) -> Iterator[VirtualLoop]:
        """Make this clock that of the module ``time``, and of all that has bound its functions."""
        mine: dict[Any, Any] = {
            _REAL.time: self.wall_time,
            _REAL.monotonic: self.time,
            _REAL.sleep: self.sleep,
        }
        with contextlib.ExitStack() as stack:
            for function, mine_of_it in mine.items():
                stack.enter_context(mock.patch.object(time, function.__name__, mine_of_it))
            for name, module in [*sys.modules.items()]:
                if name.startswith(_BOUND):
                    for attribute, value in [*vars(module).items()]:
                        if any(value is function for function in mine):
                            stack.enter_context(mock.patch.object(module, attribute, mine[value]))
            yield self


class Thread(threading.Thread):
    """A thread that works for the running loop, in the context in which it was made."""

    def __init__(self, target: Callable[[], Any], **options: Any) -> None:
        self._loop_of_it = _running()
        self._context = contextvars.copy_context()
        super().__init__(target=target, **options)

    def start(self) -> None:
        if self._loop_of_it is not None:
            self._loop_of_it.add_busy(1)
        super().start()

    def run(self) -> None:
        loop = self._loop_of_it
        if loop is None:
            return super().run()
        try:
            self._context.run(loop.counted, super().run)
        finally:
            loop.add_busy(-1)


_current: list[VirtualLoop] = []


def _running() -> VirtualLoop | None:
    return _current[-1] if _current else None


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Yield a loop whose clock is that of the module ``time``."""
    loop = VirtualLoop()
    _current.append(loop)
    try:
        with loop.installed():
            yield loop
    finally:
        _current.remove(loop)
        loop.close()
