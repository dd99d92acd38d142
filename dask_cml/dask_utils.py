"""The functions of the Dask applied-ML prototype. Code that uses it runs after changing the import.

The functions launch a cluster, first its scheduler and then its workers. The caller must stop the sessions.
For new code, use :class:`~dask_cml.CMLCluster`, which launches all sessions at once, scales, replaces lost
workers, encrypts, and stops its sessions itself.

**These clusters are open**, like the prototype's. Anyone who reaches the scheduler can run code as you. They
have no keys, because the functions cannot return them. ``cml.security`` has no effect.

Apart from the functions' parameters, the clusters use Dask's configuration like a CMLCluster
(``cml.platform``, ``cml.env``, ``cml.worker-args`` and so on). Each function that launches sessions writes
their output to a new folder in ``cml.state-directory``. The folder remains, unless the start fails.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from distributed.utils import LoopRunner

from dask_cml.cancellation import gather_or_cancel
from dask_cml.checks import gibibytes, integer, message, positive
from dask_cml.errors import CallFailed, CMLError, SessionFailed
from dask_cml.layout import LOGS_FOLDER, STARTED_FOLDER
from dask_cml.options import Options, state_directory
from dask_cml.private_files import make_folder
from dask_cml.protocol import NO_ANSWER, ask_with_keys
from dask_cml.sessions.here import dashboard_link
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLProcess, CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI, load_platform

__all__ = [
    "get_dashboard_url",
    "get_scheduler_url",
    "run_dask_cluster",
    "run_dask_workers",
    "run_scheduler",
]

_ANSWER_TIMEOUT = 5
#: The entry of a scheduler's dict that this module adds to the platform's.
_ADDRESS = "scheduler_address"
T = TypeVar("T")


def run_dask_cluster(
    num_workers: int,
    cpu: float,
    memory: float,
    nvidia_gpu: int = 0,
    dashboard_port: int | str | None = None,
) -> dict[str, Any]:
    """Launch a scheduler and workers in sessions of their own, and wait until all are connected.

    Parameters
    ----------
    num_workers : int
        Number of worker sessions.
    cpu : float
        Virtual CPUs of a worker session.
    memory : float
        Memory of a worker session, in GiB.
    nvidia_gpu : int
        Number of GPUs of a worker session. Default 0.
    dashboard_port : int or str, optional
        Port of the dashboard on the scheduler's loopback. Default: ``CDSW_READONLY_PORT`` of the calling
        session or, outside of sessions, the port of the scheduler's session.

    Returns
    -------
    dict
        ``"scheduler"`` and ``"workers"``: lists of the platform's information on the sessions, with ``"id"``
        and ``"app_url"``; ``"scheduler_address"``; ``"dashboard_address"``.

    Raises
    ------
    RuntimeError
        If a session is refused, fails, or exceeds ``cml.pending-timeout``, ``cml.scheduler-timeout`` or
        ``cml.worker-timeout``. All sessions are stopped then.
    TypeError, ValueError
        If an argument is invalid. Nothing is launched then.

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

    async def start(api: WorkersAPI, place: Place) -> dict[str, Any]:
        scheduler = CMLScheduler(api, options, place, dashboard_port=port)
        launched = await _start_scheduler(scheduler)
        url = get_scheduler_url(launched)
        return {
            "scheduler": launched,
            "workers": await _start_workers(api, options, place, url, num_workers, scheduler),
            "scheduler_address": url,
            "dashboard_address": get_dashboard_url(launched),
        }

    return _launching(options, start)


def run_scheduler(
    dashboard_port: int | str | None, num_workers: int = 1, cpu: float = 1, memory: float = 2
) -> list[dict[str, Any]]:
    """Launch a scheduler in a session of its own, and wait until it answers.

    Parameters
    ----------
    dashboard_port : int, str or None
        Port of the dashboard on the scheduler's loopback. None: as in :func:`run_dask_cluster`.
    num_workers : int
        Number of sessions. Only 1 is valid, because a cluster has one scheduler.
    cpu : float
        Virtual CPUs of the session. Default 1.
    memory : float
        Memory of the session, in GiB. Default 2.

    Returns
    -------
    list of dict
        The platform's information on the session.

    Raises
    ------
    RuntimeError
        If the session is refused, fails, or exceeds ``cml.pending-timeout`` (15 minutes) or
        ``cml.scheduler-timeout`` (90 s). The session is stopped then.
    TypeError, ValueError
        If an argument is invalid. Nothing is launched then.

    See Also
    --------
    run_dask_workers : With an example.
    """
    if integer("num_workers", num_workers, 1) != 1:
        raise ValueError(message("num_workers", num_workers, "1, because a cluster has one scheduler"))
    port = _port(dashboard_port)
    options = _options(scheduler_cpu=positive("cpu", cpu), scheduler_memory=gibibytes("memory", memory))

    async def start(api: WorkersAPI, place: Place) -> list[dict[str, Any]]:
        return await _start_scheduler(CMLScheduler(api, options, place, dashboard_port=port))

    return _launching(options, start)


def get_scheduler_url(dask_scheduler: Sequence[Mapping[str, Any]]) -> str:
    """Return the address of a scheduler, for workers and clients.

    Parameters
    ----------
    dask_scheduler : list of dict
        The result of :func:`run_scheduler`.

    See Also
    --------
    run_dask_workers : With an example.
    """
    return dask_scheduler[0][_ADDRESS]


def get_dashboard_url(dask_scheduler: Sequence[Mapping[str, Any]]) -> str:
    """Return the URL of a scheduler's dashboard, for users who are logged in to the platform.

    Return an empty text if the platform gives the session no URL.

    Parameters
    ----------
    dask_scheduler : list of dict
        The result of :func:`run_scheduler`.

    Examples
    --------
    >>> from dask_cml.dask_utils import get_dashboard_url
    >>> get_dashboard_url([{"app_url": "https://abcdefgh12345678.example.com/"}])
    'https://abcdefgh12345678.example.com/status'
    """
    return dashboard_link(dask_scheduler[0].get("app_url"))


def run_dask_workers(
    scheduler_url: str, num_workers: int, cpu: float, memory: float, nvidia_gpu: int = 0
) -> list[dict[str, Any]]:
    """Launch workers in sessions of their own, and wait until they are connected.

    Parameters
    ----------
    scheduler_url : str
        The scheduler's address.
    num_workers : int
        Number of worker sessions.
    cpu : float
        Virtual CPUs of a worker session.
    memory : float
        Memory of a worker session, in GiB.
    nvidia_gpu : int
        Number of GPUs of a worker session. Default 0.

    Returns
    -------
    list of dict
        The platform's information on the sessions.

    Raises
    ------
    RuntimeError
        If a session is refused, fails, or exceeds ``cml.pending-timeout`` (15 minutes) or
        ``cml.worker-timeout`` (10 minutes). All sessions of this call are stopped then.
    TypeError, ValueError
        If an argument is invalid. Nothing is launched then.

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

    async def start(api: WorkersAPI, place: Place) -> list[dict[str, Any]]:
        return await _start_workers(api, options, place, scheduler_url, num_workers)

    return _launching(options, start)


def _options(**arguments: Any) -> Options:
    # A new name, even if a name is configured: the folder must not be another cluster's. The caller stops
    # the cluster, and passes only its address to clients.
    name = f"dask-{secrets.token_hex(4)}"
    return Options.read(name=name, shutdown_on_close=False, security=False, **arguments).inheriting()


def _port(dashboard_port: int | str | None) -> int | None:
    if dashboard_port is None:
        dashboard_port = os.environ.get("CDSW_READONLY_PORT") or None
    if isinstance(dashboard_port, str) and dashboard_port.isdecimal():
        dashboard_port = int(dashboard_port)
    return None if dashboard_port is None else integer("dashboard_port", dashboard_port, 1)


def _launching(options: Options, start: Callable[[WorkersAPI, Place], Awaitable[T]]) -> T:
    """Launch sessions in a new folder. Stop them after an error only."""
    api, folder = WorkersAPI(load_platform(options.platform)), state_directory() / options.name
    try:
        for path in (folder.parent, folder, folder / STARTED_FOLDER, folder / LOGS_FOLDER):
            make_folder(path, "cml.state-directory")
        # In a thread, because the caller, such as a notebook, may be in an event loop itself.
        result = LoopRunner().run_sync(start, api, Place(folder))
    except BaseException:  # also Ctrl-C
        api.end()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    api.forget(*api.live)
    api.end()
    return result


async def _start_scheduler(scheduler: CMLScheduler) -> list[dict[str, Any]]:
    await scheduler.start()
    return [{**scheduler.info, _ADDRESS: scheduler.address}]


async def _start_workers(
    api: WorkersAPI, options: Options, place: Place, url: str, n: int, *others: CMLProcess
) -> list[dict[str, Any]]:
    """Launch workers, and wait until they are connected. The other sessions must not end meanwhile."""
    names = [f"{options.name}-{i}" for i in range(n)]
    workers = [CMLWorker(url, name, api=api, options=options, place=place) for name in names]
    await gather_or_cancel(*[worker.start() for worker in workers])
    missing = {name: worker for worker in workers for name in worker.dask_names}
    while missing:
        listing = None
        with contextlib.suppress(CallFailed):  # which proves nothing
            listing = await api.sessions()
        for process in (*others, *workers):
            if listing is not None and process.update(listing):
                raise SessionFailed(await process.failure("ended while the workers started"))
        for worker in missing.values():
            failure = worker.late("connect", options.worker_timeout)
            if failure is not None:
                raise CMLError(await worker.failure(failure))
        with contextlib.suppress(*NO_ANSWER, CMLError):
            identity = await ask_with_keys(url, None, "identity", _ANSWER_TIMEOUT)
            for worker in identity["workers"].values():
                missing.pop(str(worker["name"]), None)
    return [dict(worker.info) for worker in workers]
