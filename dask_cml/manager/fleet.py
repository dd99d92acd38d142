"""The state of a cluster's workers: how many are requested, which ones, and their sessions.

All parts of a manager share one :class:`Fleet`. Users change it from any thread, the manager's tasks from the
event loop. So each change is one method, which holds the lock from its check to its end, and properties
return snapshots. No method waits: a caller decides by a snapshot, does its I/O without the lock, and passes
the result to a method that checks again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from dask_cml.checks import message
from dask_cml.errors import CMLError
from dask_cml.manager.group import Group
from dask_cml.naming import DEFAULT_GROUP, dask_names, read_name
from dask_cml.options import Options


class Launched(Protocol):
    """A launched session, such as :class:`dask_cml.CMLWorker`."""

    @property
    def waits_for(self) -> float | None:
        """Time for which the session has waited for room, in seconds. None if it does not wait."""


W = TypeVar("W", bound=Launched)


class Fleet(Generic[W]):
    """The requested and the existing workers of a cluster.

    For each worker group, the *target* is the number of requested worker sessions. The *keys* are the names
    of the wanted sessions, never fewer than the target. If there are more, :meth:`trim` removes some later,
    with the scheduler's help. The *workers* are the sessions of all groups by key, including those that are
    no longer wanted.

    Parameters
    ----------
    options : Options
        The cluster's options.
    groups : mapping of str to Options, optional
        The options of its worker groups, except the default group.

    Examples
    --------
    >>> fleet = Fleet(Options.read(name="mine"))
    >>> fleet.resize(2)
    True
    >>> fleet.missing
    ['mine-0', 'mine-1']
    """

    def __init__(self, options: Options, groups: Mapping[str, Options] | None = None) -> None:
        self.name = options.name
        self._lock = threading.RLock()
        named = {DEFAULT_GROUP: options, **(groups or {})}
        self._groups = {name: Group(name, each) for name, each in named.items()}
        self._workers: dict[str, W] = {}
        self._registered: set[str] = set()
        self._closed = False

    # -- snapshots

    @property
    def groups(self) -> list[str]:
        """The names of the worker groups, the default group first."""
        with self._lock:
            return [*self._groups]

    def group_of(self, key: str) -> str:
        """Return the worker group of a session, by the session's name."""
        found = read_name(self.name, key)
        return DEFAULT_GROUP if found is None else found[0]

    def group(self, name: str = DEFAULT_GROUP) -> Group:
        """Return a copy of the state of a worker group.

        Raises
        ------
        ValueError
            If the group does not exist. All methods with a group raise this error.
        """
        with self._lock:
            group = self._group(name)
            return replace(group, keys=dict(group.keys))

    @property
    def states(self) -> list[Group]:
        """The states of all worker groups at one moment."""
        with self._lock:
            return [self.group(name) for name in self._groups]

    def options_of(self, key: str) -> Options:
        """Return the options of a session's group. If the group was removed, return the default group's."""
        group = self._groups.get(self.group_of(key))
        return self._groups[DEFAULT_GROUP].options if group is None else group.options

    @property
    def keys(self) -> list[str]:
        """The names of the wanted worker sessions of all groups."""
        with self._lock:
            return [key for group in self._groups.values() for key in group.keys]

    @property
    def workers(self) -> dict[str, W]:
        """The sessions by name, including those that are no longer wanted."""
        with self._lock:
            return dict(self._workers)

    @property
    def wanted_workers(self) -> dict[str, W]:
        """The wanted sessions, by name."""
        with self._lock:
            wanted = {*self.keys}
            return {key: worker for key, worker in self._workers.items() if key in wanted}

    @property
    def unwanted_workers(self) -> dict[str, W]:
        """The sessions that are no longer wanted, by name."""
        with self._lock:
            wanted = {*self.keys}
            return {key: worker for key, worker in self._workers.items() if key not in wanted}

    @property
    def missing(self) -> list[str]:
        """The names of wanted sessions that are not launched."""
        with self._lock:
            return [key for key in self.keys if key not in self._workers]

    def wants(self, key: str) -> bool:
        """Return whether a session is wanted."""
        with self._lock:
            return any(key in group.keys for group in self._groups.values())

    def dask_names(self, key: str) -> list[str]:
        """Return the names of the Dask workers in a session."""
        return dask_names(key, self.options_of(key).processes)

    def arrived(self, observed: Collection[object]) -> set[str]:
        """Return the wanted sessions with a Dask worker among the names that the scheduler knows."""
        return {key for key in self.keys if not set(self.dask_names(key)).isdisjoint(observed)}

    @property
    def waits(self) -> dict[str, float]:
        """For each wanted session that waits for room, the time it has waited, in seconds."""
        absent = {key: each for key, each in self.wanted_workers.items() if key not in self._registered}
        waits = {key: worker.waits_for for key, worker in absent.items()}
        return {key: waited for key, waited in waits.items() if waited is not None}

    def has_registered(self, key: str) -> bool:
        """Return whether all Dask workers of a session have been connected once."""
        return key in self._registered

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            raise ValueError(message("worker_group", name, f"one of {', '.join(map(repr, self._groups))}"))
        return self._groups[name]

    # -- wishes

    def resize(self, n: int, driver: object | None = None, group: str = DEFAULT_GROUP) -> bool:
        """Request `n` worker sessions.

        Parameters
        ----------
        n : int
            Number of worker sessions.
        driver : object, optional
            The adaptive scaling that requests them, see :meth:`drive`. Default: the user, which stops
            adaptive scaling. If another driver has replaced this one, the request is ignored, and the result
            is False.
        group : str
            The worker group.

        Raises
        ------
        CMLError
            If the cluster is closed.
        """
        with self._lock:
            asked = self._group(group)
            if not self._take_wish(asked, driver):
                return False
            asked.target, asked.ends = n, False
            asked.grow()
            return True

    def remove(self, keys: Iterable[str], driver: object | None = None) -> bool:
        """Request that these sessions stop. Parameters, result and errors are those of :meth:`resize`."""
        with self._lock:
            names = {key: self.group_of(key) for key in keys}
            asked = [self._groups[name] for name in {*names.values()} & self._groups.keys()]
            counts = [group for group in asked if self._take_wish(group, driver)]
            for group in counts:
                group.discard([*names])
                group.target = min(group.target, len(group.keys))
            return bool(counts)

    def add_group(self, name: str, options: Options) -> None:
        """Add a worker group without sessions.

        Raises
        ------
        CMLError
            If the cluster is closed.
        ValueError
            If a group with this name exists.
        """
        with self._lock:
            self._check_open()
            if name in self._groups:
                raise ValueError(message("name", name, "a name that no worker group of the cluster has"))
            self._groups[name] = Group(name, options)

    def end_group(self, name: str) -> None:
        """Request that a worker group and all its sessions stop."""
        with self._lock:
            self.resize(0, group=name)
            self._groups[name].keys.clear()
            self._groups[name].ends = True

    def forget_group(self, name: str) -> None:
        """Forget a worker group that was removed. Its remaining sessions are no longer wanted."""
        with self._lock:
            self._groups.pop(name, None)

    def forget_ended_group(self, name: str) -> bool:
        """Forget a worker group that is to be removed, unless it has sessions. Return whether it is gone."""
        with self._lock:
            there = {self.group_of(key) for key in self._workers}
            if name in self._groups and (name in there or not self._groups[name].ends):
                return False
            self.forget_group(name)
            return True

    def drive(self, driver: object | None, group: str = DEFAULT_GROUP) -> None:
        """Let `driver` scale until the user scales or another driver takes over. None: no driver scales.

        Raises
        ------
        CMLError
            If the cluster is closed.
        """
        with self._lock:
            self._check_open()
            self._group(group).take_wish(None)
            self._group(group).driver = driver

    def release(self, driver: object) -> None:
        """Let `driver` no longer scale."""
        with self._lock:
            for group in [each for each in self._groups.values() if each.driver is driver]:
                group.driver = None

    def _take_wish(self, group: Group, driver: object | None) -> bool:
        if driver is None:
            self._check_open()
        return not self._closed and group.take_wish(driver)

    def _check_open(self) -> None:
        if self._closed:
            raise CMLError(f"cannot scale cluster {self.name}: it is closed")

    # -- results of the manager's work

    def trim(self, chosen: Iterable[str], group: str = DEFAULT_GROUP) -> list[str]:
        """Remove as many of the chosen sessions from the wanted ones as exceed the target. Return these."""
        with self._lock:
            trimmed = self._group(group)
            wanted = [key for key in chosen if key in trimmed.keys]
            return trimmed.discard(wanted[: max(0, trimmed.excess)])

    def replace(self, keys: Iterable[str]) -> list[str]:
        """Replace sessions by new ones. Return those that were still wanted."""
        with self._lock:
            gone, lost = [], [*keys]
            for group in self._groups.values():
                gone += group.discard(lost)
                group.grow()
            return gone

    def refuse(self, keys: Iterable[str], wish: int, group: str = DEFAULT_GROUP) -> tuple[int, int] | None:
        """Lower the target, because the platform refused sessions, to the number that it launched or less.

        Return how many sessions it launched, and how many were wanted. Return None if nothing changed.

        Parameters
        ----------
        keys : iterable of str
            The sessions that were to be launched.
        wish : int
            The group's ``wishes`` when the launch started. If the user has scaled the group since then,
            nothing changes, and the manager tries again.
        group : str
            The worker group.
        """
        with self._lock:
            refused = self._groups.get(group)
            if refused is None or wish != refused.wishes:
                return None
            return refused.lower([key for key in keys if key not in self._workers])

    def keep(self, key: str) -> None:
        """Want a session, and its group, again, because no other worker can take its data."""
        with self._lock:
            if group := self._groups.get(self.group_of(key)):
                group.keys[key] = None
                group.target = max(group.target, len(group.keys))
                group.claim_pending, group.ends = True, False

    def registered(self, keys: Collection[str]) -> set[str]:
        """Record sessions whose Dask workers are all connected. Return those that are new."""
        with self._lock:
            new = {*keys} - self._registered
            self._registered = self._registered.union(keys) & self._workers.keys()
            return new

    def launched(self, key: str, worker: W) -> None:
        """Record a launched session, wanted or not."""
        with self._lock:
            self._workers[key] = worker

    def stopped(self, key: str) -> None:
        """Forget a session that was stopped."""
        with self._lock:
            self._workers.pop(key, None)

    # -- other managers

    def take_claims(self) -> dict[str, int]:
        """Return the targets of the groups that the user has scaled since the last call."""
        with self._lock:
            claims = {group.name: group.target for group in self._groups.values() if group.claim_pending}
            for name in claims:
                self._groups[name].claim_pending = False
            return claims

    def claim(self, groups: Iterable[str]) -> None:
        """Send the targets of groups to the other managers, as if the user had scaled them."""
        with self._lock:
            for name in groups:
                if name in self._groups:
                    self._groups[name].claim_pending = True

    def attach(self, key: str, worker: W) -> None:
        """Take over a session that another manager launched."""
        with self._lock:
            self._workers[key] = worker
            found = read_name(self.name, key)
            if group := self._groups.get(self.group_of(key)):
                group.keys.setdefault(key)
                if found is not None:  # no two sessions may get the same name, from different managers
                    group.number = max(group.number, found[1] + 1)

    def drop(self, key: str) -> W | None:
        """Forget a session that another manager stopped, and return it."""
        with self._lock:
            for group in self._groups.values():
                group.discard([key])
            return self._workers.pop(key, None)

    def follow(self, target: int, keys: Iterable[str] | None = None, group: str = DEFAULT_GROUP) -> bool:
        """Take over the target from another manager. Return whether that was done.

        Return False while this manager has a target of its own to send.

        Parameters
        ----------
        target : int
            Number of worker sessions.
        keys : iterable of str, optional
            The names of the sessions. Default: this manager chooses them, because it leads.
        group : str
            The worker group.
        """
        with self._lock:
            following = self._groups.get(group)
            if following is None or following.claim_pending or self._closed:
                return False
            following.follow(target, keys)
            return True

    def close(self) -> None:
        """Refuse requests from now on."""
        with self._lock:
            self._closed = True

    def clear(self) -> None:
        """Forget all sessions."""
        with self._lock:
            self._workers.clear()
            for group in self._groups.values():
                group.keys.clear()
                group.target = 0
