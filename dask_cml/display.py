"""What users see of a cluster's sessions: in HTML, and in one line while the cluster starts."""

from __future__ import annotations

import asyncio
import functools
import html
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from dask.widgets.widgets import TEMPLATE_PATHS, get_environment
from distributed.core import Status
from distributed.utils import Logs, format_dashboard_link, is_kernel
from jinja2 import Environment
from markupsafe import Markup

from dask_cml import output
from dask_cml.core.ending import How
from dask_cml.sessions.process import Session
from dask_cml.timing import timing
from dask_cml.words import adapting, format_duration, idle, pending, printable, scheduler_words, waiting

# Dask looks for the templates of HTML representations here.
TEMPLATE_PATHS.append(str(Path(__file__).with_name("templates")))

_INTERVAL = 0.25
#: Most sessions, and most workers in Dask's own list, that a widget shows twice a second.
_MOST_SESSIONS, _MOST_WORKERS = 50, 20
#: Seconds for which a terminal that accepts no output may delay the start.
_PATIENCE = 1.0


def render(template: str, **values: Any) -> str:
    """Fill a template, of dask-cml or of Dask, with values, which are escaped."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    """Return an environment that compiles each template once. Dask's own compile it anew for each refresh."""
    environment: Environment = get_environment()
    environment.autoescape = True
    environment.filters["format_dashboard_address"] = _dashboard_of
    return environment


def _dashboard_of(server: Mapping[str, Any]) -> str | None:
    """Return the link to a dashboard, as SchedulerInfo._repr_html_ (distributed/objects.py:30) does."""
    try:
        host = server["host"] if "host" in server else urlparse(server["address"]).hostname
        return str(format_dashboard_link(host, server["services"]["dashboard"]))
    except KeyError:
        return None


def html_of(cluster: Any, cluster_status: str) -> str:
    """Return a cluster in HTML, as Cluster._repr_html_ (cluster.py:476), which escapes nothing, does.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster. Its widget shows the sessions in a tab of its own.
    cluster_status : str
        Rows of HTML for its table.
    """
    info = cluster.scheduler_info
    scheduler_info = "Scheduler not started yet."
    if "id" in info:
        # Templates of earlier releases count the listed workers.
        most = _MOST_WORKERS if "n_workers" in info else None
        workers = [*info["workers"].values()]
        listed = {  # Cluster._update_worker_status (cluster.py:240) keeps no sums
            **info,
            "workers": dict(islice(info["workers"].items(), most)),
            "n_workers": len(workers),
            "total_threads": sum(worker["nthreads"] for worker in workers),
            "total_memory": sum(worker["memory_limit"] for worker in workers),
        }
        scheduler_info = render("scheduler_info.html.j2", scheduler=listed, **listed)
    sessions, widget = cluster.sessions, getattr(cluster, "_cached_widget", None)
    table = session_rows(cluster, sessions)
    if widget is not None:
        _show_in_tab(table, widget)
    rows = render("cml_sessions.html.j2", description=describe(cluster, sessions), widget=widget, **table)
    return render(
        "cluster.html.j2",
        type=type(cluster).__name__,
        name=cluster.name,
        workers=info["workers"],
        dashboard_link=cluster.dashboard_link if cluster.status != Status.closed else "",
        scheduler_info_repr=Markup(scheduler_info),
        cluster_status=Markup(cluster_status + rows),
    )


class EscapedLogs(Logs):
    """Logs by the names of their sessions, which Dask's template does not escape."""

    def _repr_html_(self) -> str:
        return str(Logs._repr_html_(Logs({html.escape(name): log for name, log in self.items()})))


def session_rows(cluster: Any, sessions: Sequence[Session]) -> dict[str, Any]:
    """Return what templates show of the sessions, with their status. Of many, connected ones come last."""
    connected = cluster.processes.arrived()
    if len(sessions) > _MOST_SESSIONS:
        sessions = sorted(sessions, key=lambda session: (session.role, session.name in connected))
    rows = [(session, status_of(session, connected)) for session in sessions[:_MOST_SESSIONS]]
    return {"cluster": cluster, "n_sessions": len(sessions), "rows": rows}


def status_of(session: Session, connected: Collection[str]) -> str:
    """Return the status of a session, or "connected" if its name is among these. A wait shows its time."""
    if session.name in connected:
        return "connected"
    return session.status if session.waits_for is None else waiting(session.waits_for)


def _show_in_tab(table: Mapping[str, Any], widget: Any) -> None:
    """Show the sessions in a tab of a widget, the last one.

    Cluster._widget (cluster.py:391) writes the first tab again and again, which would close a list there.
    """
    if not hasattr(widget, "sessions"):
        from ipywidgets import HTML

        widget.sessions = HTML()
        widget.children = [*widget.children, widget.sessions]
        widget.set_title(len(widget.children) - 1, "Sessions")
    widget.sessions.value = render("cml_session_table.html.j2", **table)


def describe(cluster: Any, sessions: Sequence[Session]) -> dict[str, str | None]:
    """Return what users read of a cluster, in words, which are empty where there is nothing to say.

    Returns
    -------
    dict of str to str
        Its ``status``, for a closed cluster with how long it lasted and what it used, and the ``problem``.
        Its ``age`` and its limit, such as ``12.3 of 48 h``. What is special about the ``scheduler``: queued,
        or in place of a lost one. Worker sessions that are not connected yet (``pending``). The bounds of the
        groups that adapt (``adapts``), which are named if there are several. For how long it is ``idle``.
    """
    board = cluster.sharing.link.board
    groups, n_pending = cluster.groups.names, cluster.n_pending
    limits = {group: cluster.groups.limits(group) for group in groups}
    bounds = {group: (adapt["minimum"], adapt["maximum"]) for group, adapt in limits.items() if adapt}
    scheduler = next((session for session in sessions if session.role == "scheduler"), None)
    is_another = cluster.place.number and cluster.sharing.is_connected
    return {
        "status": _status_words(cluster),
        "age": f"{board.age / 3600:.1f} of {round(board.most_age / 3600, 2):g} h" if board.most_age else "",
        "problem": cluster.problem,
        "adapts": adapting(bounds, groups),
        "idle": idle(cluster.sharing.link.idle, timing.idle),
        "scheduler": scheduler_words(scheduler.waits_for, is_another and scheduler.age) if scheduler else "",
        "pending": pending(cluster.processes.waits(sessions), n_pending) if n_pending else "",
    }


def _status_words(cluster: Any) -> str:
    if cluster.status == Status.running and not cluster.sharing.is_connected:
        return "not connected to the scheduler"
    if cluster.status == Status.created:
        return "created" if cluster._starting is None else "starting"
    if cluster.status != Status.closed or cluster.sharing.lasted is None:
        return "left" if cluster.ending.how is How.LEAVE else str(cluster.status.name)
    used = cluster.sharing.usage().total
    noun = "session" if used.sessions == 1 else "sessions"
    lasted = format_duration(cluster.sharing.lasted)
    return f"closed after {lasted}; {used.sessions} {noun}, {used.vcpu_hours:.2f} vCPU hours"


class StartDisplay:
    """Shows the sessions of one cluster until it has started, in one line that is updated.

    A file or pipe gets the last line, and another one if the scheduler is queued, which may last for minutes.
    A terminal may block, for example after Ctrl-S. So :mod:`dask_cml.output` writes to it.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.
    names : collection of str
        The names of the workers that are launched with its scheduler.

    Attributes
    ----------
    notice : str
        A clause at the end of the line. Empty if there is none.
    """

    def __init__(self, cluster: Any, names: Collection[str]) -> None:
        self.notice = ""
        self._cluster, self._names = cluster, names
        self._name: str = cluster.options.name
        self._started = time.monotonic()
        self._n_workers = "1 worker" if len(names) == 1 else f"{len(names) or 'no'} workers"
        self._out = sys.stderr
        #: The output of a notebook's cell.
        self._handle: Any = None
        self._shown = ""
        self._is_shown = True
        self._is_queue_told = False

    async def run(self) -> None:
        """Update the line until cancelled."""
        while True:
            line = self.line()
            if self._is_shown and line != self._shown:  # a terminal that blocks gets no more
                self._shown, self._is_shown = line, False
                output.write(functools.partial(self._show, line))
            await asyncio.sleep(_INTERVAL)

    async def end(self, has_started: bool) -> None:
        """Replace the line by one about the start. After a failed start, remove it.

        Parameters
        ----------
        has_started : bool
            Whether the cluster has started.
        """
        last = self._summary() if has_started else ""
        output.write(functools.partial(self._show, last, is_last=True))
        await asyncio.to_thread(output.flush, _PATIENCE)

    def line(self) -> str:
        """Return the status of the scheduler's session, and how many workers have each status."""
        status = _status(self._cluster.scheduler, self._cluster.processes.arrived())
        line = f"Starting {self._name}, {self._lasted}: scheduler {status}"
        workers = self._workers_words() if self._names else self._n_workers
        return printable("; ".join(filter(None, [line, workers, self.notice])))

    @property
    def _lasted(self) -> str:
        return format_duration(time.monotonic() - self._started)

    def _workers_words(self) -> str:
        connected, workers = self._cluster.processes.arrived(), self._cluster.workers
        statuses = [_status(workers.get(name), connected) for name in self._names]
        counts = Counter(status.partition(" for ")[0] for status in statuses)  # without the time
        n_connected = f"{self._n_workers}: {counts.pop('connected', 0)} connected"
        return ", ".join([n_connected, *(f"{n} {status}" for status, n in counts.most_common())])

    def _show(self, line: str, is_last: bool = False) -> None:
        """Show a line in place of the one before. A notebook stores only the last state of its one output."""
        if is_kernel():
            from IPython.display import display

            bundle = {"text/plain": line}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        else:
            is_terminal = output.is_terminal(self._out)
            if is_terminal:
                print(output.overwriting("" if is_last else line), end="", file=self._out, flush=True)
            is_news = not (is_terminal or self._is_queue_told) and "scheduler queued" in line
            self._is_queue_told = self._is_queue_told or is_news
            if line and (is_last or is_news):
                print(line, file=self._out, flush=True)
        self._is_shown = True

    def _summary(self) -> str:
        text, n = printable(f"Cluster {self._name} started in {self._lasted}"), len(self._names)
        if n == len(self._cluster.processes.arrived()):
            return f"{text} with {self._n_workers}"
        words = self._workers_words()
        if n == 1 and "queued" not in words:
            return f"{text}; its worker connects when it has started"
        return f"{text}; {words}"


def _status(process: Any, connected: Collection[str]) -> str:
    session = getattr(process, "session", None)  # of a subclass, it may be any worker
    if session is None or process.launched_at is None:
        return "not launched yet"
    return status_of(session, connected)
