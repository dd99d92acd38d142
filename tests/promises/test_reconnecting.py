"""Reconnecting: what a user finds and does after the kernel was killed or restarted."""

import asyncio
import subprocess
import sys

import dask
import pytest
from clusters import arrived, create_and_kill, create_elsewhere, live, log_of, rebuild, simulate, target
from distributed import Client
from shells import run_json
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists, CMLCluster

pytestmark = pytest.mark.usefixtures("light")

LAB = {"name": "lab", "n_workers": 2, "security": True}


@simulated
async def test_a_cluster_of_a_killed_kernel_is_listed_and_goes_on_with_the_one_that_reconnects(it):
    await create_and_kill(it, **LAB)
    while [(row["name"], row["workers"]) for row in await shell_json("list")] != [("lab", 2)]:
        await asyncio.sleep(0.1)
    before = {*it.platform.running.items()}
    async with rebuild("lab") as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
        assert target(cluster) == 2
        cluster.scale(3)
        await eventually(lambda: arrived(cluster) == 3)
        assert before < {*it.platform.running.items()}  # nothing restarts
        it.platform.evict(it.platform.running["lab-0"])
        await eventually(lambda: "lab-3" in it.platform.running and arrived(cluster) == 3)
        await cluster.shutdown()
    assert not it.platform.live
    assert it.clusters == []


MAKE = """
import time
from dask_cml import CMLCluster

cluster = CMLCluster(name="lab", n_workers=2, platform="local", quiet=True)
while cluster.n_pending:
    time.sleep(0.05)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.images
def test_a_cluster_of_a_killed_process_is_used_and_shut_down_by_another(platform, until):
    with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE) as maker:
        assert maker.stdout.readline() == b"ready\n"
        maker.kill()
    with dask.config.set({"cml.platform": "local"}):
        until(lambda: run_json("info", "lab")["workers"] == 2)
    with CMLCluster.from_name("lab", quiet=True) as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3
        cluster.scale(3)
        until(lambda: len(cluster.scheduler_info["workers"]) == 3)
        cluster.scale(1)
        until(lambda: len(cluster.scheduler_info["workers"]) == len(live(platform)) - 1 == 1)
        assert client.submit(sum, [3, 4]).result() == 7
        assert "Scheduler at" in cluster.get_logs()["Scheduler"]
    assert len(live(platform)) == 2
    CMLCluster.from_name("lab", quiet=True).shutdown()
    assert not live(platform)


@pytest.mark.slow
@simulated
async def test_a_cluster_of_a_killed_kernel_goes_on_from_another_session_which_lists_none_of_it(it):
    async def go_on():
        assert it.platform.list_workers() == []
        async with rebuild("lab") as cluster:
            cluster.scale(1)
            await eventually(lambda: arrived(cluster) == target(cluster) == 1)
            cluster.adapt(minimum=0, maximum=1)
            await eventually(lambda: arrived(cluster) == target(cluster) == 0)
            await cluster.shutdown()

    await create_and_kill(it, **LAB)
    await it.process("another", {"CDSW_ENGINE_ID": "anothersession00"}).start(go_on())
    await eventually(lambda: not it.platform.running)


@simulated
async def test_a_client_of_another_notebook_works_on_while_the_creators_kernel_is_killed(it):
    creator = await create_elsewhere(it, **LAB)
    async with Client("cml://lab", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 30)
        await eventually(lambda: client.status == "running" and future.status == "pending")
        creator.kill()
        await future
        assert await client.submit(sum, [1, 2]) == 3
        assert client.status == "running"
    await shell("delete", "lab")


@simulated
async def test_published_futures_survive_their_kernel_and_others_do_not(it):
    async def compute():
        client = await Client("cml://lab", asynchronous=True)
        published = client.submit(sum, [1, 2], key="published")
        await client.publish_dataset(three=published)
        await client.submit(sum, [3, 4], key="forgotten")
        computed.set()
        await asyncio.Event().wait()

    computed = asyncio.Event()
    creator = await create_elsewhere(it, **LAB)
    creator.start(compute())
    await computed.wait()
    creator.kill()
    async with rebuild("lab") as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.list_datasets() == ("three",)
        assert await (await client.get_dataset("three")) == 3
        while "forgotten" in await client.who_has():
            await asyncio.sleep(0.1)
        assert "published" in await client.who_has()
        await cluster.shutdown()


@simulated
async def test_the_cell_of_a_killed_kernel_says_how_to_connect_to_its_cluster(it):
    await create_and_kill(it, **LAB)
    with pytest.raises(ClusterExists, match=r"create_mode='create-or-connect' or call .*from_name"):
        await simulate(**LAB)
    async with simulate(**{**LAB, "create_mode": "create-or-connect"}) as cluster:
        assert len(it.platform.running) == 3
        assert "Connected to running cluster lab of " in log_of(cluster)
        await cluster.shutdown()


@simulated
async def test_the_name_of_a_cluster_whose_scheduler_has_ended_is_free_and_its_sessions_are_stopped(it):
    await create_and_kill(it, **LAB)
    it.platform.evict(it.platform.running["lab-scheduler"])
    async with simulate(name="lab") as cluster:
        assert it.platform.live == [session.id for session in cluster.sessions]


@pytest.mark.slow
@simulated
async def test_a_notebook_that_was_frozen_becomes_one_of_several_and_stops_nothing(it):
    async def use():
        async with simulate(**LAB) as cluster:
            await eventually(lambda: arrived(cluster) == 2)
            made.append(cluster)
            await asyncio.Event().wait()

    made = []
    frozen = it.process("frozen", {"CDSW_ENGINE_ID": "notebook12345678"})
    frozen.start(use())
    await eventually(lambda: made)
    async with rebuild("lab") as other:
        frozen.pause(120.0)
        other.scale(3)
        await eventually(lambda: arrived(other) == 3)
        sessions = {*it.platform.running.values()}
        await eventually(lambda: frozen.runs)
        await eventually(lambda: arrived(made[0]) == target(made[0]) == 3)
        await asyncio.sleep(60.0)
        assert {*it.platform.running.values()} == sessions
        await other.shutdown()
