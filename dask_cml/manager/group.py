"""The state of one worker group of a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dask_cml.naming import session_name
from dask_cml.options import Options, SessionSize


@dataclass(frozen=True)
class WorkerGroup:
    """A worker group of a cluster.

    Parameters
    ----------
    name : str
        The group's name.
    n_workers : int
        Number of requested worker sessions.
    n_arrived : int
        Number of worker sessions of which a Dask worker is connected.
    size : SessionSize
        Virtual CPUs, memory in GiB, and GPUs of each session.
    nthreads : int
        Number of threads in each session.
    processes : int
        Number of Dask workers in each session.
    resources : dict of str to float
        Resources of each session. Its Dask workers share them evenly.
    """

    name: str
    n_workers: int
    n_arrived: int
    size: SessionSize
    nthreads: int
    processes: int
    resources: dict[str, float]


@dataclass
class Group:
    """The state of a worker group. Only the fleet changes it, with the fleet's lock.

    Parameters
    ----------
    name : str
        The group's name.
    options : Options
        The cluster's options, with the values of this group.

    Attributes
    ----------
    target : int
        Number of requested worker sessions.
    keys : dict
        The names of the wanted sessions, the oldest first.
    number : int
        The number of the next session.
    wishes : int
        How often the user has scaled the group.
    claim_pending : bool
        Whether this manager has scaled the group, and must inform the others.
    driver : object or None
        The adaptive scaling that scales the group.
    ends : bool
        Whether to remove the group after its last session.
    """

    name: str
    options: Options
    target: int = 0
    keys: dict[str, None] = field(default_factory=dict)
    number: int = 0
    wishes: int = 0
    claim_pending: bool = False
    driver: object | None = None
    ends: bool = False

    @property
    def excess(self) -> int:
        """Number of wanted sessions above the target, because none was chosen to stop yet."""
        return len(self.keys) - self.target

    @property
    def new_key(self) -> str:
        """The name of the next session."""
        return session_name(self.options.name, self.name, self.number)

    def grow(self) -> None:
        """Add names of new sessions up to the target."""
        while self.excess < 0:
            self.keys[self.new_key] = None
            self.number += 1

    def discard(self, keys: Collection[str]) -> list[str]:
        """Remove sessions from the wanted ones. Return those that were wanted."""
        gone = [key for key in keys if key in self.keys]
        for key in gone:
            del self.keys[key]
        return gone

    def take_wish(self, driver: object | None) -> bool:
        """Record that the user or adaptive scaling scales the group. Return whether to comply."""
        if driver is None:
            self.driver = None
            self.wishes += 1
        elif driver is not self.driver:
            return False
        self.claim_pending = True
        return True

    def lower(self, refused: Collection[str]) -> tuple[int, int]:
        """Remove refused sessions from the wanted ones. Return how many remain, and how many were wanted."""
        asked = len(self.keys)
        self.discard(refused)
        granted = len(self.keys)
        self.target = min(self.target, granted)
        self.claim_pending = True
        return granted, asked

    def follow(self, target: int, keys: Iterable[str] | None) -> None:
        """Take over the target from another manager. Without keys, this manager chooses them."""
        self.target = target
        self.ends = self.ends and not target
        if keys is None:
            self.grow()
        else:
            self.keys = dict.fromkeys(keys)
