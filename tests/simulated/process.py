"""Simulated processes: parts of one event loop, as if each ran by itself, that can be killed or paused.

What a process does runs in its context: its tasks, its threads and its connections belong to it. When it is
killed, none of its code runs any more, not even what is in ``finally``, and its connections break. When it is
frozen, as with its machine, its connections stay open and nobody answers. When it is paused, it does so until
it goes on, with everything that has become due meanwhile. Without a network, it alone goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any
from unittest import mock
from weakref import WeakSet

from distributed.comm.tcp import TCP, BaseTCPConnector, BaseTCPListener
from tornado.iostream import IOStream

from .clock import VirtualLoop

_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)
_pids = itertools.count(100_000)
#: Seconds after which a kernel closes a connection that nobody acknowledges, by Dask's configuration.
_KERNEL_TIMEOUT = 30.0


class Killed(BaseException):
    """Ends what a thread does for a process that is dead."""


def current() -> SimulatedProcess | None:
    """Return the process whose code runs now."""
    return _process.get()


class SimulatedProcess:
    """One process, with an environment of its own."""

    def __init__(self, name: str, loop: VirtualLoop, env: Mapping[str, str] | None = None) -> None:
        self.name, self.loop, self.env = name, loop, dict(env or {})
        self.pid, self.started = next(_pids), loop.wall_time()
        self.state = "runs"
        self.clusters: list[Any] = []
        self.calls = self.writes = 0
        #: Whether connections to it succeed, and nothing passes, as in a mesh that demands its own TLS.
        self.is_in_mesh = False
        #: Called with a number after each call of the platform, and after each change of a file.
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
        #: What its tasks wait for while it is paused, and the timers that were due.
        self._resumed: list[asyncio.Future[None]] = []
        self._late: list[tuple[contextvars.Context, Callable[[], Any]]] = []
        self._pauses_threads = False
        #: Whether packets vanish, and what waits for the network.
        self._is_cut_off = self._refuses = False
        self._reached: list[asyncio.Future[None]] = []
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
        return [task for task in self._tasks if not task.done()]

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._context.copy().run(function, *args, **options)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self.call(self.loop.create_task, coroutine)
        # The loop refers to tasks weakly, and a program does not end because nobody waits for it.
        self._started.append(task)
        return task

    def check(self) -> None:
        """End the calling thread if the process does not run any more. Let the thread wait during a pause."""
        while self._pauses_threads and self.state == "paused" and not self.loop.is_here():
            self.loop.sleep(1.0)
        if self.state in ("dead", "frozen"):
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
        if self.state != "dead":
            self.state = "dead"
            self.loop.call_soon_threadsafe(self._bury, context=contextvars.Context())

    def freeze(self) -> None:
        """Let the process do nothing any more, as when its machine fails."""
        if self.runs:
            self.state = "frozen"

    def lose_machine(self) -> None:
        """Let the process do nothing any more. After some time, the others' kernels close its connections."""
        self.freeze()
        self._soon(_KERNEL_TIMEOUT, self._break_connections)

    def pause(self, seconds: float, threads: bool = True) -> None:
        """Let the process, or its event loop alone, do nothing for some seconds, as by SIGSTOP."""
        if self.runs:
            self.state, self._pauses_threads = "paused", threads
            self._soon(seconds, self.resume)

    def resume(self) -> None:
        if self.state != "paused":
            return
        self.state = "runs"
        late, self._late = self._late, []
        for context, callback in late:
            self.loop.call_soon(callback, context=context)
        _wake(self._resumed)

    def cut_off(self, seconds: float, refuses: bool = False) -> None:
        """Break the network of this process for some seconds: packets vanish, or all is refused."""
        self._is_cut_off = True
        self._refuses = refuses
        if refuses:
            self._break_connections()
        self._soon(seconds, self.connect_again)

    def connect_again(self) -> None:
        self._is_cut_off = False
        _wake(self._reached)

    async def connects(self) -> None:
        if self._is_cut_off and self._refuses:
            raise OSError("no route to host")
        await self.carries()

    async def carries(self) -> None:
        """Wait until the network carries packets."""
        while self._is_cut_off:
            await _added_to(self._reached, self.loop)

    def _soon(self, seconds: float, function: Callable[[], Any]) -> None:
        self.loop.call_later(seconds, function, context=contextvars.Context())

    def _break_connections(self) -> None:
        for comm in [*self._comms]:
            if not isinstance(comm, BaseTCPListener):
                comm.abort()

    def _bury(self) -> None:
        for task in self.tasks:
            task.cancel()
        self._break_connections()
        for listener in [*self._comms]:
            if isinstance(listener, BaseTCPListener):
                listener.stop()
        for stream in [*self._accepted]:
            stream.close()
        for callback in self.on_end:
            callback()

    def forget(self) -> None:
        """Let go of what the process was about to do. Call this when the loop is closed."""
        self._started.clear()
        with warnings.catch_warnings():  # of what it begins in `finally`, and never awaits
            warnings.simplefilter("ignore", RuntimeWarning)
            while self._stopped:
                self._close(self._stopped.pop().coroutine)

    def _close(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        for _ in range(20):
            # In `finally`, it may wait once more.
            with contextlib.suppress(BaseException):
                self._context.copy().run(coroutine.close)
                break


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine that goes on only while its process runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], process: SimulatedProcess) -> None:
        self.coroutine, self.process = coroutine, process
        #: What it was to raise during a pause.
        self._error: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.process.name}: {self.coroutine!r}"

    def __await__(self) -> Any:
        raise NotImplementedError  # tasks send

    def send(self, value: Any) -> Any:
        if self._error:
            return self.throw(*self._error)
        if self.process.runs:
            return self.coroutine.send(value)
        return self._stop()

    def throw(self, *error: Any) -> Any:
        self._error = ()
        if self.process.runs:
            return self.coroutine.throw(*error)
        if self.process.state == "paused":
            self._error = error
        return self._stop()

    def _stop(self) -> Any:
        if self.process.state == "paused":
            return next(_added_to(self.process._resumed, self.process.loop).__await__())
        if self not in self.process._stopped:
            self.process._stopped.append(self)
        if self.process.state == "dead":
            raise asyncio.CancelledError
        return next(self.process.loop.create_future().__await__())  # never done

    def close(self) -> None:
        if self.process.runs:
            self.coroutine.close()


def _added_to(waiting: list[asyncio.Future[None]], loop: VirtualLoop) -> asyncio.Future[None]:
    future: asyncio.Future[None] = loop.create_future()
    waiting.append(future)
    return future


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    context = options.get("context")
    process = _process.get() if context is None else context.get(_process)
    if process is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_Guarded(coroutine, process), loop=loop, **options)
    process._tasks.add(task)
    return task


def _guard(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a timer's callback that the dead do not call, and the paused call later."""
    process = _process.get()
    if process is None:
        return callback

    def call(*args: Any) -> Any:
        if process.runs:
            return callback(*args)
        if process.state == "paused":
            process._late.append((contextvars.copy_context(), lambda: call(*args)))
        return None

    return call


def _owned(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes its object a connection of the current process."""

    def owning(comm: Any, *args: Any, **options: Any) -> Any:
        process = _process.get()
        if process is not None:
            process._comms.add(comm)
        return method(comm, *args, **options)

    return owning


def _connects(connect: Callable[..., Any]) -> Callable[..., Any]:
    """Return a connector's method that needs the network of the current process."""

    async def connecting(connector: Any, *args: Any, **options: Any) -> Any:
        process = _process.get()
        if process is not None:
            await process.connects()
        return await connect(connector, *args, **options)

    return connecting


def _carries(carry: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """Return a connection's method that needs the network of the process which has the connection."""

    async def carrying(comm: Any, *args: Any, **options: Any) -> Any:
        process = _process.get()
        if before and process is not None:
            await process.carries()
        carried = await carry(comm, *args, **options)
        if not before and process is not None:
            await process.carries()
        return carried

    return carrying


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
    loop.set_task_factory(_make_task)
    loop.guard = _guard
    with (
        mock.patch.object(TCP, "__init__", _owned(TCP.__init__)),
        mock.patch.object(BaseTCPListener, "start", _owned(BaseTCPListener.start)),
        mock.patch.object(BaseTCPListener, "_handle_stream", _accepts(BaseTCPListener._handle_stream)),
        mock.patch.object(BaseTCPConnector, "connect", _connects(BaseTCPConnector.connect)),
        mock.patch.object(TCP, "read", _carries(TCP.read, before=False)),
        mock.patch.object(TCP, "write", _carries(TCP.write, before=True)),
    ):
        yield
