"""The launch of a cluster's scheduler with all wanted workers, and the connection to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo

from dask_cml.cancellation import cancel, gather_or_cancel, start_call, within
from dask_cml.core.workers import Workers
from dask_cml.display import StartDisplay
from dask_cml.errors import CallFailed
from dask_cml.sessions import api_v2
from dask_cml.sessions.process import CMLScheduler, class_of
from dask_cml.timing import timing


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


class Connection:
    """Connects a cluster object to one scheduler after another.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    async def connect(self, address: str, connection_args: Mapping[str, Any]) -> None:
        """Talk to the scheduler at an address from now on.

        Parameters
        ----------
        address : str
            The address.
        connection_args : mapping
            The result of ``Security.get_connection_args("client")``.
        """
        if self._cluster.scheduler_comm is not None:
            with contextlib.suppress(Exception):  # of Dask's comm, which may be broken in any way
                await within(timing.retry, self._cluster.scheduler_comm.close_rpc())
        self._cluster.scheduler_comm = rpc(address, connection_args=connection_args)
        for callback in self._cluster.periodic_callbacks.values():
            callback.start()
        self.note_running()

    def note_running(self) -> None:
        """Note that the cluster runs, unless it is closing already."""
        self._cluster.status = Status.closing if self._cluster.ending.has_begun else Status.running

    @property
    def is_subscribed(self) -> bool:
        """Whether the scheduler describes its workers to this process."""
        return (
            self._cluster._watch_worker_status_task is not None
            and not self._cluster._watch_worker_status_task.done()
        )

    async def subscribe(self) -> None:
        """Follow the scheduler's workers by Cluster._start (cluster.py:123), within a time limit.

        The scheduler describes its workers to its last subscriber only. So only the keeper subscribes.
        """
        await self.unsubscribe()
        await within(timing.answer, Cluster._start(self._cluster))
        self._cluster.scheduler_info = SchedulerInfo(with_numbers(self._cluster.scheduler_info))
        self.note_running()  # Cluster._start says so of an object that is closing, too

    async def unsubscribe(self) -> None:
        """Follow the scheduler's workers no more."""
        if self._cluster._watch_worker_status_comm is not None:
            self._cluster._watch_worker_status_comm.abort()
        await cancel(self._cluster._watch_worker_status_task, self._cluster._sync_cluster_info_task)
        self._cluster._watch_worker_status_comm = self._cluster._watch_worker_status_task = None
        self._cluster._sync_cluster_info_task = None

    def forget_workers(self) -> None:
        """Know of no Dask worker, because their scheduler is gone."""
        self._cluster.scheduler_info = SchedulerInfo(
            {**self._cluster.scheduler_info, "workers": {}, "n_workers": 0}
        )


def with_numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's description, with numbers where Dask and dask-labextension sum.

    A number that is none becomes 0, as for a worker whose memory has no limit.

    Examples
    --------
    >>> with_numbers({"workers": {"tcp://10.0.0.1:1234": {"nthreads": 2, "memory_limit": None}}})
    {'workers': {'tcp://10.0.0.1:1234': {'nthreads': 2, 'memory_limit': 0}}}
    """
    numbers = {}
    for address, worker in info["workers"].items():
        summed = {name: worker.get(name) for name in ("nthreads", "memory_limit")}
        odd = {name: 0 for name, value in summed.items() if not isinstance(value, (int, float))}
        numbers[address] = {**worker, **odd}
    return {**info, "workers": numbers}
