"""What a manager knows of its cluster's workers: what is wanted, by the scheduler, and their sessions.

The scheduler owns what is wanted. A :class:`Fleet` is a copy, which each answer of the scheduler updates, and
the wishes that the scheduler has not answered yet, which are sent until it does. Before the scheduler answers
for the first time, the creator's own state counts.

Users add wishes from any thread, and read snapshots. All else changes in the event loop. Each change is one
method, which holds the lock from its check to its end. No method waits.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from dask_cml.checks import message
from dask_cml.errors import CMLError
from dask_cml.identity import amount, full_workers, read_workers
from dask_cml.manager.members import GroupState, Member
from dask_cml.naming import DEFAULT_GROUP, dask_names, read_name
from dask_cml.options import Options
from dask_cml.options.limits import Sessions
from dask_cml.scheduler.wanted import Wanted, check_operation
from dask_cml.scheduler.wanted_group import Entry, WantedGroup
from dask_cml.sessions.process import CMLWorker

logger = logging.getLogger(__name__)

#: The largest number of finished tasks, and of seconds.
_MOST = 2**53


class Fleet:
    """The wanted and the existing workers of a cluster.

    Parameters
    ----------
    options : Options
        The cluster's options.
    manager : str
        The id of this manager.

    Attributes
    ----------
    leader : str or None
        The manager that launches and stops sessions.
    revision : int
        The revision of the scheduler's state that is known here.
    workers_info : dict
        The scheduler's information on its Dask workers, by their addresses. Each answer replaces it.
    observed : set
        The names of these Dask workers.
    """

    def __init__(self, options: Options, manager: str) -> None:
        self.options, self.manager, self.name = options, manager, options.name
        self.leader: str | None = None
        self.revision = 0
        self.workers_info: dict[str, dict[str, Any]] = {}
        self.observed: set[Any] = set()
        self.tasks_done = self.managers = 0
        #: The cluster's age in seconds, and its limit, if it has one.
        self.age = self.most_age = 0
        self._lock = threading.RLock()
        self._groups = {DEFAULT_GROUP: (options, WantedGroup())}
        self._members: dict[str, Member] = {}
        #: The wishes that the scheduler has not answered, each with the time at which it was made.
        self._wishes: dict[int, tuple[float, dict[str, Any]]] = {}
        #: Number the wishes of this manager.
        self.numbers = itertools.count(1)
        self._closed = False

    def begin(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin with these groups, as the next scheduler will. This manager leads until it answers."""
        first = Wanted(self.name, self.manager, groups)
        self.update({**first.since(0), "workers": {}})

    # -- answers of the scheduler

    def update(self, answer: Mapping[str, Any]) -> None:
        """Take an answer of the scheduler, see :meth:`dask_cml.scheduler.wanted.Wanted.since`.

        An answer that came late, after a newer one, changes nothing.

        Raises
        ------
        ValueError
            If the answer is invalid.
        """
        read_workers({address: each for address, each in answer["workers"].items() if each is not None})
        keys = ("tasks_done", "managers", "age", "most_age")
        amounts = [amount(key, answer.get(key, 0), _MOST) for key in keys]
        with self._lock:
            if answer["revision"] < self.revision and not answer["whole"]:
                return
            self.leader = answer["leader"]
            self.tasks_done, self.managers, self.age, self.most_age = amounts
            if answer["groups"] is not None:
                self._groups = dict(self._read_groups(answer["groups"]))
            sessions = dict(answer["sessions"])
            if answer["whole"]:
                sessions.update(dict.fromkeys(self._members.keys() - sessions.keys()))
            for name, each in sessions.items():
                self._update_member(name, each)
            workers = {**({} if answer["whole"] else self.workers_info), **answer["workers"]}
            known = {address: each for address, each in workers.items() if each is not None}
            self.workers_info, self.observed = known, {each["name"] for each in known.values()}
            # At last, so that the manager asks again for an answer that it could not read.
            self.revision = answer["revision"]

    def _read_groups(
        self, groups: Mapping[str, Mapping[str, Any]]
    ) -> Iterable[tuple[str, tuple[Options, WantedGroup]]]:
        for name, each in groups.items():
            group = WantedGroup(**each)
            options, before = self._groups.get(name, (self.options, None))
            if name != DEFAULT_GROUP and (before is None or before.options != group.options):
                try:
                    options = self.options.of_group(group.options)
                except (TypeError, ValueError) as error:
                    logger.warning("Worker group %s of cluster %s ignored: %s", name, self.name, error)
                    continue
            yield name, (options, group)

    def _update_member(self, name: str, entry: Mapping[str, Any] | None) -> None:
        member = self._members.get(name)
        if entry is None:
            if member is not None:
                member.gone = member.gone or member.launched
                member.wanted = member.launched = False
                if member.worker is None:
                    del self._members[name]
            return
        if member is None:
            member = self._members[name] = self._new_member(name, entry["group"])
        member.wanted, member.launched, member.gone = entry["wanted"], entry["launched"], False
        member.manager, member.seen = entry["manager"], frozenset(entry["seen"])
        member.leaving, member.last = entry["leaving"], entry["last"]
        member.retired = member.retired and not member.wanted

    def _new_member(self, name: str, group: str) -> Member:
        names = dask_names(name, self.options_of(group).processes)
        return Member(name=name, group=group, manager=None, dask_names=names, observed=lambda: self.observed)

    # -- snapshots

    @property
    def groups(self) -> list[str]:
        """The names of the worker groups, the default group first."""
        with self._lock:
            return [*self._groups]

    def group_of(self, name: str) -> str:
        """Return the group of a session, by its name."""
        found = read_name(self.name, name)
        return found[0] if found else DEFAULT_GROUP

    def options_of(self, group: str) -> Options:
        """Return the options of a group, or the default group's if it was removed."""
        return self._groups.get(group, (self.options, None))[0]

    def group(self, name: str = DEFAULT_GROUP) -> GroupState:
        """Return the state of a worker group.

        Raises
        ------
        ValueError
            If the group does not exist.
        """
        with self._lock:
            if name not in self._groups:
                known = ", ".join(map(repr, self._groups))
                raise ValueError(message("worker_group", name, f"one of {known}"))
            return self._state_of(name, self._wanted())

    def to_json(self) -> dict[str, Mapping[str, Any]]:
        """Return the worker groups as the scheduler knew them last, for another scheduler."""
        with self._lock:
            return {name: asdict(group) for name, (_, group) in self._groups.items()}

    def n_wishes(self, group: str) -> int:
        """Return how often a user has scaled a group, as far as the scheduler has answered."""
        return self._groups[group][1].wishes if group in self._groups else 0

    @property
    def adapting(self) -> dict[str, Mapping[str, Any] | None]:
        """The limits of the adaptive scaling of each worker group. None: it has a fixed size."""
        with self._lock:
            return {name: each.adapting for name, each in self._wanted().groups.items()}

    @property
    def states(self) -> list[GroupState]:
        """The states of all worker groups at one moment."""
        with self._lock:
            wanted = self._wanted()
            return [self._state_of(name, wanted) for name in self._groups]

    def beside(self, group: str | None = None, granted: Mapping[str, int] | None = None) -> Sessions:
        """Return the sizes and numbers of all requested sessions, with the scheduler's, without a group's.

        Of a group that adapts, count at least as many as are `granted`: it may be about to request them.
        """
        others = [(self.options.scheduler, 1)]
        for each in self.states:
            least = (granted or {}).get(each.name, 0) if each.wanted.adapting else 0
            others += [(each.options.worker, max(each.wanted.target, least))] * (each.name != group)
        return others

    def _state_of(self, name: str, wanted: Wanted) -> GroupState:
        options, known = self._groups[name]
        group = replace(wanted.groups.get(name, WantedGroup()), wishes=known.wishes)
        return GroupState(name, options, group, wanted.names(name))

    def _wanted(self) -> Wanted:
        """Return what is wanted when the scheduler has answered the wishes of this manager."""
        wanted = Wanted(self.name, self.leader)
        wanted.groups = {name: replace(each) for name, (_, each) in self._groups.items()}
        wanted.sessions = {**self._members}
        if self._wishes:  # which change sessions
            for name, each in self._members.items():
                wanted.sessions[name] = Entry(each.group, each.manager, each.wanted, each.launched)
        for _, wish in self._wishes.values():
            wanted.apply(self.manager, wish)
        return wanted

    @property
    def members(self) -> list[Member]:
        """The sessions that are wanted or launched, as the scheduler knows them."""
        with self._lock:
            return [*self._members.values()]

    def wanted_members(self, group: str | None = None) -> list[Member]:
        """Return the wanted sessions, of one group or of all."""
        return [each for each in self.members if each.wanted and group in (None, each.group)]

    @property
    def unlaunched(self) -> list[Member]:
        """The wanted sessions of known groups that are not launched, as far as this manager knows."""
        wanted = [each for each in self.wanted_members() if each.group in self._groups]
        return [each for each in wanted if not each.launched and each.worker is None]

    def member(self, name: str) -> Member | None:
        """Return a session. None: it is neither wanted nor launched."""
        return self._members.get(name)

    @property
    def workers(self) -> dict[str, CMLWorker]:
        """The launched sessions by name, including those that are no longer wanted."""
        with self._lock:
            return {name: each.worker for name, each in self._members.items() if each.worker is not None}

    @property
    def names(self) -> list[str]:
        """The names of the wanted sessions of all groups, with the wishes of this manager."""
        return [name for group in self.states for name in group.names]

    @property
    def differs(self) -> bool:
        """Whether sessions are to be launched or stopped."""
        return any(each.wanted == (each.worker is None) for each in self.members)

    @property
    def starting(self) -> bool:
        """Whether sessions are on their way that do not wait for room."""
        launched = [each for each in self.wanted_members() if each.worker is not None]
        return any(each.waits_for is None and not each.is_complete for each in launched)

    @property
    def full(self) -> str | None:
        """Which Dask workers start no tasks because their memory and their disk are full. None: no one."""
        paused = {key: each for key, each in self.workers_info.items() if each.get("status") == "paused"}
        return full_workers(read_workers(paused))

    def arrived(self, group: str | None = None) -> set[str]:
        """Return the wanted sessions of which a Dask worker is connected, in one group or in all."""
        return {each.name for each in self.wanted_members(group) if each.connected}

    def waits(self, group: str | None = None) -> dict[str, float]:
        """Return how long the wanted sessions have waited for room that do so, in one group or in all."""
        waits = {each.name: each.waits_for for each in self.wanted_members(group)}
        return {name: seconds for name, seconds in waits.items() if seconds is not None}

    # -- wishes

    def wish(self, op: str, **arguments: Any) -> None:
        """Add a wish, which is sent until the scheduler answers.

        A wish for a group replaces those that were not answered yet and that it makes void.

        Raises
        ------
        CMLError
            If the cluster is closed.
        ValueError
            If the scheduler would refuse the wish.
        """
        check_operation({"op": op, **arguments})
        with self._lock:
            if self._closed:
                raise CMLError(f"cannot scale cluster {self.name}: it is closed")
            if op in ("scale", "adapt"):
                void = ("scale", "adapt", "stop_adapting")
                self._wishes = {
                    number: (made, each)
                    for number, (made, each) in self._wishes.items()
                    if each["op"] not in void or each["group"] != arguments["group"]
                }
            self._wishes[next(self.numbers)] = (time.monotonic(), {"op": op, **arguments})

    @property
    def wishes(self) -> list[dict[str, Any]]:
        """The wishes that the scheduler has not answered, the oldest first, with their ages."""
        now = time.monotonic()
        with self._lock:
            return [
                {**each, "wish": number, "age": max(0.0, now - made)}
                for number, (made, each) in self._wishes.items()
            ]

    def answered(self, wishes: Iterable[int]) -> None:
        """Forget wishes that the scheduler has answered."""
        with self._lock:
            for wish in wishes:
                self._wishes.pop(wish, None)

    def close(self) -> None:
        """Refuse wishes from now on."""
        with self._lock:
            self._closed = True

    # -- sessions

    def attach(self, name: str, worker: CMLWorker) -> None:
        """Record a launched session, wanted or not."""
        with self._lock:
            if name not in self._members:
                self._members[name] = self._new_member(name, self.group_of(name))
            self._members[name].worker = worker

    def detach(self, name: str) -> CMLWorker | None:
        """Forget a session that was stopped, and return it."""
        with self._lock:
            member = self._members.get(name)
            if member is None:
                return None
            worker, member.worker = member.worker, None
            if not (member.wanted or member.launched):
                del self._members[name]
            return worker

    def clear(self) -> None:
        """Forget all sessions and Dask workers, because the cluster is closed."""
        with self._lock:
            self._members.clear()
            self._wishes.clear()
            self.workers_info, self.observed = {}, set()
            for _, group in self._groups.values():
                group.target, group.adapting = 0, None
