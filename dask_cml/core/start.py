"""The start of a cluster: the scheduler is launched and, without waiting until it answers, all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from distributed.core import Status
from distributed.utils import import_term
from distributed.worker import Worker

from dask_cml.cancellation import cancel, gather_or_cancel
from dask_cml.checks import message
from dask_cml.core.workers import Workers
from dask_cml.display import StartDisplay
from dask_cml.errors import CMLError
from dask_cml.options import Options
from dask_cml.sessions import api_v2, calls
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.process import CMLScheduler, class_of


def check_worker_class(options: Options) -> None:
    """Refuse a class of Dask workers that cannot be imported. Every session would fail.

    Raises
    ------
    ValueError
        If this process, whose packages the sessions have, cannot import it.
    """
    name = options.worker_class
    if name is None or "PYTHONPATH" in options.env:  # where it may be
        return
    try:
        found, why = import_term(name), "it is no class of Dask workers"
    except (ImportError, AttributeError) as error:
        found, why = None, repr(error)
    except Exception:  # its module may need what only workers have, such as a GPU
        return
    if not (isinstance(found, type) and issubclass(found, Worker)):
        expected = (
            f"the name of a class of Dask workers that can be imported, such as 'my_package.MyWorker' ({why})"
        )
        raise ValueError(message("worker_class", name, expected))


def scheduler_spec(options: Options) -> dict[str, Any]:
    """Return the spec of the scheduler, in SpecCluster's form."""
    return {"cls": CMLScheduler, "options": {"options": options}}


async def start(cluster: Any, *, strict: bool) -> None:
    """Launch the scheduler and, as soon as the platform has accepted it, all wanted workers.

    Return when the scheduler answers. SpecCluster._start (spec.py:304) waits for it before.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    strict : bool
        Whether a worker that is not launched is an error, and the progress is shown. Otherwise it is launched
        later.

    Raises
    ------
    LaunchRefused, SessionFailed, SchedulerTimeout
        As in :class:`dask_cml.CMLCluster`.
    """
    processes: Workers = cluster.processes
    arguments = {"api": cluster.api, "place": cluster.place, **cluster.scheduler_spec["options"]}
    scheduler: CMLScheduler = class_of(cluster.scheduler_spec)(**arguments)
    cluster.scheduler = scheduler
    specs = dict(cluster.worker_spec)  # a user may scale meanwhile
    workers: dict[str, Any] = {}
    if strict:  # before the scheduler's session is launched: a spec or a label may be invalid
        options = cluster.options
        await cluster.api.find_labels(options.scheduler_launch_options, "scheduler_launch_options")
        for group in (options, *options.groups().values()):
            await cluster.api.find_labels(group.launch_options)
        workers = {name: processes.make(name) for name in specs}
    shown = StartDisplay(cluster, specs)
    is_shown = strict and not cluster._quiet
    showing = asyncio.create_task(shown.run()) if is_shown else None
    watching: asyncio.Task[None] | None = None
    asking = calls.start(api_v2.quota_left) if strict else None
    has_started = False
    try:
        # The scheduler's session first: in a queue, workers could take its place.
        async with scheduler.lock:  # whoever awaits the cluster meanwhile must not launch it, too
            try:
                await scheduler.launch()
            except BaseException:
                scheduler.status = Status.failed
                raise
        # Only now: as soon as the workers are launched, the platform counts them as used.
        if asking is not None and asking.done():
            shown.notice = api_v2.shortage(cluster.groups.others()[1:], asking.result()) or ""
        await cluster.sharing.keeper.journal.write(processes.launched)
        watching = asyncio.create_task(_watch(cluster))
        launching = (
            _launch_strictly(cluster, workers) if strict else processes.launch(processes.ready, unasked=True)
        )
        # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
        await gather_or_cancel(_wait_and_join(cluster, scheduler), launching)
        has_started = True
    finally:
        await cancel(watching, showing)
        if not has_started:
            await processes.stop_launching()
        if is_shown:
            await shown.end(has_started)
    if shown.notice:
        cluster._tell(f"Cluster {cluster.options.name}: {shown.notice}")


async def _wait_and_join(cluster: Any, scheduler: CMLScheduler) -> None:
    await scheduler
    await cluster.sharing.join(str(scheduler.address))


async def _watch(cluster: Any) -> None:
    """Update workers from the platform's list, until cancelled."""
    while True:
        try:
            listing = await cluster.api.sessions()
        except CallFailed:  # the scheduler may still connect
            continue
        for worker in cluster.processes.workers():
            worker.update(listing)
        await cluster.sharing.keeper.journal.write(cluster.processes.launched)


async def _launch_strictly(cluster: Any, workers: Mapping[str, Any]) -> None:
    async def launch(name: str) -> None:
        try:
            await cluster.processes.launch_one(name, workers[name])
        except CMLError:
            if name in cluster.worker_spec:
                raise

    await gather_or_cancel(*map(launch, workers))
