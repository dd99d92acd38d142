"""The state of a cluster's workers: how many are asked for, which, and the sessions that they run in.

All parts of a manager share one :class:`Fleet`. Users change it from any thread, the manager's tasks from the
event loop. Therefore each change is one method, which holds the lock from its check to its end, and what the
properties return are snapshots. Nothing here waits: a caller decides by a snapshot, does its I/O without the
lock, and hands the result to a method that looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from dask_cml.errors import CMLError
from dask_cml.naming import dask_names


class Launched(Protocol):
    """A launched session, as :class:`dask_cml.CMLWorker` is one."""

    @property
    def waits_for(self) -> float | None:
        """For how many seconds the session has waited for room; None if it does not wait."""


W = TypeVar("W", bound=Launched)


class Fleet(Generic[W]):
    """What a cluster is asked for, and what it has.

    The *target* is how many worker sessions are asked for; the *keys* are the names of those that are wanted.
    There are never fewer keys than the target. Those above it are picked later, with the scheduler's help, by
    :meth:`trim`. The *workers* are the sessions, by key, also those that are not wanted any more.

    Parameters
    ----------
    name : str
        The cluster's name, with which the keys begin.
    processes : int
        Dask workers in each session.

    Examples
    --------
    >>> fleet = Fleet("mine")
    >>> fleet.resize(2)
    True
    >>> fleet.missing
    ['mine-0', 'mine-1']
    >>> fleet.resize(1)
    True
    >>> fleet.trim(["mine-1"])
    ['mine-1']
    """

    def __init__(self, name: str, processes: int = 1) -> None:
        self.name = name
        self._processes = processes
        self._lock = threading.RLock()
        self._target = 0
        self._keys: dict[str, None] = {}
        self._workers: dict[str, W] = {}
        self._registered: set[str] = set()
        self._number = 0
        self._wishes = 0
        self._claim_pending = False
        self._driver: object | None = None
        self._closed = False

    # -- snapshots

    @property
    def target(self) -> int:
        """How many worker sessions are asked for."""
        return self._target

    @property
    def keys(self) -> list[str]:
        """The names of the wanted worker sessions, the oldest first."""
        with self._lock:
            return [*self._keys]

    @property
    def workers(self) -> dict[str, W]:
        """The sessions by name, also those that are not wanted any more."""
        with self._lock:
            return dict(self._workers)

    @property
    def wanted_workers(self) -> dict[str, W]:
        """The sessions that are wanted, by name."""
        with self._lock:
            return {key: worker for key, worker in self._workers.items() if key in self._keys}

    @property
    def unwanted_workers(self) -> dict[str, W]:
        """The sessions that are not wanted any more, by name."""
        with self._lock:
            return {key: worker for key, worker in self._workers.items() if key not in self._keys}

    @property
    def missing(self) -> list[str]:
        """The names of wanted sessions that are not launched."""
        with self._lock:
            return [key for key in self._keys if key not in self._workers]

    @property
    def excess(self) -> int:
        """How many more sessions are wanted than the target says, because none was picked to go yet."""
        with self._lock:
            return len(self._keys) - self._target

    @property
    def wish(self) -> int:
        """A number that changes with each wish of the user's, see :meth:`refuse`."""
        return self._wishes

    def wants(self, key: str) -> bool:
        """Return whether a session is wanted."""
        return key in self._keys

    def dask_names(self, key: str) -> list[str]:
        """Return the names of the Dask workers in a session."""
        return dask_names(key, self._processes)

    def arrived(self, observed: Collection[object]) -> set[str]:
        """Return the wanted sessions of which the scheduler knows a worker, given the names that it knows."""
        return {key for key in self.keys if not set(self.dask_names(key)).isdisjoint(observed)}

    @property
    def waits(self) -> dict[str, float]:
        """For how many seconds wanted sessions have waited for room, of those that wait."""
        waits = {
            key: worker.waits_for
            for key, worker in self.wanted_workers.items()
            if key not in self._registered
        }
        return {key: waited for key, waited in waits.items() if waited is not None}

    def has_registered(self, key: str) -> bool:
        """Return whether all Dask workers of a session have registered once."""
        return key in self._registered

    def new_key(self) -> str:
        """Return the name that the next session will get."""
        return f"{self.name}-{self._number}"

    # -- wishes

    def resize(self, n: int, driver: object | None = None) -> bool:
        """Ask for `n` worker sessions.

        Parameters
        ----------
        n : int
            Worker sessions.
        driver : object, optional
            The adaptive scaling that asks, see :meth:`drive`. Default: the user, who ends adaptive scaling.

        Returns
        -------
        bool
            Whether it counts. A driver that was replaced meanwhile has no say any more.

        Raises
        ------
        CMLError
            If the cluster is closed.
        """
        with self._lock:
            if not self._take_wish(driver):
                return False
            self._target = n
            self._grow()
            return True

    def remove(self, keys: Iterable[str], driver: object | None = None) -> bool:
        """Ask for the end of these sessions. Parameters, result and errors are those of :meth:`resize`."""
        with self._lock:
            if not self._take_wish(driver):
                return False
            for key in keys:
                self._keys.pop(key, None)
            self._target = min(self._target, len(self._keys))
            return True

    def drive(self, driver: object | None) -> None:
        """Let `driver` scale from now on, until the user scales or another driver takes over; None: nobody.

        Raises
        ------
        CMLError
            If the cluster is closed.
        """
        with self._lock:
            self._check_open()
            self._driver = driver
            self._wishes += 1
            self._claim_pending = True

    def release(self, driver: object) -> None:
        """Let `driver` scale no more, if it is the one that does."""
        with self._lock:
            if self._driver is driver:
                self._driver = None

    def _take_wish(self, driver: object | None) -> bool:
        if driver is None:
            self._check_open()
            self._driver = None
            self._wishes += 1
        elif driver is not self._driver or self._closed:
            return False
        self._claim_pending = True
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise CMLError(f"cannot scale the cluster {self.name}: it is closed")

    def _grow(self) -> None:
        while len(self._keys) < self._target:
            self._keys[self.new_key()] = None
            self._number += 1

    # -- what the manager finds

    def trim(self, chosen: Iterable[str]) -> list[str]:
        """Take sessions out of the wanted ones, as far as there are too many; return those taken out.

        Parameters
        ----------
        chosen : iterable of str
            Their names, those first whose end costs least.
        """
        with self._lock:
            gone = [key for key in chosen if key in self._keys][: max(0, self.excess)]
            for key in gone:
                del self._keys[key]
            return gone

    def replace(self, keys: Iterable[str]) -> list[str]:
        """Put new sessions in the place of some; return those that were still wanted."""
        with self._lock:
            gone = [key for key in keys if key in self._keys]
            for key in gone:
                del self._keys[key]
            self._grow()
            return gone

    def refuse(self, keys: Iterable[str], wish: int) -> tuple[int, int] | None:
        """Lower the target, because the platform refuses sessions, to what it granted or less.

        Parameters
        ----------
        keys : iterable of str
            The sessions that were to be launched.
        wish : int
            :attr:`wish` when their launch began. If the user asked again since then, nothing changes here,
            and the manager asks the platform again.

        Returns
        -------
        tuple of int, or None
            How many are granted, of how many that were wanted; None if nothing changed.
        """
        with self._lock:
            if wish != self._wishes:
                return None
            asked = len(self._keys)
            for key in keys:
                if key not in self._workers:
                    self._keys.pop(key, None)
            granted = len(self._keys)
            self._target = min(self._target, granted)
            self._claim_pending = True
            return granted, asked

    def keep(self, key: str) -> None:
        """Want a session again that could not hand over its data."""
        with self._lock:
            self._keys[key] = None
            self._target = max(self._target, len(self._keys))
            self._claim_pending = True

    def registered(self, keys: Collection[str]) -> bool:
        """Note sessions all of whose Dask workers have registered; return whether some are new."""
        with self._lock:
            new = not self._registered.issuperset(keys)
            self._registered = self._registered.union(keys) & self._workers.keys()
            return new

    def launched(self, key: str, worker: W) -> None:
        """Note a session that was launched, wanted or not any more."""
        with self._lock:
            self._workers[key] = worker

    def stopped(self, key: str) -> None:
        """Forget a session that was stopped."""
        with self._lock:
            self._workers.pop(key, None)

    # -- other managers

    def take_claim(self) -> int | None:
        """Return the target if this manager was asked to scale since the last call, and else None."""
        with self._lock:
            pending, self._claim_pending = self._claim_pending, False
            return self._target if pending else None

    def claim(self) -> None:
        """Have the target told to the other managers, as when the user asked for it."""
        with self._lock:
            self._claim_pending = True

    @property
    def claim_pending(self) -> bool:
        """Whether this manager was asked to scale and did not tell the others yet."""
        return self._claim_pending

    def attach(self, key: str, worker: W) -> None:
        """Take over a session that another manager has launched."""
        with self._lock:
            self._workers[key] = worker
            self._keys.setdefault(key)
            number = key.rpartition("-")[2]
            if number.isdecimal():  # no two sessions get the same name, whoever launches them
                self._number = max(self._number, int(number) + 1)

    def drop(self, key: str) -> W | None:
        """Forget a session that another manager has stopped, and return it."""
        with self._lock:
            self._keys.pop(key, None)
            return self._workers.pop(key, None)

    def follow(self, target: int, keys: Iterable[str] | None = None) -> bool:
        """Take over what another manager was asked for.

        Parameters
        ----------
        target : int
            How many worker sessions it wants.
        keys : iterable of str, optional
            Which, if that is settled. Default: this manager picks them, for it leads.

        Returns
        -------
        bool
            Whether it was taken over. While this manager has a claim of its own to tell, it is not.
        """
        with self._lock:
            if self._claim_pending or self._closed:
                return False
            self._target = target
            if keys is None:
                self._grow()
            else:
                self._keys = dict.fromkeys(keys)
            return True

    def close(self) -> None:
        """Take no more wishes."""
        with self._lock:
            self._closed = True

    def clear(self) -> None:
        """Forget all sessions, wanted or not."""
        with self._lock:
            self._workers.clear()
            self._keys.clear()
            self._target = 0


def session_keys(keys: Iterable[str], processes: int) -> Mapping[str, str]:
    """Return the session of each Dask worker, by the worker's name."""
    return {name: key for key in keys for name in dask_names(key, processes)}
