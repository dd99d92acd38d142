"""The connection of a cluster object to its scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo

from dask_cml.cancellation import cancel, within
from dask_cml.timing import timing


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
