"""The limits of a site, ``cml.limits``: guard rails against costly mistakes, and no walls.

Each process reads them from its own configuration, so users can raise them. CML's quotas are walls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dask_cml.checks import message
from dask_cml.options import Amounts, Options, SessionSize, exact
from dask_cml.options.configuration import origin, setting
from dask_cml.options.table import OPTIONS

#: Sizes of sessions, each with the number of sessions.
Sessions = Sequence[tuple[SessionSize, int]]

_SECTION = "limits."
#: What a limit of a cluster's size limits: an amount of each session, or the number of sessions.
_AMOUNTS = {"sessions": None, "cpu": "cpu", "memory": "memory", "gpu": "nvidia_gpu"}
#: Amounts such as 0.3 / 0.1 are a little less than whole numbers.
_TOLERANCE = 1e-9


def limits() -> dict[str, float]:
    """Return the limits that are set, by name.

    Raises
    ------
    TypeError, ValueError
        If a limit is invalid. The message contains its origin.
    """
    found = {key.removeprefix(_SECTION): setting(key) for key in OPTIONS if key.startswith(_SECTION)}
    return {name: limit for name, limit in found.items() if limit is not None}


def describe(name: str) -> str:
    """Return a limit as a clause: its key, its value and its origin."""
    key = f"cml.{_SECTION}{name}"
    return f"{key} is {exact(limits()[name])}, in {origin(key)}"


def room(size: SessionSize, others: Sessions) -> tuple[float, str]:
    """Return how many sessions of a size fit into the limits together with others, and the name of the limit.

    Parameters
    ----------
    size : SessionSize
        The size of each session.
    others : sequence
        All other sessions of the cluster.

    Returns
    -------
    tuple
        An infinite number and no name without a limit.
    """
    found: tuple[float, str] = (math.inf, "")
    for name, limit in limits().items():
        if name in _AMOUNTS and (amount := _amount(name, size)):
            left = limit - sum(n * _amount(name, other) for other, n in others)
            found = min(found, (max(0, math.floor(left / amount + _TOLERANCE)), name))
    return found


def _amount(name: str, size: SessionSize) -> float:
    return getattr(size, attribute) if (attribute := _AMOUNTS[name]) else 1


def check_room(argument: str, n: int, size: SessionSize, others: Sessions) -> None:
    """Refuse more sessions than fit into the limits.

    Parameters
    ----------
    argument : str
        The name of the argument that asks for them.
    n : int
        Number of sessions.
    size, others
        As in :func:`room`.

    Raises
    ------
    ValueError
        If the sessions do not fit. The message contains the limit and its origin.
    """
    fit, name = room(size, others)
    if n > fit:
        raise ValueError(message(argument, n, f"at most {fit}, because {describe(name)}"))


def check_new(options: Options) -> None:
    """Refuse a new cluster that exceeds the limits: its scheduler, with the first workers of all groups.

    Raises
    ------
    ValueError
        As in :func:`check_room`.
    """
    fit, name = room(options.scheduler, ())
    if not fit:
        argument = f"scheduler_{_AMOUNTS[name]}"
        raise ValueError(message(argument, getattr(options, argument), f"less, because {describe(name)}"))
    sessions = [(options.scheduler, 1)]
    for group, of_group in {"": options, **options.groups()}.items():
        where = f"worker_groups[{group!r}]." if group else ""
        check_room(f"{where}n_workers", of_group.n_workers, of_group.worker, sessions)
        sessions.append((of_group.worker, of_group.n_workers))


def adaptive_bounds(
    options: Options, minimum: Amounts, maximum: Amounts, others: Sessions
) -> tuple[int, float]:
    """Return the bounds of a group's adaptive scaling. Without a maximum, take the limit of the site.

    Parameters
    ----------
    options : Options
        The options of the group.
    minimum, maximum : tuple
        As in :meth:`Options.bounds`.
    others : sequence
        All other sessions of the cluster, the scheduler first.

    Raises
    ------
    TypeError, ValueError
        If a bound is invalid, or the minimum exceeds a limit.
    """
    least, most = options.bounds(minimum, maximum)
    check_room("minimum", least, options.worker, others)
    if math.isinf(most):
        # At least one, so that adaptive scaling logs the limit if no session fits.
        most = max(1, room(options.worker, others[:1])[0])
    return least, most
