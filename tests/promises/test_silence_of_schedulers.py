"""Silence of a scheduler or of the platform ends nothing, and nobody waits for the platform's list to act."""

import asyncio
import time

import pytest
from clusters import (
    NOTEBOOK,
    SCHEDULERS_SESSION,
    arrived,
    create_elsewhere,
    cut_off,
    manager,
    rebuild,
    simulate,
    supplied,
)
from distributed import Client
from simulated.faults import Mishap
from simulated.testing import eventually, simulated
from simulated.world import World

pytestmark = pytest.mark.usefixtures("light")

ELSEWHERE = {"CDSW_ENGINE_ID": "anothersession00"}


def let_lists_hang(it: World) -> None:
    it.platform.plan("list_workers", *[Mishap(before=700.0) for _ in range(40)])


@pytest.mark.slow
@simulated
async def test_a_cluster_at_night_survives_minutes_in_which_its_scheduler_is_frozen(it: World) -> None:
    creator = await create_elsewhere(it, name="night", security=True, shutdown_on_close=False, n_workers=2)
    async with Client("cml://night", asynchronous=True) as client:
        [future] = await client.scatter([[1, 2, 3]])
        creator.kill()
        await eventually(lambda: manager("night") == SCHEDULERS_SESSION)
        before = {**it.platform.running}
        it.process_of("night-scheduler").pause(200.0)
        await asyncio.sleep(260.0)
        assert it.platform.running == before
        assert future.status == "finished"
        # A task with dependencies takes no time here, at which work stealing of distributed 2024.5 fails.
        assert await client.gather(future) == [1, 2, 3]
        assert await client.submit(sum, [1, 2, 3]) == 6
    await (await rebuild("night")).shutdown()


@pytest.mark.slow
@simulated
async def test_a_notebook_in_another_session_does_not_replace_a_scheduler_that_is_frozen(it: World) -> None:
    creator = await create_elsewhere(it, env=ELSEWHERE, name="lab", security=True, n_workers=1)
    async with rebuild("lab") as cluster:
        creator.kill()
        await eventually(lambda: manager("lab") == SCHEDULERS_SESSION and arrived(cluster) == 1)
        before = {**it.platform.running}
        it.process_of("lab-scheduler").pause(200.0)
        await asyncio.sleep(260.0)
        kept = it.platform.running == before
        await cluster.shutdown()
    assert kept


@simulated
async def test_what_another_notebook_asks_for_is_done_at_once_while_the_platform_lists_nothing(
    it: World,
) -> None:
    async with simulate(name="lab", n_workers=2) as cluster, rebuild("lab") as other:
        await eventually(lambda: arrived(other) == arrived(cluster) == 2)
        let_lists_hang(it)
        await asyncio.sleep(15.0)
        await other.scale(0)
        await eventually(lambda: {*it.platform.running} == {"lab-scheduler"}, 15.0)
        await other.scale(1)
        await eventually(lambda: arrived(other) == 1, 30.0)


@pytest.mark.slow
@simulated
async def test_adaptive_scaling_goes_on_while_the_platform_lists_nothing(it: World) -> None:
    async with (
        simulate(name="lab", security=True, n_workers=0) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        cluster.adapt(minimum=0, maximum=2)
        let_lists_hang(it)
        await asyncio.sleep(15.0)
        assert await asyncio.wait_for(client.submit(sum, [1, 2]), 60.0) == 3


@pytest.mark.slow
@simulated
async def test_a_notebook_connects_again_before_the_platform_lists_its_sessions(it: World) -> None:
    async with supplied(name="lab", n_workers=1) as cluster:
        before = {**it.platform.running}
        let_lists_hang(it)
        await asyncio.sleep(10.0)
        heal = cut_off(cluster)
        await asyncio.sleep(240.0)
        assert "not connected" in repr(cluster)
        heal()
        began = time.monotonic()
        await eventually(lambda: "not connected" not in repr(cluster), 45.0)
        assert time.monotonic() - began < 45.0
        it.platform.heal()
        await asyncio.sleep(60.0)
        assert it.platform.running == before


@pytest.mark.slow
@simulated
async def test_the_clients_of_a_replaced_scheduler_connect_to_the_next_one(it: World) -> None:
    async def use() -> None:
        async with Client("cml://lab", asynchronous=True) as client:
            assert await client.submit(sum, [1, 2]) == 3
            ready.set()
            await replaced.wait()
            await asyncio.sleep(90.0)
            assert await asyncio.wait_for(client.submit(sum, [3, 4]), 60.0) == 7

    ready, replaced = asyncio.Event(), asyncio.Event()
    async with supplied(name="lab", security=True, n_workers=1) as cluster:
        using = it.process("client", NOTEBOOK).start(use())
        await ready.wait()
        first = it.platform.running["lab-scheduler"]
        heal = cut_off(cluster)
        it.platform.set(first, status="failed")
        await eventually(lambda: it.platform.running.get("lab-scheduler", first) != first)
        heal()
        await eventually(lambda: "not connected" not in repr(cluster) and arrived(cluster) == 1)
        replaced.set()
        await using
