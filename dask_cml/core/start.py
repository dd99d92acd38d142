"""The start of a cluster: the scheduler is launched and, without waiting until it answers, all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.utils import import_term
from distributed.worker import Worker

from dask_cml.cancellation import cancel, gather_or_cancel
from dask_cml.checks import message
from dask_cml.core.workers import Workers
from dask_cml.display import StartDisplay
from dask_cml.layout import log_folder
from dask_cml.options import Options, check_new
from dask_cml.private_files import make_folder
from dask_cml.sessions import api_v2, calls, tls
from dask_cml.sessions.calls import CallFailed
from dask_cml.sessions.plan import Place
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


def fill_folder(options: Options, place: Place, keys: Mapping[Path, str]) -> None:
    """Write the keys of a new cluster into its folder, which belongs to it, and make the folder of its logs.

    Parameters
    ----------
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder.
    keys : mapping
        The files of keys with their contents, see :func:`dask_cml.sessions.tls.as_files`.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site, or the folder of the logs cannot be made.
    """
    check_new(options)  # only now it is known that no running cluster is to be connected to
    tls.write(keys)
    if options.log_directory is not None:
        make_folder(log_folder(place.folder, options.log_directory), "log_directory")


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
    asking = calls.start(api_v2.quota_left) if strict else None
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
