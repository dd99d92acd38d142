"""However a program ends, its clusters' sessions end with it, quickly and without a traceback."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import textwrap
import threading
import time
from unittest.mock import Mock

import pytest
from clusters import live, loop_runs, make, simulate
from conftest import PATIENCE
from distributed.core import Status
from programs import Program
from simulated.testing import eventually, simulated
from testbed import faults

import dask_cml
from dask_cml import CMLCluster, CMLError, output
from dask_cml.core import ending
from dask_cml.records import store
from dask_cml.records.history import ended_clusters

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
def all_stopped(platform):
    """Assert that there were sessions, that each is stopped, and that nothing of the clusters is left."""

    def all_stopped(n: int | None = None) -> None:
        sessions = platform.sessions()
        assert sessions
        assert n is None or len(sessions) == n
        assert [
            session for session in sessions if not (session["stop_requested"] or session["finished_at"])
        ] == []
        assert store.records() == []

    return all_stopped


@pytest.fixture
def no_worker_processes(platform):
    """Let sessions of workers run without a Dask worker: only whether they are stopped matters."""
    platform.inject("hangs", match="A worker of", times=9)


SYNC = """
cluster = CMLCluster(n_workers=1, quiet=True)
print("ready", flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_in_the_constructor_counts_although_the_clean_up_fails(platform, all_stopped, until):
    platform.inject("stuck", times=3)
    code = """
    class Broken(CMLCluster):
        async def _close_dask(self):
            await super()._close_dask()
            raise OSError("the clean-up failed")
    print("ready", flush=True)
    Broken(n_workers=2, name="mine", quiet=True)
    """
    program = Program(code).when_ready()
    until(lambda: len(platform.sessions()) == 3)
    program.process.send_signal(signal.SIGINT)
    returned, _, err = program.ends()
    assert returned in (-signal.SIGINT, 130)
    assert err.splitlines()[0] == "Cluster mine not closed properly: the clean-up failed"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "dask_cml/cluster.py" not in err
    all_stopped(3)


@pytest.mark.slow
@pytest.mark.usefixtures("no_worker_processes")
def test_a_second_sigterm_does_not_interrupt_the_shutdown(platform, all_stopped):
    platform.configure(latency=0.3)
    program = Program(SYNC + "while True: time.sleep(0.1)").when_ready()
    program.process.send_signal(signal.SIGTERM)
    while program.process.poll() is None:
        program.process.send_signal(signal.SIGTERM)
        try:
            program.process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    assert program.ends()[0] == 128 + signal.SIGTERM
    all_stopped(2)
    [ended] = ended_clusters()
    assert re.fullmatch(r"the program of .* \(process \d+\) ended", ended.why)


OUTPUT_THAT_NOBODY_READS = """
threading.Thread(target=print, args=("ready\\n" + "x" * 10**6,), daemon=True).start()
while True: time.sleep(0.1)
"""
LOCK = """
ending._TIMEOUT = 0.5
with threading._active_limbo_lock:  # of Thread.start, for example
    print("ready", flush=True)
    while True: time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("code", "status"), [(OUTPUT_THAT_NOBODY_READS, 128 + signal.SIGTERM), (LOCK, -signal.SIGALRM)]
)
def test_a_signal_ends_a_program_whatever_it_interrupts(code, status):
    head = """
    class Cluster:
        options = type("", (), {"name": "mine"})
        ending = property(lambda self: self)
        usual_how = None
    note_exit = end_blocking = lambda self, *arguments, **named: None
    from dask_cml.core import ending
    ending.end_at_exit(Cluster())
    """
    program = Program(textwrap.dedent(head) + code, PYTHONUNBUFFERED="").when_ready()
    program.process.terminate()
    try:
        assert program.process.wait(PATIENCE) == status
    finally:
        program.process.kill()
        program.process.communicate()


WAITS_FOR_A_THREAD = """
def disturb():
    while not threading._SHUTTING_DOWN:
        time.sleep(0.01)
    os.kill(os.getpid(), {signum})
def work():
    global cluster
    cluster = CMLCluster(n_workers=0, quiet=True)
    made.set()
    time.sleep(3600)
made = threading.Event()
other = CMLCluster(n_workers=0, quiet=True)
threading.Thread(target=work).start()
made.wait()
threading.Thread(target=disturb, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_program_that_waits_for_the_thread_of_a_cluster(platform, all_stopped, signum):
    returned, _, err = Program(WAITS_FOR_A_THREAD.format(signum=int(signum))).ends()
    if signum == signal.SIGTERM:
        assert (returned, err) == (128 + signal.SIGTERM, "")
    else:  # as if Python itself had waited for the thread
        assert "KeyboardInterrupt" in err
    all_stopped(2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_worker_processes")
def test_a_program_names_the_sessions_that_it_could_not_stop_at_exit(platform):
    program = Program(SYNC + "while True: time.sleep(0.1)", DASK_CML__API__RETRIES="1").when_ready()
    faults.inject("error", function="stop_workers", status=503, seconds=PATIENCE)
    program.process.terminate()
    returned, _, err = program.ends()
    assert returned == 128 + signal.SIGTERM
    # Without its scheduler the worker ends by itself some time, and nobody can stop either by these words.
    [line] = err.splitlines()
    assert "which may still run" in line
    for session in platform.sessions():
        assert session["id"] in line
        assert not session["stop_requested"]
    faults.clear()
    platform.stop_workers(*[session["id"] for session in platform.sessions()])


FORKS = {
    "os.fork in a block": """
        with cluster:
            if os.fork() == 0:
                cluster.close()
                sys.exit()
            assert os.wait()[1] == 0
            cluster.scale(2)
            cluster.sync(cluster.sharing.written)
            sys.exit()
    """,
    "multiprocessing": """
        import multiprocessing
        for _ in range(9):  # also at once after the fork, a signal ends a child, and no cluster
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
            child.start()
            child.terminate()
            child.join(120)
            assert child.exitcode == -signal.SIGTERM
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("fork", FORKS.values(), ids=FORKS)
def test_the_end_of_a_forked_child_is_not_that_of_the_cluster(platform, all_stopped, fork):
    code = textwrap.dedent(fork) + textwrap.dedent(
        """
        if "multiprocessing" not in sys.modules or "child" not in globals():
            assert os.wait()[1] == 0
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        assert cluster.status.name == "running"
        """
    )
    head = "import warnings; warnings.simplefilter('ignore')\n" + SYNC
    # Whether Dask notes at INFO that it sent something too late depends on the machine.
    returned, _, err = Program(head + code, DASK_LOGGING__DISTRIBUTED="warning").ends()
    assert (returned, err) == (0, "")
    all_stopped()


@pytest.fixture
def default_sigterm():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


async def test_sigterm_is_handled_only_while_clusters_are_open(platform, default_sigterm, monkeypatch):
    one = CMLCluster(platform="local", asynchronous=True)
    assert signal.getsignal(signal.SIGTERM) is ending._exit
    two = CMLCluster(platform="local", asynchronous=True)
    await one.close()
    assert signal.getsignal(signal.SIGTERM) is ending._exit
    exited, third = Mock(), Mock()
    with monkeypatch.context() as patch:
        patch.setattr(ending, "_clusters", {third: threading.current_thread})
        patch.setattr(ending, "_is_over", False)
        patch.setattr(os, "_exit", exited)
        patch.setattr(signal, "setitimer", Mock())
        signal.raise_signal(signal.SIGTERM)
        assert ending.unclosed() == []
    third.ending.end_blocking.assert_called_once()
    exited.assert_called_once_with(128 + signal.SIGTERM)
    await two.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_clusters_whose_end_hangs_are_waited_for_together(monkeypatch, caplog):
    released = threading.Event()
    hanging = Mock(side_effect=lambda *_, **__: released.wait())
    clusters = [Mock(**{"options.name": "night", "ending.end_blocking": hanging}) for _ in range(9)]
    clusters.append(Mock(**{"ending.end_blocking.side_effect": OSError("the disk is full")}))
    monkeypatch.setattr(ending, "_clusters", dict.fromkeys(clusters))
    monkeypatch.setattr(ending, "_is_over", False)
    monkeypatch.setattr(ending, "_TIMEOUT", 1.0)
    began = time.monotonic()
    ending._end_all()
    assert time.monotonic() - began < 18.0  # as long as one after the other takes
    assert "the disk is full" in caplog.text
    ending._ask_for_patience()
    output.flush()
    assert "Shutting down cluster night, night" in caplog.text
    with pytest.raises(CMLError, match="not started: the program is exiting"):
        ending.end_at_exit(Mock())
    released.set()


@pytest.mark.parametrize("is_set_later", [False, True])
async def test_a_handler_that_somebody_sets_stays(platform, default_sigterm, is_set_later):
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, signal.SIG_DFL if is_set_later else own)
    cluster = CMLCluster(platform="local", asynchronous=True)
    signal.signal(signal.SIGTERM, own) if is_set_later else None
    assert signal.getsignal(signal.SIGTERM) is own
    await cluster.close()
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.fixture
def closing(platform):
    """Return a cluster whose end waits for a coroutine of the test. It is to be closed at the end."""
    cluster = CMLCluster(n_workers=0, name="mine", platform="local", quiet=True)
    close = cluster._close_dask

    def closing(step, *, is_at_the_end=False):
        async def close_dask():
            if is_at_the_end:
                await close()
            await step()
            if not is_at_the_end:
                await close()

        cluster._close_dask = close_dask
        return cluster

    yield closing
    assert cluster.status == Status.closed
    assert not loop_runs(cluster)
    assert all(session["stop_requested"] for session in platform.sessions())


@pytest.mark.slow
@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_handler_that_closes_joins_the_close_that_it_interrupts(closing, default_sigterm, is_at_the_end):
    """The handler runs in the thread that closes."""

    def handle(*_):
        handled.set()
        cluster.close()
        ended.append(cluster.status)

    async def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.to_thread(handled.wait, 60)

    handled, ended = threading.Event(), []
    cluster = closing(interrupt, is_at_the_end=is_at_the_end)
    signal.signal(signal.SIGTERM, handle)
    cluster.close()
    assert ended == [Status.closed]


@pytest.mark.slow
def test_a_close_after_an_interrupted_close_joins_it(closing):
    async def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.to_thread(interrupted.wait, 60)

    interrupted = threading.Event()
    cluster = closing(interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.close()
    assert cluster.status == Status.closing
    interrupted.set()
    cluster.close()


@pytest.mark.slow
def test_a_close_waits_for_that_of_another_thread_as_long_as_it_may(closing):
    async def wait():
        closes.set()
        await asyncio.to_thread(may_close.wait)

    closes, may_close = threading.Event(), threading.Event()
    cluster = closing(wait)
    thread = threading.Thread(target=cluster.close)
    thread.start()
    assert closes.wait(60)
    with pytest.raises(TimeoutError, match="another thread"):
        cluster.close(timeout=0.01)
    may_close.set()
    cluster.close()
    thread.join()


@pytest.mark.slow
def test_a_close_that_takes_longer_than_it_may_says_so_and_goes_on(closing, until):
    """Also if the event loop is busy. In Python 3.10, the TimeoutError of futures is not Python's."""

    async def block():
        may_close.wait(60)

    may_close = threading.Event()
    cluster = closing(block)
    with pytest.raises(TimeoutError, match=r"^cluster mine not closed within 0\.1 s$") as caught:
        cluster.close(timeout=0.1)
    assert type(caught.value) is TimeoutError
    may_close.set()
    until(lambda: cluster.status == Status.closed)
    cluster.close()


@pytest.mark.slow
@pytest.mark.usefixtures("no_worker_processes")
def test_sigterm_after_the_last_cluster_ends_the_program_as_ever(platform, all_stopped):
    """Even if a thread closed it, from where no handler can be set."""
    code = """
    cluster = CMLCluster(n_workers=0, quiet=True)
    thread = threading.Thread(target=cluster.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)
    """
    assert Program(code).ends() == (128 + signal.SIGTERM, "", "")
    all_stopped(1)


@pytest.fixture
def all_closed(platform):
    def all_closed(*clusters, n_sessions):
        assert {cluster.status.name for cluster in clusters} == {"closed"}
        assert len(platform.sessions()) == n_sessions
        assert live(platform) == []
        assert store.records() == []
        assert CMLCluster.open() == []
        assert ending.unclosed() == []

    return all_closed


@pytest.mark.slow
async def test_another_thread_closes_the_clusters_of_an_event_loop(all_closed):
    clusters = [await make(n_workers=1), await make()]
    await asyncio.wait_for(asyncio.to_thread(clusters[0].close), PATIENCE)
    await asyncio.wait_for(asyncio.to_thread(dask_cml.close_all), PATIENCE)
    all_closed(*clusters, n_sessions=3)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["last", "after", "after it is closed"])
def test_close_all_closes_clusters_whose_event_loop_has_ended(all_closed, when):
    async def main():
        cluster = await make(n_workers=1)
        if when == "last":
            dask_cml.close_all()
        return cluster

    loop = asyncio.new_event_loop()
    cluster = asyncio.run(main()) if when == "last" else loop.run_until_complete(main())
    if when != "after":
        loop.close()
    if when != "last":
        dask_cml.close_all()
    loop.close()
    all_closed(cluster, n_sessions=2)


@pytest.mark.slow
@simulated
async def test_close_all_in_an_event_loop_logs_which_sessions_it_could_not_stop(it, caplog):
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    cluster = await simulate()
    session = cluster.sessions[0].id
    it.platform.answer_stop(*[403] * 1000)
    dask_cml.close_all()
    await eventually(lambda: f"CML did not stop {session}, which may still run" in caplog.text)
    gc.collect()
    assert unretrieved == []
    it.platform.heal()
    dask_cml.close_all()
    await eventually(lambda: cluster.status.name == "closed")
    assert not it.platform.running


def test_close_all_closes_all_clusters_and_raises_the_errors_of_some(monkeypatch):
    stays = CMLError("CML did not stop a session")
    clusters = [Mock(asynchronous=False, **{"close.side_effect": error}) for error in (stays, None)]
    monkeypatch.setattr(CMLCluster, "open", lambda: clusters)
    with pytest.raises(CMLError, match="CML did not stop a session"):
        dask_cml.close_all()
    clusters[1].close.assert_called_once()


@simulated
async def test_close_all_leaves_a_cluster_alone_that_is_just_closed(it):
    class Impatient(CMLCluster):
        async def _close_dask(self):
            await super()._close_dask()
            dask_cml.close_all()

    await (await simulate(Impatient)).close()
    assert it.platform.live == []
