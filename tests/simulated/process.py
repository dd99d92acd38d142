"""Simulated processes: parts of one event loop that can be killed or frozen, as if each ran by itself.

What a process does runs in its context: its tasks, its threads and its connections belong to it. When it is
killed, none of its code runs any more, not even what is in ``finally``, and its connections break. When it is
frozen, as with its machine, its connections stay open and nobody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any
from unittest import mock
from weakref import WeakSet

from distributed.comm.tcp import TCP, BaseTCPListener
from tornado.iostream import IOStream

from .clock import VirtualLoop

_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)
_pids = itertools.count(100_000)


class Killed(BaseException):
    """Ends what a thread does for a process that is dead."""


def current() -> SimulatedProcess | None:
    """Return the process whose code runs now."""
    return _process.get()


class SimulatedProcess:
    """One process, with an environment of its own.

    Parameters
    ----------
    name : str
        Its name, for readers.
    loop : VirtualLoop
        The loop in which it runs.
    env : mapping of str to str
        Its environment variables, in addition to those of this machine's process.

    Attributes
    ----------
    clusters : list
        The clusters that are to end at its exit.
    at_call, at_write : callable
        Called with a number after each call of the platform, and after each change of a file.
    is_in_mesh : bool
        Whether connections to it succeed, and nothing passes, as in a mesh that demands its own TLS.
    """

    def __init__(self, name: str, loop: VirtualLoop, env: Mapping[str, str] | None = None) -> None:
        self.name, self.loop, self.env = name, loop, dict(env or {})
        self.pid, self.started = next(_pids), loop.wall_time()
        self.state = "runs"
        self.clusters: list[Any] = []
        self.calls = self.writes = 0
        self.is_in_mesh = False
        self.at_call: Callable[[int], None] = lambda _: None
        self.at_write: Callable[[int], None] = lambda _: None
        self.on_end: list[Callable[[], None]] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._comms: WeakSet[Any] = WeakSet()
        #: Connections from others. A frozen process does not get to make comms of them.
        self._accepted: WeakSet[IOStream] = WeakSet()
        #: Those that a mesh keeps open.
        self._held: list[IOStream] = []
        self._stopped: list[_Guarded] = []
        self._started: list[asyncio.Task[Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.state}>"

    @property
    def runs(self) -> bool:
        return self.state == "runs"

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not over."""
        return [task for task in self._tasks if not task.done()]

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function as this process."""
        return self._context.copy().run(function, *args, **options)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as this process."""
        task: asyncio.Task[Any] = self.call(self.loop.create_task, coroutine)
        # The loop refers to tasks weakly, and a program does not end because nobody waits for it.
        self._started.append(task)
        return task

    def check(self) -> None:
        """End the calling thread if the process does not run any more.

        Raises
        ------
        Killed
            If it does not.
        """
        if not self.runs:
            raise Killed(self.name)

    def called(self) -> None:
        """Count a call of the platform, which is carried out and not answered yet."""
        self.calls += 1
        self.at_call(self.calls)
        self.check()

    def wrote(self) -> None:
        """Count a change of a file."""
        self.writes += 1
        self.at_write(self.writes)
        self.check()

    def kill(self) -> None:
        """End the process as ``kill -9`` does. Any thread may call this."""
        if self.state != "dead":
            self.state = "dead"
            self.loop.call_soon_threadsafe(self._bury, context=contextvars.Context())

    def freeze(self) -> None:
        """Let the process do nothing any more, as when its machine fails."""
        if self.runs:
            self.state = "frozen"

    def _bury(self) -> None:
        for task in self.tasks:
            task.cancel()
        for comm in [*self._comms]:
            comm.stop() if isinstance(comm, BaseTCPListener) else comm.abort()
        for stream in [*self._accepted]:
            stream.close()
        for callback in self.on_end:
            callback()

    def forget(self) -> None:
        """Let go of what the process was about to do. Call this when the loop is closed."""
        self._started.clear()
        while self._stopped:
            coroutine = self._stopped.pop().coroutine
            for _ in range(20):
                # In `finally`, it may wait once more.
                with contextlib.suppress(BaseException):
                    self._context.copy().run(coroutine.close)
                    break


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine that goes on only while its process runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: SimulatedProcess) -> None:
        self.coroutine, self.process = coroutine, process

    def __repr__(self) -> str:
        return f"{self.process.name}: {self.coroutine!r}"

    def __await__(self) -> Any:
        raise NotImplementedError  # tasks send

    def send(self, value: Any) -> Any:
        if self.process.runs:
            return self.coroutine.send(value)
        return self._stop()

    def throw(self, *error: Any) -> Any:
        if self.process.runs:
            return self.coroutine.throw(*error)
        return self._stop()

    def _stop(self) -> Any:
        if self not in self.process._stopped:
            self.process._stopped.append(self)
        if self.process.state == "dead":
            raise asyncio.CancelledError
        return next(self.process.loop.create_future().__await__())  # never done

    def close(self) -> None:
        if self.process.runs:
            self.coroutine.close()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    context = options.get("context")
    process = _process.get() if context is None else context.get(_process)
    if process is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_Guarded(coroutine, process), loop=loop, **options)
    process._tasks.add(task)
    return task


def _guard(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a timer's callback that the dead do not call."""
    process = _process.get()
    if process is None:
        return callback
    return lambda *args: callback(*args) if process.runs else None


def _owned(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes its object a connection of the current process."""

    def owning(comm: Any, *args: Any, **options: Any) -> Any:
        process = _process.get()
        if process is not None:
            process._comms.add(comm)
        return method(comm, *args, **options)

    return owning


def _accepts(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return a listener's method that makes the current process the owner of a connection.

    What a mesh accepts, the process never gets.
    """

    def accepting(listener: BaseTCPListener, stream: IOStream, address: Any) -> Any:
        process = _process.get()
        if process is not None:
            process._accepted.add(stream)
            if process.is_in_mesh:
                process._held.append(stream)
                return None
        return handle(listener, stream, address)

    return accepting


@contextlib.contextmanager
def processes_in(loop: VirtualLoop) -> Iterator[None]:
    """Let processes run in a loop."""
    loop.set_task_factory(_make_task)
    loop.guard = _guard
    with (
        mock.patch.object(TCP, "__init__", _owned(TCP.__init__)),
        mock.patch.object(BaseTCPListener, "start", _owned(BaseTCPListener.start)),
        mock.patch.object(BaseTCPListener, "_handle_stream", _accepts(BaseTCPListener._handle_stream)),
    ):
        yield
