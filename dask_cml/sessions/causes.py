"""Why a session ended that nobody asked to end: by the last lines of its log, and what else is known."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dask_cml.private_files import open_regular
from dask_cml.words import printable

#: The beginning of the line that ends the output of a lost session. Another session may go on with its log.
LOST = "[lost: "
#: Bytes of the end of a log that contains its last lines.
_END = 2**13
#: The share of a limit above which it is the likely cause.
_NEARLY = 0.9
_EXIT = re.compile(r"^\[.* exited with status (-?\d+)\]$")
_MEMORY = re.compile(r"^\[memory: (\d+) of (\d+) bytes\]$")
_SCRATCH = re.compile(r"^\[scratch: (\d+) of (\d+) bytes\]$")
#: What Kubernetes says of a pod over one of its limits.
_OOM_KILLED, _NO_STORAGE = re.compile(r"\bOOM", re.IGNORECASE), re.compile("ephemeral", re.IGNORECASE)
#: What Dask's nanny logs before or after the end of a worker's process.
_OUT_OF_MEMORY = re.compile(r"exceeded \d+% memory budget|was killed by signal 9\b")
#: The words of a Dask worker or nanny that has not reached its scheduler within its ``--death-timeout``.
_NO_SCHEDULER = "Timed out starting worker"
#: What helps against full shared memory.
_MORE_SHARED_MEMORY = (
    "raise the shared memory limit in the project's settings, or pass num_workers=0 to PyTorch's DataLoader"
)
#: Why Dask ends a worker by itself, in its log (worker.py, `handle_scheduler` and `heartbeat`).
_DISCONNECTED, _UNKNOWN = "handle-scheduler-connection-broken", "Scheduler was unaware of this worker"
_LAST_LINES = 4
#: Bytes.
GIB, GB = 2**30, 10**9


class Cause(str, Enum):
    """Why a session ended."""

    OUT_OF_MEMORY = "out of memory"
    SCRATCH_FULL = "scratch full"
    BUS_ERROR = "bus error"
    PROGRAM_FAILED = "program failed"
    PROGRAM_ENDED = "program ended"
    EVICTED = "evicted"
    KILLED = "killed"
    CLOSED = "closed"
    NEVER_CONNECTED = "never connected"
    NAME_TAKEN = "name taken"


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


def last_lines(log: Path, n: int) -> list[str]:
    """Return the last lines of a session as a terminal can show them. Without a log, return no lines."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            lines = file.read(_END).decode(errors="replace").splitlines()
    except ValueError as error:  # tasks could have put something else in its place
        return [f"cannot read the log {log}: {error}"]
    except OSError:
        return []
    begin = max((i + 1 for i, line in enumerate(lines) if line.startswith(LOST)), default=0)
    return [*map(printable, lines[begin:][-n:])]


def find_cause(
    last: Mapping[str, Any] | None,
    log: list[str],
    *,
    said: str,
    connected: bool = True,
    noticed: bool = False,
    succeeded: bool = False,
    gone: str | None = None,
    status: int | None = None,
) -> Loss:
    """Return the likely cause of a session's end.

    Parameters
    ----------
    last : mapping or None
        What the scheduler knew last of its Dask worker, see :mod:`dask_cml.scheduler.health`.
    log : list of str
        The last lines of its log.
    said : str
        What the platform says.
    connected : bool
        Whether its Dask process was ever connected.
    noticed : bool
        Whether the platform gave notice.
    succeeded : bool
        Whether its program ended without an error, by the platform.
    gone : str, optional
        What is known if the session runs, and lacks a Dask worker. Default: the session has ended.
    status : int, optional
        The exit status of the Dask worker's process. A negative number is that of a signal. Default: that of
        the session's program, in its log.

    Examples
    --------
    >>> last = {"memory": 990 * 2**20, "limit": 2**30, "spilled": 0, "max_spill": None, "tasks": ["train-1"]}
    >>> find_cause(last, [], said="failed").words
    'out of memory, 0.97 of 1.00 GiB while it ran `train-1`'
    """
    tasks = [*(last or {}).get("tasks", ())]
    ran = f" while it ran {_listed(tasks)}" if tasks else ""
    if status is None:
        status = next((int(match[1]) for line in reversed(log) if (match := _EXIT.match(line))), None)
    spilled, most = (last or {}).get("spilled") or 0, (last or {}).get("max_spill")
    if (used := _amounts(_SCRATCH, log)) or _NO_STORAGE.search(said):
        amount = f"{_of(used, GB)} GB" if used else f"the platform says {said}"
        return Loss(Cause.SCRATCH_FULL, f"scratch full, {amount}{ran}", bool(tasks))
    if noticed:
        return Loss(Cause.EVICTED, "evicted, with notice")
    if status == -signal.SIGBUS:
        words = f"bus error: shared memory (/dev/shm, 64 MB by default) is full{ran}; {_MORE_SHARED_MEMORY}"
        return Loss(Cause.BUS_ERROR, words, bool(tasks))
    if memory := _memory_of(last, log, said):
        return Loss(Cause.OUT_OF_MEMORY, f"out of memory, {memory}{ran}", bool(tasks))
    if most and spilled > _NEARLY * most:
        words = f"scratch full, {_of((spilled, most), GB)} GB spilled{ran}"
        return Loss(Cause.SCRATCH_FULL, words, bool(tasks))
    if not connected and any(_NO_SCHEDULER in line for line in log):
        return Loss(Cause.NEVER_CONNECTED, "it got no answer from the scheduler in time")
    if status and status != -signal.SIGKILL:  # which a program does not send itself
        output = f": {_last_line(log)}" if log else ""
        words = f"its program failed with exit status {status}{ran}{output}"
        return Loss(Cause.PROGRAM_FAILED, words, bool(tasks))
    if not connected:
        return Loss(Cause.NEVER_CONNECTED, f"it never connected; the platform says {said}")
    if succeeded:
        return Loss(Cause.PROGRAM_ENDED, f"its program ended{_why_it_ended(log)}{ran}", bool(tasks))
    words = gone or f"evicted or killed by the platform, which says {said}"
    return Loss(Cause.KILLED, f"{words}{ran}", bool(tasks))


def _why_it_ended(log: list[str]) -> str:
    """Return why Dask has ended a worker by itself, as far as its log says it."""
    if any(_UNKNOWN in line for line in log):
        return ", because the scheduler had counted it as lost"
    if any(_DISCONNECTED in line for line in log):
        return ", because its connection to the scheduler broke"
    return " with exit status 0"


def _memory_of(last: Mapping[str, Any] | None, log: list[str], said: str) -> str | None:
    """Return how much memory was used, if it was out of memory."""
    log = log[-_LAST_LINES:]  # earlier ones are of processes that the nanny has replaced
    if full := _amounts(_MEMORY, log):
        return f"{_of(full, GIB)} GiB of the session"
    if last and last["limit"]:
        words = any(map(_OUT_OF_MEMORY.search, log))
        if last["memory"] > _NEARLY * last["limit"] or words:
            return f"{_of((last['memory'], last['limit']), GIB)} GiB"
    return f"the platform says {said}" if _OOM_KILLED.search(said) else None


def _amounts(pattern: re.Pattern[str], log: list[str]) -> tuple[int, int] | None:
    """Return the amounts that the wrapper wrote last."""
    matches = [match for line in log if (match := pattern.match(line))]
    return (int(matches[-1][1]), int(matches[-1][2])) if matches else None


def _of(amounts: tuple[float, float], unit: int) -> str:
    used, most = amounts
    return f"{used / unit:.2f} of {most / unit:.2f}"


def _listed(tasks: list[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)


def _last_line(log: list[str]) -> str:
    """Return the last line of a program's output."""
    return next(
        (line.strip() for line in reversed(log) if line.strip() and not _EXIT.match(line)), "no output"
    )
