"""A worker session and a worker group, as a manager knows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_cml.options import Options
from dask_cml.sessions.process import CMLWorker


@dataclass
class Member:
    """A worker session that is wanted or launched.

    Parameters
    ----------
    name : str
        Its name.
    group : str
        Its worker group.
    dask_names : sequence of str
        The names of its Dask workers.
    observed : mapping of str to str
        The addresses of all Dask workers that are connected to the scheduler now, by their names.
    wanted : bool
        Whether it is wanted.
    launched : bool
        Whether the scheduler knows that it is launched.
    manager : str or None
        The manager that may launch it, or has launched it.
    seen : collection of str
        The names of its Dask workers that have been connected.
    worker : CMLWorker or None
        Its session. None if it is not launched, or not known here yet.
    gone : bool
        Whether another manager has stopped it.
    leaving : bool
        Whether the platform is about to stop it.
    last : mapping or None
        What the scheduler knew last of the Dask worker that left last.
    """

    name: str
    group: str
    dask_names: Sequence[str]
    observed: Mapping[str, str]
    wanted: bool = False
    launched: bool = False
    manager: str | None = None
    seen: Collection[str] = ()
    worker: CMLWorker | None = None
    gone: bool = False
    leaving: bool = False
    last: Mapping[str, Any] | None = None

    @property
    def connected(self) -> list[str]:
        """The names of its Dask workers that are connected now."""
        return [name for name in self.dask_names if name in self.observed]

    @property
    def is_whole(self) -> bool:
        """Whether all its Dask workers are connected."""
        return len(self.connected) == len(self.dask_names)

    @property
    def waits_for(self) -> float | None:
        """For how long its session has waited for room, in seconds. None: it does not wait."""
        return None if self.seen or self.worker is None else self.worker.waits_for

    @property
    def has_registered(self) -> bool:
        """Whether all its Dask workers have been connected once."""
        return len(self.seen) >= len(self.dask_names)


@dataclass(frozen=True)
class GroupState:
    """The state of a worker group at one moment, with the wishes of this manager.

    Parameters
    ----------
    name : str
        The group's name.
    options : Options
        The cluster's options, with the values of this group.
    target : int
        Number of requested sessions.
    number : int
        The number of the next session.
    wishes : int
        How often a user has scaled the group.
    adapting : mapping or None
        The limits of adaptive scaling, see :class:`dask_cml.scheduler.wanted.WantedGroup`.
    names : tuple of str
        The names of the wanted sessions, the oldest first.
    """

    name: str
    options: Options
    target: int = 0
    number: int = 0
    wishes: int = 0
    adapting: Mapping[str, Any] | None = None
    names: tuple[str, ...] = ()

    @property
    def excess(self) -> int:
        """Number of wanted sessions above the target, because none was chosen to stop yet."""
        return len(self.names) - self.target
