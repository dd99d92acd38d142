"""The processes of a session: finds them, compares their memory with the session's size, and kills them.

Importing psutil takes long, so supervisors import this module only when they need it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

#: Seconds until killed processes must have ended.
_PATIENCE = 10.0
#: Seconds of pause after a look of one second at what processes share.
_PAUSE = 30.0


def find(session_id: str, group: int | None = None) -> set[psutil.Process]:
    """Return the processes of a session.

    Parameters
    ----------
    session_id : str
        The session's id. Its processes are those with this ``CDSW_ENGINE_ID``, and their descendants.
    group : int, optional
        A process group or POSIX session whose processes count, too. Pass it only while no other processes can
        have reused the number.
    """
    found: set[psutil.Process] = set()
    parents: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        pid = process.pid
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process] = process.ppid()
            in_group = group is not None and group in (os.getpgid(pid), os.getsid(pid))
            if in_group or process.environ().get("CDSW_ENGINE_ID") == session_id:
                found.add(process)
    while descendants := {each for each in parents if parents[each] in {of.pid for of in found}} - found:
        found |= descendants
    return found


def kill(session_id: str, group: int | None = None) -> None:
    """Kill all processes of a session, including those that it starts meanwhile.

    Parameters
    ----------
    session_id : str
        The session's id, see :func:`find`.
    group : int, optional
        A process group of the session, see :func:`find`.

    Raises
    ------
    TimeoutError
        If some processes remain.
    """
    deadline = time.monotonic() + _PATIENCE
    while left := find(session_id, group):
        if time.monotonic() > deadline:
            pids = sorted(process.pid for process in left)
            raise TimeoutError(f"processes {pids} of session {session_id} still run after SIGKILL")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


class MemoryWatch:
    """The memory of a session's processes.

    Parameters
    ----------
    session : mapping
        The session. Its ``over_memory`` says whether all processes must end when they exceed its ``memory``.
        Otherwise, only the largest one is killed.
    group : int
        See :func:`find`.
    """

    def __init__(self, session: Mapping[str, Any], group: int) -> None:
        self.session_id, self.group, self.limit = session["id"], group, session["memory"] * 2**30
        self.whole = session["over_memory"] == "session"
        self._exceeded = False
        self._next_exact = 0.0
        self._processes: set[psutil.Process] = set()
        self._killed: psutil.Process | None = None

    def search(self) -> None:
        """Search for the processes. This takes far longer than :meth:`look`."""
        self._processes = find(self.session_id, self.group)

    def look(self) -> bool:
        """Return whether the processes have exceeded the limit. If only the largest must end, kill it."""
        begin = time.monotonic()
        sizes = self._sizes(lambda process: process.memory_info().rss)
        # A killed process keeps its memory for a moment.
        if sum(sizes.values()) <= self.limit or (self._killed and sizes.get(self._killed)):
            return self._exceeded
        # Memory that processes share is counted for each of them. It takes longer to count it once.
        if begin < self._next_exact:
            return self._exceeded
        sizes = self._sizes(_share)
        self._next_exact = begin + _PAUSE * (time.monotonic() - begin)
        if sum(sizes.values()) <= self.limit:
            return self._exceeded
        self._exceeded = True
        if not self.whole:
            self._killed = max(sizes, key=lambda process: sizes[process] + self._adjustment(process))
            with contextlib.suppress(psutil.Error):
                self._killed.kill()
        return True

    def _sizes(self, size: Callable[[psutil.Process], int]) -> dict[psutil.Process, int]:
        sizes = {}
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                sizes[process] = size(process)
        return sizes

    def _adjustment(self, process: psutil.Process) -> float:
        """Return how much larger or smaller a process is for the kernel's choice, in bytes."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) / 1000 * self.limit
        return 0.0


def _share(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except psutil.AccessDenied:  # macOS
        return process.memory_info().rss
    return int(getattr(memory, "pss", memory.uss))
