"""Shows a cluster that another process keeps, as its board describes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.objects import SchedulerInfo

from dask_cml.core.view import Sessions
from dask_cml.core.workers import connected_names
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.records import store
from dask_cml.sessions.session import Session
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.outbox import Outbox
from dask_cml.sharing.report import Report
from dask_cml.validation import with_numbers

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

#: Dask workers whose description a process reads in a second, at most.
_DESCRIPTIONS = 500


class Follower(Sessions):
    """Follows the board of a cluster that another process keeps, and writes on it what is changed here.

    It has the members of :class:`~dask_cml.core.view.View` that users see.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, whose ``worker_spec`` shows what the keeper wants.
    link : Link
        Talks to the scheduler.
    outbox : Outbox
        Writes on the board.
    """

    def __init__(self, cluster: CMLCluster, link: Link, outbox: Outbox) -> None:
        self._cluster, self._groups, self._link, self._outbox = cluster, cluster.groups, link, outbox
        self._report = Report()
        #: How many moves of Dask workers are known, and when they were read.
        self._moves = -1
        self._read_workers_at = 0.0

    # -- what is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return self._report.known_sessions()

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the names of the wanted workers of which a Dask worker is connected."""
        return self._groups.arrived(connected_names(self._cluster), group)

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the queued worker sessions have waited, in seconds."""
        names = {*self._groups.workers(group)} - self.arrived(group)
        waits = [session.waits_for for session in self.sessions if session.name in names]
        return [seconds for seconds in waits if seconds is not None]

    def target(self, group: str = DEFAULT_GROUP) -> int:
        """Return how many worker sessions of a group are requested."""
        board_group = self._link.board.groups.get(group)
        return self._groups.target(group) if board_group is None else board_group.target

    def limits(self, group: str = DEFAULT_GROUP) -> Mapping[str, Any] | None:
        """Return the limits of a group's adaptive scaling. None: it has a fixed size."""
        board_group = self._link.board.groups.get(group)
        return self._groups.limits(group) if board_group is None else board_group.adapt

    @property
    def staying(self) -> Sequence[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        return self._report.staying

    @property
    def not_stopped(self) -> str | None:
        """Why the platform does not stop sessions, as a sentence. None if it does."""
        return self._report.not_stopped

    @property
    def gave_up(self) -> Mapping[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        return self._report.current(self._report.gave_up, self._link.board.groups)

    @property
    def shortages(self) -> Mapping[str, str]:
        """Why the platform has launched only some workers of some groups, since users scaled them last."""
        return self._report.current(self._report.shortages, self._link.board.groups)

    @property
    def untaken(self) -> list[str]:
        """The groups whose last change was asked for here, and that no keeper has taken yet."""
        groups, requests = self._link.board.groups, self._report.requests
        own = [name for name, group in groups.items() if group.writer == self._link.id]
        return [name for name in own if requests.get(name, 0) < groups[name].request]

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        return self._report.problem

    # -- the board

    async def take(self, board: BoardState) -> None:
        """Show what the board says.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        ValueError
            If the keeper's report is invalid.
        """
        with self._groups.changing():
            self._groups.take(board.groups)
            for name, board_group in board.groups.items():
                # An Adaptive of another class scales here, until a user of another process does.
                is_own = board_group.writer == self._link.id or self._outbox.changes
                if not is_own and self._groups.adapts(name):
                    self._groups.adapt(name, None)
        self._report = Report.read(board.report) if board.report else Report()
        self._groups.given(self._report.wanted)
        with self._groups.changing():
            if not self._groups.is_changed_by_hand:  # else the next step writes it on the board first
                self._cluster.worker_spec.clear()
                for name, group in self._report.wanted.items():
                    if group in self._groups:  # an older report may name workers of a deleted group
                        own = board.groups[group].own.get(name)
                        self._cluster.worker_spec[name] = self._groups.spec(group, own)
        pause = len(self._cluster.scheduler_info["workers"]) / _DESCRIPTIONS
        if board.moves != self._moves and time.monotonic() - self._read_workers_at > pause:
            self._read_workers_at, known = time.monotonic(), self._cluster.scheduler_info
            identity = await self._link.ask("identity")
            identity["workers"] = with_numbers(identity["workers"])
            # Unless wait_for_workers has stored another answer meanwhile, which may be newer: ask again then.
            if self._cluster.scheduler_info is known:
                self._cluster.scheduler_info = SchedulerInfo(identity)
                self._moves = board.moves

    def forget_workers(self) -> None:
        """Know of no Dask worker, because another scheduler begins, which counts anew."""
        self._moves = -1

    async def step(self) -> None:
        """Write on the board how the spec was changed here.

        Raises
        ------
        CMLError
            If the scheduler does not answer. Then the change is lost. Also if the board cannot carry what
            was added.
        OSError
            If the record cannot be read. Then the next step writes the change.
        """
        if not self._groups.is_changed_by_hand:
            return
        assert self._cluster.sharing.record is not None
        # Before the changes are taken: a board that comes meanwhile would replace them.
        given = await asyncio.to_thread(store.given_names, self._cluster.sharing.record)
        differences: dict[str, Mapping[str, Any] | None] = {}
        changes: dict[str, Any] = {}
        with self._groups.changing():
            self._groups.given(given)
            closed, new = self._groups.take_changes_by_hand()
            for group in {*new.values()}:
                names = [name for name in new if new[name] == group]
                differences |= self._groups.differences(group, names)
            refused = sorted(name for name, options in differences.items() if options is None)
            self._groups.drop(refused)
            groups: dict[str, dict[str, Any]] = {}
            for name, options in differences.items():
                if options is not None:
                    group = new[name]
                    # Not the number in the spec, which does not show what others have asked for meanwhile.
                    change = groups.setdefault(group, {"target": self.target(group), "own": {}})
                    change["target"] += 1
                    if options:
                        change["own"][self._groups.rename_given(name)] = options
            if closed:
                changes["closing"] = sorted(closed)
            if groups:
                changes["groups"] = groups
        if changes:
            await self._outbox.write(**changes)
        if refused:
            raise CMLError(
                f"{', '.join(refused)} not added to cluster {self._cluster.options.name}: another process "
                "manages it and makes its workers. A worker that is added here can have other options, but "
                "no class and no arguments of its own"
            )
