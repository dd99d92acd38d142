"""One manager among those that a cluster may have."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)

_TIMEOUT = 10.0
_BEAT_INTERVAL = 3.0


class Membership:
    """Agree with the other managers of a cluster on who leads, how many workers there should be, and which.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster that this is a manager of.
    leads : bool
        Whether it leads to begin with, as the maker does.
    """

    def __init__(self, cluster: CMLCluster, leads: bool) -> None:
        self.id = uuid.uuid4().hex
        self.leads = leads
        self._cluster = cluster
        self._claims = leads
        self._known: dict[str, str] = {}

    def claim(self) -> None:
        """Lead from now on, because the user has asked this manager to scale."""
        self._claims = True

    async def sync(self) -> bool:
        """Tell what has changed here and learn what has changed elsewhere; return whether this one leads."""
        cluster = self._cluster
        here = {key: w.session_id for key, w in cluster.workers.items() if w.session_id}
        claims, self._claims = self._claims, False
        try:
            state = await asyncio.wait_for(
                cluster.scheduler_comm.cml_sync(
                    manager=self.id,
                    wanted=cluster.wanted if claims else None,
                    launched={key: each for key, each in here.items() if self._known.get(key) != each},
                    gone=[key for key in self._known if key not in here],
                ),
                _TIMEOUT,
            )
        except (OSError, asyncio.TimeoutError):
            self._claims = self._claims or claims
            return False
        leads = state["leader"] == self.id
        if leads and not self.leads:
            logger.info("This manager of the cluster %s leads from now on", cluster.name)
        elif self.leads and not leads and cluster._adaptive is not None:
            cluster._adaptive.stop(reason="another manager scales the cluster")
        known_before, self._known, self.leads = self._known, state["sessions"], leads
        for key in self._known.keys() - here.keys():
            cluster.adopt_worker(key, self._known[key])
        for key in (here.keys() & known_before.keys()) - self._known.keys():
            cluster.drop_worker(key)
        if not claims and not self._claims:
            cluster.follow(state["wanted"], None if leads else self._known)
        return leads

    async def beat(self) -> None:
        """Let the scheduler know that this manager is there, also while it waits for something else."""
        while True:
            await asyncio.sleep(_BEAT_INTERVAL)
            try:
                await asyncio.wait_for(self._cluster.scheduler_comm.cml_sync(manager=self.id), _TIMEOUT)
            except (OSError, asyncio.TimeoutError):
                continue

    async def leave(self) -> None:
        """Say that this manager goes, so that the next one leads at once."""
        try:
            await asyncio.wait_for(self._cluster.scheduler_comm.cml_leave(manager=self.id), _TIMEOUT)
        except (OSError, asyncio.TimeoutError):
            logger.info("The scheduler of the cluster %s does not answer", self._cluster.name)
