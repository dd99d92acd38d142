"""Why a worker session ended that nobody asked to end: from what is known, and on real processes."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import dask
import pytest
from clusters import arrived, folder_of, log_of, make, simulate
from distributed import Client, KilledWorker
from simulated.testing import eventually, simulated

from dask_cml.layout import log_path
from dask_cml.options import Options
from dask_cml.protocol import EXITED
from dask_cml.records import store
from dask_cml.records.history import usage_of
from dask_cml.scheduler.health import Health
from dask_cml.sessions.causes import Cause, find_cause
from dask_cml.sessions.plan import Place, plan_worker

GIB = 2**30
IDLE = {
    "memory": GIB // 8,
    "limit": GIB,
    "spilled": 0,
    "max_spill": 8 * 10**9,
    "tasks": [],
    "expected": False,
}
FULL = {**IDLE, "memory": int(0.97 * GIB)}
SPILLED = {**IDLE, "spilled": int(7.9e9)}
TRAINS, RAN = {"tasks": ["train-1", "train-2"]}, " while it ran `train-1`, `train-2`"


def cause(last=IDLE, *log, connected=True, noticed=False, said="failed"):
    succeeded = connected and said == "succeeded"
    return find_cause(last, [*log], connected=connected, noticed=noticed, said=said, succeeded=succeeded)


#: What is known of the ends of sessions, by their causes and the words for users.
ENDS = {
    Cause.OUT_OF_MEMORY: {
        "out of memory, 0.97 of 1.00 GiB": cause(FULL),
        f"out of memory, 0.97 of 1.00 GiB{RAN}": cause({**FULL, **TRAINS}),
        "out of memory, 1.90 of 2.00 GiB of the session": cause(
            IDLE, f"[memory: {int(1.9 * GIB)} of {2 * GIB} bytes]"
        ),
        "out of memory, 0.12 of 1.00 GiB": cause(IDLE, "WARNING - Worker process 7 was killed by signal 9"),
        "out of memory, the platform says OOMKilled": cause(None, connected=False, said="OOMKilled"),
    },
    Cause.SCRATCH_FULL: {
        "scratch full, 7.90 of 8.00 GB spilled": cause(SPILLED),
        "scratch full, 9.50 of 10.00 GB": cause(
            IDLE, "[scratch: 9500000000 of 10000000000 bytes]", "[dask worker exited with status -9]"
        ),
        "scratch full, the platform says Pod ephemeral local storage usage exceeds 10Gi": cause(
            IDLE, said="Pod ephemeral local storage usage exceeds 10Gi"
        ),
    },
    Cause.KILLED: {
        "evicted or killed by the platform, which says failed": cause(
            None, "Registered to scheduler", "[dask scheduler exited with status -9]"
        ),
        f"evicted or killed by the platform, which says UNKNOWN{RAN}": cause(
            {**IDLE, **TRAINS}, said="UNKNOWN"
        ),
        # The memory is that of a process which the nanny has replaced.
        "evicted or killed by the platform, which says stopped": cause(
            IDLE, f"[memory: {GIB} of {GIB} bytes]", *["Worker process started"] * 4, said="stopped"
        ),
    },
    Cause.PROGRAM_FAILED: {
        "its program failed with exit status 3: no licence": cause(
            IDLE, "no licence", "", "[dask worker exited with status 3]"
        ),
    },
    Cause.BUS_ERROR: {
        f"bus error: shared memory (/dev/shm, 64 MB by default) is full{RAN}; raise the shared memory "
        "limit in the project's settings, or pass num_workers=0 to PyTorch's DataLoader": cause(
            {**FULL, **TRAINS}, "Event loop was unresponsive", "[dask worker exited with status -7]"
        ),
    },
    Cause.EVICTED: {"evicted, with notice": cause(FULL, noticed=True)},
    Cause.PROGRAM_ENDED: {
        f"its program ended with exit status 0{RAN}": cause(
            {**IDLE, **TRAINS}, "[dask worker exited with status 0]", said="succeeded"
        ),
        "its program ended, because its connection to the scheduler broke": cause(
            IDLE, "Reason: worker-handle-scheduler-connection-broken", said="succeeded"
        ),
        "its program ended, because the scheduler had counted it as lost": cause(
            IDLE, "Scheduler was unaware of this worker; shutting down.", said="succeeded"
        ),
    },
    Cause.NEVER_CONNECTED: {
        "it never connected; the platform says succeeded": cause(None, connected=False, said="succeeded"),
    },
}


@pytest.mark.parametrize("kind", ENDS)
def test_the_cause_follows_from_the_last_state_and_the_log(kind):
    for words, loss in ENDS[kind].items():
        assert (loss.cause, loss.words) == (kind, words)


@pytest.mark.parametrize("last", [FULL, SPILLED, IDLE])
@pytest.mark.parametrize("log", [(), ("[dask worker exited with status 3]",)])
def test_a_session_that_ran_tasks_ended_because_of_them(last, log):
    assert cause({**last, **TRAINS}, *log).of_task
    assert not cause(last, *log).of_task


@pytest.mark.slow
@pytest.mark.parametrize("worker_args", [[], ["--no-nanny"]])
def test_a_worker_whose_scheduler_accepts_connections_and_never_answers_ends(tmp_path, worker_args):
    options = Options.read(name="lab", platform="local", worker_timeout=20, worker_args=worker_args)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        plan = plan_worker(options, Place(tmp_path), "lab-0", address)
        plan.log.parent.mkdir(mode=0o700)
        env = {**os.environ, **plan.env, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
        subprocess.run([sys.executable, "-c", plan.code], env=env, timeout=120)
    log = plan.log.read_text().splitlines()
    assert sum("Waiting to connect to" in line or "did not answer within 1 s" in line for line in log) > 1
    loss = cause(None, *log, connected=False)
    assert (loss.cause, loss.words) == (Cause.NEVER_CONNECTED, "it got no answer from the scheduler in time")


@pytest.fixture
async def mine(platform, light):
    """A cluster of one worker session without a nanny, which gives a task up that ends its worker."""
    platform.configure(scratch=150_000_000)
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with make(name="mine", n_workers=1, memory=1, scratch="100 MB") as cluster:
            yield cluster


@pytest.fixture
async def client(mine):
    async with Client(mine, asynchronous=True) as client:
        await client.wait_for_workers(1)
        yield client


@pytest.fixture
def is_told(mine, holds):
    """Wait until users read the end of the session, in all places, and another one has replaced it."""

    async def is_told(words, lost=None):
        line = f"Worker mine-0 {words}; launching a replacement"
        await holds(lambda: "Worker mine-0 " in log_of(mine))  # another line may say that it is paused
        assert re.search(line, log_of(mine))
        await holds(lambda: arrived(mine) == 1)
        await holds(lambda: losses() == ({lost: 1} if lost else {}))

    return is_told


def losses():
    return usage_of(store.read("mine"), time.time()).total.lost


@pytest.mark.slow
async def test_out_of_memory(platform, client, is_told):
    if not platform.settings().memory_limit:
        pytest.skip("this user may not create memory cgroups")

    def fills_memory(log):  # within this function, because sessions cannot import this module
        blocks = [b"1" * int(0.8 * 2**30)]
        while "[memory: " not in log.read_text():  # the kernel may be faster than the wrapper
            time.sleep(0.02)
        while True:
            blocks.append(b"1" * (10 << 20))

    log = log_path("mine-0", folder_of(client.cluster), None)
    future = client.submit(fills_memory, log, key="fills-memory")
    with pytest.raises(KilledWorker):
        await future
    words = r"lost: out of memory, (0\.[789]\d|1\.00) of 1.00 GiB of the session while it ran `fills-memory`"
    await is_told(words, "out of memory")


@pytest.mark.slow
async def test_scratch_full(client, is_told):
    def fills_scratch():
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(200_000_000))
            file.flush()
            time.sleep(600)

    future = client.submit(fills_scratch, key="fills-scratch")
    with pytest.raises(KilledWorker):
        await future
    await is_told(r"lost: scratch full, 0\.[12]\d of 0\.10 GB while it ran `fills-scratch`", "scratch full")


BUS_ERROR = (
    r"bus error: shared memory \(/dev/shm, 64 MB by default\) is full while it ran `crashes`; raise the "
    "shared memory limit in the project's settings, or pass num_workers=0 to PyTorch's DataLoader"
)


@pytest.mark.slow
async def test_shared_memory_full(client, is_told):
    # So ends a process that writes to a full /dev/shm.
    future = client.submit(lambda: os.kill(os.getpid(), signal.SIGBUS), key="crashes")
    with pytest.raises(KilledWorker):
        await future
    await is_told(f"lost: {BUS_ERROR}", "bus error")


#: Returns a nanny's status. A lambda is sent whole, and a function of this module by its name.
STATUS = lambda dask_worker: dask_worker.status.name  # noqa: E731


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGBUS), BUS_ERROR),
        (lambda: os._exit(3), "its program failed with exit status 3 while it ran `crashes`"),
    ],
)
async def test_why_a_nanny_has_started_its_worker_again(platform, holds, crash, words):
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with make(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
            await client.wait_for_workers(1)
            # A nanny gives up if its worker ends before the nanny has noticed that it has started.
            while {*(await client.run(STATUS, nanny=True)).values()} != {"running"}:
                await asyncio.sleep(0.05)
            with pytest.raises(KilledWorker):
                await client.submit(crash, key="crashes")
            await holds(lambda: "restarted" in log_of(cluster))
            restarted = f"worker mine-0 was restarted: {words}"
            assert re.fullmatch(f"Cluster mine: {restarted}", log_of(cluster))
            await holds(lambda: re.search(f"problem: {restarted}\\)$", repr(cluster)))
            assert losses() == {}


@pytest.mark.parametrize(
    ("event", "tasks", "told"),
    [
        (None, [], ""),
        ({"status": 0, "asked": False}, [], ""),
        ({"status": 0, "asked": False}, ["leave"], "its process exited with status 0 while it ran `leave`"),
        ({"status": 0, "asked": True}, ["leave"], ""),
        ({"status": -9, "asked": True}, [], ""),
        ({"status": -9, "asked": False}, [], "its process ended; it crashed, or"),
        ({"status": None, "asked": False}, [], "its process ended; it crashed, or"),
    ],
)
def test_a_user_is_told_only_of_a_restart_that_nobody_asked_for(event, tasks, told):
    health = Health(None)
    last = {"memory": 0, "limit": GIB, "spilled": 0, "max_spill": None, "tasks": tasks, "expected": False}
    if event is not None:
        health.note_event(EXITED, {"worker": "tcp://10.0.0.1:1234", **event})
    health.note_left("mine-0", "tcp://10.0.0.1:1234", {**last, "noticed": False})
    health.note_connected("mine-0", 0.0)
    told_of = f"worker mine-0 was restarted: {told}"
    assert [words.startswith(told_of) for words in health.restarts.values()] == [True] * bool(told)


@simulated
async def test_of_several_dask_workers_of_a_session_the_one_that_ran_tasks_counts(it):
    def sleeps():
        [scheduler] = it.sessions.program(it.platform.running["mine-scheduler"])
        return "sleeps" in scheduler.tasks and scheduler.tasks["sleeps"].state == "processing"

    async with (
        simulate(name="mine", n_workers=1, cpu=2, processes=2, worker_args=[]) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        future = client.submit(asyncio.sleep, 3600, key="sleeps", workers=["mine-0-1"])
        await eventually(sleeps)
        it.platform.evict(it.platform.running["mine-0"])
        await eventually(lambda: "Worker mine-0 lost" in log_of(cluster))
        assert "which says failed while it ran `sleeps`; launching" in log_of(cluster)
        await future.cancel()


@pytest.mark.slow
async def test_a_worker_whose_connection_breaks_is_a_loss_although_its_program_exits_with_0(client, is_told):
    def break_connection(dask_worker):
        dask_worker.loop.call_later(0.1, dask_worker.batched_stream.comm.abort)

    await client.run(break_connection)
    words = "lost: its program ended, because its connection to the scheduler broke"
    await is_told(words, "program ended")
