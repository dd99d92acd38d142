"""Silence ends nothing: a process counts as a user while it is connected, and only proof ends a cluster."""

import asyncio
import time

import pytest
from clusters import NOTEBOOK, arrived, create_and_kill, create_elsewhere, rebuild, simulate, supplied
from distributed import Client
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists

MINUTE = 60.0
#: The default of the option, in seconds.
ORPHAN_TIMEOUT = 300.0


async def left_running(it, seconds):
    """Return the running sessions after some time, or as soon as there are none."""
    deadline = time.monotonic() + seconds
    while it.platform.running and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
    return {*it.platform.running}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [False, True], ids=["event-loop", "interpreter"])
@simulated
async def test_a_cell_of_minutes_costs_neither_the_cluster_nor_its_results(it, threads):
    async def work():
        async with (
            simulate(name="lab", n_workers=1, security=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            future = client.submit(sum, [1, 2])
            assert await future == 3
            computed.set()
            await asyncio.sleep(11 * MINUTE)
            assert future.status == "finished"
            assert await client.submit(sum, [future, 4]) == 7
            await eventually(lambda: arrived(cluster) == 1)

    computed, kernel = asyncio.Event(), it.process("kernel", NOTEBOOK)
    working = kernel.start(work())
    await computed.wait()
    kernel.pause(10 * MINUTE, threads=threads)
    await working


@pytest.mark.slow
@simulated
async def test_a_client_that_is_held_for_minutes_keeps_the_cluster(it):
    async def work():
        async with Client("cml://lab", asynchronous=True) as client:
            future = client.submit(sum, [1, 2])
            assert await future == 3
            computed.set()
            await asyncio.sleep(11 * MINUTE)
            assert await client.submit(sum, [future, 4]) == 7

    computed, program = asyncio.Event(), it.process("program", NOTEBOOK)
    creator = await create_elsewhere(it, name="lab", n_workers=1, security=True)
    working = program.start(work())
    await computed.wait()
    program.pause(10 * MINUTE)
    creator.kill()
    await working
    assert await left_running(it, 2 * ORPHAN_TIMEOUT) == set()


@pytest.mark.slow
@simulated
async def test_a_held_creator_does_not_delay_who_manages_the_cluster(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    creator.pause(10 * MINUTE)
    async with rebuild("lab") as cluster:
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2, 2 * MINUTE)
        await asyncio.sleep(10 * MINUTE)
        assert arrived(cluster) == 2
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_a_creator_whose_machine_is_gone_leaves_an_orphan_that_ends(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    creator.lose_machine()
    assert await left_running(it, ORPHAN_TIMEOUT) == {"lab-scheduler", "lab-0"}
    assert await left_running(it, 2 * MINUTE) == set()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [5.0, 20.0])
@simulated
async def test_an_orphan_whose_scheduler_pauses_now_and_then_ends(it, pause):
    await create_and_kill(it, name="lab", n_workers=1)
    scheduler = it.process_of("lab-scheduler")
    deadline = time.monotonic() + 10 * ORPHAN_TIMEOUT
    while it.platform.running and time.monotonic() < deadline:
        scheduler.pause(pause)
        await asyncio.sleep(pause + MINUTE / 2)
    assert {*it.platform.running} == set()


@pytest.mark.slow
@simulated
async def test_a_long_pause_of_the_scheduler_does_not_use_up_the_time_of_a_new_user(it):
    await create_and_kill(it, name="lab", n_workers=1)
    await asyncio.sleep(MINUTE)
    it.process_of("lab-scheduler").pause(2 * ORPHAN_TIMEOUT)
    await asyncio.sleep(2 * ORPHAN_TIMEOUT + 2 * MINUTE)
    async with rebuild("lab") as cluster:
        assert arrived(cluster) == 1
        await cluster.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("connects", [False, True], ids=["nobody-comes", "a-client-comes-and-goes"])
@simulated
async def test_a_cluster_that_is_to_live_on_does_so_if_its_creator_is_killed_while_it_starts(it, connects):
    async def create():
        async with simulate(name="night", shutdown_on_close=False, n_workers=1, security=True):
            await asyncio.Event().wait()

    creator = it.process("creator", NOTEBOOK)
    creator.start(create())
    await eventually(lambda: "night-scheduler" in it.platform.running)
    creator.kill()
    await asyncio.sleep(2 * MINUTE)
    if connects:
        async with Client("cml://night", asynchronous=True) as client:
            assert await client.submit(sum, [1, 2]) == 3
    assert len(await left_running(it, 2 * ORPHAN_TIMEOUT)) == 2
    await (await rebuild("night")).shutdown()


@pytest.mark.slow
@simulated
async def test_a_cluster_that_its_creator_leaves_runs_on(it):
    async def create():
        cluster = await simulate(name="lab", n_workers=1)
        await eventually(lambda: arrived(cluster) == 1)
        await cluster.leave()

    creator = it.process("creator", NOTEBOOK)
    await creator.start(create())
    creator.kill()
    assert await left_running(it, 6 * ORPHAN_TIMEOUT) == {"lab-scheduler", "lab-0"}
    await (await rebuild("lab")).shutdown()


@pytest.mark.slow
@simulated
async def test_who_only_connects_and_leaves_does_not_keep_the_cluster_of_another_process(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab") as cluster:
        await cluster.leave()
    creator.kill()
    assert await left_running(it, 2 * ORPHAN_TIMEOUT) == set()


@pytest.mark.slow
@pytest.mark.parametrize("security", [True, False], ids=["keys", "no-keys"])
@simulated
async def test_no_command_but_delete_ends_a_cluster_that_is_silent_for_minutes(it, security):
    async def tidy_up():
        [row] = await shell_json("list")
        assert row["status"] == "not answering"
        assert "has left no sign of life for 5" in row["problem"]
        assert "; if this persists, run `dask cml delete lab`\n" in await shell("info", "lab")
        assert "Cluster lab skipped: " in await shell("prune")
        with pytest.raises(ClusterExists, match="run `dask cml delete lab`"):
            await simulate(name="lab")

    await create_elsewhere(it, name="lab", n_workers=1, security=security)
    it.process_of("lab-scheduler").pause(10 * MINUTE)
    await asyncio.sleep(5.5 * MINUTE)
    await it.process("colleague", {"CDSW_ENGINE_ID": "anothersession00"}).start(tidy_up())
    await asyncio.sleep(6 * MINUTE)
    async with rebuild("lab") as cluster:
        assert arrived(cluster) == 1
        await cluster.shutdown()


@simulated
async def test_delete_removes_a_cluster_that_ended_with_another_session(it):
    env = {"CDSW_ENGINE_ID": "yesterday1234567"}
    creator = await create_elsewhere(it, name="lab", n_workers=1, env=env)
    creator.kill()
    it.platform.end_session("yesterday1234567")
    await asyncio.sleep(600 * MINUTE)
    with pytest.raises(ClusterExists, match="run `dask cml delete lab`"):
        await simulate(name="lab")
    await shell("delete", "lab")
    async with supplied(name="lab", n_workers=1):
        pass


@pytest.mark.slow
@simulated
async def test_a_client_waits_as_long_as_the_next_scheduler_may_take_to_start(it):
    async with (
        supplied(name="lab", n_workers=1, security=True) as cluster,
        Client("cml://lab", asynchronous=True) as client,
    ):
        it.platform.configure({"sessions": 0}, waits_for_room=True)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await asyncio.sleep(14 * MINUTE)
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 1)
        assert await client.submit(sum, [1, 2]) == 3
