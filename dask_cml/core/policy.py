"""The number of sessions that each worker group needs for the known work, as functions of a snapshot.

Tasks with equal needs scale up one group: the group that offers the least beyond their needs. So tasks that
need no GPU launch no sessions with GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dask_cml.words import counted

#: Dask's rules for memory. If more than this share of the limit is managed, it asks for twice the workers.
#: The remaining workers must have a limit of this many times the managed bytes.
_FULL, _MEMORY_RATIO = 0.6, 2
#: The least work that makes a session worth its launch, in start times: for the first sessions, and, in
#: addition to ``target_duration``, for further sessions, because the first sessions work meanwhile.
_FIRST, _MORE = 0.25, 0.5
#: Tolerance for rounding errors.
_ROUNDING = 1e-6


@dataclass
class Work:
    """Tasks that need the same resources.

    Parameters
    ----------
    resources : mapping of str to float
        What one task needs.
    tasks : int
        Number of tasks that run or could run now.
    seconds : float
        Time that one thread would take for all these tasks by Dask's own estimates, in seconds.
    unrunnable : int
        Number of these tasks that no connected worker can run.
    """

    resources: Mapping[str, float]
    tasks: float = 0
    seconds: float = 0.0
    unrunnable: float = 0


def slots(nthreads: int, resources: Mapping[str, float], needs: Iterable[tuple[str, float]]) -> int:
    """Return how many tasks with these needs a Dask worker runs at once."""
    offers = [resources.get(name, 0.0) / need for name, need in needs if need > 0]
    return math.floor(min([nthreads, *offers]) + _ROUNDING)


@dataclass(frozen=True)
class Supply:
    """The size and the state of a worker group.

    Parameters
    ----------
    name : str
        The group's name.
    processes : int
        Number of Dask workers in a session.
    nthreads : int
        Number of threads in a session, of all its Dask workers together.
    resources : mapping of str to float
        Resources of a session. Its Dask workers share them evenly.
    adapts : bool
        Whether the group scales with the work.
    target : int
        Number of requested sessions.
    sessions : int
        Number of sessions that the scheduler knows.
    busy : int
        Number of these sessions that process tasks.
    borrowed : sequence of str
        The names of busy sessions that only process tasks without needs, and would lose little.
    full : int
        Number of sessions that run nothing, because their memory and their disk are full.
    managed : int
        Number of bytes that these sessions hold.
    limit : int
        Number of bytes that these sessions may hold.
    """

    name: str
    processes: int = 1
    nthreads: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    adapts: bool = False
    target: int = 0
    sessions: int = 0
    busy: int = 0
    borrowed: Sequence[str] = ()
    full: int = 0
    managed: int = 0
    limit: int = 0

    def slots(self, needs: Mapping[str, float]) -> int:
        """Return how many tasks with these needs a session runs at once. Return 0 if it can run none."""
        share = {name: offered / self.processes for name, offered in self.resources.items()}
        return slots(self.nthreads // self.processes, share, needs.items()) * self.processes


@dataclass(frozen=True)
class Snapshot:
    """The state of the scheduler and of the worker groups at one time.

    Parameters
    ----------
    work : sequence of Work
        The tasks, by their needs.
    supplies : sequence of Supply
        The worker groups, the default group first.
    restricted : mapping
        Numbers of tasks that only certain workers may run, of which none is connected, by these workers'
        names.
    """

    work: Sequence[Work] = ()
    supplies: Sequence[Supply] = ()
    restricted: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any], supplies: Iterable[Supply]) -> Snapshot:
        """Return the snapshot of a scheduler's answer, see ``known_demand``, with the groups' own values."""
        return cls(
            work=[Work(**work) for work in answer["work"]],
            supplies=[replace(supply, **answer["groups"].get(supply.name, {})) for supply in supplies],
            restricted={tuple(task["names"]): task["tasks"] for task in answer["restricted"]},
        )

    def supply(self, group: str) -> Supply:
        """Return the supply of a group. It is empty if the group does not exist."""
        return next((supply for supply in self.supplies if supply.name == group), Supply(group))

    def work_of(self, group: str) -> list[Work]:
        """Return the work that scales up a group."""
        return [work for work in self.work if self._group_for(work.resources) == group]

    def borrowed(self, group: str) -> Sequence[str]:
        """Return the names of the sessions that only process tasks of another group."""
        plain_group = self._group_for({})
        if plain_group in (group, None) or not self.supply(plain_group).sessions:
            return ()
        return self.supply(group).borrowed

    def engaged(self, group: str) -> int:
        """Return how many sessions are needed because they are busy."""
        return self.supply(group).busy - len(self.borrowed(group))

    def has_work(self, group: str) -> bool:
        """Return whether a group has work, or processes any."""
        return bool(self.work_of(group) or self.engaged(group))

    def able(self, needs: Mapping[str, float]) -> list[Supply]:
        """Return the groups that can run tasks with these needs, the best fit first."""
        able = [supply for supply in self.supplies if supply.slots(needs)]
        return sorted(able, key=lambda supply: _excess(supply, needs))

    def _group_for(self, needs: Mapping[str, float]) -> str | None:
        """Return the group that tasks with these needs scale up. Return None if no group can run them."""
        for supply in self.able(needs):
            if supply.adapts or supply.target:
                return supply.name
        return None


def _excess(supply: Supply, needs: Mapping[str, float]) -> tuple[int, bool, float]:
    """Return how badly a group fits needs: it offers other resources, has a fixed size, or offers more."""
    others = sum(name not in needs for name, offered in supply.resources.items() if offered)
    more = sum(supply.resources.get(name, 0.0) - need for name, need in needs.items())
    return others, not supply.adapts, more


def sessions_to_finish(supply: Supply, work: Iterable[Work], duration: float) -> int:
    """Return how many sessions finish the work within a duration. All of them have something to do.

    Parameters
    ----------
    supply : Supply
        A group that can run the work.
    work : iterable of Work
        The work.
    duration : float
        The duration, in seconds.

    Examples
    --------
    >>> supply = Supply("gpu", nthreads=4, resources={"GPU": 2})
    >>> sessions_to_finish(supply, [Work({"GPU": 1}, tasks=12, seconds=600)], 10)
    6
    """
    # Numbers of tasks that must run at once, by their needs.
    at_once = [(entry, min(entry.tasks, entry.seconds / duration)) for entry in work]
    # No other task can use the remainder of a Dask worker's share.
    sessions = [n / supply.slots(entry.resources) for entry, n in at_once]
    sessions.append(sum(n for _, n in at_once) / supply.slots({}))
    for name, offered in supply.resources.items():
        if offered > 0:
            sessions.append(sum(n * entry.resources.get(name, 0.0) for entry, n in at_once) / offered)
    # Any work needs a session, however short it is.
    return max(math.ceil(max(sessions) - _ROUNDING), any(entry.tasks for entry, _ in at_once))


def sessions_wanted(
    snapshot: Snapshot,
    group: str,
    *,
    arrived: int,
    planned: int,
    underway: Collection[float],
    start_time: float,
    target_duration: float,
    minimum: int = 0,
) -> int:
    """Return how many sessions a group should have, given the start time of a session.

    Parameters
    ----------
    snapshot : Snapshot
        The tasks and the groups.
    group : str
        The name of a group that adapts.
    arrived : int
        Number of wanted sessions that are connected.
    planned : int
        Number of all wanted sessions.
    underway : collection of float
        Times since the launches of the sessions that are not connected yet, in seconds.
    start_time : float
        Time from a launch until the session is connected, in seconds.
    target_duration : float
        Time within which the work should be finished, in seconds.
    minimum : int
        Minimum number of sessions, which need not be worth their start.
    """
    if planned <= minimum:
        duration = max(target_duration, _FIRST * start_time)
    else:
        duration = target_duration + max(target_duration, _MORE * start_time)
    useful = _useful_sessions(snapshot, group, duration, arrived)
    if useful <= arrived:
        return useful
    # Present sessions, and sessions that start before a session launched now, do some of the work.
    working = max(0, arrived - snapshot.supply(group).full)
    done_meanwhile = working * start_time + sum(min(age, start_time) for age in underway)
    needed = useful - math.ceil(done_meanwhile / duration)
    # There are never more sessions than tasks. This is for a few long tasks.
    needed = max(needed, _useful_sessions(snapshot, group, start_time + duration, arrived))
    return max(planned, min(useful, needed))


def _useful_sessions(snapshot: Snapshot, group: str, duration: float, arrived: int) -> int:
    """Return how many sessions finish the work of a group in time, and can hold the group's data."""
    supply = snapshot.supply(group)
    useful = sessions_to_finish(supply, snapshot.work_of(group), duration)
    if useful:
        useful += supply.full
    if supply.managed > _FULL * supply.limit > 0:
        useful = max(useful, 2 * supply.sessions)
    # The scheduler also counts sessions that are no longer wanted, until they have ended.
    return max(useful, min(arrived, _sessions_to_keep(snapshot, group)))


def _sessions_to_keep(snapshot: Snapshot, group: str) -> int:
    """Return how many sessions of a group must be kept, for their tasks or for their data."""
    held: float = _MEMORY_RATIO * sum(supply.managed for supply in snapshot.supplies)
    # All groups must reckon alike from this snapshot, so that no two of them count on one group's memory.
    for supply in sorted(snapshot.supplies, key=lambda supply: supply.adapts):
        kept = supply.sessions
        if supply.adapts and held <= 0:
            kept = 0
        elif supply.adapts and supply.limit:
            kept = min(kept, math.ceil(held * supply.sessions / supply.limit))
        if supply.name == group:
            return max(kept, snapshot.engaged(group))
        held -= supply.limit * kept / (supply.sessions or 1)
    return 0


def unrunnable(snapshot: Snapshot, expected: Collection[str]) -> dict[str, str]:
    """Return how many tasks no present or future worker can run, in words, by their reasons.

    Parameters
    ----------
    snapshot : Snapshot
        The tasks and the groups.
    expected : collection of str
        The names and addresses of all wanted workers.

    Examples
    --------
    >>> snapshot = Snapshot([Work({"FPGA": 1}, tasks=3, seconds=1.5, unrunnable=3)], [Supply("default")])
    >>> [*unrunnable(snapshot, []).values()]
    ['3 tasks need FPGA=1, which no worker group offers']
    """
    found: dict[str, str] = {}
    has_workers = any(supply.adapts or supply.target or supply.sessions for supply in snapshot.supplies)
    for work in snapshot.work:
        if work.tasks and not work.resources and not has_workers:
            verb = "waits" if work.tasks == 1 else "wait"
            reason = "but the cluster has no workers: call cluster.scale(n) or cluster.adapt()"
            found[reason] = f"{counted(work.tasks, 'task')} {verb}, {reason}"
        able = snapshot.able(work.resources)
        if work.unrunnable and work.resources and not any(supply.adapts or supply.target for supply in able):
            n, why = work.unrunnable, ", which no worker group offers"
            if able:
                group = able[0].name
                call = f"call cluster.scale(1, worker_group={group!r})"
                why = f"; worker group {group} offers it, but has no workers: {call}"
            reason = ", ".join(f"{name}={need:g}" for name, need in work.resources.items()) + why
            found[reason] = f"{counted(n, 'task')} {'needs' if n == 1 else 'need'} {reason}"
    for names, n in snapshot.restricted.items():
        if not any(name in expected for name in names):
            reason = f"restricted to {' or '.join(names)}, which the cluster does not have"
            found[reason] = f"{counted(n, 'task')} {'is' if n == 1 else 'are'} {reason}"
    return found
