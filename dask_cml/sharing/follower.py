"""Shows a cluster that another process keeps, by its reports."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from distributed.objects import SchedulerInfo

from dask_cml.core.connection import with_numbers
from dask_cml.core.view import View
from dask_cml.errors import CMLError
from dask_cml.sessions.session import Session
from dask_cml.sharing.link import BoardState, Link
from dask_cml.sharing.report import Report

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

#: Dask workers whose description a process reads in a second, at most.
_DESCRIPTIONS = 500


class Follower:
    """Shows what another process reports that keeps the cluster.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, whose ``worker_spec`` shows what the keeper wants.
    link : Link
        Talks to the scheduler.
    report : Report
        What is known of the cluster at first.
    """

    def __init__(self, cluster: CMLCluster, link: Link, report: Report) -> None:
        self._cluster, self._groups, self._link = cluster, cluster.groups, link
        self._report = report
        #: Up to which move the Dask workers of which scheduler are known, and when they were read.
        self._known_moves: tuple[str | None, int] | None = None
        self._read_workers_at = 0.0

    # -- what is

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        return self._report.known_sessions()

    @property
    def view(self) -> View:
        """What the keeper says of the sessions, since users scaled the cluster last."""
        return self._report.since(self._link.board.mail)

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
        self.show(board)
        pause = len(self._cluster.scheduler_info["workers"]) / _DESCRIPTIONS
        moves = self._link.address, board.moves
        if moves != self._known_moves and time.monotonic() - self._read_workers_at > pause:
            self._read_workers_at, known = time.monotonic(), self._cluster.scheduler_info
            identity = await self._link.ask("identity")
            identity["workers"] = with_numbers(identity["workers"])
            # Unless wait_for_workers has stored another answer meanwhile, which may be newer: ask again then.
            if self._cluster.scheduler_info is known:
                self._cluster.scheduler_info = SchedulerInfo(identity)
                self._known_moves = moves

    def show(self, board: BoardState) -> None:
        """Show what is wanted.

        Raises
        ------
        ValueError
            If the keeper's report is invalid.
        """
        if board.report:
            self._report = Report.read(board.report)
        self._groups.given(self._report.wanted)
        if not self._groups.is_changed_by_hand:  # else the next step refuses that first
            self._groups.take(board.groups, self._report.wanted)

    def refuse_changes_by_hand(self) -> None:
        """Undo what was changed by hand in ``worker_spec``.

        Raises
        ------
        CMLError
            If something was. The message says what to do instead.
        """
        if not self._groups.is_changed_by_hand:
            return
        self._groups.take_changes_by_hand()
        self._groups.take(self._link.board.groups, self._report.wanted)
        name = self._cluster.options.name
        raise CMLError(
            f"worker_spec of cluster {name} not changed: another process manages it. To scale the cluster, "
            f"run `dask cml scale {shlex.quote(name)} N`"
        )
