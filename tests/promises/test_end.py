"""However a cluster ends, each of its sessions is stopped, and no other one."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import dask
import pytest
from clusters import arrived, create_elsewhere, log_of, simulate, supplied
from jupyter_client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from programs import Program
from simulated.faults import HTTPError
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import CallFailed, CMLError

# -- programs, as processes

SYNC = """
cluster = CMLCluster(n_workers=1, quiet=True)
print("ready", flush=True)
"""
TWICE = """
cluster = CMLCluster(quiet=True)
cluster = CMLCluster(quiet=True)
"""
BLOCK = """
with CMLCluster(n_workers=1, quiet=True) as cluster:
    print("ready", flush=True)
    while True: time.sleep(0.1)  # a signal just before one long sleep would not end it
"""
CLIENT = """
cluster = CMLCluster(n_workers=1, quiet=True)
client = Client(cluster)
assert client.submit(sum, [1, 2]).result() == 3
print("ready", flush=True)
"""
UNCLOSED = """
async def main():
    global cluster
    cluster = await CMLCluster(n_workers=1, quiet=True, asynchronous=True)
    print("ready", flush=True)
"""
ASYNC_BLOCK = """
async def main():
    async with CMLCluster(n_workers=1, quiet=True, asynchronous=True):
        print("ready", flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""
THREAD = """
def work():
    global cluster
    cluster = CMLCluster(n_workers=1, quiet=True)
    print("ready", flush=True)
thread = threading.Thread(target=work, daemon={daemon})
thread.start()
thread.join()
"""
LOOP_IN_A_THREAD = (
    UNCLOSED
    + """
    await asyncio.sleep(3600)
threading.Thread(target=asyncio.run, args=[main()], daemon=True).start()
while "cluster" not in globals() or cluster.status.name != "running":
    time.sleep(0.05)
"""
)
#: Programs by the way in which they end, with their exit status.
ENDS = {
    "end of the script": (SYNC, 0),
    "end of the script, with a client": (CLIENT, 0),
    "end of the script, one name for two clusters": (TWICE, 0),
    "sys.exit": (SYNC + "sys.exit(7)", 7),
    "end of asyncio.run": (UNCLOSED + "asyncio.run(main())", 0),
    "end of another loop, which stays open": (
        UNCLOSED + "asyncio.new_event_loop().run_until_complete(main())",
        0,
    ),
    "a thread made it": (THREAD.format(daemon=False), 0),
    "a daemon thread made it": (THREAD.format(daemon=True), 0),
    "its loop runs in a daemon thread": (LOOP_IN_A_THREAD, 0),
}
#: Programs by the way in which they wait.
WAITS = {
    "sync": SYNC + "while True: time.sleep(0.1)",
    "sync, in a block": BLOCK,
    "sync, with a client": CLIENT + "while True: time.sleep(0.1)",
    "async, in a block": ASYNC_BLOCK,
    "async, unclosed": UNCLOSED + "    await asyncio.sleep(3600)\nasyncio.run(main())",
}
each_signal = pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["SIGINT", "SIGTERM"]
)
STARTS = 'print("ready", flush=True)\nCMLCluster(n_workers=2, quiet=True)'


def each_of(ways: dict[str, Any], *usual: str) -> list[Any]:
    """Return parameters that name a program. Variants of the usual ones are slow."""
    return [
        pytest.param(
            *(way if isinstance(way, tuple) else [way]),
            id=name,
            marks=[] if name in usual else [pytest.mark.slow],
        )
        for name, way in ways.items()
    ]


def unstopped(platform: ModuleType) -> list[str]:
    """Return the ids of the sessions that have not ended and that nobody has stopped."""
    sessions = platform.sessions()
    return [s["id"] for s in sessions if not (s["stop_requested"] or s["finished_at"])]


@pytest.mark.parametrize(("code", "status"), each_of(ENDS, "end of the script", "end of asyncio.run"))
def test_the_end_of_a_program_stops_all_sessions_without_a_traceback(platform, light, code, status):
    returned, _, err = Program(code).ends()
    assert (returned, err) == (status, "")
    assert len(platform.sessions()) == 2
    assert unstopped(platform) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        SYNC + "1 / 0",
        UNCLOSED + "    1 / 0\nasyncio.run(main())",
        BLOCK.replace("while True: time.sleep(0.1)", "1 / 0"),
    ],
    ids=["sync", "async", "block"],
)
def test_an_error_that_ends_a_program_stops_all_sessions(platform, light, code):
    returned, _, err = Program(code).ends()
    assert returned == 1
    assert err.count("Traceback") == err.count("ZeroDivisionError: division by zero") == 1
    assert len(platform.sessions()) == 2
    assert unstopped(platform) == []


@pytest.mark.parametrize("code", each_of(WAITS, "sync"))
@each_signal
def test_ctrl_c_and_a_signal_that_ends_a_program_stop_all_sessions(platform, light, code, signum):
    program = Program(code).when_ready()
    program.process.send_signal(signum)
    returned, _, err = program.ends()
    if signum == signal.SIGINT:
        assert returned in (-signal.SIGINT, 130)
        # asyncio.run shows the CancelledError as its cause.
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "Exception ignored" not in err
        assert "Error in" not in err
    else:
        assert (returned, err) == (128 + signal.SIGTERM, "")
    assert len(platform.sessions()) == 2
    assert unstopped(platform) == []


@pytest.mark.slow
def test_a_terminal_that_closes_stops_all_sessions(platform, light):
    program = Program(SYNC + "while True: time.sleep(0.1)").when_ready()
    program.process.send_signal(signal.SIGHUP)
    returned, _, err = program.ends()
    assert (returned, err) == (128 + signal.SIGHUP, "")
    assert len(platform.sessions()) == 2
    assert unstopped(platform) == []


@each_signal
def test_a_start_that_is_interrupted_stops_all_sessions(platform, light, until, signum):
    platform.inject("stuck", times=3)
    program = Program(STARTS).when_ready()
    until(lambda: len(platform.sessions()) == 3)
    program.process.send_signal(signum)
    _, _, err = program.ends()
    assert signum == signal.SIGTERM or "KeyboardInterrupt" in err
    assert unstopped(platform) == []


@pytest.fixture
def kernel(platform: ModuleType, light: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A notebook's kernel: its manager, and a function that runs a cell and returns its error or None."""
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")
    manager, client = start_new_kernel(startup_timeout=120)
    assert isinstance(client, BlockingKernelClient)

    def run(code: str) -> str | None:
        content = client.execute_interactive(code, timeout=120, output_hook=lambda _: None)["content"]
        return content.get("ename")

    yield manager, run
    client.stop_channels()
    if manager.has_kernel:
        manager.shutdown_kernel()


CELL = "from dask_cml import CMLCluster; cluster = CMLCluster(n_workers=1, quiet=True)"
BUSY = """
import threading, _thread, time
threading.Timer(1, _thread.interrupt_main).start()
while True: time.sleep(0.1)
"""


@pytest.mark.slow
def test_an_error_or_ctrl_c_in_a_cell_stops_nothing_and_a_restart_of_the_kernel_all(
    platform: ModuleType, kernel: Any, until: Callable[..., None]
) -> None:
    manager, run = kernel
    assert run(CELL) is None
    assert run("1 / 0") == "ZeroDivisionError"
    assert run(BUSY) == "KeyboardInterrupt"
    assert run("assert cluster.status.name == 'running'") is None
    assert len(unstopped(platform)) == 2
    manager.restart_kernel()
    until(lambda: unstopped(platform) == [])


@simulated
async def test_close_stops_each_session_by_its_id_and_removes_the_folder(it):
    cluster = await simulate(n_workers=2, worker_groups={"big": {"n_workers": 1}})
    await eventually(lambda: arrived(cluster) == 3)
    cluster.scale(4)  # which have not connected
    await eventually(lambda: len(it.platform.all) == 6)
    await cluster.close()
    assert (it.platform.live, it.clusters, cluster.status.name) == ([], [], "closed")
    stopped = it.platform.arguments("stop_workers")
    assert all(stopped)  # an empty call stops the sessions of others, too
    assert {session for ids in stopped for session in ids} == {*it.platform.all}
    await cluster.close()


@simulated
async def test_an_error_in_a_block_closes_the_cluster(it):
    async def fail():
        async with supplied(n_workers=1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert (it.platform.live, it.clusters) == ([], [])


async def enter(cluster):
    async with cluster:
        pytest.fail("the block has begun")


@pytest.mark.parametrize("start", [asyncio.ensure_future, enter], ids=["await", "block"])
@simulated
async def test_a_cancelled_start_stops_all_sessions(it, start):
    starting = asyncio.ensure_future(start(simulate(n_workers=2)))
    await eventually(lambda: len(it.platform.live) == 3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (it.platform.live, it.clusters) == ([], [])


@simulated
async def test_close_stops_all_sessions_although_the_scheduler_is_dead(it):
    cluster = await simulate(n_workers=2)
    await eventually(lambda: arrived(cluster) == 2)
    it.sessions.freeze(it.platform.running[f"{cluster.name}-scheduler"])
    began = time.monotonic()
    await cluster.close()
    assert time.monotonic() - began < 15.0
    assert it.platform.live == []


@simulated
async def test_close_names_the_sessions_that_cml_does_not_stop_and_tries_again(it):
    cluster = await simulate(n_workers=1)
    await eventually(lambda: arrived(cluster) == 1)
    kept = it.platform.running[f"{cluster.name}-0"]
    it.platform.denied[kept] = 503
    with pytest.raises(CallFailed, match=f"CML did not stop {kept}, which may still run"):
        await cluster.close()
    it.platform.heal()
    await cluster.close()
    assert it.platform.live == []


@simulated
async def test_close_has_an_end_while_cml_does_not_answer(it):
    cluster = await simulate(n_workers=1)
    await eventually(lambda: arrived(cluster) == 1)
    began = time.monotonic()
    with it.platform.held("stop_workers"), pytest.raises(CMLError, match="may still run"):
        await cluster.close()
    assert time.monotonic() - began < 120.0
    await cluster.close()
    assert it.platform.live == []


@simulated
async def test_other_sessions_of_the_user_run_on(it):
    [other] = await asyncio.to_thread(it.platform.launch_workers, 1, cpu=1, memory=1, code="work()")
    async with supplied(n_workers=1) as cluster:
        cluster.scale(0)
        await eventually(lambda: len(it.platform.live) == 2)
    it.platform.doom("fails", key="scheduler")
    with pytest.raises(CMLError):
        await simulate(n_workers=1)
    assert it.platform.live == [other["id"]]


@simulated
async def test_close_all_closes_all_clusters_of_the_process(it):
    clusters = [await simulate(n_workers=1), await simulate()]
    dask_cml.close_all()
    await eventually(lambda: all(cluster.status.name == "closed" for cluster in clusters))
    assert it.platform.live == []


@simulated
async def test_a_closed_cluster_refuses_what_it_is_asked_for(it):
    async with simulate(name="night") as cluster:
        pass
    for ask in (lambda: cluster.scale(1), lambda: cluster.adapt(0, 1)):
        with pytest.raises(CMLError, match="cluster night is closed"):
            ask()
    assert len(it.platform.all) == 1


@pytest.mark.slow
@simulated
async def test_never_means_that_idle_time_ends_no_cluster(it):
    with dask.config.set({"cml.idle-timeout": "10 s"}):
        async with simulate(n_workers=1, idle_timeout="never") as cluster:
            await asyncio.sleep(600.0)
            assert arrived(cluster) == 1


@pytest.mark.slow
@simulated
async def test_a_cluster_announces_its_limit_of_hours_and_ends_there(it):
    with dask.config.set({"cml.limits.hours": 0.25}):
        cluster = await simulate(name="night", n_workers=1)
    began = time.monotonic()
    await eventually(lambda: "night shuts down in 10 min: its age is 0.1 of 0.25 h" in log_of(cluster), 1800)
    await eventually(lambda: cluster.status.name == "closed", 1800)
    assert 890.0 < time.monotonic() - began < 950.0
    assert "Cluster night shut down: reached its limit of 0.25 h" in log_of(cluster)
    assert it.platform.live == []


@simulated
async def test_stop_workers_without_ids_ends_the_cluster_and_its_user_is_told(it):
    cluster = await simulate(name="night", n_workers=2)
    await eventually(lambda: arrived(cluster) == 2)
    it.platform.stop_workers()
    await eventually(lambda: cluster.status.name == "closed")
    why = "somebody stopped all its sessions, as `stop_workers()` of CML does"
    assert f"Cluster night shut down: {why}" in log_of(cluster)
    assert len(it.platform.all) == 3


@simulated
async def test_sessions_whose_launch_was_not_answered_are_stopped_at_the_end(it):
    it.platform.lose("launch_workers", *[HTTPError(502)] * 3)
    async with supplied(n_workers=2):
        pass
    await eventually(lambda: it.platform.live == [])


@simulated
async def test_the_cluster_of_another_program_runs_on_when_this_one_ends_its_own(it):
    creator = await create_elsewhere(it, name="theirs", n_workers=1, orphan_timeout="10 s")
    async with supplied(name="mine", n_workers=1):
        pass
    assert {*it.platform.running} == {"theirs-scheduler", "theirs-0"}
    creator.kill()
    await eventually(lambda: it.platform.live == [])
