"""What is wanted of a cluster's workers: the one state that all its managers share.

The scheduler's plugin owns it. Managers send wishes, decisions and what they did; each is one method here,
which gets the manager's id. The types of its arguments say which values are valid. There is no I/O and no
clock in it, so the order of the calls alone decides.

For each worker group, the *target* is the number of requested worker sessions. Never fewer sessions are
*wanted*. If there are more, the leader chooses some to stop. Numbers in names are given out once, so no two
managers launch sessions with one name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from dask_cml.naming import DEFAULT_GROUP, read_name, session_name
from dask_cml.scheduler.exchange import AnsweredWishes, ChangeLog
from dask_cml.scheduler.messages import Count, Group, Names, Number, Options, Text, Texts, Wishes, check_of
from dask_cml.scheduler.wanted_group import Entry, WantedGroup

#: Maximum number of events that nobody has taken yet.
_MOST_EVENTS = 10_000
#: What a change of a group, and of the leader, is logged as; sessions are logged by their names.
GROUPS = ("groups", "")


class Wanted:
    """The wanted and the launched worker sessions of a cluster.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    leader : str, optional
        The manager that launches and stops sessions.
    groups : mapping of str to mapping, optional
        The groups, as :meth:`to_json` returns them. Default: the default group without sessions.

    Examples
    --------
    >>> wanted = Wanted("mine", leader="me")
    >>> wanted.scale("me", "default", 2)
    >>> [*wanted.sessions]
    ['mine-0', 'mine-1']
    """

    def __init__(
        self, cluster: str, leader: str | None = None, groups: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.cluster = cluster
        self.leader = leader
        self.changes = ChangeLog()
        self.sessions: dict[str, Entry] = {}
        #: What has happened to sessions, for Dask's log of events.
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        known = {name: WantedGroup(**each) for name, each in (groups or {DEFAULT_GROUP: {}}).items()}
        # The sessions for which a deleted group has stayed are those of the scheduler before.
        self.groups = {name: group for name, group in known.items() if not group.deleted}
        self._answered = AnsweredWishes()
        self._grow_all()

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the groups for JSON, from which another scheduler begins."""
        return {name: asdict(group) for name, group in self.groups.items()}

    def names(self, group: str) -> list[str]:
        """Return the names of the wanted sessions of a group, the oldest first."""
        return [name for name, each in self.sessions.items() if each.wanted and each.group == group]

    def since(self, revision: int) -> dict[str, Any]:
        """Return for managers what has changed since a revision.

        Returns
        -------
        dict
            The current ``revision``; ``whole``, whether the state is complete; the ``leader``; ``groups``, or
            None if they are as before; ``sessions`` by name, None for those that are gone; and the addresses
            of ``workers``.
        """
        changed = self.changes.since(revision) if revision else None
        everything = [GROUPS, *(("session", name) for name in self.sessions)]
        keys = everything if changed is None else changed[::-1]  # the oldest first
        return {
            "revision": self.changes.revision,
            "whole": changed is None,
            "leader": self.leader,
            "groups": self.to_json() if GROUPS in keys else None,
            "sessions": {name: self._session(name) for kind, name in keys if kind == "session"},
            "workers": [name for kind, name in keys if kind == "worker"],
        }

    def _session(self, name: str) -> dict[str, Any] | None:
        entry = self.sessions.get(name)
        return None if entry is None else {**asdict(entry), "seen": [*entry.seen]}

    def lead(self, leader: str | None) -> None:
        """Let a manager lead from now on."""
        if leader != self.leader:
            self.leader = leader
            self.changes.touch(GROUPS)

    def apply(self, sender: str, operation: Any, now: float = 0.0) -> Any:
        """Carry out an operation. Return its result, or ``{"error": message}`` if it is invalid or refused.

        Parameters
        ----------
        sender : str
            The manager's id.
        operation : mapping
            ``op``, the name of one of the methods below, with its arguments. A ``wish`` has a number, which
            counts up, and its ``age`` in seconds. A wish that a manager sends again, because the answer was
            lost, is not carried out again. A wish that comes after a younger one of another manager for its
            group changes nothing.
        now : float
            The time of the call, in seconds.
        """
        try:
            check_operation(operation)
            return self._carry_out(sender, now, **operation)
        except ValueError as error:
            return {"error": str(error)}

    def _carry_out(
        self, sender: str, now: float, op: str, wish: int | None = None, age: float = 0.0, **arguments: Any
    ) -> Any:
        carry_out = partial(getattr(self, op), sender, **arguments)
        if wish is None:
            return carry_out()
        groups = {arguments.get("group", ""), *self._groups_of(arguments.get("names", ()))}
        return self._answered.once(sender, wish, carry_out, groups & self.groups.keys(), now - age)

    # -- wishes of users

    def scale(self, manager: str, group: Group, n: Count) -> None:
        """Request `n` sessions, and stop adaptive scaling."""
        asked = self._asked(group)
        asked.target, asked.adapting = n, None
        self._grow(group)

    def adapt(
        self, manager: str, group: Group, minimum: Count, maximum: Count | None, key: Text, options: Options
    ) -> None:
        """Scale a group by its work from now on. `key` names this request."""
        asked = self._asked(group)
        limits = {"minimum": minimum, "maximum": maximum, "options": dict(options)}
        asked.adapting = {**limits, "manager": manager, "key": key}
        # At once, without waiting for a look at the work.
        asked.target = max(asked.target, minimum)
        if maximum is not None:
            asked.target = min(asked.target, maximum)
        self._grow(group)

    def stop_adapting(self, manager: str, group: Group, key: Text | None) -> None:
        """Keep the current number of sessions. With a key, only if that request is the last one."""
        if key is None or self._adapts(group, key):
            self._asked(group).adapting = None

    def remove(self, manager: str, names: Names) -> None:
        """Stop these sessions, request fewer by as many, and stop adaptive scaling."""
        for group in self._groups_of(names):
            self._asked(group).adapting = None
        self._lower(names)

    def add_group(self, manager: str, group: Group, options: Options, n: Count) -> None:
        """Add a worker group with `n` sessions."""
        before = self.groups.get(group)
        if before is not None and not before.deleted:
            expected = "a name that no worker group of the cluster has"
            raise ValueError(f"invalid name={group!r}: expected {expected}")
        self.groups[group] = WantedGroup(dict(options), target=n, number=before.number if before else 0)
        self._grow(group)

    def delete_group(self, manager: str, group: Group) -> None:
        """Stop all sessions of a group, and remove the group after the last one."""
        asked = self._asked(group)
        asked.target, asked.adapting, asked.deleted = 0, None, True
        self._discard(self.names(group))
        self._remove_deleted()

    def _asked(self, name: str) -> WantedGroup:
        """Record that a user scales a group, which is wanted again if it was deleted."""
        if name not in self.groups:
            known = ", ".join(map(repr, self.groups))
            raise ValueError(f"invalid worker_group={name!r}: expected one of {known}")
        asked = self.groups[name]
        asked.wishes, asked.deleted = asked.wishes + 1, False
        self.changes.touch(GROUPS)
        return asked

    # -- adaptive scaling, unless another request has replaced the one with this key

    def resize(self, manager: str, group: Group, n: Count, key: Text) -> bool:
        """Request `n` sessions. Return whether that was done."""
        if not self._adapts(group, key):
            return False
        self.groups[group].target = n
        self._grow(group)
        return True

    def shrink(self, manager: str, group: Group, names: Names, key: Text) -> bool:
        """Stop these sessions, and request fewer by as many. Return whether that was done."""
        if not self._adapts(group, key):
            return False
        wanted = {*self.names(group)}
        self._lower([name for name in names if name in wanted])
        return True

    def _adapts(self, group: Group, key: Text) -> bool:
        asked = self.groups.get(group)
        return asked is not None and asked.adapting is not None and asked.adapting["key"] == key

    # -- decisions of the leader; those of another manager change nothing

    def trim(self, manager: str, group: Group, names: Names) -> None:
        """Stop as many of these sessions as exceed the target."""
        if manager == self.leader and group in self.groups:
            wanted = {*self.names(group)}
            chosen = [name for name in names if name in wanted]
            self._discard(chosen[: max(0, len(wanted) - self.groups[group].target)])

    def replace(self, manager: str, names: Names, causes: Texts) -> list[str]:
        """Replace sessions by new ones. Return those that were still wanted. `causes` says why by name."""
        if manager != self.leader:
            return []
        gone = self._discard(names)
        for name in gone:
            self._log("lost", name, cause=causes.get(name, "not launched"))
        self._grow_all()
        return gone

    def refuse(self, manager: str, group: Group, names: Names, wishes: Number) -> list[int] | None:
        """Lower the target, because the platform refused these sessions.

        Return how many were launched, and how many were wanted. If a user has scaled the group since
        `wishes`, nothing changes, and the result is None.
        """
        refused = self.groups.get(group)
        if manager != self.leader or refused is None or refused.wishes != wishes:
            return None
        asked = {*self.names(group)}
        self._discard([name for name in names if name in asked and not self.sessions[name].launched])
        granted = len(self.names(group))
        refused.target = min(refused.target, granted)
        self.changes.touch(GROUPS)
        return [granted, len(asked)]

    def keep(self, manager: str, names: Names, wishes: Wishes) -> None:
        """Want sessions again whose data no other worker can take.

        Of a group that a user has scaled since its number in `wishes`, none stays.
        """
        for name in names if manager == self.leader else ():
            entry = self.sessions.get(name)
            group = None if entry is None else self.groups.get(entry.group)
            if entry is not None and group is not None and wishes.get(entry.group) == group.wishes:
                entry.wanted = True
                group.target, group.deleted = max(group.target, len(self.names(entry.group))), False
                self._touch(name)
                self.changes.touch(GROUPS)

    # -- what happened to sessions

    def launched(self, manager: str, names: Names) -> None:
        """Record launched sessions, wanted or not. They are in the cluster's record."""
        for name in names:
            found = read_name(self.cluster, name)
            if found is None or session_name(self.cluster, *found) != name:
                raise ValueError(f"invalid session {name!r}: expected a worker session of this cluster")
            group, number = found
            entry = self.sessions.setdefault(name, Entry(group, manager))
            if not entry.launched:
                self._log("launched", name)
            entry.launched, entry.manager = True, manager
            if group in self.groups:
                self.groups[group].number = max(self.groups[group].number, number + 1)
            self._touch(name)

    def found(self, manager: str, states: Texts) -> None:
        """Log what the platform says of sessions: ``waiting`` for room, or ``running``."""
        for name, state in states.items():
            if name in self.sessions:
                self._log(state, name)

    def connected(self, worker: str) -> None:
        """Record a Dask worker that has connected, by its name.

        Its session is in the cluster's record, even if its manager died before it said that it launched it.
        """
        if (found := read_name(self.cluster, worker)) is None:
            return
        name = session_name(self.cluster, *found)
        entry = self.sessions.setdefault(name, Entry(found[0], self.leader))
        if not entry.launched:
            self._log("launched", name)
        self._log("connected", worker)
        entry.launched, entry.last = True, None
        entry.seen |= {worker}
        self._touch(name)

    def left(self, worker: str, last: Mapping[str, Any]) -> None:
        """Record a Dask worker that has left, and what was known of it last.

        Of several Dask workers of a session, the one that ran tasks counts.
        """
        if (entry := self._entry_of(worker)) is not None and (last["tasks"] or not entry.last):
            entry.last = last

    def leave(self, workers: Iterable[str]) -> None:
        """Record that the platform is about to stop the session of Dask workers."""
        for worker in workers:
            if (entry := self._entry_of(worker)) is not None:
                entry.leaving = True
                self._log("evicted", worker)

    def _entry_of(self, worker: str) -> Entry | None:
        """Return the session of a Dask worker, which changes."""
        found = read_name(self.cluster, worker)
        name = session_name(self.cluster, *found) if found else ""
        if name in self.sessions:
            self._touch(name)
        return self.sessions.get(name)

    def stopped(self, manager: str, names: Names) -> None:
        """Forget sessions that were stopped. Replace those that are wanted."""
        self._discard(names)
        for name in names:
            if self.sessions.pop(name, None) is not None:
                self._log("stopped", name)
                self._touch(name)
        self._grow_all()
        self._remove_deleted()

    # -- their parts

    def _grow_all(self) -> None:
        for name in self.groups:
            self._grow(name)

    def _grow(self, name: str) -> None:
        """Give out names of new sessions up to the target."""
        group = self.groups[name]
        missing = group.target - len(self.names(name))
        while missing > 0:
            session = session_name(self.cluster, name, group.number)
            group.number += 1
            if session not in self.sessions:
                self.sessions[session] = Entry(name, self.leader, wanted=True)
                self._touch(session)
                missing -= 1
        self.changes.touch(GROUPS)

    def _discard(self, names: Iterable[str]) -> list[str]:
        """Want sessions no longer. Return those that were wanted."""
        gone = []
        for name in names:
            if (entry := self.sessions.get(name)) is not None and entry.wanted:
                entry.wanted = False
                gone.append(name)
                if not entry.launched:
                    del self.sessions[name]
                self._touch(name)
        return gone

    def _groups_of(self, names: Iterable[str]) -> set[str]:
        return {self.sessions[name].group for name in names if name in self.sessions} & {*self.groups}

    def _lower(self, names: Names) -> None:
        groups = self._groups_of(names)
        self._discard(names)
        for name in groups:
            group = self.groups[name]
            group.target = min(group.target, len(self.names(name)))
        self.changes.touch(GROUPS)

    def _remove_deleted(self) -> None:
        """Remove deleted groups that have no sessions any more."""
        there = {entry.group for entry in self.sessions.values()}
        for name in [name for name, group in self.groups.items() if group.deleted and name not in there]:
            del self.groups[name]
            self.changes.touch(GROUPS)

    def _log(self, action: str, session: str, **more: str) -> None:
        self.events.append({"action": action, "session": session, **more})

    def _touch(self, name: str) -> None:
        self.changes.touch(("session", name))


#: The operations that managers may send: the methods that take the id of the manager that sends them.
OPERATIONS = [each for each in vars(Wanted).values() if "manager" in getattr(each, "__annotations__", ())]
check_operation = check_of(OPERATIONS)
