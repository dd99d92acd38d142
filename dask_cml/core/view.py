"""What a process knows of a cluster's sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.sessions.session import Session
from dask_cml.words import command


@dataclass(frozen=True)
class View:
    """What is wrong with the sessions of a cluster, as its keeper knows it.

    Parameters
    ----------
    problem : str or None
        The present problem, as a clause.
    gave_up : mapping of str to str
        Why no more workers of some groups are launched, until a user scales them.
    shortages : mapping of str to str
        Why the platform has launched only some workers of some groups, since users scaled them last.
    staying : sequence of str
        Workers that cannot be stopped now, because no other worker can take their data.
    not_stopped : str or None
        Why the platform does not stop sessions, as a sentence.
    """

    problem: str | None = None
    gave_up: Mapping[str, str] = field(default_factory=dict)
    shortages: Mapping[str, str] = field(default_factory=dict)
    staying: Sequence[str] = ()
    not_stopped: str | None = None


def own_view(cluster: Any) -> View:
    """Return what the process knows that launches and stops the sessions."""
    messages, backoffs = cluster.messages, cluster.processes.backoffs.items()
    problems = (
        messages.failure,
        messages.outage,
        cluster.processes.problem,
        cluster.retirements.words,
        messages.unrunnable,
    )
    return View(
        problem=next(filter(None, problems), None),
        gave_up={group: backoff.words or "" for group, backoff in backoffs if backoff.gave_up},
        shortages={group: backoff.shortage for group, backoff in backoffs if backoff.shortage},
        staying=cluster.retirements.staying,
        not_stopped=cluster.api.failures.get("stop"),
    )


def own_sessions(cluster: Any) -> list[Session]:
    """Return the sessions that this process launches and stops, the scheduler's first."""
    return [process.session for process in cluster.processes.launched]


def workers_of(cluster: Any, group: str) -> list[str]:
    """Return the names of a group's sessions, wanted or not."""
    return [session.name for session in cluster.sessions if session.group == group]


def waits(cluster: Any, group: str | None = None) -> list[float]:
    """Return how long the wanted worker sessions that are queued have waited, in seconds."""
    absent = {*cluster.groups.workers(group)} - cluster.processes.arrived(group)
    waits = [session.waits_for for session in cluster.sessions if session.name in absent]
    return [seconds for seconds in waits if seconds is not None]


def check_that_workers_may_come(cluster: Any, what: str) -> None:
    """Refuse to wait for workers after too many failures, when no other worker is to connect.

    Raises
    ------
    CMLError
        If no worker of any group is to connect until a user scales a group that failed.
    """
    gave_up, groups = cluster.sharing.view.gave_up, cluster.groups
    for group in groups.names:
        arrived = cluster.processes.arrived(group)
        wanted = groups.target(group) - len(arrived)
        may_launch = group not in gave_up and (wanted > 0 or groups.limits(group) is not None)
        if may_launch or {*workers_of(cluster, group)} - arrived:
            return
    for group, why in gave_up.items():
        scale = command("scale", cluster.options.name, groups.target(group), group=group)
        raise CMLError(f"{what}: {why}. To try again, run {scale}")
