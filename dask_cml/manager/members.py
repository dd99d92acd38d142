"""A worker session and a worker group, as a manager knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dask_cml.options import Options
from dask_cml.scheduler.wanted_group import Entry, WantedGroup
from dask_cml.sessions.process import CMLWorker


@dataclass(kw_only=True)
class Member(Entry):
    """A worker session that is wanted or launched.

    Parameters
    ----------
    name : str
        Its name.
    dask_names : sequence of str
        The names of its Dask workers.
    observed : mapping of str to str
        The addresses of all Dask workers that are connected to the scheduler now, by their names.
    wanted : bool
        Whether it is wanted.
    worker : CMLWorker or None
        Its session. None if it is not launched, or not known here yet.
    gone : bool
        Whether another manager has stopped it.
    **entry
        What the scheduler knows of it.
    """

    name: str
    dask_names: Sequence[str]
    observed: Mapping[str, str]
    wanted: bool = False
    worker: CMLWorker | None = None
    gone: bool = False

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
    wanted : WantedGroup
        What is wanted of it. Its wishes are those that the scheduler knows.
    """

    name: str
    options: Options
    wanted: WantedGroup
