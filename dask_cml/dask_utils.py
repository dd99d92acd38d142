"""The functions of the Dask applied-ML prototype: change the import, and code written for it runs.

They launch a cluster, first its scheduler and then its workers, and leave its end to the caller. For new code
take :class:`~dask_cml.CMLCluster`: it launches all sessions at the same moment, scales, replaces lost
workers, encrypts, and stops its sessions itself.

**These clusters are open**, as the prototype's are. They have no keys, because what the functions return has
no place for them: whoever reaches the scheduler can run code as you do. ``cml.security`` has no effect.

Beyond their parameters, Dask's configuration holds as for a CMLCluster (``cml.platform``, ``cml.env``,
``cml.worker-args`` and so on). Each function that launches sessions writes their output to a new folder in
``cml.state-directory``; it stays, but for a start that fails.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from distributed.comm.addressing import get_address_host_port
from distributed.core import rpc
from distributed.scheduler import Scheduler

from dask_cml.aio import cancel
from dask_cml.checks import gibibytes, integer, message, positive
from dask_cml.errors import CMLError, SessionFailed
from dask_cml.options import Options, state_directory
from dask_cml.private import make_folder
from dask_cml.sessions.process import CMLProcess, CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import SessionInfo, WorkersAPI, has_ended, ip_address, load_platform

__all__ = [
    "get_dashboard_url",
    "get_scheduler_url",
    "run_dask_cluster",
    "run_dask_workers",
    "run_scheduler",
]

_LOOK_INTERVAL = 0.2
_ANSWER_TIMEOUT = 5
#: The entry of a scheduler's dict that the platform does not give.
_PORT = "scheduler_port"
T = TypeVar("T")


def run_dask_cluster(
    num_workers: int,
    cpu: float,
    memory: float,
    nvidia_gpu: int = 0,
    dashboard_port: int | str | None = None,
) -> dict[str, Any]:
    """Launch a scheduler and workers, each in a session of its own, and wait until all are there.

    Parameters
    ----------
    num_workers : int
        Worker sessions.
    cpu : float
        Virtual CPUs of each of them.
    memory : float
        Memory of each of them, in GiB.
    nvidia_gpu : int
        GPUs of each of them.
    dashboard_port : int or str, optional
        Where the dashboard listens on the scheduler's loopback. Default: ``CDSW_READONLY_PORT`` of the
        calling session; outside of sessions, the port of the scheduler's session.

    Returns
    -------
    dict
        ``"scheduler"`` and ``"workers"``: lists of what the platform told of each session, with its ``"id"``
        and ``"app_url"``; ``"scheduler_address"``; ``"dashboard_address"``.

    Raises
    ------
    RuntimeError
        If a session is refused, fails or is late (``cml.pending-timeout``, ``cml.scheduler-timeout``,
        ``cml.worker-timeout``). No session is left then.
    TypeError, ValueError
        For an argument that is not allowed, before anything is launched.

    Examples
    --------
    On a laptop, :func:`dask_cml.local.install` makes ``cml.workers_v1`` importable.

    >>> from cml import workers_v1
    >>> from dask.distributed import Client
    >>> from dask_cml.dask_utils import run_dask_cluster
    >>> cluster = run_dask_cluster(num_workers=2, cpu=1, memory=1)
    >>> with Client(cluster["scheduler_address"]) as client:
    ...     client.submit(sum, [1, 2]).result()
    3
    >>> ids = [session["id"] for session in cluster["scheduler"] + cluster["workers"]]
    >>> answers = workers_v1.stop_workers(*ids)
    """
    num_workers = integer("num_workers", num_workers, 0)
    port = _port(dashboard_port)
    options = _options(cpu=cpu, memory=memory, nvidia_gpu=nvidia_gpu, scheduler_cpu=1, scheduler_memory=2)

    async def start() -> dict[str, Any]:
        async with _launching(options) as (api, folder):
            scheduler = await _start_scheduler(api, options, folder, port)
            launched = [_described(scheduler)]
            url = await _scheduler_url(api, launched[0], options.scheduler_timeout)
            workers = await _start_workers(api, options, folder, url, num_workers, scheduler)
            return {
                "scheduler": launched,
                "workers": workers,
                "scheduler_address": url,
                "dashboard_address": get_dashboard_url(launched),
            }

    return _run(start())


def run_scheduler(
    dashboard_port: int | str | None, num_workers: int = 1, cpu: float = 1, memory: float = 2
) -> list[dict[str, Any]]:
    """Launch a scheduler in a session of its own, and wait until it answers.

    Parameters
    ----------
    dashboard_port : int, str or None
        Where the dashboard listens on the scheduler's loopback. None: as for :func:`run_dask_cluster`.
    num_workers : int
        Sessions. A cluster has one scheduler, so nothing but 1 is allowed.
    cpu : float
        Virtual CPUs of the session.
    memory : float
        Memory of the session, in GiB.

    Returns
    -------
    list of dict
        What the platform told of the session.

    Raises
    ------
    RuntimeError
        If the session is refused or fails, waits for room longer than ``cml.pending-timeout``, 15 minutes, or
        runs and its scheduler does not answer in time (``cml.scheduler-timeout``, 90 s). No session is left
        then.
    TypeError, ValueError
        For an argument that is not allowed, before anything is launched.

    See Also
    --------
    run_dask_workers : Has an example.
    """
    if integer("num_workers", num_workers, 1) != 1:
        raise ValueError(message("num_workers", num_workers, "1, because a cluster has 1 scheduler"))
    port = _port(dashboard_port)
    options = _options(scheduler_cpu=positive("cpu", cpu), scheduler_memory=gibibytes("memory", memory))

    async def start() -> list[dict[str, Any]]:
        async with _launching(options) as (api, folder):
            return [_described(await _start_scheduler(api, options, folder, port))]

    return _run(start())


def get_scheduler_url(dask_scheduler: Sequence[Mapping[str, Any]]) -> str:
    """Return the address of a scheduler, for workers and clients.

    Parameters
    ----------
    dask_scheduler : list of dict
        What :func:`run_scheduler` returned.

    Raises
    ------
    RuntimeError
        If the platform tells no address of the session, which it must have launched for this very session.

    See Also
    --------
    run_dask_workers : Has an example.
    """
    options = _options()

    async def find() -> str:
        api = WorkersAPI(load_platform(options.platform))
        try:
            return await _scheduler_url(api, dask_scheduler[0], options.scheduler_timeout)
        finally:
            await api.close()

    return _run(find())


def get_dashboard_url(dask_scheduler: Sequence[Mapping[str, Any]]) -> str:
    """Return where the platform serves a scheduler's dashboard to users who are logged in.

    Parameters
    ----------
    dask_scheduler : list of dict
        What :func:`run_scheduler` returned.

    Examples
    --------
    >>> from dask_cml.dask_utils import get_dashboard_url
    >>> get_dashboard_url([{"app_url": "https://abcdefgh12345678.example.com/"}])
    'https://abcdefgh12345678.example.com/status'
    """
    return f"{dask_scheduler[0]['app_url'].rstrip('/')}/status"


def run_dask_workers(
    scheduler_url: str, num_workers: int, cpu: float, memory: float, nvidia_gpu: int = 0
) -> list[dict[str, Any]]:
    """Launch workers, each in a session of its own, and wait until the scheduler knows them.

    Parameters
    ----------
    scheduler_url : str
        The scheduler's address.
    num_workers : int
        Worker sessions.
    cpu : float
        Virtual CPUs of each of them.
    memory : float
        Memory of each of them, in GiB.
    nvidia_gpu : int
        GPUs of each of them.

    Returns
    -------
    list of dict
        What the platform told of the sessions.

    Raises
    ------
    RuntimeError
        If a session is refused or fails, waits for room longer than ``cml.pending-timeout``, 15 minutes, or
        runs and its worker does not register in time (``cml.worker-timeout``, 10 minutes). No session of this
        call is left then.
    TypeError, ValueError
        For an argument that is not allowed, before anything is launched.

    Examples
    --------
    >>> from cml import workers_v1
    >>> from dask_cml.dask_utils import get_scheduler_url, run_dask_workers, run_scheduler
    >>> scheduler = run_scheduler(dashboard_port=None)
    >>> url = get_scheduler_url(scheduler)
    >>> workers = run_dask_workers(url, num_workers=1, cpu=1, memory=2)
    >>> ids = [session["id"] for session in scheduler + workers]
    >>> answers = workers_v1.stop_workers(*ids)
    """
    num_workers = integer("num_workers", num_workers, 0)
    options = _options(cpu=cpu, memory=memory, nvidia_gpu=nvidia_gpu)

    async def start() -> list[dict[str, Any]]:
        async with _launching(options) as (api, folder):
            return await _start_workers(api, options, folder, scheduler_url, num_workers)

    return _run(start())


def _options(**arguments: Any) -> Options:
    # A name of its own, even if one is configured: its folder must not be another cluster's. Its end is the
    # caller's, and so is its address, which is all that clients get.
    name = f"dask-{secrets.token_hex(4)}"
    return Options.read(name=name, shutdown_on_close=False, security=False, **arguments).inheriting()


def _port(dashboard_port: int | str | None) -> int | None:
    if dashboard_port is None:
        dashboard_port = os.environ.get("CDSW_READONLY_PORT") or None
    if isinstance(dashboard_port, str) and dashboard_port.isdecimal():
        dashboard_port = int(dashboard_port)
    return None if dashboard_port is None else integer("dashboard_port", dashboard_port, 1)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in a thread, because the caller, e.g. a notebook, may be in an event loop itself."""
    interrupted: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def run() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        interrupted.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))
        return await task

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dask-cml") as thread:
        done: concurrent.futures.Future[T] | None = None
        try:
            done = thread.submit(lambda: asyncio.run(run()))
            while not done.done():
                # With a timeout, because another thread may be told of Ctrl-C, and that wakes nobody.
                concurrent.futures.wait([done], timeout=_LOOK_INTERVAL)
            return done.result()
        except BaseException:
            if done is None or not done.done():  # leaving the pool waits until the sessions are stopped
                interrupted.set_result(None)
            raise


@contextlib.asynccontextmanager
async def _launching(options: Options) -> AsyncIterator[tuple[WorkersAPI, Path]]:
    """Give what launches sessions, and stop them after an error; else they are left to the caller."""
    api = WorkersAPI(load_platform(options.platform))
    folder = state_directory() / options.name
    try:
        await asyncio.to_thread(make_folder, folder.parent)
        await asyncio.to_thread(make_folder, folder)
        yield api, folder
    except BaseException:
        await api.close()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    api.forget(*api.live)
    await api.close()


async def _start_scheduler(
    api: WorkersAPI, options: Options, folder: Path, dashboard_port: int | None
) -> CMLScheduler:
    scheduler = CMLScheduler(api, options, folder, dashboard_port=dashboard_port)
    await scheduler.start()
    return scheduler


def _described(scheduler: CMLScheduler) -> dict[str, Any]:
    # Where it listens, which it may have been left to choose.
    _, port = get_address_host_port(str(scheduler.address))
    return {**scheduler.info, _PORT: port}


async def _start_workers(
    api: WorkersAPI, options: Options, folder: Path, url: str, n: int, scheduler: CMLScheduler | None = None
) -> list[dict[str, Any]]:
    workers = [
        CMLWorker(url, f"{options.name}-{i}", api=api, options=options, folder=folder) for i in range(n)
    ]
    launches = [asyncio.ensure_future(worker.start()) for worker in workers]
    try:
        await asyncio.gather(*launches)
    except BaseException:
        await cancel(*launches)
        raise
    missing = {name: worker for worker in workers for name in worker.dask_names}
    arrival = asyncio.create_task(_arrival(url, missing))
    end = asyncio.create_task(_end(api, [*filter(None, [scheduler]), *workers]))
    try:
        while not arrival.done():
            await asyncio.wait({arrival, end}, timeout=_LOOK_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                end.result()
            for worker in [*missing.values()]:
                if what := worker.late("register", options.worker_timeout):
                    raise CMLError(await worker.failure(what))
        arrival.result()
    finally:
        await cancel(arrival, end)
    return [dict(worker.info) for worker in workers]


async def _arrival(url: str, missing: dict[str, CMLWorker]) -> None:
    """Wait until the scheduler knows the workers, and take those that it knows off the missing ones."""
    while missing:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with rpc(url) as scheduler:
                info = await asyncio.wait_for(scheduler.identity(), _ANSWER_TIMEOUT)
            for worker in info["workers"].values():
                missing.pop(worker["name"], None)
        await asyncio.sleep(_LOOK_INTERVAL)


async def _end(api: WorkersAPI, processes: Sequence[CMLProcess]) -> NoReturn:
    """Wait until one of the sessions ends, which is an error."""
    while True:
        listing = await api.sessions()
        for process in processes:
            if process.update(listing):
                raise SessionFailed(await process.failure("ended while the workers started"))


async def _scheduler_url(api: WorkersAPI, session: SessionInfo, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while not (ip := ip_address(session)):
        if has_ended(session) or time.monotonic() > deadline:
            status = session.get("status", "unknown")
            raise CMLError(f"the session {session['id']} has no address, its status is {status}")
        session = {**session, **(await api.sessions()).get(session["id"], {})}
    return f"tcp://{ip}:{session.get(_PORT, Scheduler.default_port)}"
