"""The role of a process that manages a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ManagerRole:
    """How a manager differs from that of a user's program, which keeps its cluster while it runs.

    Parameters
    ----------
    observes : bool
        Whether it only observes: it does not keep an orphan running.
    serves : bool
        Whether it stays when others leave, and then continues to adapt.
    user : str or None
        The user for whom it creates a cluster. Default: the user of this process.
    """

    observes: bool = False
    serves: bool = False
    user: str | None = None
