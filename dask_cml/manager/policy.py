"""How many sessions each worker group needs for the work that is known, as functions of a snapshot.

Tasks that need the same resources grow one group, the one that offers least beyond their needs. So work
that needs no GPU brings no sessions with GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_cml.manager.group import Group

#: Dask's rules for memory. If more than this share of the limit is managed, it asks for twice the workers.
#: The workers that stay must have a limit of so many times the managed bytes.
_FULL, _MEMORY_RATIO = 0.6, 2
#: In start times, the least work that makes a session worth its launch: of the first ones, and on top of
#: ``target_duration`` of those that come to others, which get on with the work meanwhile.
_FIRST, _MORE = 0.25, 0.5
#: Against the errors of sums and quotients of fractions.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Work:
    """Tasks that need the same resources.

    Parameters
    ----------
    resources : mapping of str to float
        The needs of each task.
    tasks : int
        How many tasks run or could run now.
    seconds : float
        How long one thread would take for all.
    unrunnable : int
        How many of them no worker can run now.
    """

    resources: Mapping[str, float]
    tasks: int
    seconds: float
    unrunnable: int = 0


@dataclass(frozen=True)
class Supply:
    """What a worker group offers and has.

    Parameters
    ----------
    name : str
        The group's name.
    processes, nthreads : int
        Dask workers of a session, and the threads of all of them.
    resources : mapping of str to float
        What the Dask workers of a session offer in all. Each offers an even share.
    adapts : bool
        Whether the group scales with the work.
    target : int
        How many sessions are asked for.
    sessions, busy : int
        How many sessions the scheduler knows, and how many of them process tasks.
    lent : sequence of int
        The numbers of busy sessions that only process tasks which need no resources and would lose little.
    managed, limit : int
        The bytes that these sessions hold, and those that they may hold.
    """

    name: str
    processes: int = 1
    nthreads: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    adapts: bool = False
    target: int = 0
    sessions: int = 0
    busy: int = 0
    lent: Sequence[int] = ()
    managed: int = 0
    limit: int = 0

    def slots(self, needs: Mapping[str, float]) -> int:
        """Return how many tasks with these needs a session runs at a time; 0 if it can run none."""
        slots = self.nthreads // self.processes
        for name, need in needs.items():
            if need > 0:
                share = self.resources.get(name, 0.0) / self.processes
                slots = min(slots, math.floor(share / need + _ROUNDING))
        return slots * self.processes


@dataclass(frozen=True)
class Snapshot:
    """What the scheduler and the fleet know at one moment.

    Parameters
    ----------
    work : sequence of Work
        The tasks, by their needs.
    supplies : sequence of Supply
        The worker groups, the default one first.
    restricted : mapping
        How many tasks only certain workers may run, none of which can now, by names of these.
    """

    work: Sequence[Work] = ()
    supplies: Sequence[Supply] = ()
    restricted: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Mapping[str, Any], groups: Iterable[Group]) -> Snapshot:
        """Return the snapshot of a scheduler's answer, see ``known_demand``, and a fleet's groups."""
        return cls(
            work=[
                Work(
                    resources=each["resources"],
                    tasks=each["unrunnable"] + each["queued"] + each["processing"],
                    seconds=each["seconds"],
                    unrunnable=each["unrunnable"],
                )
                for each in answer["work"]
            ],
            supplies=[
                Supply(
                    name=group.name,
                    processes=group.options.processes,
                    nthreads=group.options.nthreads,
                    resources=group.options.resources,
                    adapts=group.driver is not None,
                    target=group.target,
                    **answer["groups"].get(group.name, {}),
                )
                for group in groups
            ],
            restricted={tuple(each["names"]): each["tasks"] for each in answer["restricted"]},
        )

    def supply(self, group: str) -> Supply:
        """Return the supply of a group, which is empty if there is no such group."""
        return next((each for each in self.supplies if each.name == group), Supply(group))

    def work_of(self, group: str) -> list[Work]:
        """Return the work that grows a group."""
        return [work for work in self.work if self._group_for(work.resources) == group]

    def lent(self, group: str) -> Sequence[int]:
        """Return the numbers of the sessions that only do what another group's sessions should."""
        home = self._group_for({})
        return self.supply(group).lent if home not in (group, None) and self.supply(home).sessions else ()

    def engaged(self, group: str) -> int:
        """Return how many sessions must stay because they are busy."""
        return self.supply(group).busy - len(self.lent(group))

    def has_work(self, group: str) -> bool:
        """Return whether any work is known for a group, or done by it."""
        return bool(self.work_of(group) or self.engaged(group))

    def _group_for(self, needs: Mapping[str, float]) -> str | None:
        """Return the group that tasks with these needs grow; None if no group with workers can run them."""
        able = [each for each in self.supplies if each.slots(needs) and (each.adapts or each.target)]
        closest = min(able, key=lambda each: _excess(each, needs), default=None)
        return None if closest is None else closest.name


def _excess(supply: Supply, needs: Mapping[str, float]) -> tuple[int, bool, float]:
    """Return how badly a group suits needs: it offers other resources, has a fixed size, or offers more."""
    others = sum(name not in needs for name, offered in supply.resources.items() if offered)
    more = sum(supply.resources.get(name, 0.0) - need for name, need in needs.items())
    return others, not supply.adapts, more


def sessions_to_finish(supply: Supply, work: Iterable[Work], duration: float) -> int:
    """Return how many sessions finish the work within a duration, and never more than have something to do.

    Parameters
    ----------
    supply : Supply
        Of a group that can run the work.
    work : iterable of Work
        The work.
    duration : float
        In seconds.

    Examples
    --------
    >>> supply = Supply("gpu", nthreads=4, resources={"GPU": 2})
    >>> sessions_to_finish(supply, [Work({"GPU": 1}, tasks=12, seconds=600)], 10)
    6
    """
    #: Tasks that run at the same time: those of each need, and all of them by threads and by resources.
    at_once = [(each, min(each.tasks, each.seconds / duration)) for each in work]
    # A task that needs most of a Dask worker's share leaves the rest of it to nobody.
    sessions = [n / supply.slots(each.resources) for each, n in at_once]
    sessions.append(sum(n for _, n in at_once) / supply.slots({}))
    for name, offered in supply.resources.items():
        if offered > 0:
            sessions.append(sum(n * each.resources.get(name, 0.0) for each, n in at_once) / offered)
    # Any work is worth a session, however short.
    return max(math.ceil(max(sessions) - _ROUNDING), any(each.tasks for each, _ in at_once))


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
    """Return how many sessions a group should have, given how long a session takes to start.

    Parameters
    ----------
    snapshot : Snapshot
        The tasks and the groups.
    group : str
        The name of a group that adapts.
    arrived, planned : int
        How many of its wanted sessions have arrived, and how many are wanted in all.
    underway : collection of float
        For each session that was launched and has not arrived, the seconds since then.
    start_time : float
        Seconds from a launch until the arrival.
    target_duration : float
        Seconds within which the work should be done.
    minimum : int
        The least number of sessions, which need not be worth their start.
    """
    if planned <= minimum:
        duration = max(target_duration, _FIRST * start_time)
    else:
        duration = target_duration + max(target_duration, _MORE * start_time)
    useful = _useful_sessions(snapshot, group, duration, arrived)
    if useful <= arrived:
        return useful
    # What is there, or will come before a session that is launched now, does some of the work.
    done_meanwhile = arrived * start_time + sum(min(age, start_time) for age in underway)
    needed = useful - math.ceil(done_meanwhile / duration)
    # There are never more sessions than tasks. So this is for few long ones.
    needed = max(needed, _useful_sessions(snapshot, group, start_time + duration, arrived))
    return max(planned, min(useful, needed))


def _useful_sessions(snapshot: Snapshot, group: str, duration: float, arrived: int) -> int:
    """Return how many sessions finish the work of a group in time, and hold what the group holds."""
    supply = snapshot.supply(group)
    useful = sessions_to_finish(supply, snapshot.work_of(group), duration)
    if supply.managed > _FULL * supply.limit > 0:
        useful = max(useful, 2 * supply.sessions)
    # The scheduler also counts sessions that are not wanted any more, until they have gone.
    return max(useful, min(arrived, _sessions_to_keep(snapshot, group)))


def _sessions_to_keep(snapshot: Snapshot, group: str) -> int:
    """Return how many sessions of a group must stay, for what they do or for what is held."""
    held: float = _MEMORY_RATIO * sum(each.managed for each in snapshot.supplies)
    # Each group that looks at this snapshot must find the same: no two count on the same memory.
    for each in sorted(snapshot.supplies, key=lambda each: each.adapts):
        stay = each.sessions
        if each.adapts and held <= 0:
            stay = 0
        elif each.adapts and each.limit:
            stay = min(stay, math.ceil(held * each.sessions / each.limit))
        if each.name == group:
            return max(stay, snapshot.engaged(group))
        held -= each.limit * stay / (each.sessions or 1)
    return 0


def unmet(snapshot: Snapshot, expected: Collection[str]) -> dict[str, str]:
    """Return in words which tasks no worker can run, and none that is to come; by their reasons.

    Parameters
    ----------
    snapshot : Snapshot
        The tasks and the groups.
    expected : collection of str
        The names and addresses of all workers that are wanted.

    Examples
    --------
    >>> snapshot = Snapshot([Work({"FPGA": 1}, tasks=3, seconds=1.5, unrunnable=3)], [Supply("default")])
    >>> [*unmet(snapshot, []).values()]
    ['3 tasks need FPGA=1, which no worker group offers']
    """
    found: dict[str, str] = {}
    for work in snapshot.work:
        if work.unrunnable and work.resources and (why := _why_unmet(snapshot, work.resources)):
            needs = ", ".join(f"{name}={need:g}" for name, need in work.resources.items())
            n = work.unrunnable
            found[f"{needs}{why}"] = f"{_tasks(n)} {'needs' if n == 1 else 'need'} {needs}{why}"
    for names, n in snapshot.restricted.items():
        if not any(name in expected for name in names):
            to = f"restricted to {' or '.join(names)}, which the cluster lacks"
            found[to] = f"{_tasks(n)} {'is' if n == 1 else 'are'} {to}"
    return found


def _why_unmet(snapshot: Snapshot, needs: Mapping[str, float]) -> str | None:
    able = [each for each in snapshot.supplies if each.slots(needs)]
    if any(each.adapts or each.target for each in able):
        return None
    if not able:
        return ", which no worker group offers"
    closest = min(able, key=lambda each: _excess(each, needs))
    return f"; the worker group {closest.name} offers it and has no workers"


def _tasks(n: int) -> str:
    return f"{n} task" if n == 1 else f"{n} tasks"
