"""Dask's SpecCluster with the manager's state instead of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster

from dask_cml.errors import CMLError
from dask_cml.frames import without_frames
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.group import Group
from dask_cml.manager.launch import Launcher
from dask_cml.manager.leadership import Leadership
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.naming import dask_names
from dask_cml.options import Options
from dask_cml.sessions.process import CMLScheduler, CMLWorker


class FleetCluster(SpecCluster):
    """A SpecCluster with the workers of a fleet, which the reconciler corrects.

    Attributes
    ----------
    options : Options
        The cluster's options.
    """

    options: Options
    loop: Any
    _client: SchedulerClient
    _fleet: Fleet[CMLWorker]
    _launcher: Launcher
    _leadership: Leadership
    _reconciler: Reconciler
    _stepping: asyncio.Task[Any] | None = None
    _watch_worker_status_task: Any

    def _spec(self, processes: int) -> dict[str, Any]:
        """Return SpecCluster's template of a worker session, by which it counts the Dask workers."""
        group = {"group": dask_names("", processes)} if processes > 1 else {}
        return {"cls": CMLWorker, "options": {}, **group}

    @property
    def _arrived(self) -> set[str]:
        """The worker sessions of which a Dask worker is connected."""
        return self._fleet.arrived(self.observed)

    def _n_arrived(self, group: Group) -> int:
        """Return how many sessions of a worker group are connected, given the group's state."""
        return len(self._arrived & group.keys.keys())

    @property
    def _cluster_class_name(self) -> str:
        return type(self).__name__

    async def _correct_state_internal(self) -> None:
        async with self._lock:
            self._correct_state_waiting = None
            self._stepping = asyncio.current_task()
            if self.status == Status.running and await self._leadership.sync():
                await self._reconciler.step()

    async def _carry_out(self) -> None:
        """Reconcile the sessions once. Return early if the cluster closes."""
        step = self._correct_state()
        await asyncio.wait([step])
        if not step.cancelled():
            step.result()

    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function. Remove the event loop's frames from errors of the platform."""
        try:
            return super().sync(func, *args, **kwargs)
        except CMLError as error:
            raise without_frames(error) from None

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster closes a lost worker after a while, without a replacement. The reconciler replaces it.
        if op == "remove":
            self.scheduler_info["workers"].pop(msg, None)
        else:
            Cluster._update_worker_status(self, op, msg)
        self._reconciler.poke()

    # -- SpecCluster sets these attributes. Here they come from the fleet and the launcher.

    @property
    def worker_spec(self) -> dict[str, Any]:
        """The wanted worker sessions, by name."""
        states = [(each.keys, self._spec(each.options.processes)) for each in self._fleet.states]
        return {key: spec for keys, spec in states for key in keys}

    @worker_spec.setter
    def worker_spec(self, _: Any) -> None:
        pass

    @property
    def workers(self) -> dict[str, CMLWorker]:
        """The worker sessions by name, including those that are no longer wanted."""
        return self._fleet.workers

    @workers.setter
    def workers(self, _: Any) -> None:
        pass

    @property
    def scheduler(self) -> CMLScheduler:
        """The scheduler's session. None before the start."""
        return self._launcher.scheduler  # type: ignore[return-value]  # as in SpecCluster

    @scheduler.setter
    def scheduler(self, _: Any) -> None:
        pass

    # -- Cluster sets these attributes. Here they come from the scheduler client.

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """The scheduler's last information on itself and its workers."""
        return self._client.info

    @scheduler_info.setter
    def scheduler_info(self, info: dict[str, Any]) -> None:
        self._client.info = info

    @property
    def scheduler_comm(self) -> Any:
        """The connection to the scheduler. None before the start."""
        return self._client.comm

    @scheduler_comm.setter
    def scheduler_comm(self, _: Any) -> None:
        pass
