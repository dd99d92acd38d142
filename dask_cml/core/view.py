"""What the keeper of a cluster knows of its sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.sessions.session import Session
from dask_cml.words import command


class Sessions:
    """The sessions of a cluster as a process knows them."""

    _cluster: Any

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        raise NotImplementedError

    def workers_of(self, group: str) -> list[str]:
        """Return the names of a group's sessions, wanted or not."""
        return [session.name for session in self.sessions if session.group == group]

    def waits(self, group: str | None = None) -> list[float]:
        """Return how long the wanted worker sessions that are queued have waited, in seconds."""
        absent = {*self._cluster.groups.workers(group)} - self._cluster.processes.arrived(group)
        waits = [session.waits_for for session in self.sessions if session.name in absent]
        return [seconds for seconds in waits if seconds is not None]

    @property
    def gave_up(self) -> Mapping[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        raise NotImplementedError

    def check_that_workers_may_come(self, what: str) -> None:
        """Refuse to wait for workers after too many failures, when no other worker is to connect.

        Raises
        ------
        CMLError
            If no worker of any group is to connect until a user scales a group that failed.
        """
        gave_up = self.gave_up
        for group in self._cluster.groups.names:
            arrived = self._cluster.processes.arrived(group)
            absent = {*self.workers_of(group)} - arrived
            wanted = self._cluster.groups.target(group) - len(arrived)
            adapts = self._cluster.groups.limits(group) is not None
            if absent or (group not in gave_up and (wanted > 0 or adapts)):
                return
        for group, why in gave_up.items():
            n = self._cluster.groups.target(group)
            scale = command("scale", self._cluster.options.name, n, group=group)
            raise CMLError(f"{what}: {why}. To try again, run {scale}")


class View(Sessions):
    """The sessions of a cluster as the process knows them that launches and stops them.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    @property
    def sessions(self) -> list[Session]:
        """The cluster's sessions by their last known state, the scheduler's first."""
        sessions = [process.session for process in self._cluster.processes.launched]
        return [session for session in sessions if session is not None]

    # -- what is wrong

    @property
    def staying(self) -> Sequence[str]:
        """The workers that cannot be stopped now, because no other worker can take their data."""
        return self._cluster.retirements.staying

    @property
    def not_stopped(self) -> str | None:
        """Why the platform does not stop sessions, as a sentence. None if it does."""
        return self._cluster.api.failures.get("stop")

    @property
    def gave_up(self) -> Mapping[str, str]:
        """Why no more workers of some groups are launched, until a user scales them."""
        backoffs = self._cluster.processes.backoffs.items()
        return {group: backoff.words or "" for group, backoff in backoffs if backoff.gave_up}

    @property
    def shortages(self) -> Mapping[str, str]:
        """Why the platform has launched only some workers of some groups."""
        backoffs = self._cluster.processes.backoffs.items()
        return {group: backoff.shortage for group, backoff in backoffs if backoff.shortage}

    @property
    def problem(self) -> str | None:
        """The present problem, as a clause. None if there is none."""
        problems = (
            self._cluster.messages.failure,
            self._cluster.messages.outage,
            self._cluster.processes.problem,
            self._cluster.retirements.words,
            self._cluster.messages.unrunnable,
        )
        return next(filter(None, problems), None)
