"""A world for dask-cml: one platform, one clock, and processes that can be killed at any moment."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from datetime import datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
from distributed import Client, SpecCluster
from distributed.core import Status
from distributed.threadpoolexecutor import ThreadPoolExecutor

from dask_cml import cancellation, checks, cluster, observers, private_files, wrapper
from dask_cml.core import ending
from dask_cml.layout import HISTORY_FOLDER
from dask_cml.records import operations, store
from dask_cml.scheduler import plugin, resident
from dask_cml.serve import clusters
from dask_cml.sessions import here, workers_api
from dask_cml.sessions import process as sessions

from .clock import Thread, VirtualLoop, virtual_time
from .faults import Luck
from .files import Files, ProcessTable
from .platform import SimulatedPlatform
from .process import SimulatedProcess, current, processes_in
from .running import RunningSessions

#: What looks often only costs time, and no test depends on it.
_SETTINGS = {
    "distributed.admin.tick.interval": "10s",
    "distributed.admin.tick.limit": "1000s",
    "distributed.admin.system-monitor.interval": "60s",
    "distributed.admin.system-monitor.disk": False,
    "distributed.admin.system-monitor.host-cpu": False,
    "distributed.scheduler.allowed-failures": 1000,
    "distributed.scheduler.work-stealing-interval": "2s",
    "distributed.worker.profile.enabled": False,
}


_shut_down = ThreadPoolExecutor.shutdown


class _Platform(SimulatedPlatform):
    """The platform as processes see it: each has a session of its own, and may be killed in a call."""

    def caller(self) -> str:
        process = current()
        return super().caller() if process is None else process.env.get("CDSW_ENGINE_ID", "")

    def carried_out(self) -> None:
        if (process := current()) is not None:
            process.called()

    def _call(self, function: str, arguments: Any, action: Any, key: str = "") -> Any:
        process = current()
        if process is None:
            return super()._call(function, arguments, action, key)
        process.check()
        try:
            return super()._call(function, arguments, action, key)
        finally:
            process.check()


class World:
    """What simulated processes share. Make it by :func:`world`."""

    def __init__(self, loop: VirtualLoop, directory: Path, luck: Luck, named: bool = True) -> None:
        self.loop, self.directory, self.luck = loop, directory, luck
        self.processes: list[SimulatedProcess] = []
        self.files = Files(loop)
        self.platform = _Platform(named=named, luck=luck)
        self.sessions = RunningSessions(self.platform, self.process, luck)
        self.platform.runner = self.sessions

    def process(self, name: str, env: Mapping[str, str] | None = None) -> SimulatedProcess:
        process = SimulatedProcess(name, self.loop, env)
        self.processes.append(process)
        return process

    def process_of(self, name: str) -> SimulatedProcess:
        """Return the process of the session that runs under this name, such as ``lab-scheduler``."""
        return self.sessions.processes[self.platform.running[name]]

    def wait(self, futures: Collection[Future[Any]], timeout: float | None = None) -> None:
        """Block until calls of the platform return. The dead wait no more, in whose tasks it may begin."""
        if (process := current()) is not None:
            process.check()
        self.loop.wait(futures, timeout)

    async def run_resident(self, cluster: str, _: Path, closes: asyncio.Event) -> int:
        """Run the process that keeps a cluster in the session of the present process, until it ends."""
        scheduler = current()
        assert scheduler is not None
        process = self.process(f"resident of {cluster}", scheduler.env)
        scheduler.on_end.append(process.kill)
        keeping = process.start(resident.keep(cluster, closes))
        try:
            await asyncio.wait([keeping])
        finally:
            process.kill()
        return int(keeping.cancelled() or keeping.exception() is not None)

    @property
    def clusters(self) -> list[str]:
        """The names of the folders of clusters, also of what removed them in part."""
        return sorted({path.name for path in self.directory.iterdir()} - {HISTORY_FOLDER})


@contextlib.contextmanager
def world(directory: Path, *, luck: Luck | None = None, named: bool = True) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a coroutine function with a world."""
    folders = {"cml.state-directory": str(directory), "temporary-directory": f"{directory}.tmp"}
    with virtual_time() as loop, dask.config.set({**_SETTINGS, **folders}):
        made: list[World] = []
        before = {*Client._instances, *SpecCluster._instances}

        def run(play: Callable[[World], Coroutine[Any, Any, Any]]) -> Any:
            async def main() -> Any:
                it = World(loop, directory, luck or Luck(0), named)
                made.append(it)
                with _patched(it):
                    try:
                        return await play(it)
                    finally:
                        await _end(it)

            with processes_in(loop):
                return loop.run_until_complete(main())

        try:
            yield run
        finally:
            loop.close()
            asyncio.set_event_loop(loop)  # what asks for one would make another, and leave it open
            for it in made:
                for process in it.processes:
                    process.forget()
            asyncio.set_event_loop(None)
            # At exit, or when they are collected, Dask would close what killed processes have left.
            for left in {*Client._instances, *SpecCluster._instances} - before:
                left.status = Status.closed if isinstance(left, SpecCluster) else "closed"
            SpecCluster._instances.clear()


async def _end(it: World) -> None:
    it.platform.heal()
    await it.sessions.close()
    for process in it.processes:
        process.kill()
    await asyncio.sleep(1.0)


def _patched(it: World) -> contextlib.ExitStack:
    """Let the package see this world where it would see the machine."""
    files, table, names = it.files, ProcessTable(it.processes), itertools.count()
    patches: list[tuple[Any, str, Any]] = [
        *((module, "os", files) for module in (here, plugin, private_files, ending)),
        *((module, "os", files) for module in (store, wrapper)),
        (store, "shutil", files.shutil),
        (store, "psutil", table),
        # The luck of sessions depends on their names.
        (checks, "secrets", SimpleNamespace(token_hex=lambda _: f"{next(names):08x}")),
        *(
            (module, "load_platform", lambda _: it.platform)
            for module in (operations, store, cluster, clusters)
        ),
        (ThreadPoolExecutor, "shutdown", _shutdown),
        (cancellation, "threading", _with(threading, Thread=Thread)),
        *((module, "wait", it.wait) for module in (cancellation, workers_api)),
        (resident, "run", it.run_resident),
        *((module, "datetime", _Datetime) for module in (store, sessions)),
        (cluster, "end_at_exit", lambda cluster: _clusters().append(cluster)),
        (ending, "no_longer_end_at_exit", _forget),
        *((module, "unclosed", _clusters) for module in (ending, observers)),
    ]
    stack = contextlib.ExitStack()
    for module, name, value in patches:
        stack.enter_context(mock.patch.object(module, name, value))
    return stack


def _shutdown(executor: ThreadPoolExecutor, wait: bool = True, timeout: float | None = None) -> None:
    """Do not join threads, which may wait for a clock that stands still meanwhile."""
    _shut_down(executor, wait=False)


def _clusters() -> list[Any]:
    process = current()
    return [] if process is None else process.clusters


def _forget(cluster: Any) -> None:
    if any(other is cluster for other in _clusters()):
        _clusters().remove(cluster)


def _with(module: Any, **changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(module), **changed})


class _Datetime(datetime):
    """The class, by the clock."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(time.time(), tz)
