"""What users see of a cluster's sessions: in HTML, and in one table while the cluster starts.

The table is updated in place, in a terminal or a notebook. A file or pipe gets one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import dask.config
from dask.utils import parse_timedelta
from dask.widgets.widgets import TEMPLATE_PATHS, get_environment
from distributed.core import Status
from distributed.utils import Logs, is_kernel
from tornado.ioloop import PeriodicCallback

from dask_cml import output
from dask_cml.sessions.session import CMLProcess, Session
from dask_cml.words import adapting, format_duration, idle, printable, table, waiting, waiting_workers

# Dask looks for the templates of HTML representations here.
TEMPLATE_PATHS.append(str(Path(__file__).with_name("templates")))

#: The cells of a session's row: its name, its id, its status, and its time so far or until it ran.
Row = tuple[str, str, str, str]

_INTERVAL = 0.25
#: One row counts all further sessions.
_MOST_ROWS = 12
#: Seconds for which a terminal that accepts no output may delay the start.
_PATIENCE = 1.0
_NO_WIDTH = 80
#: Only one cluster at a time shows a table: two would overwrite each other.
_terminal = threading.Lock()


def render(template: str, **values: Any) -> str:
    """Fill a template of dask-cml with values, which are escaped."""
    environment = get_environment()
    environment.autoescape = True
    return environment.get_template(template).render(**values)


def escaped(value: Any) -> Any:
    """Return a copy of a value for Dask's templates, in which everything but numbers is escaped for HTML."""
    if isinstance(value, dict):
        return {escaped(key): escaped(item) for key, item in value.items()}
    if value is None or isinstance(value, (int, float)):
        return value
    return html.escape(str(value))


class EscapedLogs(Logs):
    """Logs by the names of their sessions, which Dask's template does not escape."""

    def _repr_html_(self) -> str:
        return str(Logs._repr_html_(Logs({html.escape(name): log for name, log in self.items()})))


def status_of(session: Session, connected: Collection[str]) -> str:
    """Return the status of a session, or "connected" if its name is among these. A wait shows its time."""
    if session.name in connected:
        return "connected"
    return session.status if session.waits_for is None else waiting(session.waits_for)


def add_sessions_tab(cluster: Any, tab: Any) -> None:
    """Add a tab with the sessions to the widget of a cluster."""
    from ipywidgets import HTML

    sessions = HTML()
    interval = parse_timedelta(dask.config.get("distributed.deploy.cluster-repr-interval"), "ms")

    def update() -> None:
        sessions.value = render("cml_session_table.html.j2", cluster=cluster, status_of=status_of)

    def install() -> None:
        callback = cluster.periodic_callbacks["cml-sessions"] = PeriodicCallback(update, interval * 1000)
        callback.start()

    update()
    tab.children = [*tab.children, sessions]
    tab.set_title(len(tab.children) - 1, "Sessions")
    cluster.loop.add_callback(install)


@dataclass(frozen=True)
class Description:
    """What users read of a cluster, in words.

    Parameters
    ----------
    status : str
        Its status. For a closed cluster, how long it lasted and what it used.
    age : str
        Its age and its limit, such as ``12.3 of 48 h``. Empty without a limit.
    scheduler : str
        What is special about the scheduler: queued, or in place of a lost one. Else empty.
    pending : str
        Worker sessions that are not connected yet. Empty if there are none.
    problem : str or None
        The present problem, as a clause.
    adapts : str
        The bounds of the groups that adapt, which are named if there are several. Empty if none adapts.
    idle : str
        For how long it has had no tasks. Empty if it has some, or had a moment ago.
    """

    status: str
    age: str
    scheduler: str
    pending: str
    problem: str | None
    adapts: str
    idle: str


def describe(cluster: Any) -> Description:
    """Describe a cluster for users."""
    age, most_age = (seconds / 3600 for seconds in cluster.sharing.age)
    idle_for = cluster.sharing.idle
    waits = cluster.view.waits()
    n_pending = cluster.n_pending - len(waits)
    pending = [f"{n_pending} pending" if n_pending > 0 else "", waiting_workers(waits)]
    return Description(
        status=_status_words(cluster),
        age=f"{age:.1f} of {most_age:g} h" if most_age else "",
        scheduler=_scheduler_words(cluster),
        pending=", ".join(filter(None, pending)),
        problem=cluster.problem,
        adapts=_adapts_words(cluster),
        idle="" if idle_for is None else idle(idle_for),
    )


def _adapts_words(cluster: Any) -> str:
    groups = cluster.groups.names
    limits = {group: cluster.view.limits(group) for group in groups}
    bounds = {group: (found["minimum"], found["maximum"]) for group, found in limits.items() if found}
    return adapting(bounds, names_groups=len(groups) > 1)


def _status_words(cluster: Any) -> str:
    if cluster.status == Status.running and not cluster.sharing.is_connected:
        return "not connected to the scheduler"
    if cluster.status == Status.created:
        return "created" if cluster.starting is None else "starting"
    if cluster.status != Status.closed or cluster.sharing.lasted is None:
        return str(cluster.status.name)
    used = cluster.sharing.usage().total
    noun = "session" if used.sessions == 1 else "sessions"
    hours = f"{used.sessions} {noun}, {used.vcpu_hours:.2f} vCPU hours"
    return f"closed after {format_duration(cluster.sharing.lasted)}; {hours}"


def _scheduler_words(cluster: Any) -> str:
    sessions = [session for session in cluster.sessions if session.role == "scheduler"]
    if not sessions:
        return ""
    [session] = sessions
    if session.waits_for is not None:
        return f"scheduler {waiting(session.waits_for)}"
    if not cluster.place.number or not cluster.sharing.is_connected:
        return ""
    return f"scheduler restarted {format_duration(session.age)} ago"


class StartDisplay:
    """Shows the sessions of one cluster until it has started.

    A terminal may block, for example after Ctrl-S. So :mod:`dask_cml.output` writes to it.

    Parameters
    ----------
    name : str
        The cluster's name.
    scheduler : CMLProcess
        The scheduler.
    names : collection of str
        The names of the workers that are launched with it.
    workers : mapping
        The workers that are launched, by their names.
    connected : callable
        Returns the names of the sessions whose Dask workers are connected.

    Attributes
    ----------
    notice : str
        A clause after the title. Empty if there is none.
    """

    def __init__(
        self,
        name: str,
        scheduler: CMLProcess,
        names: Collection[str],
        workers: Mapping[str, Any],
        connected: Callable[[], Collection[str]],
    ) -> None:
        self.notice = ""
        self._name = name
        self._scheduler, self._names, self._workers = scheduler, names, workers
        self._connected = connected
        self._started = time.monotonic()
        self._ran_after: dict[str, float] = {}
        self._screen = open_screen()

    async def run(self) -> None:
        """Show the sessions until cancelled."""
        while True:
            title = f"Starting cluster {self._name}, {format_duration(time.monotonic() - self._started)}"
            if self.notice:
                title += f"; {self.notice}"
            if output.flush(0):  # a screen that blocks gets no more
                output.write(functools.partial(self._screen.show, title, self.rows()))
            await asyncio.sleep(_INTERVAL)

    async def end(self, has_started: bool) -> None:
        """Replace the table by one line about the start. After a failed start, remove the table.

        Parameters
        ----------
        has_started : bool
            Whether the cluster has started.
        """
        line = self._summary() if has_started else ""
        output.write(lambda: self._screen.end(line))
        await asyncio.to_thread(output.flush, _PATIENCE)

    def rows(self) -> list[Row]:
        """Return a row for each session, the scheduler's first. The last row counts further sessions."""
        sessions: list[tuple[str, Any]] = [(self._scheduler.name, self._scheduler)]
        sessions += [(str(name), self._workers.get(name)) for name in self._names]  # of a subclass: any
        n = _MOST_ROWS if len(sessions) <= _MOST_ROWS else _MOST_ROWS - 1
        connected = self._connected()
        rows = [self._row(name, process, connected) for name, process in sessions[:n]]
        if others := sessions[n:]:
            statuses = [self._row(name, process, connected)[2] for name, process in others]
            counts = Counter(status.partition(" for ")[0] for status in statuses)  # without the time
            summary = ", ".join(f"{n} {status}" for status, n in counts.most_common())
            rows.append((f"{len(others)} more", "", summary, ""))
        return rows

    def _row(self, name: str, process: Any, connected: Collection[str]) -> Row:
        session = getattr(process, "session", None)  # of a subclass, it may be any worker
        if session is None or process.launched_at is None:
            return name, "", "not launched yet", ""
        duration = time.monotonic() - process.launched_at
        if session.status == "running":
            duration = self._ran_after.setdefault(session.id, duration)
        return session.name, session.id, status_of(session, connected), format_duration(duration)

    def _summary(self) -> str:
        text = f"Cluster {self._name} started in {format_duration(time.monotonic() - self._started)}"
        n = len(self._names)
        if n == 0:
            return f"{text} without workers"
        n_connected, noun = len(self._connected()), "worker" if n == 1 else "workers"
        if n_connected == n:
            return f"{text} with {n} {noun}"
        if all(getattr(self._workers.get(name), "is_scheduling", False) for name in self._names):
            return f"{text}; its {n} {noun} {'is' if n == 1 else 'are'} queued"
        if n == 1:
            return f"{text}; its worker connects when it has started"
        if n_connected == 0:
            return f"{text}; its {n} workers connect as they start"
        return f"{text}; {n_connected} of {n} workers connected, the others connect as they start"


def open_screen() -> Line | Notebook:
    """Return the screen of this process. A terminal is taken until :meth:`Terminal.end`."""
    if is_kernel():
        return Notebook()
    out = sys.stderr
    has_cursor = output.is_terminal(out) and os.environ.get("TERM") != "dumb"
    if not (has_cursor and _terminal.acquire(blocking=False)):
        return Line(out)
    return Terminal(out)


def as_lines(title: str, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table. No text in it steers a terminal."""
    lines = table([[*map(printable, row)] for row in rows]) if rows else []
    return [printable(title), *(f"  {line}" for line in lines)]


class Line:
    """A file or pipe, which gets only the last line, and before a line if the scheduler is queued.

    Parameters
    ----------
    out : text file or None
        The file. None if the process has no standard error.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._is_queue_told = False

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Say once that the scheduler is queued, which may last for minutes."""
        for scheduler, _, status, _ in rows[:1]:
            if status.startswith("queued") and not self._is_queue_told:
                self._is_queue_told = True
                self._write(f"{title}: {scheduler} is {status}")

    def end(self, line: str) -> None:
        """Write a line, unless it is empty."""
        if line:
            self._write(line)

    def _write(self, line: str) -> None:
        if self._out is not None:
            self._out.write(f"{printable(line)}\n")
            self._out.flush()


class Terminal(Line):
    """A terminal.

    Parameters
    ----------
    out : text file
        The terminal.
    """

    _out: TextIO

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._shown: list[str] = []
        self._taken = contextlib.ExitStack()
        self._taken.callback(_terminal.release)

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Replace the table."""
        try:
            width = os.get_terminal_size(self._out.fileno()).columns or _NO_WIDTH
        except (AttributeError, OSError, ValueError):
            width = _NO_WIDTH
        # A line that wraps would count as two when the cursor moves up.
        self._draw([line[: width - 1] for line in as_lines(title, rows)])

    def end(self, line: str) -> None:
        """Replace the table by a line."""
        self._draw([])
        super().end(line)
        self._taken.close()

    def _draw(self, lines: list[str]) -> None:
        if lines != self._shown:
            up = f"\x1b[{len(self._shown)}A" if self._shown else ""
            self._out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
            self._out.flush()
        self._shown = lines


class Notebook:
    """One output of a notebook's cell. It is updated in place, so the notebook stores only its last state."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Replace the table."""
        from IPython.display import display

        text = "\n".join(as_lines(title, rows))
        bundle = {"text/plain": text}
        if title:
            bundle["text/html"] = render("cml_start.html.j2", title=title, rows=rows)
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        elif text != self._shown:
            self._handle.update(bundle, raw=True)
        self._shown = text

    def end(self, line: str) -> None:
        """Replace the table by a line."""
        if line or self._handle is not None:
            self.show(line, [])
