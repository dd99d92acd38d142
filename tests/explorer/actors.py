"""Who uses a cluster: notebooks, the web UI, and commands, each a process of its own."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from types import MappingProxyType
from typing import Any

import click
from clusters import found_by_dask_ctl, until_written
from distributed import Client, KilledWorker
from distributed.core import Status
from simulated.faults import UnexpectedError
from simulated.process import SimulatedProcess
from simulated.world import World

from dask_cml import CMLCluster, CMLError
from dask_cml.cli import change
from dask_cml.observers import EXPECTED
from dask_cml.records import operations, store
from dask_cml.serve.clusters import ProjectClusters

from .schedule import NAME, Crash

#: Options of all clusters.
OPTIONS = {
    "name": NAME,
    "orphan_timeout": "30s",
    "scheduler_timeout": "30s",
    "pending_timeout": "60s",
    "worker_timeout": "30s",
}
_ADAPT = {"interval": "1s", "wait_count": 2}


class Actor:
    """One process, and what it has under way."""

    def __init__(self, world: World, name: str, crash: Crash | None = None) -> None:
        self.world, self.name = world, name
        session = "".join(character for character in name if character.isalnum()).lower()
        self.process: SimulatedProcess = world.process(name, {"CDSW_ENGINE_ID": f"{session:x<16}"[:16]})
        #: What it does.
        self.under_way: list[asyncio.Task[Any]] = []
        #: What a user saw as an error.
        self.errors: list[str] = []
        if crash is not None:
            setattr(self.process, f"at_{crash.what}", self._die_at(crash.after))

    def _die_at(self, after: int) -> Callable[[int], None]:
        return lambda n: self.process.kill() if n == after else None

    @property
    def runs(self) -> bool:
        return self.process.runs

    @property
    def lives(self) -> bool:
        """Whether it runs, or goes on after a pause."""
        return self.process.state in ("runs", "paused")

    @property
    def session(self) -> str:
        return self.process.env["CDSW_ENGINE_ID"]

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.process.start(self._as_user(coroutine))
        self.under_way.append(task)
        return task

    def ask(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Ask for something, as a user does who sees errors."""
        try:
            self.process.call(function, *args, **options)
        except (CMLError, ValueError) as error:  # closed, no such group, …
            self.errors.append(f"{type(error).__name__}: {error}")

    async def _as_user(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await coroutine
        except (*EXPECTED, UnexpectedError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def kill(self) -> None:
        self.process.kill()


class User(Actor):
    """A process with a cluster: what notebook and page have in common."""

    @property
    def cluster(self) -> CMLCluster | None:
        raise NotImplementedError

    @property
    def open(self) -> CMLCluster | None:
        if not self.runs or self.cluster is None or self.cluster.status != Status.running:
            return None
        return self.cluster

    def scale(self, cluster: CMLCluster, n: int, group: str) -> None:
        self.start(self._later(cluster.scale, n, worker_group=group))

    def adapt(self, cluster: CMLCluster, minimum: int, maximum: int, group: str) -> None:
        limits = {"minimum": minimum, "maximum": maximum, "worker_group": group}
        self.ask(cluster.adapt, **limits, **_ADAPT)
        self.start(self._later(until_written, cluster))

    def add_group(self, cluster: CMLCluster, name: str, n: int) -> None:
        self.start(self._later(cluster.add_worker_group, name, n_workers=n))

    def delete_group(self, cluster: CMLCluster, name: str) -> None:
        self.start(self._later(cluster.delete_worker_group, name))

    def renew_group(self, cluster: CMLCluster, name: str, n: int) -> None:
        self.start(self._renew_group(cluster, name, n))

    async def _renew_group(self, cluster: CMLCluster, name: str, n: int) -> None:
        if name in cluster.worker_groups:
            await cluster.delete_worker_group(name)
        await cluster.add_worker_group(name, n_workers=n)

    def add_by_hand(self, cluster: CMLCluster, memory: float | None) -> None:
        """Add a worker to the spec, perhaps one of another size."""
        self.process.call(self._add_by_hand, cluster, memory)
        self.start(self._later(cluster._correct_state))

    def _add_by_hand(self, cluster: CMLCluster, memory: float | None) -> None:
        [(name, spec)] = cluster.new_worker_spec().items()
        if memory is not None:
            spec = {**spec, "options": {**spec["options"], "memory": memory}}
        cluster.worker_spec.update({name: spec})

    def remove(self, cluster: CMLCluster, i: int) -> None:
        names = [*cluster.worker_spec]
        if names:
            self.start(self._later(cluster.scale_down, [names[i % len(names)]]))

    async def _later(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        await function(*args, **options)


class Notebook(User):
    """A kernel with a cluster, and a client."""

    def __init__(self, world: World, name: str, crash: Crash | None = None) -> None:
        super().__init__(world, name, crash)
        self._cluster: CMLCluster | None = None
        #: Whether its user has left or closed its cluster.
        self.ended = False
        #: Whether it has seen a cluster run.
        self.started = False
        self.client: Client | None = None
        #: What it computes: each future, and the result that it is to have.
        self.futures: list[tuple[Any, int]] = []
        #: Results that are wrong.
        self.wrong: list[str] = []

    @property
    def cluster(self) -> CMLCluster | None:
        return self._cluster

    @property
    def is_busy(self) -> bool:
        if not self.lives:
            return False
        if any(not task.done() for task in self.under_way):
            return True
        over = (Status.closed, Status.failed)
        return self._cluster is not None and self._cluster.status not in over

    def create(self, cls: type[CMLCluster] = CMLCluster, **options: Any) -> None:
        self.start(self._make(lambda: cls(**OPTIONS, **options, **_QUIET)))

    def connect(self) -> asyncio.Task[Any]:
        return self.start(self._make(lambda: CMLCluster.from_name(NAME, **_QUIET)))

    async def _make(self, make: Callable[[], CMLCluster]) -> None:
        self.ended = self.started = False
        self._cluster = make()
        await self._cluster
        self.started = True
        try:
            self.client = client = await Client(self._cluster, asynchronous=True)
        except RuntimeError as error:  # Dask's, if the cluster is closed meanwhile
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        # Otherwise, Dask tries to close the client of a process that was killed.
        self.process.on_end.append(lambda: setattr(client, "status", "closed"))

    def submit(self, cluster: CMLCluster, n: int, seconds: float) -> None:
        if self.client is not None and self.client.status == "running":
            numbers = range(len(self.futures), len(self.futures) + n)
            futures = self.process.call(self.client.map, _work, [seconds] * n, numbers, pure=False)
            self.futures += zip(futures, numbers, strict=True)

    def forget(self, cluster: CMLCluster) -> None:
        self.process.call(self.futures.clear)

    def retire(self, cluster: CMLCluster, i: int) -> None:
        workers = [*cluster.scheduler_info["workers"]]
        if workers and self.client is not None and self.client.status == "running":
            chosen = [workers[i % len(workers)]]
            self.start(self._later(self.client.retire_workers, workers=chosen, close_workers=True))

    def leave(self, cluster: CMLCluster) -> asyncio.Task[Any]:
        self.ended = True
        return self.start(self._end(cluster.leave))

    def shut_down(self, cluster: CMLCluster) -> asyncio.Task[Any]:
        self.ended = True
        return self.start(self._end(cluster.shutdown))

    async def _end(self, end: Callable[[], Any]) -> None:
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._check_results(), 10.0)
            with contextlib.suppress(RuntimeError):  # Dask's pool of connections may be closed before
                await client.close(timeout=1)
        await end()

    async def _check_results(self) -> None:
        """Compare the results that have been computed with those expected. Some may be lost meanwhile."""
        for future, expected in [*self.futures]:
            if future.status != "finished":
                continue
            with contextlib.suppress(CancelledError, OSError, KilledWorker, KeyError):
                result = await future.result()
                if result != expected:
                    self.wrong.append(f"{result} instead of {expected}")


_QUIET = {"asynchronous": True, "quiet": True, "silence_logs": False}


class NamedCluster(CMLCluster):
    """A cluster whose class names the workers."""

    def _new_worker_name(self, worker_number: int) -> str:
        return f"{self.options.name}-w{worker_number}"


async def connect_in_a_task(process: SimulatedProcess, kind: str) -> None:
    """Connect to the cluster in one of its own sessions, as a task does that never closes anything."""
    try:
        if kind == "client":
            name = process.env.get("DASK_CLIENT_NAME")  # which Dask reads when it is imported
            client = await Client(f"cml://{NAME}", name=name, asynchronous=True, set_as_default=False)
            process.on_end.append(lambda: setattr(client, "status", "closed"))
            return
        cluster = CMLCluster.from_name(NAME, **_QUIET)
        await cluster
        if kind == "cluster that scales":
            await cluster.scale(1)
    except EXPECTED:
        return
    await asyncio.Event().wait()


def _work(seconds: float, number: int) -> int:
    time.sleep(seconds)
    return number


class Page(User):
    """The web UI: shows all clusters, and keeps those that are to live without their creator."""

    def __init__(self, world: World, name: str, crash: Crash | None = None) -> None:
        super().__init__(world, name, crash)
        self.observers = self.process.call(ProjectClusters)
        self.process.call(self.observers.start)

    @property
    def cluster(self) -> CMLCluster | None:
        found = [kept.cluster for kept in self.observers.kept.values() if kept.record.name == NAME]
        return found[0] if found else None

    def delete(self) -> asyncio.Task[Any]:
        return self.start(self.observers.delete(NAME))

    def close(self) -> asyncio.Task[Any]:
        return self.start(self.observers.close())


class Command(Actor):
    """A command of ``dask cml``, which ends by itself, or by Ctrl-C."""

    #: The clusters that ``dask cml prune`` names instead of deleting them, and why.
    passed_over: Mapping[str, str] = MappingProxyType({})

    def begin(self, what: str, *arguments: Any) -> asyncio.Task[Any]:
        return self.start(getattr(self, f"_{what.replace(' ', '_')}")(*arguments))

    async def _scale(self, n: int, group: str) -> None:
        await _program_of(change.scale)(NAME, n, group, 120.0)

    async def _adapt(self, minimum: int, maximum: int, group: str) -> None:
        await _program_of(change.adapt)(NAME, minimum, maximum, group)

    async def _monitor(self, times: int, seconds: float) -> None:
        """Connect every ten seconds, as a script does that watches the cluster."""
        for _ in range(times):
            async with CMLCluster.from_name(NAME, **_QUIET):
                await asyncio.sleep(seconds)
            await asyncio.sleep(10.0 - seconds)

    async def _ctl_list(self, times: int, seconds: float) -> None:
        """List the clusters every ten seconds, as dask-ctl does."""
        for _ in range(times):
            for cluster in await found_by_dask_ctl():
                async with cluster:
                    await asyncio.sleep(seconds)
            await asyncio.sleep(10.0 - seconds)

    async def _add(self, name: str, n: int) -> None:
        await _program_of(change.add_group)(NAME, name, 120.0, n_workers=str(n))

    async def _delete_group(self, name: str) -> None:
        await _program_of(change.delete_group)(NAME, name)

    async def _delete(self) -> None:
        results = await operations.end_all([store.read(NAME)])
        for error in filter(None, results.values()):
            raise error

    async def _prune(self) -> None:
        results, passed_over = await operations.prune()
        for error in filter(None, results.values()):
            raise error
        self.passed_over = passed_over

    async def _list(self) -> None:
        await operations.describe(store.records())


def _program_of(command: click.Command) -> Callable[..., Coroutine[Any, Any, None]]:
    program: Callable[..., Coroutine[Any, Any, None]] = command.callback  # type: ignore[assignment]
    return program
