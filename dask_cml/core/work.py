"""Tasks by the resources that they need, and how many of them a Dask worker runs at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor

#: Tolerance for rounding errors.
_ROUNDING = 1e-6


@dataclass
class Work:
    """Tasks that need the same resources.

    Parameters
    ----------
    resources : mapping of str to float
        What one task needs.
    tasks : int
        Number of tasks that run or could run now.
    seconds : float
        Time that one thread would take for all these tasks by Dask's own estimates, in seconds.
    unrunnable : int
        Number of these tasks that no connected worker can run.
    """

    resources: Mapping[str, float]
    tasks: float = 0
    seconds: float = 0.0
    unrunnable: float = 0


def slots(nthreads: int, resources: Mapping[str, float], needs: Iterable[tuple[str, float]]) -> int:
    """Return how many tasks with these needs a Dask worker runs at once."""
    offers = [resources.get(name, 0.0) / need for name, need in needs if need > 0]
    return floor(min([nthreads, *offers]) + _ROUNDING)
