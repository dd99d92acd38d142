"""What one worker group of a cluster is asked for."""

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
        Worker sessions that are asked for.
    n_arrived : int
        Those of which a Dask worker has registered.
    size : SessionSize
        Virtual CPUs, memory in GiB, and GPUs of each session.
    nthreads : int
        Threads of each session.
    processes : int
        Dask workers in each session.
    resources : dict of str to float
        What the workers of a session offer to tasks, in all.
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
    """The state of a worker group. Only its fleet changes it, under the fleet's lock.

    Parameters
    ----------
    name : str
        The group's name.
    options : Options
        The cluster's, with the values of this group.

    Attributes
    ----------
    target : int
        How many worker sessions are asked for.
    keys : dict
        The names of the wanted sessions, the oldest first.
    number : int
        That of the next session.
    wishes : int
        How often the user asked.
    claim_pending : bool
        Whether this manager was asked to scale and did not tell the others yet.
    driver : object or None
        The adaptive scaling that has a say.
    ends : bool
        Whether the group goes when its last session has gone.
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
        """How many more sessions are wanted than the target says, because none was picked to go yet."""
        return len(self.keys) - self.target

    @property
    def new_key(self) -> str:
        """The name that the next session will get."""
        return session_name(self.options.name, self.name, self.number)

    def grow(self) -> None:
        """Name new sessions, as far as there are too few."""
        while self.excess < 0:
            self.keys[self.new_key] = None
            self.number += 1

    def discard(self, keys: Collection[str]) -> list[str]:
        """Take sessions out of the wanted ones; return those that were wanted."""
        gone = [key for key in keys if key in self.keys]
        for key in gone:
            del self.keys[key]
        return gone

    def take_wish(self, driver: object | None) -> bool:
        """Note that the user asked, or adaptive scaling did; return whether that has a say."""
        if driver is None:
            self.driver = None
            self.wishes += 1
        elif driver is not self.driver:
            return False
        self.claim_pending = True
        return True

    def lower(self, refused: Collection[str]) -> tuple[int, int]:
        """Want refused sessions no more; return how many are granted, of how many that were wanted."""
        asked = len(self.keys)
        self.discard(refused)
        granted = len(self.keys)
        self.target = min(self.target, granted)
        self.claim_pending = True
        return granted, asked

    def follow(self, target: int, keys: Iterable[str] | None) -> None:
        """Take over what another manager was asked for; without keys, this one picks them."""
        self.target = target
        self.ends = self.ends and not target
        if keys is None:
            self.grow()
        else:
            self.keys = dict.fromkeys(keys)
