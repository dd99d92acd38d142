"""A worker group and a session, in the state that all managers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class WantedGroup:
    """What is wanted of one worker group.

    Parameters
    ----------
    options : mapping
        The group's own arguments, as in ``CMLCluster.add_worker_group``. Empty for the default group.
    target : int
        Number of requested worker sessions.
    number : int
        The number of the next session.
    wishes : int
        How often a user has scaled the group.
    adapting : mapping or None
        The limits of adaptive scaling: ``minimum``, ``maximum`` (None: unlimited), more ``options``, the
        ``manager`` that was asked, and the ``wish``.
    deleted : bool
        Whether to remove the group after its last session.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    target: int = 0
    number: int = 0
    wishes: int = 0
    adapting: Mapping[str, Any] | None = None
    deleted: bool = False


@dataclass(eq=False)
class Entry:
    """A session that is wanted or launched.

    Parameters
    ----------
    group : str
        Its worker group.
    manager : str or None
        The manager that may launch it, or has launched it.
    wanted : bool
        Whether it is wanted.
    launched : bool
        Whether it is launched, and in the cluster's record.
    seen : frozenset of str
        The names of its Dask workers that have been connected.
    leaving : bool
        Whether the platform is about to stop it.
    last : mapping or None
        What the scheduler knew last of the Dask worker that left last, see
        :func:`dask_cml.scheduler.last_state.last_state`.
    """

    group: str
    manager: str | None
    wanted: bool = False
    launched: bool = False
    seen: frozenset[str] = frozenset()
    leaving: bool = False
    last: Mapping[str, Any] | None = None
