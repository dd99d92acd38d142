"""The wishes of a cluster's users, and the adaptive scaling for which they ask."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Collection
from typing import Any

from distributed.core import Status
from distributed.deploy.adaptive import Adaptive

from dask_cml.checks import group_name, message
from dask_cml.errors import CMLError
from dask_cml.manager.adaptive import CMLAdaptive, stop_adapting
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.startup import insist
from dask_cml.manager.state import ClusterState
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import Amounts, Options
from dask_cml.options.limits import check_room, room

logger = logging.getLogger(__name__)

#: Seconds between two looks at a worker group that is being deleted.
_DELETING_INTERVAL = 0.1
#: Maximum number of sessions of adaptive scaling without a maximum and without a limit.
_MAXIMUM = 100


class Wishes:
    """Takes wishes. They are sent until the scheduler has answered them.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    reconciler : Reconciler
        Launches and stops sessions.
    """

    def __init__(self, state: ClusterState, reconciler: Reconciler) -> None:
        self.state = state
        self.reconciler = reconciler
        self._fleet = state.fleet
        #: The adaptive scaling of each worker group, including stopped ones.
        self._adaptives: dict[str, Adaptive] = {}
        self._lock = threading.Lock()

    def scale(self, n: int, group: str = DEFAULT_GROUP) -> None:
        """Scale a worker group to `n` sessions, and stop its adaptive scaling.

        Raises
        ------
        ValueError
            If the group does not exist, or more sessions exceed a limit of the site.
        CMLError
            If the cluster is closed.
        """
        before = self._fleet.group(group)
        if n > before.wanted.target:
            check_room("n", n, before.options.worker, self._fleet.beside(group))
        with self._lock:
            self._fleet.wish("scale", group=group, n=n)
            if isinstance(adaptive := self._adaptives.get(group), CMLAdaptive):
                stop_adapting(adaptive, "scale() was called")
        self.state.client.send_wishes()

    def remove(self, names: Collection[str]) -> None:
        """Close worker sessions after moving their data to others.

        Parameters
        ----------
        names : collection of str
            Names of sessions or of Dask workers.
        """
        sessions = {each: member.name for member in self._fleet.members for each in member.connected}
        self._fleet.wish("remove", names=sorted({sessions.get(name, name) for name in names}))
        self.state.client.send_wishes()

    def bounds(self, group: str, minimum: Amounts, maximum: Amounts) -> tuple[int, int]:
        """Return the bounds of adaptive scaling; see :meth:`Options.bounds` for the arguments.

        Without a maximum, take the limit of the site, or else warn.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or the minimum exceeds a limit of the site.
        """
        options = self._fleet.group(group).options
        least, most = options.bounds(minimum, maximum)
        check_room("minimum", least, options.worker, self._fleet.beside(group))
        if math.isinf(most):
            # At least one, so that adapting tells it if not even one fits.
            most = max(1, room(options.worker, [(self._fleet.options.scheduler, 1)])[0])
        if math.isinf(most):
            most = max(least, _MAXIMUM)
            name = self._fleet.name
            logger.warning("Cluster %s adapts to at most %s workers: adapt() got no maximum", name, most)
        return least, int(most)

    def adapt(self, adaptive: Adaptive, group: str = DEFAULT_GROUP) -> None:
        """Let the leader scale a group between the limits of this adaptive scaling.

        Another class than CMLAdaptive scales itself.
        """
        with self._lock:
            if isinstance(adaptive, CMLAdaptive):
                self._fleet.wish("adapt", group=group, **adaptive.limits)
            else:
                self._fleet.wish("stop_adapting", group=group, key=None)
            if (before := self._adaptives.get(group)) is not None:
                stop_adapting(before, "adapt() was called")
            self._adaptives[group] = adaptive
        self.state.client.send_wishes()

    def adaptive(self, group: str = DEFAULT_GROUP) -> Adaptive | None:
        """Return the last adaptive scaling of a group in this process."""
        return self._adaptives.get(group)

    async def add_group(self, name: str, options: Options) -> None:
        """Add a worker group.

        Raises
        ------
        ValueError
            If a group with this name exists, or its sessions exceed a limit of the site.
        CMLError
            If the cluster is not running, or the scheduler does not answer.
        """
        group_name("name", name)
        self.state.api.check_options(options.launch_options)
        check_room("n_workers", options.n_workers, options.worker, self._fleet.beside())
        arguments = options.group_arguments()
        await self._ask("added", name, op="add_group", options=arguments, n=options.n_workers)

    async def delete_group(self, name: str) -> None:
        """Delete a worker group, and stop all its sessions after moving their data to other workers.

        Raises
        ------
        ValueError
            If no such group exists.
        CMLError
            If no other worker can take the data, the group is scaled meanwhile, or the scheduler or the
            platform does not answer.
        """
        if name == DEFAULT_GROUP or name not in self._fleet.groups:
            raise ValueError(message("name", name, "a worker group of the cluster other than 'default'"))
        what = f"worker group {name!r} of cluster {self._fleet.name} not deleted"
        await self._ask("deleted", name, op="delete_group")
        while name in self._fleet.groups:
            self._check_running(f"worker group {name!r} not deleted")
            if not self._fleet.group(name).wanted.deleted:
                raise CMLError(f"{what}: no other worker can take its data, or it was scaled meanwhile")
            if outage := self.state.outage:
                raise CMLError(f"{what} yet: {outage}")
            await self.reconciler.settle()
            await asyncio.sleep(_DELETING_INTERVAL)  # the manager that leads may be another one

    async def _ask(self, done: str, group: str, op: str, **arguments: Any) -> None:
        """Send a wish for a group until the scheduler has answered it."""
        wish, begin = next(self._fleet.numbers), time.monotonic()

        async def ask() -> None:
            self._check_running(f"worker group {group!r} not {done}")
            if not self.state.client.connected:
                raise OSError("this manager is not connected to the scheduler")
            age = time.monotonic() - begin
            await self.state.client.decide(op, group=group, wish=wish, age=age, **arguments)

        await insist(self.state, self._fleet.options.scheduler_timeout, ask)

    def _check_running(self, what: str) -> None:
        if self.state.status != Status.running:
            raise CMLError(f"{what}: cluster {self._fleet.name} is {self.state.status.name}")

    async def settle(self) -> None:
        """Wait until the scheduler has answered all wishes, and sessions were launched and stopped for them.

        Raises
        ------
        CMLError
            If the cluster closes meanwhile.
        """
        self.state.client.send_wishes()
        await self.reconciler.settle()
        self._check_running("not settled")

    # -- adaptive scaling

    def tend_adaptives(self) -> None:
        """Stop adaptive scaling that another request has replaced. Take over that of other managers."""
        with self._lock:
            for deleted in self._adaptives.keys() - {*self._fleet.groups}:
                stop_adapting(self._adaptives.pop(deleted), "the worker group was deleted")
            for group, adapting in self._fleet.adapting.items():
                own = self._adaptives.get(group)
                if isinstance(own, CMLAdaptive) and not own.released:
                    if adapting is not None and adapting["key"] == own.key:
                        continue
                    stop_adapting(own, "another manager scales the cluster")
                if adapting is not None and self.state.client.leads:
                    logger.info(
                        "Adaptive scaling of group %s of cluster %s taken over", group, self._fleet.name
                    )
                    self._adaptives[group] = CMLAdaptive.of(self.state, group, adapting)

    def close(self) -> None:
        """Stop all adaptive scaling of this process."""
        for adaptive in self._adaptives.values():
            stop_adapting(adaptive, "the cluster closes")
