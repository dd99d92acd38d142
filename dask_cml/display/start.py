"""The display of a cluster that starts: one table of its sessions, updated in place."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

from dask_cml.display.html import status_of
from dask_cml.display.screens import Line, Notebook, Row, open_screen
from dask_cml.display.words import span
from dask_cml.sessions.session import CMLProcess

_INTERVAL = 0.25
#: One row counts all further sessions.
_MOST_ROWS = 12
#: Seconds for which a terminal that accepts no output may delay the start.
_PATIENCE = 1.0


class StartDisplay:
    """Shows the sessions of one cluster until it has started.

    A terminal may block, for example after Ctrl-S. So a thread writes to it, and not the event loop.

    Parameters
    ----------
    name : str
        The cluster's name.
    processes : collection of CMLProcess
        The scheduler, and the workers launched with it.
    connected : callable
        Returns the names of the sessions whose Dask workers are connected.
    """

    def __init__(
        self, name: str, processes: Collection[CMLProcess], connected: Callable[[], Collection[str]]
    ) -> None:
        self._name = name
        self._processes = processes
        self._connected = connected
        self._started = time.monotonic()
        self._ran_after: dict[str, float] = {}
        # Threads use the following attributes, and hold the lock.
        self._lock = threading.Lock()
        self._screen: Line | Notebook | None = None
        self._last: str | None = None

    async def run(self) -> None:
        """Show the sessions until cancelled."""
        while True:
            title = f"Starting cluster {self._name}, {span(time.monotonic() - self._started)}"
            await asyncio.to_thread(self._show, title, self.rows())
            await asyncio.sleep(_INTERVAL)

    async def end(self, has_started: bool) -> None:
        """Replace the table by one line about the start. After a failed start, remove the table.

        Parameters
        ----------
        has_started : bool
            Whether the cluster has started.
        """
        line = self._summary() if has_started else ""
        ending = asyncio.ensure_future(asyncio.to_thread(self.end_with, line))
        await asyncio.wait([ending], timeout=_PATIENCE)

    def end_with(self, line: str) -> None:
        """Replace the table by a line, in a blocking call. A second call with the same line does nothing."""
        # The stream may be closed.
        with self._lock, contextlib.suppress(OSError, ValueError):
            if line != self._last:
                self._last = line
                self._screen = self._screen or open_screen()
                self._screen.end(line)

    def _show(self, title: str, rows: list[Row]) -> None:
        with self._lock:
            if self._last is None:
                self._screen = self._screen or open_screen()
                self._screen.show(title, rows)

    def rows(self) -> list[Row]:
        """Return a row for each session, the scheduler's first. The last row counts further sessions."""
        processes = [*self._processes]
        n = _MOST_ROWS if len(processes) <= _MOST_ROWS else _MOST_ROWS - 1
        connected = self._connected()
        rows = [self._row(process, connected) for process in processes[:n]]
        if others := processes[n:]:
            counts = Counter(_word(process, connected) for process in others)
            words = ", ".join(f"{n} {word}" for word, n in counts.most_common())
            rows.append((f"{len(others)} more", "", words, ""))
        return rows

    def _row(self, process: CMLProcess, connected: Collection[str]) -> Row:
        session = process.session
        if session is None or process.launched_at is None:
            return process.name, "", _word(process, connected), ""
        took = time.monotonic() - process.launched_at
        if session.status == "running":
            took = self._ran_after.setdefault(session.id, took)
        return session.name, session.id, status_of(session, connected), span(took)

    def _summary(self) -> str:
        text = f"Cluster {self._name} started in {span(time.monotonic() - self._started)}"
        n = sum(process.role == "worker" for process in self._processes)
        noun = f"worker session{'s' * (n != 1)}"
        return f"{text}; {len(self._connected())} of {n} {noun} connected" if n else text


def _word(process: CMLProcess, connected: Collection[str]) -> str:
    """Return the status of a session without the time."""
    if process.session is None:
        return "not launched yet"
    return status_of(process.session, connected) if process.waits_for is None else "waiting for room"
