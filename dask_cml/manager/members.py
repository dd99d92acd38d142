"""A worker session and a worker group, as a manager knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dask_cml.options import Options
from dask_cml.scheduler.wanted_group import Entry, WantedGroup
from dask_cml.sessions.process import CMLWorker


@dataclass(eq=False, kw_only=True)
class Member(Entry):
    """A worker session that is wanted or launched.

    Parameters
    ----------
    name : str
        Its name.
    dask_names : sequence of str
        The names of its Dask workers.
    observed : callable
        Returns the names of all Dask workers that are connected to the scheduler now.
    worker : CMLWorker or None
        Its session. None if it is not launched, or not known here yet.
    gone : bool
        Whether another manager has stopped it.
    has_arrived : bool
        Whether it has been complete once.
    gone_since : float or None
        Since when a Dask worker of it has been missing, after all have been connected.
    told_state : str or None
        What the scheduler's log says of its session.
    retiring_since : float or None
        Since when it is being retired.
    retired : bool
        Whether its session can be stopped.
    stays : frozenset or None
        If it was kept because no Dask worker could take its data: the Dask workers that were there.
    **entry
        What the scheduler knows of it.
    """

    name: str
    dask_names: Sequence[str]
    observed: Callable[[], Collection[str]]
    worker: CMLWorker | None = None
    gone: bool = False
    has_arrived: bool = False
    gone_since: float | None = None
    told_state: str | None = None
    retiring_since: float | None = None
    retired: bool = False
    stays: frozenset[str] | None = None

    @property
    def connected(self) -> list[str]:
        """The names of its Dask workers that are connected now."""
        return [name for name in self.dask_names if name in self.observed()]

    @property
    def is_whole(self) -> bool:
        """Whether all its Dask workers are connected."""
        return len(self.connected) == len(self.dask_names)

    @property
    def is_complete(self) -> bool:
        """Whether all its Dask workers are connected. For a kept session, one is enough."""
        return self.is_whole or (self.stays is not None and bool(self.connected))

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
    wanted : WantedGroup
        What is wanted of it. Its wishes are those that the scheduler knows.
    names : sequence of str
        The names of its wanted sessions, the oldest first.
    """

    name: str
    options: Options
    wanted: WantedGroup
    names: Sequence[str]

    @property
    def excess(self) -> int:
        """Number of wanted sessions above the target, because none was chosen to stop yet."""
        return len(self.names) - self.wanted.target
