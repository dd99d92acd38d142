"""Compares the memory of a session's processes with the session's size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from dask_cml.local import processes


class MemoryWatch:
    """The memory of a session's processes.

    Parameters
    ----------
    session_id : str
        The session's id.
    group : int
        See :func:`processes.find`.
    memory : float
        The session's size, in GiB.
    whole : bool
        Whether all processes must end when they exceed the limit. Otherwise, only the largest one is killed.
    """

    #: Seconds between two looks.
    interval = 0.1

    def __init__(self, session_id: str, group: int, memory: float, whole: bool) -> None:
        self.session_id, self.group, self.limit, self.whole = session_id, group, memory * 2**30, whole
        #: How often the processes exceeded the limit.
        self.oom_kills = 0
        self._processes: set[psutil.Process] = set()
        self._killed: psutil.Process | None = None

    def search(self) -> None:
        """Search for the processes. This takes far longer than :meth:`look`."""
        self._processes = processes.find(self.session_id, self.group)

    def look(self) -> bool:
        """Return whether all processes must end."""
        sizes = self._sizes(lambda process: process.memory_info().rss)
        # A killed process keeps its memory for a moment.
        if sum(sizes.values()) <= self.limit or (self._killed and sizes.get(self._killed)):
            return False
        # Memory that processes share is counted for each of them. It takes longer to count it once.
        sizes = self._sizes(_share)
        if sum(sizes.values()) <= self.limit:
            return False
        self.oom_kills += 1
        if not self.whole:
            self._killed = max(sizes, key=lambda process: sizes[process] + self._adjustment(process))
            with contextlib.suppress(psutil.Error):
                self._killed.kill()
        return self.whole

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
