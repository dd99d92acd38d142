"""Agreement among the managers of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping

from dask_cml.errors import CMLError
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.launch import Launcher
from dask_cml.manager.presence import Presence
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.sessions.process import CMLWorker

logger = logging.getLogger(__name__)

#: Seconds after which the manager of an adaptive group counts as gone. Its connection may only have broken.
_ALONE = 5.0


class Leadership:
    """Agrees with the other managers of a cluster on the leader, the number of workers, and their sessions.

    Parameters
    ----------
    fleet : Fleet
        The cluster's workers.
    client : SchedulerClient
        Asks the scheduler, through which managers agree.
    launcher : Launcher
        Takes over sessions that other managers launched.
    record_keeper : RecordKeeper
        Knows the sessions in the cluster's record.
    leads : bool
        Whether this manager leads at first, as the creator does.
    on_overruled : callable
        Called with the name of a worker group after another manager has scaled it.
    on_unattended : callable, optional
        Called with the name of a worker group, a minimum and a maximum, after the manager has left that
        scaled the group adaptively between them. Default: the group keeps its sessions.

    Attributes
    ----------
    served : bool
        Whether a manager is connected that continues to adapt when others leave.
    tasks_done : int
        Number of tasks that the scheduler has completed, when it answered last.
    """

    def __init__(
        self,
        fleet: Fleet[CMLWorker],
        client: SchedulerClient,
        launcher: Launcher,
        record_keeper: RecordKeeper,
        *,
        leads: bool,
        on_overruled: Callable[[str], None],
        on_unattended: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self.leads = leads
        self._adapts: Mapping[str, Mapping[str, float]] = {}
        self.tasks_done = 0
        self.served = False
        self._fleet = fleet
        self._client = client
        self._launcher = launcher
        self._record_keeper = record_keeper
        self._on_overruled = on_overruled
        self._on_unattended = on_unattended
        self._presence: Presence | None = None
        self._asked: Mapping[str, str] = {}
        self._known: dict[str, str] = {}
        self._passed_over: set[tuple[str, str]] = set()
        self._gone_groups: set[str] = set()
        self._told: set[str] = set()
        self._alone_since: dict[str, float] = {}

    async def join(self, presence: Presence) -> None:
        """Register the scheduler's plugin, and send heartbeats from now on."""
        self._presence = presence
        await presence.start()

    async def sync(self) -> bool:
        """Exchange changes with the other managers. Return whether this manager leads."""
        fleet, workers = self._fleet, self._fleet.workers
        if any(w.session_id and self._known.get(key) != w.session_id for key, w in workers.items()):
            await self._record_keeper.write()  # others take over only sessions in the record
            workers = fleet.workers
        here = {key: w.session_id for key, w in workers.items() if w.session_id}
        launched = {key: each for key, each in here.items() if self._known.get(key) != each}
        claims = fleet.take_claims()
        self._adapts = {group: each for group, each in self._adapts.items() if group not in claims}
        gone_groups, self._gone_groups = self._gone_groups, set()
        try:
            state = await self._client.sync(
                manager=self.id,
                wanted={**claims, **dict.fromkeys(gone_groups)},
                adapts={group: limits for group in claims if (limits := self._own_limits(group))},
                launched=launched,
                owners={key: owner for key in launched if (owner := workers[key].owner)},
                gone=[key for key in self._known if key not in here],
            )
        except (OSError, asyncio.TimeoutError, ValueError):  # ValueError: unknown manager
            fleet.claim(claims)
            self._gone_groups |= gone_groups
            return False
        await self._learn_groups(state["wanted"])
        sessions = await self._trusted(state["sessions"], here)
        leads = state["leader"] == self.id
        if leads and not self.leads:
            logger.info("This manager of cluster %s leads from now on", fleet.name)
        before, self._asked = self._asked, state["asked"]
        for group in fleet.groups:
            # A new leader alone does not overrule: it may have disconnected since, as `dask cml scale` does.
            overruled = before.get(group) == self.id != self._asked.get(group)
            if overruled and not fleet.group(group).claim_pending:
                self._on_overruled(group)
        known_before, self._known, self.leads = self._known, sessions, leads
        for key in self._known.keys() - here.keys():
            self._launcher.attach(key, self._known[key], state["owners"].get(key))
        for key in (here.keys() & known_before.keys()) - self._known.keys():
            self._launcher.detach(key)
        for group in fleet.groups:
            if group not in claims:
                settled = None if leads else [key for key in self._known if fleet.group_of(key) == group]
                fleet.follow(state["wanted"].get(group, 0), settled, group)
        self._adapts, self.served, self.tasks_done = state["adapts"], state["served"], state["tasks_done"]
        self._go_on_adapting()
        return leads

    def limits(self, group: str) -> Mapping[str, float] | None:
        """Return the limits of a worker group's adaptive scaling. Return None without adaptive scaling.

        The keys are ``minimum`` and ``maximum``. The manager that scales may have left: then nobody scales.
        """
        asked_here = self._fleet.group(group).claim_pending
        return self._own_limits(group) or (None if asked_here else self._adapts.get(group))

    def _own_limits(self, group: str) -> dict[str, float] | None:
        """Return the limits between which this manager scales a group adaptively, if it does."""
        with contextlib.suppress(ValueError):  # the group was deleted meanwhile
            driver = self._fleet.group(group).driver
            if driver is not None:
                return {limit: getattr(driver, limit) for limit in ("minimum", "maximum")}
        return None

    def _go_on_adapting(self) -> None:
        if self._on_unattended is None:
            return
        now = time.monotonic()
        alone = {group for group, limits in self._adapts.items() if not limits["attended"]}
        self._alone_since = {group: self._alone_since.get(group, now) for group in alone}
        for group in [group for group, since in self._alone_since.items() if now - since >= _ALONE]:
            limits = self._adapts[group]
            with contextlib.suppress(ValueError, CMLError):  # the group was deleted, or this manager closes
                known = self._fleet.group(group)
                if known.driver is None and not known.claim_pending:
                    self._on_unattended(group, limits["minimum"], limits["maximum"])

    def forget_ended_group(self, name: str) -> bool:
        """Forget a worker group that has ended, and let the next sync inform the other managers.

        Return False while the group has sessions, or if it is wanted again.
        """
        if not self._fleet.forget_ended_group(name):
            return False
        self._told.discard(name)
        self._gone_groups.add(name)
        return True

    async def _learn_groups(self, wanted: Collection[str]) -> None:
        """Add worker groups that other managers have added, and forget those that they have deleted."""
        if new := set(wanted) - {*self._fleet.groups} - self._gone_groups:
            recorded = await asyncio.to_thread(self._record_keeper.groups)
            for name in new & recorded.keys():  # others may be recorded a moment later
                with contextlib.suppress(ValueError, CMLError):  # this manager adds it itself, or closes
                    self._fleet.add_group(name, self._launcher.options.of_group(recorded[name]))
        self._told |= {*self._fleet.groups} & {*wanted}
        there = {self._fleet.group_of(key) for key in self._fleet.workers}
        for name in self._told - {*wanted} - there:
            if not self._fleet.group(name).claim_pending:
                self._fleet.forget_group(name)
                self._told.discard(name)

    async def _trusted(self, told: Mapping[str, str], here: Collection[str]) -> dict[str, str]:
        """Omit sessions that are not in the cluster's record, because any program can send names of sessions.

        The record may contain them a moment later, so the next sync looks again.
        """
        if told.keys() <= set(here):
            return dict(told)
        recorded = await asyncio.to_thread(self._record_keeper.sessions)
        new = {(key, each) for key, each in told.items() if key not in here}
        passed_over = {(key, each) for key, each in new if recorded.get(each) != key}
        for key, session_id in passed_over - self._passed_over:
            logger.info("Session %s of %s not taken over: it is not in the record", session_id, key)
        self._passed_over = passed_over
        return {key: each for key, each in told.items() if (key, each) not in passed_over}

    async def close(self, **change: float | None) -> None:
        """Close the connection by which the scheduler knows this manager.

        Parameters
        ----------
        **change
            ``orphan_timeout``, to change it.
        """
        if self._presence is not None:
            await self._presence.close(**change)

    @property
    def id(self) -> str:
        """The id of this manager."""
        return self._presence.id if self._presence is not None else ""
