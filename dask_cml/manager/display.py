"""What a cluster shows of itself: its sessions in a notebook, and a line while it starts."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dask.widgets.widgets import TEMPLATE_PATHS, get_template

from dask_cml.manager.waiting import pending, waiting

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster
    from dask_cml.sessions.process import Session

# Where Dask looks for the templates of what is shown in notebooks.
TEMPLATE_PATHS.append(str(Path(__file__).parents[1] / "templates"))

_INTERVAL = 0.25
_WIDTH = 100


def sessions_html(cluster: CMLCluster) -> str:
    """Return rows for the table of the cluster's HTML representation."""
    template = get_template("cml_sessions.html.j2")
    return template.render(
        sessions=cluster.sessions,
        status=_status,
        pending=pending(cluster),
        trouble=cluster._reconciler.trouble,
    )


def _status(session: Session) -> str:
    return session.status if session.waits_for is None else waiting(session.waits_for)


def first_line(text: str) -> str:
    """Return the first line of a text that may hold a session's output."""
    return text.partition("\n")[0].rstrip(":; ")


async def show_start(cluster: CMLCluster, out: TextIO | None = None) -> None:
    """Keep one line on what is waited for, until cancelled. Nothing, where nobody would see it move.

    A terminal's line is empty then. A notebook would show the empty line for good, so there it says how long
    it took.
    """
    out = out or sys.stdout
    in_notebook = type(out).__module__.startswith("ipykernel")
    if cluster.quiet or not (in_notebook or out.isatty()):
        return

    def show(line: str) -> None:
        out.write(f"\r{line[:_WIDTH]:<{_WIDTH}}")
        out.flush()

    started = time.monotonic()
    try:
        while True:
            session = cluster.scheduler and cluster.scheduler.session
            state = f"{session.id} is {_status(session)}" if session else "is being launched"
            show(f"{cluster.name}: the scheduler's session {state}, {time.monotonic() - started:.0f} s")
            await asyncio.sleep(_INTERVAL)
    finally:
        took = cluster.scheduler and cluster.scheduler.start_time
        if in_notebook and took is not None:
            show(f"{cluster.name}: the scheduler answered after {took:.0f} s")
        elif not in_notebook:
            show("")
            out.write("\r")
            out.flush()
