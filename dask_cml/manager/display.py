"""What a cluster shows of itself: its sessions in a notebook, and a line while it starts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

from dask.widgets.widgets import TEMPLATE_PATHS, get_template

from dask_cml.manager.group import WorkerGroup
from dask_cml.manager.waiting import waiting
from dask_cml.sessions.process import CMLScheduler, Session

# Where Dask looks for the templates of what is shown in notebooks.
TEMPLATE_PATHS.append(str(Path(__file__).parents[1] / "templates"))

_INTERVAL = 0.25
_WIDTH = 100


def sessions_html(
    address: str,
    sessions: Collection[Session],
    groups: Collection[WorkerGroup],
    pending: str,
    problem: str | None,
) -> str:
    """Return rows for the table of a cluster's HTML representation.

    Parameters
    ----------
    address : str
        The cluster's, for clients.
    sessions : collection of Session
        The cluster's.
    groups : collection of WorkerGroup
        The cluster's.
    pending : str
        How many worker sessions are on their way; may be empty.
    problem : str or None
        What is wrong.
    """
    template = get_template("cml_sessions.html.j2")
    return template.render(
        address=address,
        sessions=sessions,
        groups=groups,
        status=_status,
        pending=pending,
        problem=problem,
    )


def _status(session: Session) -> str:
    return session.status if session.waits_for is None else waiting(session.waits_for)


def first_line(text: str) -> str:
    """Return the first line of a text that may hold a session's output."""
    return text.partition("\n")[0].rstrip(":; ")


async def show_start(name: str, scheduler: CMLScheduler, out: TextIO | None = None) -> None:
    """Keep one line on what is waited for, until cancelled. Nothing, where nobody would see it move.

    A terminal's line is empty then. A notebook would show the empty line for good, so there it says how long
    it took.
    """
    out = out or sys.stdout
    in_notebook = type(out).__module__.startswith("ipykernel")
    if not (in_notebook or out.isatty()):
        return

    def show(line: str) -> None:
        out.write(f"\r{line[:_WIDTH]:<{_WIDTH}}")
        out.flush()

    started = time.monotonic()
    try:
        while True:
            session = scheduler.session
            state = f"{session.id} is {_status(session)}" if session else "is being launched"
            show(f"{name}: the scheduler's session {state}, {time.monotonic() - started:.0f} s")
            await asyncio.sleep(_INTERVAL)
    finally:
        took = scheduler.start_time
        if in_notebook and took is not None:
            show(f"{name}: the scheduler answered after {took:.0f} s")
        elif not in_notebook:
            show("")
            out.write("\r")
            out.flush()
