"""One manager among those that a cluster may have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from dask_cml.manager.adaptive import stop_adapting
from dask_cml.manager.presence import Presence
from dask_cml.sessions.process import connection_args
from dask_cml.wire import WATCHES

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)


class Leadership:
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
        #: Whether this manager is there for whomever may look, so that an orphan ends nevertheless.
        self.watches = False
        self._makes = leads
        self._presence: Presence | None = None
        self._cluster = cluster
        self._asked: str | None = None
        self._known: dict[str, str] = {}
        self._passed_over: set[tuple[str, str]] = set()

    async def sync(self) -> bool:
        """Tell what has changed here and learn what has changed elsewhere; return whether this one leads."""
        cluster = self._cluster
        fleet, workers = cluster._fleet, cluster._fleet.workers
        if any(w.session_id and self._known.get(key) != w.session_id for key, w in workers.items()):
            await cluster._record_keeper.write()  # others take over only what the record names
            workers = fleet.workers
        here = {key: w.session_id for key, w in workers.items() if w.session_id}
        launched = {key: each for key, each in here.items() if self._known.get(key) != each}
        claim = fleet.take_claim()
        try:
            state = await cluster._reconciler.answer(
                cluster.scheduler_comm.cml_sync(
                    manager=self.id,
                    wanted=claim,
                    launched=launched,
                    owners={key: owner for key in launched if (owner := workers[key].owner)},
                    gone=[key for key in self._known if key not in here],
                )
            )
        except (OSError, asyncio.TimeoutError, ValueError):  # ValueError: it does not know this manager
            if claim is not None:
                fleet.claim()
            return False
        sessions = await self._trusted(state["sessions"], here)
        leads = state["leader"] == self.id
        if leads and not self.leads:
            logger.info("This manager of the cluster %s leads from now on", cluster.name)
        # Not when another one leads: it may have gone again since it was asked, as `dask cml scale` does.
        overruled = self._asked == self.id != state["asked"] and not fleet.claim_pending
        if overruled and cluster._adaptive is not None:
            fleet.release(cluster._adaptive)
            stop_adapting(cluster._adaptive, "another manager scales the cluster")
        self._asked = state["asked"]
        known_before, self._known, self.leads = self._known, sessions, leads
        for key in self._known.keys() - here.keys():
            self.adopt(key, self._known[key], state["owners"].get(key))
        for key in (here.keys() & known_before.keys()) - self._known.keys():
            self._drop(key)
        if claim is None:
            fleet.follow(state["wanted"], None if leads else self._known)
        return leads

    async def _trusted(self, told: Mapping[str, str], here: Collection[str]) -> dict[str, str]:
        """Leave out sessions that the cluster's record does not name: anybody may tell the scheduler of some.

        The record may name them a moment later, so the next sync looks again.
        """
        if told.keys() <= set(here):
            return dict(told)
        recorded = await asyncio.to_thread(self._cluster._record_keeper.sessions)
        new = {(key, each) for key, each in told.items() if key not in here}
        passed_over = {(key, each) for key, each in new if recorded.get(each) != key}
        for key, session_id in passed_over - self._passed_over:
            logger.info("%s's session %s is not taken over: the record does not name it", key, session_id)
        self._passed_over = passed_over
        return {key: each for key, each in told.items() if (key, each) not in passed_over}

    def adopt(self, key: str, session_id: str, owner: str | None = None) -> None:
        """Take a worker over that another manager has launched.

        Parameters
        ----------
        key : str
            Its name.
        session_id : str
            Its session's id.
        owner : str, optional
            The id of the session with which it ends.
        """
        cluster = self._cluster
        worker = cluster.make_worker(key)
        worker.adopt(session_id, owner=owner)
        cluster._fleet.attach(key, worker)

    def _drop(self, key: str) -> None:
        """Forget a worker that another manager has stopped."""
        worker = self._cluster._fleet.drop(key)
        if worker is not None and worker.session_id is not None:
            self._cluster._api.forget(worker.session_id)

    async def start(self) -> None:
        """Have the plugin in the scheduler, and say from now on that this manager is there."""
        cluster = self._cluster
        patience: float | None = Presence.KEEP
        if self._makes:
            patience = cluster.options.orphan_timeout if cluster.shutdown_on_close else None
        self._presence = Presence(
            cluster.scheduler_comm.address,
            connection_args(cluster._tls),
            orphan_timeout=patience,
            info={WATCHES: True} if self.watches else None,
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
