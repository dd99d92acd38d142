"""The number of worker sessions for a number of threads or an amount of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dask_cml.checks import gibibytes, integer, message, positive
from dask_cml.options import Options
from dask_cml.options.table import MOST_SESSIONS


def sessions_for(
    options: Options, n: int, memory: float | str | None = None, cores: float | None = None
) -> int:
    """Return the number of sessions that is at least `n`, and has at least the memory and the threads in all.

    Parameters
    ----------
    options : Options
        The size of a session.
    n : int
        Number of worker sessions.
    memory : float or str, optional
        Total memory, in GiB or as a string such as ``"100 GiB"``.
    cores : float, optional
        Total number of threads.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """
    n = integer("n", n, 0, MOST_SESSIONS)
    if memory is not None:
        n = max(n, math.ceil(_sessions("memory", memory, gibibytes, options.worker_memory)))
    if cores is not None:
        n = max(n, math.ceil(_sessions("cores", cores, positive, options.nthreads)))
    return n


def bounds(
    options: Options,
    minimum: float | None,
    maximum: float | None,
    cores: tuple[float | None, float | None],
    memory: tuple[float | str | None, float | str | None],
) -> tuple[int, float]:
    """Return the minimum and maximum number of sessions for adaptive scaling.

    Parameters
    ----------
    options : Options
        The size of a session.
    minimum : float or None
        Minimum number of worker sessions.
    maximum : float or None
        Maximum number of worker sessions.
    cores : tuple
        Minimum and maximum of the total number of threads. Each may be None.
    memory : tuple
        Minimum and maximum of the total memory. Each may be None.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """
    least = integer("minimum", minimum or 0, 0, MOST_SESSIONS)
    most: float = math.inf
    if maximum is not None and maximum != math.inf:
        most = integer("maximum", maximum, 0, MOST_SESSIONS)
    for unit, check, (low, high), per_session in (
        ("cores", positive, cores, options.nthreads),
        ("memory", gibibytes, memory, options.worker_memory),
    ):
        if low is not None:
            least = max(least, math.ceil(_sessions(f"minimum_{unit}", low, check, per_session)))
        if high is not None:
            most = min(most, math.floor(_sessions(f"maximum_{unit}", high, check, per_session)))
    if most < least:
        raise ValueError(message("maximum", most, f"at least the minimum, {least} worker sessions"))
    return least, most


def _sessions(
    argument: str, total: float | str, check: Callable[[str, Any], float], per_session: float
) -> float:
    """Return the number of sessions, with a fraction, that together have a total of something."""
    n = check(argument, total) / per_session
    if n > MOST_SESSIONS:
        raise ValueError(message(argument, total, f"an amount for at most {MOST_SESSIONS} worker sessions"))
    return n
