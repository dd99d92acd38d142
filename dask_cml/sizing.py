"""The number of worker sessions for a number of threads or an amount of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    return math.ceil(max(_amounts(options, n, cores, memory)))


def bounds(
    options: Options,
    minimum: float | None,
    maximum: float | None,
    cores: tuple[float | None, float | None] = (None, None),
    memory: tuple[float | str | None, float | str | None] = (None, None),
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
    maximum = None if maximum == math.inf else maximum
    least = math.ceil(max(_amounts(options, minimum or 0, cores[0], memory[0], "minimum")))
    upper = min(_amounts(options, maximum, cores[1], memory[1], "maximum"), default=math.inf)
    most = upper if math.isinf(upper) else math.floor(upper)
    if most < least:
        raise ValueError(message("maximum", most, f"at least the minimum, {least} worker sessions"))
    return least, most


def _amounts(
    options: Options, n: float | None, cores: float | None, memory: float | str | None, limit: str = ""
) -> Iterator[float]:
    """Yield the number of sessions, with a fraction, for each amount that is given."""
    if n is not None:
        yield integer(limit or "n", n, 0, MOST_SESSIONS)
    for unit, total, check, of_session in (
        ("cores", cores, positive, options.nthreads),
        ("memory", memory, gibibytes, options.worker_memory),
    ):
        if total is not None:
            argument = f"{limit}_{unit}" if limit else unit
            sessions = check(argument, total) / of_session
            if sessions > MOST_SESSIONS:
                expected = f"an amount for at most {MOST_SESSIONS} worker sessions"
                raise ValueError(message(argument, total, expected))
            yield sessions
