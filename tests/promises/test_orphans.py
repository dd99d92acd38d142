"""Orphans: clusters that nobody uses any more end by themselves, and others see what is left of them."""

import asyncio

import dask
import pytest
from clusters import arrived, create_and_kill, create_elsewhere, rebuild, simulate
from distributed import Client
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

pytestmark = pytest.mark.usefixtures("light")

LAB = {"name": "lab", "n_workers": 2, "security": True}
WHY = "orphaned: no process and no client has used it for 60 s"


@simulated
async def test_a_cluster_of_a_killed_process_ends_says_why_and_its_folder_goes_with_prune(it):
    await create_and_kill(it, **LAB, orphan_timeout="60s")
    await asyncio.sleep(40.0)
    assert len(it.platform.running) == 3
    await eventually(lambda: not it.platform.live, 60.0)
    [row] = await shell_json("list")
    assert (row["name"], row["status"]) == ("lab", "stale")
    assert WHY in await shell("info", "lab")
    assert await shell("prune") == "Cluster lab deleted\n"
    assert it.clusters == []
    [ended] = await shell_json("history")
    assert ended["why"] == WHY


@simulated
async def test_a_new_cluster_with_its_name_removes_it(it):
    await create_and_kill(it, **LAB, orphan_timeout="60s")
    await eventually(lambda: not it.platform.live)
    async with simulate(name="lab"):
        [row] = await shell_json("list")
        assert row["status"] == "running"
        assert WHY in [ended["why"] for ended in await shell_json("history")]


@simulated
async def test_an_orphan_computes_on_without_a_manager(it):
    creator = await create_elsewhere(it, **LAB, orphan_timeout="2 minutes")
    async with Client("cml://lab", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 20)
        await eventually(lambda: future.status == "pending")
        creator.kill()
        it.platform.evict(it.platform.running["lab-0"])
        await future
        await asyncio.sleep(60.0)
        assert {*it.platform.running} == {"lab-scheduler", "lab-1"}
        about = await shell("info", "lab")
        assert "manager    no process: lost workers are not replaced, and nothing adapts" in about
        assert "until you run `dask cml scale lab 2`" in about
    await eventually(lambda: not it.platform.live)


@simulated
async def test_a_connected_client_never_loses_its_work(it):
    await create_and_kill(it, **LAB, orphan_timeout="10s")
    async with Client("cml://lab", asynchronous=True) as client:
        await asyncio.sleep(120.0)
        assert await client.submit(sum, [1, 2]) == 3
    await eventually(lambda: not it.platform.live)


@simulated
async def test_another_notebook_keeps_the_cluster_and_its_workers(it):
    await create_and_kill(it, **LAB, orphan_timeout="10s")
    async with rebuild("lab") as cluster:
        await asyncio.sleep(60.0)
        it.platform.evict(it.platform.running["lab-0"])
        await eventually(lambda: {*it.platform.running} == {"lab-scheduler", "lab-1", "lab-2"})
        await eventually(lambda: arrived(cluster) == 2)
    await eventually(lambda: not it.platform.live)


@pytest.mark.slow
@simulated
async def test_with_never_a_cluster_waits_for_its_users(it):
    await create_and_kill(it, name="lab", security=True, orphan_timeout="never")
    await asyncio.sleep(400.0)
    async with rebuild("lab", shutdown_on_close=True) as cluster:
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)


async def open_client(opened, name):
    """Connect as the code of a task does. Dask reads the client's name from the session's environment."""
    with dask.config.set({"client-name": name}):
        client = Client("cml://lab", asynchronous=True)
    opened.append(await client)


async def scale(opened, name):
    """Scale the cluster as the code of a task does."""
    cluster = await rebuild("lab")
    await cluster.scale(1)
    opened.append(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("open_in_a_task", [open_client, scale])
@simulated
async def test_what_its_own_tasks_open_does_not_keep_it(it, open_in_a_task):
    opened = []
    await create_and_kill(it, **LAB, orphan_timeout="60s")
    process = it.process_of("lab-0")
    process.start(open_in_a_task(opened, process.env["DASK_CLIENT_NAME"]))
    await eventually(lambda: opened)
    await eventually(lambda: not it.platform.live)


@pytest.mark.slow
@simulated
async def test_a_task_of_another_cluster_keeps_it(it):
    opened = []
    async with simulate(name="other", n_workers=1):
        await create_and_kill(it, **LAB, orphan_timeout="60s")
        process = it.process_of("other-0")
        process.start(open_client(opened, process.env["DASK_CLIENT_NAME"]))
        await eventually(lambda: opened)
        await asyncio.sleep(120.0)
        [client] = opened
        assert await client.submit(sum, [1, 2]) == 3
        await client.close()
        await eventually(lambda: "lab-scheduler" not in it.platform.running)


@simulated
async def test_queued_workers_of_an_orphan_exit_when_they_start(it):
    async def create():
        async with simulate(**LAB, orphan_timeout="10s"):
            await asyncio.Event().wait()

    it.platform.configure({"sessions": 2}, waits_for_room=True)
    creator = it.process("creator", {"CDSW_ENGINE_ID": "notebook12345678"})
    creator.start(create())
    while "1 queued" not in await shell("list"):
        await asyncio.sleep(1.0)
    creator.kill()
    await eventually(lambda: not it.platform.running)
    it.platform.configure()
    await eventually(lambda: it.platform.live == [], 30.0)
