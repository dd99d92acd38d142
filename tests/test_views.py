"""What a terminal and a notebook show while a cluster starts."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

import pytest

from dask_cml.aio import cancel
from dask_cml.manager.display import show_start


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook(io.StringIO):
    pass


Notebook.__module__ = "ipykernel.iostream"


@pytest.fixture
def scheduler():
    session = SimpleNamespace(id="abc", status="starting", waits_for=None)
    return SimpleNamespace(session=session, start_time=None)


def shown(text):
    """What is to be seen of text with carriage returns."""
    line = ""
    for part in text.split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


@pytest.mark.parametrize(
    ("out", "took", "left"),
    [
        (Terminal, 3.2, ""),
        (Terminal, None, ""),
        (Notebook, 3.2, "c: the scheduler answered after 3 s"),
        (Notebook, None, "c: the scheduler's session abc is starting, 0 s"),
    ],
    ids=["terminal", "terminal, failed", "notebook", "notebook, failed"],
)
async def test_line_on_the_start(scheduler, holds, out, took, left):
    out = out()
    showing = asyncio.create_task(show_start("c", scheduler, out))
    await holds(lambda: shown(out.getvalue()) == "c: the scheduler's session abc is starting, 0 s")
    scheduler.start_time = took
    await cancel(showing)
    assert shown(out.getvalue()) == left


async def test_line_on_a_scheduler_that_waits_for_room(scheduler, holds):
    out = Terminal()
    scheduler.session = SimpleNamespace(id="abc", status="scheduling", waits_for=200)
    showing = asyncio.create_task(show_start("c", scheduler, out))
    await holds(lambda: "c: the scheduler's session abc is waiting for room, 3 min" in shown(out.getvalue()))
    await cancel(showing)


async def test_nothing_is_shown_to_nobody(scheduler):
    out = io.StringIO()
    await asyncio.wait_for(show_start("c", scheduler, out), 120)
    assert out.getvalue() == ""
