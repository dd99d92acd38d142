"""Why a process manages a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ManagerRole:
    """What distinguishes a manager from that of a user's program, which keeps its cluster while it runs.

    Parameters
    ----------
    observes : bool
        Whether it only looks: it does not keep an orphan alive.
    serves : bool
        Whether it stays when others leave, and then goes on to adapt.
    user : str or None
        For whom it creates a cluster. Default: whoever runs this process.
    """

    observes: bool = False
    serves: bool = False
    user: str | None = None
