"""A process in the scheduler's session keeps a cluster that is left alone, until a process of a user can."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import dask
import psutil
import pytest
from click.testing import CliRunner
from clusters import arrived, create_elsewhere, live, rebuild, simulate
from distributed import Client
from distributed.core import Status
from simulated.testing import eventually, simulated

from dask_cml import cli, protocol
from dask_cml.records import history, store
from dask_cml.records.record import Maker
from dask_cml.scheduler import resident
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions.session_logs import SessionLogs, log_folder
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")

NIGHT = {"name": "night", "security": True, "shutdown_on_close": False}


async def leave_alone(it, **options):
    """Let another process create a cluster that lives on, and kill it."""
    creator = await create_elsewhere(it, **NIGHT, **options)
    creator.kill()


async def shut_down():
    await (await rebuild("night")).shutdown()


def residents(it):
    """Return the processes that keep clusters in their schedulers' sessions, and run."""
    return [process for process in it.processes if process.name.startswith("resident") and process.runs]


def state():
    """Return what the cluster's scheduler has written."""
    return store.read("night").scheduler


def connected():
    """Return how many Dask workers are connected."""
    return state().workers.workers


@simulated
async def test_a_cluster_that_is_left_alone_replaces_a_lost_worker(it):
    await leave_alone(it, n_workers=2)
    await eventually(lambda: state().manager == WHO)
    it.platform.evict(it.platform.running["night-0"])
    await eventually(lambda: {*it.platform.running} == {"night-scheduler", "night-1", "night-2"})
    await eventually(lambda: connected() == 2)
    log = await asyncio.to_thread(
        SessionLogs("night", log_folder(store.read("night").folder, None)).read, False, ["Cluster"]
    )
    words = "a Dask worker has been gone for 15 s, and the platform does not list its session here"
    assert f"Worker night-0 lost: {words}; launching a replacement" in "\n".join(log["Cluster"])
    assert {launch.key for launch in store.read("night").launches.values()} == {
        "scheduler",
        "night-1",
        "night-2",
    }
    await shut_down()


@simulated
async def test_a_cluster_that_is_left_alone_replaces_a_worker_at_once_that_leaves_with_notice(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: state().manager == WHO)
    [scheduler] = it.sessions.program(it.platform.running["night-scheduler"])
    scheduler.handlers[protocol.NOTICE](names=["night-0"])
    begin = time.monotonic()
    await eventually(lambda: not connected())
    await eventually(lambda: connected() == 1)
    assert time.monotonic() - begin < 15.0
    await shut_down()


@simulated
async def test_a_cluster_that_is_left_alone_adapts(it):
    creator = await create_elsewhere(it, **NIGHT)
    async with rebuild("night") as cluster:
        cluster.adapt(minimum=0, maximum=3, interval="1s", wait_count=2)
        await cluster.sharing.written()
    creator.kill()
    await eventually(lambda: state().manager == WHO)
    async with Client("cml://night", asynchronous=True) as client:
        futures = client.map(lambda n: n, range(30), pure=False)
        assert await client.gather(futures) == [*range(30)]
        futures = client.map(asyncio.sleep, [3600] * 100, pure=False)
        await eventually(lambda: connected() == 3)
        await client.cancel(futures)
        await eventually(lambda: not connected())
    await eventually(lambda: {*it.platform.running} == {"night-scheduler"})
    await shut_down()


@simulated
async def test_a_users_process_keeps_the_cluster_while_it_is_connected(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: state().manager == WHO)
    async with rebuild("night") as cluster:
        await eventually(lambda: cluster.keeps)
        await eventually(lambda: state().manager == Maker.this_process().words)
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
        assert not residents(it)
    await eventually(lambda: state().manager is None)
    await eventually(lambda: state().manager == WHO)
    it.platform.evict(it.platform.running["night-1"])
    await eventually(lambda: "night-2" in it.platform.running and connected() == 2)
    await shut_down()


@simulated
async def test_a_change_that_the_keeper_has_not_carried_out_when_it_is_killed_is_carried_out(it):
    creator = await create_elsewhere(it, **NIGHT)
    async with rebuild("night") as cluster:
        with it.platform.held("launch_workers"):
            cluster.scale(2)
            await cluster.sharing.written()
            cluster.sharing.disconnect()
            creator.kill()
        cluster.status = Status.closed
    await eventually(lambda: connected() == 2, 200.0)
    assert len(it.platform.running) == 3
    await shut_down()


@simulated
async def test_a_cluster_that_is_left_alone_ends_when_it_is_idle(it):
    await leave_alone(it, n_workers=1, idle_timeout="60s")
    await eventually(lambda: state().manager == WHO)
    await eventually(lambda: not it.platform.live)
    await eventually(lambda: not store.records())
    assert it.clusters == []
    [ended] = history.ended_clusters()
    assert ended.why == "idle for 60 s"


@simulated
async def test_a_cluster_that_is_left_alone_ends_with_its_scheduler(it):
    await leave_alone(it, n_workers=2)
    await eventually(lambda: state().manager == WHO)
    n_launched = it.platform.count("launch_workers")
    it.platform.evict(it.platform.running["night-scheduler"])
    await eventually(lambda: not it.platform.live, 300.0)
    assert it.platform.count("launch_workers") == n_launched


@simulated
async def test_a_cluster_whose_tasks_wait_in_vain_for_a_worker_ends_when_nobody_manages_it(it):
    await leave_alone(it, n_workers=1, idle_timeout="120s")
    async with Client("cml://night", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 3600)
        await eventually(lambda: state().manager == WHO)
        it.platform.configure({"sessions": 1})
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: "quota" in (state().workers.problem or ""))
        assert future.status == "pending"
        await eventually(lambda: not store.records(), 300.0)
    assert not it.platform.live
    [ended] = history.ended_clusters()
    assert ended.why == (
        "its tasks have waited for 120 s without a worker, and no process of a user has managed it"
    )


@simulated
async def test_a_cluster_that_cannot_keep_itself_says_so_and_tries_again(it, monkeypatch, caplog):
    async def fail(*_):
        starts.append(None)
        return 1

    starts, run = [], resident.run
    monkeypatch.setattr(resident, "run", fail)
    await leave_alone(it)
    await eventually(lambda: len(starts) == 3)
    assert (
        "no process replaces workers or adapts, because its own process in its scheduler's"
        in state().workers.problem
    )
    assert caplog.text.count("Cluster night not managed by this session: exit status 1") == 1
    monkeypatch.setattr(resident, "run", run)
    await eventually(lambda: state().manager == WHO)
    async with rebuild("night") as cluster:
        await eventually(lambda: cluster.keeps)
        await eventually(lambda: state().workers.problem is None)
        await cluster.shutdown()


@simulated
async def test_a_keeper_that_hangs_is_replaced(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: state().manager == WHO)
    [process] = residents(it)
    process.freeze()
    it.platform.evict(it.platform.running["night-0"])
    await eventually(lambda: "failed with no answer within 120 s" in (state().workers.problem or ""), 300.0)
    await eventually(lambda: "night-1" in it.platform.running and connected() == 1)
    await eventually(lambda: state().workers.problem is None)
    await shut_down()


@simulated
async def test_a_keeper_that_cannot_be_started_is_tried_again_later(it, monkeypatch):
    async def fail(*_):
        starts.append(None)
        raise RuntimeError("can't start new thread")

    starts = []
    monkeypatch.setattr(resident, "run", fail)
    await leave_alone(it)
    await eventually(lambda: starts)
    await asyncio.sleep(60.0)
    assert len(starts) <= 3
    assert 'failed with RuntimeError("can\'t start new thread")' in state().workers.problem
    await shut_down()


@simulated
async def test_a_cluster_whose_workers_are_queued_waits_for_them(it):
    await leave_alone(it, n_workers=1, idle_timeout="120s")
    async with Client("cml://night", asynchronous=True) as client:
        future = client.submit(sum, [1, 2])
        assert await future == 3
        future = client.submit(asyncio.sleep, 3600)
        await eventually(lambda: state().manager == WHO)
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        it.platform.evict(it.platform.running["night-0"])
        await asyncio.sleep(400.0)
        assert future.status == "pending"
        it.platform.configure()
        await eventually(lambda: connected() == 1)
    await shut_down()


@pytest.mark.parametrize("kept_by", ["its creator", "nobody"])
@simulated
async def test_a_cluster_that_ends_with_its_creator_or_is_kept_starts_no_keeper(it, kept_by):
    if kept_by == "nobody":
        creator = await create_elsewhere(it, name="day", security=True, orphan_timeout="60s")
        creator.kill()
        await eventually(lambda: not it.platform.live)
    else:
        async with simulate(**NIGHT, n_workers=1) as cluster:
            await asyncio.sleep(resident._ALONE + timing.reconnect + 10.0)
            assert state().manager == Maker.this_process().words
            await cluster.shutdown()
    assert not residents(it)


MAKE = """
import time
from dask_cml import CMLCluster
from distributed import Client, fire_and_forget

options = {"shutdown_on_close": False, "idle_timeout": "20s", "platform": "local"}
cluster = CMLCluster(name="night", n_workers=1, quiet=True, **options)
client = Client(cluster)
client.wait_for_workers(1)
tasks = client.map(time.sleep, [15] * 4, pure=False)
fire_and_forget(tasks)
while not client.processing() or not any(client.processing().values()):
    time.sleep(0.1)
print("made", flush=True)
time.sleep(3600)
"""


def of_night():
    """Return the commands of processes that keep the cluster."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if command[-2:] == ["dask_cml.sharing.resident", "night"]]


@pytest.mark.slow
@pytest.mark.images
async def test_a_cluster_of_a_killed_program_is_kept_to_its_end(platform, holds):
    with dask.config.set({"cml.platform": "local"}):
        maker = await asyncio.create_subprocess_exec(sys.executable, "-c", MAKE, stdout=subprocess.PIPE)
        assert await maker.stdout.readline() == b"made\n"
        maker.kill()
        await maker.wait()
        await holds(lambda: state().manager == WHO)
        shown = await asyncio.to_thread(CliRunner().invoke, cli.cml, ["info"], catch_exceptions=False)
        assert f"manager    {WHO}" in shown.stdout
        [worker] = [session for session, key in store.read("night").sessions.items() if key != "scheduler"]
        platform.stop_workers(worker)
        await holds(lambda: "night-1" in store.read("night").sessions.values() and connected() == 1)
        await holds(lambda: not store.records(), 240.0)
        assert not live(platform)
        [ended] = history.ended_clusters()
        assert (ended.why, ended.task_words) == ("idle for 20 s", "4 done")
        await holds(lambda: not of_night())
