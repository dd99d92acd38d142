"""Words to users: they neither stop the upkeep of a cluster nor run in its event loop."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import traceback
import warnings

import pytest
from clusters import arrived, log_of, supplied
from jupyter_client.manager import start_new_kernel
from programs import STEERING
from simulated.testing import eventually, simulated

from dask_cml import output
from dask_cml.errors import CMLError
from dask_cml.words import printable

pytestmark = pytest.mark.usefixtures("light")


def closed():
    out = io.StringIO()
    out.close()
    return contextlib.nullcontext(out)


@contextlib.contextmanager
def broken():
    """A pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w", buffering=1) as out:
        yield out
        assert output.flush(60)


@contextlib.contextmanager
def blocked():
    """A pipe that nobody reads, and that is full."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(65536))
    os.set_blocking(write, True)
    with contextlib.suppress(BrokenPipeError), open(write, "w", buffering=1) as out:
        yield out
        os.close(read)  # what waits to write fails now
        assert output.flush(60)


class WriteOnly:
    """As programs give in place of a standard stream to log what is printed."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture(params=[closed, broken, blocked, None, WriteOnly()])
def out(request):
    """A standard stream that fails. It is None in a process without a console."""
    assert output.flush(60)
    with request.param() if callable(request.param) else contextlib.nullcontext(request.param) as out:
        yield out


@simulated
async def check_upkeep(it):
    """A lost worker is replaced, and calls of the platform that fail are repeated."""
    async with supplied(name="mine", n_workers=1, quiet=False) as cluster:
        it.platform.evict(cluster.sessions[1].id)
        it.platform.fail("launch_workers", OSError("no route to host"))
        await eventually(lambda: "mine-0 lost" in log_of(cluster))
        await eventually(lambda: arrived(cluster) == 1)
        cluster.scale(0)
        it.platform.answer_stop(503, 503)
        await eventually(lambda: len(it.platform.running) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_cluster_goes_on_whatever_becomes_of_its_output(tmp_path, monkeypatch, out, name):
    monkeypatch.setattr(sys, name, out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python itself fails to show one
        check_upkeep(tmp_path)


def test_nothing_that_is_said_or_logged_steers_a_terminal(capsys):
    """A message, an argument, an exception and the error of a cluster may all have the text of a task."""
    logger, handler = output.get_logger("dask_cml.steered"), logging.StreamHandler(io.StringIO())
    logging.getLogger("dask_cml.steered").addHandler(handler)
    try:
        raise ValueError(STEERING)
    except ValueError:
        logger.exception("failed: %s", STEERING)
    logger.warning("failed: %s", CMLError(STEERING))
    output.say(STEERING)
    assert output.flush(60)
    [shown] = traceback.format_exception_only(CMLError(STEERING))
    assert shown.rstrip("\n").isprintable()
    for text, n in (handler.stream.getvalue(), 3), (capsys.readouterr().out, 1):
        assert text.count(printable(STEERING)) == n
        assert all(map(str.isprintable, text.splitlines()))


class Handler(logging.Handler):
    """A handler that raises, and notes in which threads it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, threading.Thread]] = []

    def emit(self, record):
        self.seen.append((record.getMessage(), threading.current_thread()))
        raise RuntimeError("no logs")


def test_a_cluster_goes_on_whatever_the_handlers_of_its_logs_do(tmp_path):
    """One that waits would stop the event loop, so none runs in its thread."""
    handler, logger = Handler(), logging.getLogger("dask_cml")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        check_upkeep(tmp_path)
        assert output.flush(60)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any("next try" in message for message, _ in handler.seen)
    assert [message for message, thread in handler.seen if thread is threading.current_thread()] == []


FORK = """
import os, sys, threading
from dask_cml import output

held, free = threading.Event(), threading.Event()


def hold():
    held.set()
    free.wait()


output.write(hold)  # as a terminal after Ctrl-S
held.wait()
output.say("of the parent")
child = os.fork()
if child == 0:
    output.say("of the child")
    output.get_logger("mine").error("logged")
    os._exit(0 if output.flush(60) else 1)
_, status = os.waitpid(child, 0)
free.set()
output.flush(60)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_child_that_is_forked_while_words_are_written_writes_its_own():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "of the child\nof the parent\n", "logged\n")


SIGNAL = """
import logging, signal, sys, threading
from dask_cml import output

logging.basicConfig(format="%(message)s")
logger = output.get_logger("dask_cml.test")
own = output.__file__, threading.__file__

def interrupt(frame, event, _):
    global line
    if frame.f_code.co_filename in own:
        line += 1
        if line == interrupted:
            signal.raise_signal(signal.SIGUSR1)
        return interrupt

def write():
    logger.warning("of the program")
    output.flush(60)

signal.signal(signal.SIGUSR1, lambda *_: logger.warning("of the handler"))
interrupted = line = 0
while line >= interrupted:
    output._begin()
    interrupted, line = interrupted + 1, 0
    sys.settrace(interrupt)
    write()
    sys.settrace(None)
    assert output.flush(60)
print(interrupted)
"""


def test_a_signals_handler_may_log_wherever_it_interrupts_the_program():
    """Before each line, in turn, of what writes words, and of the locks and threads that it uses."""
    command = [sys.executable, "-c", SIGNAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    n, words = int(done.stdout), done.stderr.splitlines()
    assert n > 10
    assert (words.count("of the program"), words.count("of the handler")) == (n, n - 1)


CREATE = """
import asyncio
from dask_cml import CMLCluster

cluster = CMLCluster(name="lab", platform="local", quiet=False)
may_tell = [asyncio.Event() for _ in range(2)]

async def tell():
    for n, event in enumerate(may_tell):
        await event.wait()
        cluster._tell(f"line {n}")
        cluster.logger_of_test.warning(f"warning {n}")

async def begin():
    return asyncio.create_task(tell())

from dask_cml.output import get_logger
cluster.logger_of_test = get_logger("of.test")
task = cluster.sync(begin)
"""
ALLOW = "cluster.loop.add_callback(may_tell[{}].set)"


class Notebook:
    """A kernel whose cells show what is written below them."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(startup_timeout=120)
        #: The output of the cells, by the ids of the requests that run them.
        self.below = {}

    def run(self, code):
        """Run a cell, and return the id of its request."""
        # Not the next message: a slow kernel was asked more than once whether it is ready.
        answer = self.client.execute(code, reply=True, timeout=120)
        assert answer["content"]["status"] == "ok", answer["content"]
        return answer["parent_header"]["msg_id"]

    def shows(self, cell, words):
        """Wait until words are written below a cell."""
        while words not in self.below.get(cell, ""):
            message = self.client.get_iopub_msg(timeout=120)
            if message["msg_type"] == "stream":
                parent = message["parent_header"]["msg_id"]
                self.below[parent] = self.below.get(parent, "") + message["content"]["text"]
        return True


@pytest.mark.slow
def test_lines_of_a_cluster_appear_below_the_cell_that_runs_or_ran_last(platform):
    notebook = Notebook()
    try:
        create = notebook.run(CREATE)
        runs = notebook.run(ALLOW.format(0) + "; cluster.sync(asyncio.sleep, 0.5)")
        assert notebook.shows(runs, "line 0")
        assert notebook.shows(runs, "warning 0")
        later = notebook.run(f"import threading; threading.Timer(1.0, lambda: {ALLOW.format(1)}).start()")
        notebook.client.complete("clus", reply=True, timeout=120)
        assert notebook.shows(later, "line 1")
        assert notebook.shows(later, "warning 1")
        assert "line" not in notebook.below.get(create, "")
        notebook.run("cluster.close()")
    finally:
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel(now=True)


def test_a_stream_whose_encoding_lacks_a_character_gets_the_line_nevertheless(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    output.say("Cluster küche started")
    assert output.flush(60)
    assert out.buffer.getvalue() == b"Cluster k\\xfcche started\n"
