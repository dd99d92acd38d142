"""The display of a starting cluster in a terminal, a notebook and a file."""

import asyncio
import contextlib
import html
import io
import re
import sys
import threading
from datetime import datetime, timezone
from types import SimpleNamespace

import nbformat
import pytest
from clusters import lines_of, make, simulate, supplied
from distributed import Client, get_worker
from distributed.objects import SchedulerInfo
from nbclient import NotebookClient
from programs import STEERING, in_a_terminal
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, output
from dask_cml import display as screens
from dask_cml.cancellation import cancel
from dask_cml.cli import show
from dask_cml.display import StartDisplay
from dask_cml.options import SessionSize
from dask_cml.records import store
from dask_cml.records.store import Record, SchedulerState
from dask_cml.sessions.process import Session


class Terminal(io.StringIO):
    """A terminal of 80 columns, whose last line can be overwritten."""

    def isatty(self):
        return True

    def lines(self):
        return self.getvalue().split("\r\x1b[2K")[1:]


def process(n=0, status="starting", role="worker", waits_for=None):
    session = None
    if status is not None:
        session = SimpleNamespace(id=f"id{n}", name=f"c-{n}", status=status, waits_for=waits_for)
    return SimpleNamespace(name=f"c-{n}", role=role, session=session, waits_for=waits_for, launched_at=0.0)


def start_display(processes, name="c", connected=(), out=None):
    scheduler, *workers = processes
    by_name = {worker.name: worker for worker in workers}
    with contextlib.redirect_stderr(out):
        return StartDisplay(starting(name, scheduler, by_name, connected), [*by_name])


def starting(name="c", scheduler=None, workers=(), connected=()):
    processes, options = SimpleNamespace(arrived=lambda: connected), SimpleNamespace(name=name)
    return SimpleNamespace(options=options, scheduler=scheduler, workers=dict(workers), processes=processes)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("dask_cml.display.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@contextlib.asynccontextmanager
async def shown(display):
    showing = asyncio.create_task(display.run())
    yield
    await cancel(showing)


# -- the display

STARTED = "Cluster c started in 0 s"


def test_the_line_counts_the_sessions_by_their_status(clock):
    workers = [process(n, "running") for n in range(1, 900)]
    workers += [process(n, "scheduling", waits_for=60 + n) for n in range(900, 930)]
    workers.append(process(930, None))
    display = start_display([process(0, "running"), *workers], connected=[f"c-{n}" for n in range(500)])
    clock.now = 180.0
    counts = "930 workers: 499 connected, 400 running, 30 queued, 1 not launched yet"
    assert display.line() == f"Starting c, 3 min: scheduler connected; {counts}"
    display = start_display([process(0, "scheduling", waits_for=180)])
    assert display.line() == "Starting c, 0 s: scheduler queued for 3 min; no workers"
    line = StartDisplay(starting(scheduler=process(0)), [0]).line()  # as a worker of a subclass may be named
    assert line.endswith("; 1 worker: 0 connected, 1 not launched yet")


LEFT = [
    ([], [], " with no workers"),
    (["running"], [], "; its worker connects when it has started"),
    (["queued"], [], "; 1 worker: 0 connected, 1 queued"),
    (["running", "running"], ["c-2"], "; 2 workers: 1 connected, 1 running"),
    (["running", "running"], ["c-1", "c-2"], " with 2 workers"),
]


async def test_one_line_is_left_when_the_start_ends(clock, terminal):
    for statuses, connected, line in LEFT:
        out = Terminal()
        workers = [process(n, status) for n, status in enumerate(statuses, 1)]
        await start_display([process(0), *workers], connected=connected, out=out).end(True)
        assert out.lines() == [f"{STARTED}{line}\n"]


async def test_a_line_can_be_overwritten_and_nothing_is_left_when_the_start_fails(terminal, holds):
    scheduler = process(status="x" * 500)
    display = start_display([scheduler], out=terminal)
    async with shown(display):
        await holds(terminal.lines)
        assert len(terminal.lines()[0]) == 79
        scheduler.session.status = "starting"
        display.notice = "its workers need more"
        await holds(lambda: terminal.lines()[-1].endswith("; no workers; its workers need more"))
    await display.end(False)
    assert terminal.lines()[-1] == ""


async def test_a_blocked_terminal_delays_neither_the_event_loop_nor_the_start(
    clock, holds, terminal, monkeypatch
):
    stopped, continued = threading.Event(), threading.Event()

    def write(text):
        stopped.set()
        continued.wait()
        return io.StringIO.write(terminal, text)

    terminal.write = write
    monkeypatch.setattr("dask_cml.display._PATIENCE", 0.01)
    display = start_display([process()], out=terminal)
    async with shown(display):
        await holds(stopped.is_set)
    await display.end(True)
    assert terminal.lines() == []
    continued.set()
    await holds(lambda: terminal.lines()[-1:] == [f"{STARTED} with no workers\n"])


async def test_a_file_or_a_terminal_without_a_cursor_gets_only_the_last_line(monkeypatch, clock, holds):
    for kind, out in {"xterm": io.StringIO(), "dumb": Terminal()}.items():
        monkeypatch.setenv("TERM", kind)
        scheduler = process(status="scheduling")
        display = start_display([scheduler], out=out)
        async with shown(display):
            await asyncio.to_thread(output.flush, 60)
            assert out.getvalue() == ""
            scheduler.waits_for = scheduler.session.waits_for = 60.0  # it may wait for hours
            await holds(out.getvalue)
            scheduler.session.waits_for = 120.0
            await asyncio.sleep(2 * screens._INTERVAL)
        await display.end(True)
        waits, started = out.getvalue().splitlines()
        assert waits == "Starting c, 0 s: scheduler queued for 60 s; no workers"
        assert started == f"{STARTED} with no workers"


ESCAPED = r"\x1b]0;title\x07\x1b[2j\u202e"


@simulated
async def test_control_characters_of_a_task_do_not_reach_a_terminal(it):
    async with simulate(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        future = client.submit(sum, [1, 2], resources={STEERING: 1})
        await eventually(lambda: "which no worker group offers" in repr(cluster))
        [logged] = [line for line in lines_of(cluster) if "which no worker group offers" in line]
        for text in repr(cluster), logged:
            assert ESCAPED in text.lower()
            assert text.isprintable()
        await future.cancel()


# -- whole starts

ENDED = r"Cluster c started in .+( with 1 worker|; its worker connects when it has started)"
PROGRAM = (
    "from dask_cml import CMLCluster; CMLCluster(n_workers=1, name='c', platform='local', quiet={quiet})"
)


@pytest.mark.slow
@pytest.mark.usefixtures("light", "platform")
def test_a_terminal_shows_how_far_the_start_is_and_then_one_line():
    status, output = in_a_terminal([sys.executable, "-c", PROGRAM.format(quiet=False)], TERM="xterm")
    assert status == 0
    assert "Starting c, " in output
    assert "; 1 worker: 0 connected, " in output
    assert re.search(ENDED + "\r\n$", output)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_notebook_stores_one_output(platform, monkeypatch, tmp_path):
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    options = "n_workers=1, name='c', platform='local'"
    cells = [
        "from dask_cml import CMLCluster",
        f"cluster = CMLCluster({options})",
        "cluster.close()",
        f"cluster = await CMLCluster({options}, asynchronous=True)",
        "await cluster.close()",
        f"with CMLCluster({options}, quiet=True): pass",
        f"with CMLCluster({options}, scheduler_args=['--preload', 'no_such_module']): pass",
        f"CMLCluster({options}, cpu='many')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, startup_timeout=240, allow_errors=True).execute()
    _, sync, _, awaited, _, quiet, failed, refused = [cell.outputs for cell in notebook.cells]
    for outputs in (sync, awaited):
        [output] = outputs
        assert re.fullmatch(ENDED, output.data["text/plain"])
    assert quiet == []
    display, error = failed
    assert display.data == {"text/plain": ""}
    assert error.traceback[0].startswith("SessionFailed: ")
    [error] = refused
    assert error.traceback[0] == "TypeError: invalid cpu='many': expected a number above 0"
    assert len(error.traceback) == 2  # and where it was called


@simulated
async def test_of_several_groups_those_that_adapt_are_named(it, capsys):
    async with simulate(name="lab", worker_groups={"gpu": {"n_workers": 1}}) as cluster:
        cluster.adapt(0, 2)
        assert "(1 pending, default adapts between 0 and 2)" in repr(cluster)
        cluster.adapt(1, 4, worker_group="gpu")
        words = "default adapts between 0 and 2, gpu adapts between 1 and 4"
        assert f"{words})" in repr(cluster)
        assert f"</strong> running, {words}" in cluster._repr_html_()
        await eventually(lambda: store.read("lab").bounds.keys() == {"default", "gpu"})
        await show.list_clusters.callback(False)
        assert f"{words})" in capsys.readouterr().out


@pytest.mark.slow
@simulated
async def test_of_many_sessions_the_scheduler_and_those_that_are_not_connected_are_shown(it):
    async with supplied(name="night", n_workers=60) as cluster:
        it.platform.configure({"sessions": 61})
        cluster.scale(62)
        await eventually(lambda: len(cluster.sessions) > 61 or cluster.problem)
        page, tab = cluster._repr_html_(), cluster._widget()
        tab.children = [*tab.children, type(tab.children[0])("a subclass's")]
        assert cluster._repr_html_().count("Local directory") == 20
        for shown in page, tab.children[3].value:
            assert "more sessions run. <code>dask cml info night</code> lists them all." in shown
            assert "night-scheduler" in shown


HTML = "<img src=x onerror=alert(1)>"


@pytest.mark.slow
@pytest.mark.usefixtures("light")
async def test_no_task_puts_html_into_a_notebook(platform, holds):
    def show(place, html):
        """Report HTML where Dask's template shows a number of this worker."""
        get_worker().metrics[place] = lambda _: [html]

    async with make(name="<i>&\"'", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: cluster.scheduler_info["workers"])
        for place in ("executing", "ready", "in_flight", HTML):
            await client.submit(show, place, HTML)
        [address] = cluster.scheduler_info["workers"]

        async def arrives():
            cluster.scheduler_info = SchedulerInfo(await client.scheduler.identity())
            return HTML in cluster.scheduler_info["workers"][address]["metrics"]

        while not await arrives():
            await asyncio.sleep(0.1)
        shown = [cluster._repr_html_(), client._repr_html_(), (await cluster.get_logs())._repr_html_()]
        widget = cluster._widget()
        cluster._repr_html_()  # fills the last tab
        first, _, sessions = widget.children
        shown += [first.value, sessions.value]
    for text in shown:
        assert "<img" not in text
        assert "<i>" not in text
    assert html.unescape(shown[0]).count(f"{cluster.name}-0") > 1
    assert "CMLCluster</h3>" in shown[0]
    assert shown[0].count(html.escape(HTML)) == 3


def test_only_links_of_the_web_are_shown():
    for url in "javascript:alert(1)//", 'https://x.example/"onclick=alert(1)//':
        now = datetime.now(timezone.utc)
        session = Session("id0", "worker", "c-0", "running", None, url, now, SessionSize(1, 1))
        table = screens.render("cml_session_table.html.j2", rows=[(session, "running")], n_sessions=1)
        assert "id0" in table
        assert "<a" not in table
        assert Record("c", scheduler=SchedulerState(app_url=url)).dashboard_link is None


async def cancel_once(task):
    """Do the same as ``asyncio.run`` after Ctrl-C. A second cancellation would not wait for the end."""
    task.cancel()
    await asyncio.wait([task])


async def test_a_cancelled_start_says_how_many_sessions_were_stopped(platform, holds, capsys):
    platform.configure(start_delay=60)
    starting = asyncio.ensure_future(CMLCluster(n_workers=2, platform="local", asynchronous=True))
    await holds(lambda: len(platform.sessions()) == 3)
    await cancel_once(starting)
    platform.configure(start_delay=0)
    assert re.fullmatch(r"Interrupted: \d sessions? stopped\n", capsys.readouterr().err)
    assert all(session["stop_requested"] for session in platform.sessions())
