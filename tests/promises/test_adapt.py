"""adapt() launches sessions while tasks wait, and stops those that are idle."""

import asyncio

import dask
import pytest
from clusters import arrived, connected, simulate, supplied, target
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml import CMLAdaptive


async def slowly(n):
    await asyncio.sleep(100.0)
    return n


async def remember(cluster, seen):
    """Note the largest number of connected Dask workers until the task is cancelled."""
    while True:
        seen.append(len(connected(cluster)))
        await asyncio.sleep(1.0)


@simulated
async def test_sessions_come_with_the_work_and_go_when_they_are_idle(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(minimum=0, maximum=3)
        await asyncio.sleep(30.0)
        assert len(it.platform.live) == 1
        for n in (0, 100):
            futures = client.map(slowly, range(n, n + 9))
            await eventually(lambda: arrived(cluster) == 3)
            assert await client.gather(futures) == [*range(n, n + 9)]
            assert len(it.platform.live) <= 4
            del futures
            await eventually(lambda: len(it.platform.live) == 1)  # the scheduler's


@pytest.mark.slow
@simulated
async def test_adapting_keeps_its_minimum_and_its_maximum(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(minimum=1, maximum=2)
        await eventually(lambda: arrived(cluster) == 1)
        seen: list[int] = []
        watching = asyncio.create_task(remember(cluster, seen))
        assert await client.gather(client.map(slowly, range(10))) == [*range(10)]
        await eventually(lambda: len(connected(cluster)) == 1)
        await asyncio.sleep(60.0)
        watching.cancel()
        assert (min(seen), max(seen)) == (1, 2)
        assert len(it.platform.live) == 2


@simulated
async def test_limits_may_be_threads_or_memory_and_are_counted_in_sessions(it):
    async with simulate(cpu=2, memory=4) as cluster:
        for arguments, limits in (
            ({"maximum_cores": 9}, (0, 4)),
            ({"minimum_cores": 3, "maximum_memory": "20 GiB"}, (2, 5)),
            ({"minimum_memory": 8, "maximum": 7}, (2, 7)),
            ({}, (0, 100)),
        ):
            adaptive = cluster.adapt(**arguments)
            assert isinstance(adaptive, CMLAdaptive)
            assert (adaptive.minimum, adaptive.maximum) == limits
            await eventually(lambda least=limits[0]: arrived(cluster) == least)


@simulated
async def test_without_a_maximum_the_limit_of_the_site_applies(it):
    async with simulate() as cluster:
        with dask.config.set({"cml.limits.sessions": 8}):
            assert cluster.adapt().maximum == 7


@simulated
async def test_invalid_limits_are_refused_and_change_nothing(it):
    async with simulate(n_workers=1) as cluster:
        for arguments, error, words in (
            ({"minimum": -1}, ValueError, "minimum=-1"),
            ({"maximum": "all"}, TypeError, "maximum='all'"),
            ({"Adaptive": int}, TypeError, "Adaptive=<class 'int'>"),
            ({"minimum": 3, "maximum": 2}, ValueError, "maximum=2"),
            ({"maximum_memory": "lots"}, ValueError, "maximum_memory='lots'"),
            ({"minimum_cores": 4, "maximum": 1}, ValueError, "maximum=1"),
            ({"minimum_cores": 8, "maximum_cores": 4}, ValueError, "maximum_cores=4"),
            ({"minimum_memory": "8 GiB", "maximum_memory": 4}, ValueError, "maximum_memory=4"),
        ):
            with pytest.raises(error, match=f"invalid {words}: expected"):
                cluster.adapt(**arguments)
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(60.0)
        assert (target(cluster), len(connected(cluster))) == (1, 1)  # adapting would stop it


@simulated
async def test_scale_ends_adaptive_scaling(it):
    async with simulate(name="night") as cluster:
        cluster.adapt(minimum=1, maximum=3)
        await eventually(lambda: arrived(cluster) == 1)
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
        await asyncio.sleep(60.0)
        assert target(cluster) == arrived(cluster) == 2


@pytest.mark.slow
@simulated
async def test_stopping_adaptive_scaling_keeps_the_number_of_workers(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        adaptive = cluster.adapt(minimum=0, maximum=3)
        futures = client.map(slowly, range(9))
        await eventually(lambda: arrived(cluster) == 3)
        adaptive.stop()
        del futures
        await asyncio.sleep(120.0)
        assert target(cluster) == arrived(cluster) == 3


@simulated
async def test_a_session_is_launched_only_if_enough_work_is_left_when_it_is_ready(it):
    async def quickly(n):
        await asyncio.sleep(0.05)
        return n

    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        await client.gather(client.map(quickly, range(5)))  # Dask has seen these tasks
        cluster.adapt(minimum=1, maximum=10)
        for n in range(10, 60, 10):
            await client.gather(client.map(quickly, range(n, n + 10)))
            await asyncio.sleep(2.0)
        assert len(it.platform.all) == 2


@simulated
async def test_a_client_that_waits_in_scatter_gets_a_worker(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 3, wait_count=2)
        for broadcast in False, True:
            future = await client.scatter({"a": 1}, broadcast=broadcast, timeout=600)
            assert await client.gather(future) == {"a": 1}
            await asyncio.sleep(20)
            assert target(cluster) == 1  # which holds the data
            del future
            await eventually(lambda: target(cluster) == 0)


@simulated
async def test_adapting_to_fewer_sessions_loses_no_data(it):
    async with supplied(n_workers=4) as cluster, Client(cluster, asynchronous=True) as client:
        futures = await client.scatter([*range(20)])
        cluster.adapt(minimum=1, maximum=2)
        await eventually(lambda: len(connected(cluster)) <= 2)
        assert await client.gather(futures) == [*range(20)]


@pytest.mark.slow
@simulated
async def test_groups_adapt_side_by_side_each_to_the_tasks_that_need_it(it):
    async with (
        simulate(name="night", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        cluster.adapt(0, 2)
        cluster.adapt(0, 2, worker_group="gpu")
        plain = client.map(slowly, range(6))
        await eventually(lambda: connected(cluster) == {"night-0", "night-1"})
        assert await client.gather(plain) == [*range(6)]
        gpu = client.map(slowly, range(6), resources={"GPU": 1}, pure=False)
        del plain
        await eventually(lambda: {*connected(cluster)} == {"night-gpu-0", "night-gpu-1"})
        assert await client.gather(gpu) == [*range(6)]
        del gpu
        await eventually(lambda: len(it.platform.live) == 1)
        assert len([name for name in it.sessions.workers if "gpu" in name]) == 2


@pytest.mark.slow
@simulated
async def test_a_gpu_session_stops_when_no_task_needs_it_and_its_plain_tasks_run_elsewhere(it):
    async with (
        simulate(name="night", n_workers=1, worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(1)
        cluster.adapt(0, 1, worker_group="gpu")
        held = client.submit(sum, [1, 2], resources={"GPU": 1})
        assert await held == 3
        plain = client.map(slowly, range(6))
        del held
        await eventually(lambda: connected(cluster) == {"night-0"})
        assert await client.gather(plain) == [*range(6)]
