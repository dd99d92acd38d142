"""One manager among those that a cluster may have."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dask_cml.plugin import Presence
from dask_cml.processes import connection_args

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)

_TIMEOUT = 10.0


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
        self.leads = leads
        self._makes = leads
        self._presence: Presence | None = None
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

    async def start(self) -> None:
        """Have the plugin in the scheduler, and say from now on that this manager is there."""
        cluster = self._cluster
        patience: float | None = Presence.KEEP
        if self._makes:
            patience = cluster.options.orphan_timeout if cluster.shutdown_on_close else None
        self._presence = Presence(
            cluster.scheduler_comm.address, connection_args(cluster._keys), orphan_timeout=patience
        )
        await self._presence.start()

    async def close(self, stays: bool) -> None:
        """Say goodbye; if the cluster stays, its maker does not make it an orphan."""
        if self._presence is not None:
            await self._presence.close(**({"orphan_timeout": None} if stays and self._makes else {}))

    @property
    def id(self) -> str:
        """Tells this manager from others."""
        return self._presence.id if self._presence is not None else ""
