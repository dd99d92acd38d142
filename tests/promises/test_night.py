"""The night: a cluster that lives without the notebook that created it, and who manages it."""

import asyncio
import subprocess
import sys

import dask
import pytest
from clusters import (
    NIGHT,
    SCHEDULERS_SESSION,
    arrived,
    create_elsewhere,
    leave_alone,
    live,
    rebuild,
    shut_down,
    simulate,
)
from distributed import Client
from shells import run_json
from simulated.faults import HTTPError
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

pytestmark = pytest.mark.usefixtures("light")


async def manager():
    return (await shell_json("info", "night"))["manager"]


async def until_manager_is(name):
    while name not in (await manager() or ""):
        await asyncio.sleep(1.0)


async def n_connected():
    [row] = await shell_json("list")
    return row["workers"]


async def until_connected(n):
    while await n_connected() != n:
        await asyncio.sleep(1.0)


async def why_ended():
    [ended] = await shell_json("history")
    return ended["why"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["the end of its block", "a crash"])
@simulated
async def test_a_cluster_with_shutdown_on_close_false_outlives_its_creator(it, end):
    options = {"n_workers": 1, "orphan_timeout": "10s"}
    if end == "a crash":
        await leave_alone(it, **options)
    else:
        async with simulate(**NIGHT, **options) as cluster:
            await eventually(lambda: arrived(cluster) == 1)
    await asyncio.sleep(300.0)
    assert {*it.platform.running} == {"night-scheduler", "night-0"}
    async with Client("cml://night", asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
    await shut_down()


@simulated
async def test_its_creation_says_until_when_it_can_run(it):
    async with simulate(**NIGHT, idle_timeout="2h") as cluster:
        words = "can run until session notebook12345678 ends, or until it is idle for 2 h"
        assert words in (await cluster.get_logs())["Cluster"]
    [row] = await shell_json("list")
    assert row["ends"] == ["after 2 h without tasks", "with session notebook12345678"]
    await shut_down()


@simulated
async def test_a_cluster_ends_with_the_session_that_launched_it(it):
    await leave_alone(it, n_workers=1)
    await until_manager_is(SCHEDULERS_SESSION)
    n_launched = it.platform.count("launch_workers")
    it.platform.end_session("notebook12345678")
    while (await shell_json("list"))[0]["status"] != "stale":
        await asyncio.sleep(1.0)
    assert it.platform.count("launch_workers") == n_launched
    await shell("prune")
    assert await why_ended() == "its scheduler's session ended"


@pytest.mark.slow
@simulated
async def test_a_cluster_that_is_left_alone_replaces_a_lost_worker(it):
    await leave_alone(it, n_workers=2)
    await until_manager_is(SCHEDULERS_SESSION)
    it.platform.evict(it.platform.running["night-0"])
    await eventually(lambda: {*it.platform.running} == {"night-scheduler", "night-1", "night-2"})
    await until_connected(2)
    log = await shell("logs", "night", "Cluster")
    assert "Worker night-0 lost: " in log
    assert "; launching a replacement" in log
    await shut_down()


@simulated
async def test_a_cluster_that_is_left_alone_adapts(it):
    creator = await create_elsewhere(it, **NIGHT)
    async with rebuild("night") as cluster:
        cluster.adapt(minimum=0, maximum=3, interval="1s", wait_count=2)
    creator.kill()
    await until_manager_is(SCHEDULERS_SESSION)
    async with Client("cml://night", asynchronous=True) as client:
        futures = client.map(lambda n: n, range(30), pure=False)
        assert await client.gather(futures) == [*range(30)]
        futures = client.map(asyncio.sleep, [3600] * 100, pure=False)
        await until_connected(3)
        await client.cancel(futures)
        await until_connected(0)
    await eventually(lambda: {*it.platform.running} == {"night-scheduler"})
    await shut_down()


@pytest.mark.slow
@simulated
async def test_a_cluster_that_is_left_alone_ends_when_it_is_idle(it):
    await leave_alone(it, n_workers=1, idle_timeout="60s")
    await until_manager_is(SCHEDULERS_SESSION)
    await eventually(lambda: not it.platform.live and it.clusters == [])
    assert await why_ended() == "idle for 60 s"


@pytest.mark.slow
@simulated
async def test_an_idle_cluster_ends_although_clients_are_connected(it):
    await leave_alone(it, n_workers=1, idle_timeout="60s")
    async with Client("cml://night", asynchronous=True) as client:
        await client.submit(asyncio.sleep, 200)  # which is no idle time
        assert it.platform.running
        await eventually(lambda: not it.platform.live)
    assert await why_ended() == "idle for 60 s"


@pytest.mark.slow
@simulated
async def test_a_cluster_that_is_left_alone_ends_with_its_scheduler(it):
    await leave_alone(it, n_workers=2)
    await until_manager_is(SCHEDULERS_SESSION)
    n_launched = it.platform.count("launch_workers")
    it.platform.evict(it.platform.running["night-scheduler"])
    await eventually(lambda: not it.platform.live)
    assert it.platform.count("launch_workers") == n_launched


@pytest.mark.slow
@simulated
async def test_a_cluster_whose_tasks_wait_in_vain_for_a_worker_ends_when_nobody_manages_it(it):
    await leave_alone(it, n_workers=1, idle_timeout="120s")
    async with Client("cml://night", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 3600)
        await until_manager_is(SCHEDULERS_SESSION)
        it.platform.configure({"sessions": 1})
        it.platform.evict(it.platform.running["night-0"])
        while "quota" not in await shell("info", "night"):
            await asyncio.sleep(1.0)
        assert future.status == "pending"
        await eventually(lambda: it.clusters == [])
    await eventually(lambda: not it.platform.live)
    waited = "its tasks have waited for 120 s without a worker, and no process of a user has managed it"
    assert await why_ended() == waited


@pytest.mark.slow
@simulated
async def test_a_cluster_whose_workers_are_queued_waits_for_them(it):
    await leave_alone(it, n_workers=1, idle_timeout="120s")
    async with Client("cml://night", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 3600)
        await until_manager_is(SCHEDULERS_SESSION)
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        it.platform.evict(it.platform.running["night-0"])
        await asyncio.sleep(400.0)
        assert future.status == "pending"
        assert "1 queued" in await shell("list")
        it.platform.configure()
        await until_connected(1)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_info_shows_why_the_schedulers_session_launches_nothing(it):
    await leave_alone(it, n_workers=1)
    await until_manager_is(SCHEDULERS_SESSION)
    it.platform.fail("launch_workers", *[HTTPError(403)] * 100)
    it.platform.evict(it.platform.running["night-0"])
    while "403" not in await shell("info", "night"):
        await asyncio.sleep(1.0)
    it.platform.heal()
    await until_connected(1)
    await shut_down()


MAKE = """
import time
from dask_cml import CMLCluster
from distributed import Client, fire_and_forget

def n_kept(dask_scheduler):
    return len(dask_scheduler.clients["fire-and-forget"].wants_what)

options = {"shutdown_on_close": False, "idle_timeout": "20s", "platform": "local"}
cluster = CMLCluster(name="night", n_workers=1, quiet=True, **options)
client = Client(cluster)
client.wait_for_workers(1)
tasks = client.map(time.sleep, [15] * 4, pure=False)
while not client.processing() or not any(client.processing().values()):
    time.sleep(0.1)
fire_and_forget(tasks)  # a scheduler ignores that of tasks which it does not know yet
while client.run_on_scheduler(n_kept) < 4:
    time.sleep(0.1)
print("made", flush=True)
time.sleep(3600)
"""


@pytest.mark.images
def test_a_cluster_of_a_killed_program_is_managed_to_its_end(platform, until):
    with dask.config.set({"cml.platform": "local"}):
        with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE) as maker:
            assert maker.stdout.readline() == b"made\n"
            maker.kill()
        until(lambda: run_json("info", "night")["manager"] == SCHEDULERS_SESSION)
        sessions = run_json("info", "night")["sessions"]
        platform.stop_workers(*[session for session, name in sessions.items() if name == "night-0"])
        until(lambda: run_json("info", "night")["workers"] == 1)
        until(lambda: run_json("list") == [], 240.0)
        assert not live(platform)
        [ended] = run_json("history")
        assert (ended["why"], ended["tasks_done"]) == ("idle for 20 s", 4)


@pytest.mark.slow
@simulated
async def test_the_process_that_created_a_cluster_manages_it_while_it_runs(it):
    async with simulate(**NIGHT, n_workers=1) as cluster:
        await asyncio.sleep(120.0)
        assert "in session notebook12345678" in await manager()
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_another_notebook_manages_the_cluster_and_hands_it_back_when_it_leaves(it):
    await leave_alone(it, n_workers=1)
    await until_manager_is(SCHEDULERS_SESSION)
    async with rebuild("night") as cluster:
        await asyncio.wait_for(until_manager_is("in session notebook12345678"), 60.0)
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
    await asyncio.wait_for(until_manager_is(SCHEDULERS_SESSION), 60.0)
    it.platform.evict(it.platform.running["night-1"])
    await eventually(lambda: "night-2" in it.platform.running)
    await until_connected(2)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_the_schedulers_session_manages_a_cluster_that_a_command_has_scaled(it):
    await leave_alone(it)
    await until_manager_is(SCHEDULERS_SESSION)
    assert await shell("scale", "night", 2) == "Cluster night scaled to 2 workers\n"
    assert len(it.platform.running) == 3
    await asyncio.wait_for(until_manager_is(SCHEDULERS_SESSION), 60.0)
    await shut_down()


@simulated
async def test_commands_that_only_look_leave_the_manager_alone(it):
    await leave_alone(it, n_workers=1)
    await until_manager_is(SCHEDULERS_SESSION)
    for words in ["list"], ["info", "night"], ["group", "list", "night"], ["logs", "night"]:
        await shell(*words)
        assert await manager() == SCHEDULERS_SESSION
    await shut_down()


@pytest.mark.slow
@simulated
async def test_a_change_that_the_notebook_has_not_carried_out_when_it_dies_is_carried_out(it):
    creator = await create_elsewhere(it, **NIGHT)
    with it.platform.held("launch_workers"):
        other = it.process("another notebook", {"CDSW_ENGINE_ID": "notebook12345678"})
        await other.start(scale_and_wait(2))
        creator.kill()
        other.kill()
    await until_connected(2)
    assert len(it.platform.running) == 3
    await shut_down()


async def scale_and_wait(n):
    """Ask for workers, as a cell does that ends at once."""
    cluster = await rebuild("night")
    await cluster.scale(n)
