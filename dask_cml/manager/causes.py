"""Why a worker session ended that nobody asked to end, from what is known of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

#: The share of a limit above which it is the likely cause.
_NEARLY = 0.9
_EXIT = re.compile(r"^\[.* exited with status (-?\d+)\]$")
_MEMORY = re.compile(r"^\[memory: (\d+) of (\d+) bytes\]$")
#: What Dask's nanny logs before or after the end of a worker's process.
_OUT_OF_MEMORY = re.compile(r"exceeded \d+% memory budget|was killed by signal 9\b")
_LAST_LINES = 4
_GIB, _GB = 2**30, 10**9


class Cause(str, Enum):
    """Why a session ended."""

    OUT_OF_MEMORY = "out of memory"
    SCRATCH_FULL = "scratch full"
    PROGRAM_FAILED = "program failed"
    EVICTED = "evicted"
    KILLED = "killed"
    CLOSED = "closed"
    NEVER_CONNECTED = "never connected"


@dataclass(frozen=True)
class Loss:
    """A lost worker session.

    Parameters
    ----------
    cause : Cause
        The likely cause.
    words : str
        The cause with what is known, for users.
    of_task : bool
        Whether it ended while it ran a task, which is no failure of the launch.
    """

    cause: Cause
    words: str
    of_task: bool = False


def find_cause(
    last: Mapping[str, Any] | None, log: list[str], *, connected: bool, noticed: bool, closed: bool, said: str
) -> Loss:
    """Return the likely cause of a session's end.

    Parameters
    ----------
    last : mapping or None
        What the scheduler knew last of its Dask worker, see :mod:`dask_cml.scheduler.last_state`.
    log : list of str
        The last lines of its log.
    connected : bool
        Whether its Dask worker was ever connected.
    noticed : bool
        Whether the platform gave notice.
    closed : bool
        Whether a user closed it.
    said : str
        What the platform says.

    Examples
    --------
    >>> last = {"memory": 990 * 2**20, "limit": 2**30, "spilled": 0, "max_spill": None, "tasks": ["train-1"]}
    >>> find_cause(last, [], connected=True, noticed=False, closed=False, said="failed").words
    'out of memory, 0.97 of 1.00 GiB while it ran `train-1`'
    """
    tasks = [*(last or {}).get("tasks", ())]
    ran = f" while it ran {_listed(tasks)}" if tasks else ""
    status = next((int(match[1]) for line in reversed(log) if (match := _EXIT.match(line))), None)
    if closed:
        return Loss(Cause.CLOSED, "closed")
    if noticed:
        return Loss(Cause.EVICTED, "evicted, with notice")
    if (memory := _memory_of(last, log)) is not None:
        return Loss(Cause.OUT_OF_MEMORY, f"out of memory, {memory}{ran}", bool(tasks))
    spilled, most = (last or {}).get("spilled") or 0, (last or {}).get("max_spill")
    if most and spilled > _NEARLY * most:
        words = f"scratch full, {spilled / _GB:.1f} of {most / _GB:.1f} GB spilled{ran}"
        return Loss(Cause.SCRATCH_FULL, words, bool(tasks))
    if status:
        return Loss(Cause.PROGRAM_FAILED, f"its program failed with exit status {status}: {_last_line(log)}")
    if not connected:
        return Loss(Cause.NEVER_CONNECTED, f"it never connected; the platform says {said}")
    return Loss(Cause.KILLED, f"evicted or killed by the platform, which says {said}{ran}", bool(tasks))


def _memory_of(last: Mapping[str, Any] | None, log: list[str]) -> str | None:
    """Return how much memory was used, if it was out of memory."""
    log = log[-_LAST_LINES:]  # earlier ones are of processes that the nanny has replaced
    full = next((match for line in reversed(log) if (match := _MEMORY.match(line))), None)
    if full is not None:
        return f"{int(full[1]) / _GIB:.2f} of {int(full[2]) / _GIB:.2f} GiB of the session"
    if (
        last
        and last["limit"]
        and (last["memory"] > _NEARLY * last["limit"] or any(map(_OUT_OF_MEMORY.search, log)))
    ):
        return f"{last['memory'] / _GIB:.2f} of {last['limit'] / _GIB:.2f} GiB"
    return None


def _listed(tasks: list[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)


def _last_line(log: list[str]) -> str:
    """Return the last line of a program's output."""
    return next(
        (line.strip() for line in reversed(log) if line.strip() and not _EXIT.match(line)), "no output"
    )
