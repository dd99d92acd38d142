"""Worker sessions that are lost or retired: how the keeper notices it, what it says, where data goes."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import dask
import pytest
from clusters import (
    arrived,
    connected,
    log_of,
    make,
    rebuild,
    scheduler_of,
    simulate,
    step_in,
    supplied,
    target,
    waits,
)
from distributed import Client, Worker, wait
from simulated.faults import CALM, Weather
from simulated.testing import eventually, simulated
from testbed import networks

from dask_cml import CMLCluster
from dask_cml.core import workers
from dask_cml.protocol import HELD, LAST
from dask_cml.sessions import process
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")
PROCESSES = {"processes": 2, "cpu": 2, "worker_args": []}


def end_worker(it, cluster, name):
    """End one Dask worker of a session, which goes on."""
    session = cluster.workers[name.rpartition("-")[0]].session_id
    [worker] = [worker for worker in it.sessions.program(session) if worker.name == name]
    return it.sessions.processes[session].start(worker.close(nanny=False, executor_wait=False))


@simulated
async def test_no_data_of_a_dead_worker_is_waited_for_although_its_session_is_not_stopped(it):
    async with supplied(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        _data = await client.scatter(["data"])
        it.platform.doom("silent")
        cluster.scale(2)
        await cluster.scale_down(["mine-0"])
        await eventually(lambda: cluster.problem == "waiting for the data of mine-0")
        it.platform.never_stops.add(lost := it.platform.running["mine-0"])
        it.platform.evict(lost)
        await eventually(lambda: cluster.problem is None, seconds=30.0)
        it.platform.never_stops.clear()


@simulated
async def test_a_worker_that_does_not_connect_is_replaced(it):
    async with simulate(worker_timeout=20.0, **PROCESSES) as cluster:
        for n, (fault, words) in enumerate(
            (
                ("fails", "lost: it never connected; the platform says failed"),
                ("succeeds", "lost: it never connected; the platform says succeeded"),
                ("silent", "lost: it did not connect within 20 s"),
                ("silent, and evicted", "lost: it never connected; the platform says failed"),
            ),
            start=1,
        ):
            before = log_of(cluster).count(words)
            it.platform.doom(fault.partition(",")[0])
            cluster.scale(n)
            if "evicted" in fault:
                await eventually(lambda n=n: len(it.platform.running) == n + 1)
                it.platform.evict([*it.platform.running.values()][-1])
            await eventually(lambda words=words, before=before: log_of(cluster).count(words) > before)
            await eventually(
                lambda n=n: len(cluster.workers) == len(cluster.worker_spec) == arrived(cluster) == n
            )
            assert len(connected(cluster)) == 2 * n
            # What was given up is stopped.
            await eventually(lambda n=n: len(it.platform.running) == n + 1)


@simulated
async def test_a_worker_that_is_lost_when_one_too_many_is_wanted_is_not_replaced(it):
    async with supplied(name="mine", n_workers=2) as cluster:
        del scheduler_of(it, cluster).handlers["workers_to_close"]  # it cannot say which one to close
        cluster.scale(1)
        it.platform.evict(it.platform.running["mine-0"])
        await eventually(lambda: "Worker mine-0 " in log_of(cluster))
        assert "launching a replacement" not in log_of(cluster)
        assert {*it.platform.running} == {"mine-scheduler", "mine-1"}


def fail(names):
    raise RuntimeError("it failed")


@pytest.mark.slow
@simulated
async def test_a_session_that_ends_or_waits_and_leaves_the_list_is_replaced(it):
    """Its wait would have no end: somebody has stopped it, and the platform has archived it."""
    it.platform.configure({"sessions": 1}, waits_for_room=True)
    async with simulate(name="mine", n_workers=1) as cluster:
        await eventually(lambda: waits(cluster))
        it.platform.set(cluster.workers["mine-0"].session_id, "stopped", listed=False)
        it.platform.configure()
        await eventually(lambda: connected(cluster) == {"mine-1"}, seconds=120)
        words = "it never connected; the platform says no longer listed"
        assert f"Worker mine-0 lost: {words}; launching a replacement" in log_of(cluster)

        await eventually(lambda: cluster.workers["mine-1"].is_listed)
        scheduler_of(it, cluster).handlers["cml_last"] = fail  # it cannot say more of the lost worker
        it.platform.set(cluster.workers["mine-1"].session_id, listed=False)
        it.platform.evict(cluster.workers["mine-1"].session_id)
        await eventually(lambda: connected(cluster) == {"mine-2"}, seconds=120)
        assert "runs" not in log_of(cluster)
        assert "and the platform no longer lists its session" in log_of(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("nanny", "limit"), [("answers", 40), ("is unknown", 40), ("is gone", 5)])
@simulated
async def test_a_dask_worker_may_be_gone_for_as_long_as_at_first_while_its_nanny_lives(it, nanny, limit):
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "5s"}):
        async with supplied(name="mine", n_workers=1, worker_timeout=40, **PROCESSES) as cluster:
            scheduler = scheduler_of(it, cluster)
            answers = scheduler.aliases["mine-0-0"]  # as any of Dask's servers
            nannies = {"answers": answers, "is unknown": None, "is gone": "tcp://127.0.0.1:1"}
            scheduler.workers[scheduler.aliases["mine-0-1"]].nanny = nannies[nanny]
            if nanny == "is unknown":
                scheduler.handlers["cml_abandoned"] = fail
            await end_worker(it, cluster, "mine-0-1")
            await eventually(lambda: connected(cluster) == {"mine-0-0"})
            await asyncio.sleep(limit - 4)
            assert {*cluster.workers} == {"mine-0"}
            await eventually(lambda: connected(cluster) == {"mine-1-0", "mine-1-1"}, seconds=20.0)
            words = f"lost: a Dask worker has been gone for {limit} s, but its session runs"
            assert log_of(cluster).startswith(f"Worker mine-0 {words}")


@pytest.mark.slow
@simulated
async def test_a_worker_that_has_waited_for_the_scheduler_has_its_time_to_connect(it):
    it.luck.weather = Weather(fates={"waits": 0.0})
    it.platform.doom("waits", key="scheduler")
    cluster = simulate(name="mine", n_workers=1, worker_timeout=10)
    starting = asyncio.ensure_future(cluster)
    await eventually(lambda: "mine-0" in it.platform.running)
    await asyncio.sleep(20)
    it.sessions.processes[it.platform.running["mine-0"]].freeze()  # the first look is earlier than the worker
    it.luck.weather = CALM
    await starting
    async with cluster:
        await asyncio.sleep(8)
        assert {*cluster.workers} == {"mine-0"}
        line = "mine-0 lost: it did not connect within 10 s"
        await eventually(lambda: line in log_of(cluster), seconds=9.0)


@pytest.mark.slow
@simulated
async def test_a_worker_that_comes_back_before_its_loss_is_explained_stays(it):
    async def ask_slowly(op, *arguments, **more):
        answer = await ask(op, *arguments, **more)
        if op == LAST and not asked:
            asked.append(op)
            again = Worker(scheduler_of(it, cluster).address, name="mine-0-1", nthreads=1, dashboard=False)
            await it.sessions.processes[session].start(again.start())
            await eventually(lambda: "mine-0-1" in connected(cluster))
        return answer

    asked = []
    async with simulate(name="mine", n_workers=1, worker_timeout=20, **PROCESSES) as cluster:
        await eventually(lambda: len(connected(cluster)) == 2)
        session = cluster.workers["mine-0"].session_id
        ask = step_in(cluster, "asks the scheduler", ask_slowly)
        await end_worker(it, cluster, "mine-0-1")
        await eventually(lambda: asked)
        await asyncio.sleep(30)
        assert log_of(cluster) == ""
        assert [*cluster.worker_spec] == ["mine-0"]


def session_of(cluster, key):
    return cluster.workers[key].session_id


@simulated
async def test_many_workers_that_are_lost_while_files_hang_are_replaced_soon(it, monkeypatch):
    def hang(*_):
        while time.monotonic() < answers:
            time.sleep(1.0)
        return b""

    async with supplied(name="mine", n_workers=0) as cluster:
        it.platform.doom("silent", times=10)
        cluster.scale(10)
        await eventually(lambda: len(cluster.workers) == 10)
        answers = time.monotonic() + 90.0
        monkeypatch.setattr(process, "read_file", hang)
        for worker in [*cluster.workers.values()]:
            it.platform.evict(worker.session_id)
        await eventually(lambda: log_of(cluster).count("launching a replacement") == 10, seconds=60.0)


@simulated
async def test_the_user_is_told_of_no_wait_for_the_data_of_a_worker_that_has_left(it):
    async with supplied(name="mine", n_workers=2) as cluster:
        scheduler_of(it, cluster).handlers["retire_workers"] = lambda **_: asyncio.sleep(3600)
        await cluster.scale_down(["mine-0"])
        it.platform.evict(it.platform.running["mine-0"])
        await asyncio.sleep(2 * timing.long_retirement)
        assert "copy the data" not in log_of(cluster)


@pytest.mark.slow
@simulated
async def test_a_frozen_worker_that_is_retired_delays_no_other(it, monkeypatch):
    monkeypatch.setattr(timing, "long_retirement", 0.5)
    with dask.config.set({"cml.retire-timeout": "1 hour"}):
        cluster = await simulate(n_workers=2)
    async with cluster, Client(cluster, asynchronous=True) as client:
        await eventually(lambda: arrived(cluster) == 2)
        frozen = f"{cluster.name}-0"
        session = session_of(cluster, frozen)
        held = await client.scatter([1, 2, 3], workers=[frozen])
        it.sessions.processes[session].freeze()
        await cluster.scale_down([frozen])
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
        line = f"waiting for other workers to copy the data of {frozen}"
        problem = f"waiting for the data of {frozen}"
        await eventually(lambda: line in log_of(cluster) and problem in repr(cluster))
        async with rebuild(cluster.name) as other:
            await other.scale(3)
            await eventually(lambda: target(other) == 3)
        await eventually(lambda: arrived(cluster) == target(cluster) == 3)
        assert frozen not in cluster.worker_spec
        assert frozen in cluster.workers
        assert session in it.platform.running.values()
        assert len(held) == 3
        await asyncio.wait_for(cluster.close(), 120)
    assert not it.platform.running


class SlowToRead:
    """A result that nobody else has read before a file is there."""

    def __init__(self, made: Path, gate: Path) -> None:
        self.made, self.gate = made, gate
        with made.open("a") as file:
            file.write("once\n")

    def __setstate__(self, state):
        self.__dict__.update(state)
        while not self.gate.exists():
            time.sleep(0.05)


@pytest.mark.slow
async def test_a_cluster_waits_for_a_worker_that_moves_its_data_slowly(platform, holds, tmp_path):
    heard = []

    async def counted(op, *arguments, **more):
        answer = await ask(op, *arguments, **more)
        if op == HELD:
            heard.append(answer)
        return answer

    with dask.config.set({"cml.retire-timeout": "8s"}):
        cluster = await make(n_workers=2, env={"PYTHONPATH": str(Path(__file__).parent)})
    made, gate = tmp_path / "made", tmp_path / "gate"
    async with cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: arrived(cluster) == 2)
        ask = step_in(cluster, "asks the scheduler", counted)
        slow = f"{cluster.name}-0"
        future = client.submit(SlowToRead, made, gate, workers=[slow], allow_other_workers=True)
        await wait(future)  # this process would read it, too
        await cluster.scale_down([slow])
        await holds(lambda: len(heard) == 2)
        assert slow in cluster.workers
        gate.touch()
        await holds(lambda: slow not in cluster.workers)
        assert "abandoned" not in log_of(cluster)
        assert (await client.gather(future)).made == made
    assert made.read_text() == "once\n"


@pytest.mark.slow
async def test_a_worker_whose_node_fails_silently_is_dropped_and_replaced(namespaces, holds):
    # So long nothing else tells anybody that the node is lost.
    names = "COMM__TIMEOUTS__TCP", "SCHEDULER__WORKER_TTL"
    hour = {f"DASK_DISTRIBUTED__{name}": "1 hour" for name in names}
    async with make(n_workers=2, env=hour) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: arrived(cluster) == 2)
        lost = f"{cluster.name}-0"
        future = client.submit(sum, [1, 2], workers=[lost], allow_other_workers=True)
        await future
        networks.cut(session_of(cluster, lost))
        await asyncio.to_thread(namespaces.evict, session_of(cluster, lost))
        await holds(lambda: arrived(cluster) == 2 and lost not in cluster.observed)
        assert f"Worker {lost} lost: evicted or killed by the platform" in log_of(cluster)
        workers = (await client.scheduler.identity())["workers"].values()
        assert lost not in {worker["name"] for worker in workers}
        assert await client.gather(future) == 3


@pytest.mark.slow
async def test_tasks_end_their_own_processes_by_sigterm(platform, light):
    """A worker ignores the signal, but what its tasks start does not."""

    def end(start):
        process = start()
        time.sleep(0.2)
        process.terminate()
        process.wait(60)
        return process.returncode

    def started():
        return subprocess.Popen(["sleep", "600"])

    def forked():
        pid = os.fork()
        if not pid:
            time.sleep(600)
            os._exit(1)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async with make(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(end, started) == -signal.SIGTERM
        assert await client.submit(forked) == -signal.SIGTERM


@simulated
async def test_the_only_data_moves_to_a_worker_that_connects_while_its_worker_is_retired(it):
    async with simulate(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        await eventually(lambda: connected(cluster) == {"mine-0"})
        data = client.submit(lambda: "data", pure=False)
        assert await data == "data"
        with it.platform.held("list_workers"):  # the retirement asks for the sessions at its end
            await cluster.scale_down(["mine-0"])
            await cluster.scale(1)
            await eventually(lambda: connected(cluster) == {"mine-0", "mine-1"})
        await eventually(lambda: {*cluster.workers} == {"mine-1"})
        assert await data == "data"


@simulated
async def test_many_workers_leave_a_few_at_a_time_after_all_have_moved_their_data(it, monkeypatch):
    """The scheduler tells all workers of each one that leaves, and is held meanwhile."""
    monkeypatch.setattr(workers, "_AT_ONCE", 2)
    async with supplied(name="mine", n_workers=6) as cluster, Client(cluster, asynchronous=True) as client:
        data = await client.scatter([f"data {i}" for i in range(12)])
        holding = {name for names in (await client.who_has(data)).values() for name in names}
        assert len(holding) == 6
        handlers = scheduler_of(it, cluster).handlers
        retire, calls = handlers["retire_workers"], []

        async def note(names, **arguments):
            calls.append((len(names), arguments.get("remove", True)))
            return await retire(names=names, **arguments)

        handlers["retire_workers"] = note
        cluster.scale(1)
        await eventually(lambda: len(cluster.workers) == 1)
        assert calls == [(5, False), (2, True), (2, True), (1, True)]
        assert await client.gather(data) == [f"data {i}" for i in range(12)]
        assert len(connected(cluster)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("op", ["retire_workers", "cml_held"])
@simulated
async def test_no_session_is_stopped_while_the_scheduler_does_not_answer(it, op):
    async with supplied(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        [data] = await client.scatter(["data"])
        questions = []

        async def reset(**arguments):
            questions.append(arguments)
            raise ConnectionResetError("the other side closed the connection")

        handlers = scheduler_of(it, cluster).handlers
        answer, handlers[op] = handlers[op], reset
        it.platform.doom("silent")
        cluster.scale(2)
        await eventually(lambda: len(cluster.workers) == 2)
        await cluster.scale_down(["mine-0"])
        await eventually(lambda: len(questions) > 1)
        assert await data == "data"
        assert "mine-0" in cluster.workers
        handlers[op] = answer
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-1", "mine-2"})
        assert await data == "data"


@pytest.mark.slow
def test_a_session_that_is_stopped_while_its_dask_worker_starts_ends_at_once(platform, until, tmp_path):
    platform.configure(stop_grace=60.0)
    (tmp_path / "slow.py").write_text("import time; time.sleep(5)")
    with (
        dask.config.set({"distributed.worker.preload": [str(tmp_path / "slow.py")]}),
        CMLCluster(n_workers=1, name="night", platform="local", quiet=True, worker_args=[]) as cluster,
    ):
        until(lambda: "Start Nanny" in cluster.get_logs()["night-0"])
        cluster.scale(0)
        # By the notice (SIGUSR1), for which it has no handler yet, and not after the grace.
        until(lambda: "[dask worker exited with status -10]" in cluster.get_logs()["night-0"])
