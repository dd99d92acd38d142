"""Scaling down loses no data."""

import asyncio

import dask
import pytest
from clusters import arrived, connected, lines_of, simulate, supplied, target
from distributed import Client
from simulated.testing import eventually, simulated


@simulated
async def test_workers_hand_their_results_to_others_before_they_stop(it):
    async with supplied(n_workers=4) as cluster, Client(cluster, asynchronous=True) as client:
        futures = await client.scatter([*range(100)])
        assert (
            len({worker for workers in (await client.who_has(futures)).values() for worker in workers}) == 4
        )
        cluster.scale(1)
        await eventually(lambda: len(connected(cluster)) == 1 and len(it.platform.running) == 2)
        assert await client.gather(futures, errors="raise") == [*range(100)]


@simulated
async def test_a_worker_that_is_named_hands_over_its_results_and_one_that_is_retired_is_replaced(it):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        futures = await client.scatter([*range(10)])
        await client.retire_workers(names=["night-0"])
        await eventually(lambda: connected(cluster) == {"night-1", "night-2"})
        assert await client.gather(futures) == [*range(10)]
        assert target(cluster) == 2
        await cluster.scale_down(["night-1"])
        await eventually(lambda: connected(cluster) == {"night-2"})
        assert await client.gather(futures) == [*range(10)]
        assert target(cluster) == 1


@simulated
async def test_after_scaling_to_zero_results_are_computed_again_and_scattered_data_is_lost(it):
    async with supplied(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        computed = client.submit(pow, 2, 10)
        assert await computed == 1024
        [scattered] = await client.scatter(["data"])
        cluster.scale(0)
        await eventually(lambda: len(it.platform.running) == 1)
        await eventually(lambda: scattered.status == "cancelled")
        cluster.scale(1)
        assert await computed == 1024


@simulated
async def test_a_worker_stays_until_another_can_take_its_data(it):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        [data] = await client.scatter(["data"])
        it.platform.doom("silent")
        cluster.scale(2)
        await eventually(lambda: "night-1" in it.platform.running)
        await cluster.scale_down(["night-0"])
        words = "waiting for the data of night-0"
        await eventually(lambda: cluster.problem == words)
        assert f"problem: {words}" in repr(cluster)
        await asyncio.sleep(10)
        assert lines_of(cluster) == ["Worker night-0 stays until other workers can take its data"]
        assert target(cluster) == 1
        assert await data == "data"
        cluster.scale(2)
        await eventually(lambda: connected(cluster) == {"night-2"})
        assert await data == "data"
        await eventually(lambda: cluster.problem is None)


@simulated
async def test_a_worker_with_an_actor_stays(it):
    class Counter:
        n = 0

        def add(self, n):
            self.n += n
            return self.n

    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        counter = await client.submit(Counter, actor=True, workers=["night-0"])
        assert await counter.add(1) == 1
        await cluster.scale_down(["night-0"])
        await eventually(lambda: "Worker night-0 stays until" in "".join(lines_of(cluster)))
        await asyncio.sleep(30.0)
        assert await counter.add(1) == 2


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
@simulated
async def test_a_task_that_runs_is_run_again_elsewhere_when_its_worker_is_stopped(it, n):
    async def slowly(i):
        await asyncio.sleep(30.0)
        return i

    async with supplied(n_workers=3) as cluster, Client(cluster, asynchronous=True) as client:
        futures = client.map(slowly, range(6))
        while not any((await client.processing()).values()):
            await asyncio.sleep(0.1)
        cluster.scale(n)
        assert await client.gather(futures) == [*range(6)]
        await eventually(lambda: arrived(cluster) == len(it.platform.running) - 1 == n)


@pytest.mark.slow
@simulated
async def test_a_worker_that_does_not_answer_is_stopped_after_retire_timeout_and_its_results_computed_again(
    it,
):
    with dask.config.set({"cml.retire-timeout": "60s"}):
        cluster = await simulate(name="night", n_workers=2)
    async with cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(2)
        held = client.submit(pow, 2, 10, workers=["night-0"], allow_other_workers=True)
        assert await held == 1024
        it.sessions.cut_off(it.platform.running["night-0"], 3600.0)
        await cluster.scale_down(["night-0"])
        await eventually(lambda: "night-0" not in it.platform.running)
        assert "Worker night-0 abandoned: no answer for 60 s" in lines_of(cluster)
        assert await held == 1024
        assert connected(cluster) == {"night-1"}
