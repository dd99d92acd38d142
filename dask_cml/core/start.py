"""The launch of a cluster's scheduler with all wanted workers."""

from __future__ import annotations

import asyncio
from typing import Any

from dask_cml.cancellation import cancel, gather_or_cancel, start_call
from dask_cml.core.workers import Workers
from dask_cml.display import StartDisplay
from dask_cml.errors import CallFailed
from dask_cml.sessions import api_v2
from dask_cml.sessions.process import CMLScheduler, class_of


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
    names = [*cluster.worker_spec]  # a user may scale meanwhile
    if strict:  # before the scheduler's session is launched: a spec or a label may be invalid
        options = cluster.options
        await cluster.api.find_labels(options.scheduler_launch_options, "scheduler_launch_options")
        for group in (options, *options.groups().values()):
            await cluster.api.find_labels(group.launch_options)
        for name in names:
            processes.make(name)
    shown = StartDisplay(cluster, names)
    is_shown = strict and not cluster._quiet
    showing = asyncio.create_task(shown.run()) if is_shown else None
    watching: asyncio.Task[None] | None = None
    asking = start_call(api_v2.quota_left) if strict else None
    has_started = False
    try:
        # The scheduler's session first: in a queue, workers could take its place.
        await scheduler.launch()
        cluster.scheduler = scheduler  # only now: whoever awaits the cluster would launch it, too
        # Only now: as soon as the workers are launched, the platform counts them as used.
        if asking is not None and asking.done():
            shown.notice = api_v2.shortage(cluster.groups.others()[1:], asking.result()) or ""
        await cluster.sharing.keeper.journal.write(processes.launched)
        watching = asyncio.create_task(_watch(cluster))
        if strict:
            launches = [processes.launch_one(name) for name in names]
        else:
            launches = [processes.launch(processes.ready, unasked=True)]
        # Then the workers at once, because sessions start slowly. They wait for the scheduler's file.
        await gather_or_cancel(_wait_and_join(cluster, scheduler), *launches)
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
