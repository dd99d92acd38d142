"""scale() sets the number of sessions, and the cluster keeps it."""

import asyncio

import pytest
from clusters import arrived, connected, log_of, simulate, supplied, target
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml import CMLError


@simulated
async def test_the_number_of_sessions_is_that_of_the_last_scale(it):
    async with simulate(name="night", n_workers=1) as cluster:
        for n in (3, 1, 0, 2):
            cluster.scale(n)
            await eventually(lambda n=n: len(connected(cluster)) == arrived(cluster) == n)
            await eventually(lambda n=n: len(it.platform.running) == n + 1)
            assert target(cluster) == n
        assert log_of(cluster) == ""


@simulated
async def test_scale_returns_at_once_and_all_missing_sessions_are_launched_together(it):
    async with simulate(name="night") as cluster:
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        cluster.scale(10)
        assert target(cluster) == 10
        assert len(it.platform.all) == 1
        await eventually(lambda: len(it.platform.all) == 11)
        assert len([s for s in it.platform.live_sessions if s.status == "scheduling"]) == 10
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 10)


@simulated
async def test_a_scale_that_is_awaited_launches_its_sessions_once(it):
    async with simulate(name="night") as cluster:
        await cluster.scale(2)
        await cluster.wait_for_workers(2)
        await cluster.scale(2)
        await asyncio.sleep(60.0)
        assert len(it.platform.all) == 3


@pytest.mark.slow
@simulated
async def test_a_total_of_threads_or_memory_is_rounded_up_to_sessions(it):
    async with simulate(name="night", cpu=2, memory=4) as cluster:
        for arguments, n in (
            ({"cores": 4}, 2),
            ({"memory": "12 GiB"}, 3),
            ({"cores": 3}, 2),
            ({"memory": 9}, 3),
            ({"n": 1, "cores": 7}, 4),
            ({"n": 5, "memory": 8}, 5),
        ):
            cluster.scale(**arguments)
            await eventually(lambda n=n: arrived(cluster) == len(it.platform.running) - 1 == n)
            assert target(cluster) == n
        await asyncio.sleep(30.0)
        assert target(cluster) == len(it.platform.running) - 1 == 5


@simulated
async def test_an_invalid_number_is_refused_and_changes_nothing(it):
    async with supplied(name="night", n_workers=1) as cluster:
        for arguments, error, words in (
            ({}, TypeError, "n=None"),
            ({"n": -1}, ValueError, "n=-1"),
            ({"n": 1.5}, ValueError, "n=1.5"),
            ({"n": "many"}, TypeError, "n='many'"),
            ({"memory": "lots"}, ValueError, "memory='lots'"),
            ({"memory": 0}, ValueError, "memory=0"),
            ({"cores": -2}, ValueError, "cores=-2"),
            ({"n": 1, "worker_group": "big"}, ValueError, "worker_group='big'"),
        ):
            with pytest.raises(error, match=f"invalid {words}: expected"):
                cluster.scale(**arguments)
        for workers, error in (["xx"], ValueError), ("night-0", TypeError), (3, TypeError):
            with pytest.raises(error, match=r"invalid workers=.*: expected"):
                await cluster.scale_down(workers)
        await asyncio.sleep(30.0)
        assert (target(cluster), connected(cluster)) == (1, {"night-0"})


@simulated
async def test_sessions_that_have_not_started_are_cancelled_first(it):
    async with supplied(name="night", n_workers=2) as cluster:
        it.platform.configure({"sessions": 3}, waits_for_room=True)
        cluster.scale(5)
        await eventually(lambda: len(it.platform.all) == 6)
        cluster.scale(2)
        await eventually(lambda: len(it.platform.live) == 3)
        assert connected(cluster) == {"night-0", "night-1"}


@simulated
async def test_idle_workers_are_stopped_before_busy_ones(it):
    async with supplied(name="night", n_workers=3) as cluster, Client(cluster, asynchronous=True) as client:
        busy = client.submit(asyncio.sleep, 600, workers=["night-1"])
        while not any((await client.processing()).values()):
            await asyncio.sleep(0.1)
        cluster.scale(1)
        await eventually(lambda: connected(cluster) == {"night-1"})
        await busy.cancel()


@simulated
async def test_a_worker_that_is_named_is_stopped_without_a_replacement(it):
    async with supplied(name="night", n_workers=2) as cluster:
        await cluster.scale_down(["night-1"])
        await eventually(lambda: len(it.platform.live) == 2)
        await asyncio.sleep(30.0)
        assert (target(cluster), connected(cluster)) == (1, {"night-0"})


@simulated
async def test_the_size_of_a_running_cluster_cannot_change(it):
    async with simulate(memory=2) as cluster:
        with pytest.raises(AttributeError):
            cluster.memory = 16


@pytest.mark.slow
@simulated
async def test_tasks_that_wait_for_a_resource_move_to_workers_that_connect_later(it):
    async def slowly(n):
        await asyncio.sleep(100.0)
        return n

    async with (
        supplied(name="night", n_workers=1, resources={"GPU": 1}) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        futures = client.map(slowly, range(4), resources={"GPU": 1})
        while not any((await client.processing()).values()):
            await asyncio.sleep(0.1)
        cluster.scale(4)
        await client.wait_for_workers(4)
        await eventually(lambda: all(future.done() for future in futures), seconds=150.0)
        assert (
            len({worker for workers in (await client.who_has(futures)).values() for worker in workers}) == 4
        )


@simulated
async def test_wait_for_workers_ends_with_an_error_when_no_other_worker_is_to_connect(it):
    async with simulate(name="night") as cluster:
        it.platform.doom("fails", times=5)
        cluster.scale(1)
        with pytest.raises(CMLError, match="0 of 1 workers connected: no new workers"):
            await cluster.wait_for_workers(1)


@simulated
async def test_specifications_by_hand_are_launched_and_removed_as_in_speccluster(it):
    async with simulate(name="night", n_workers=1) as cluster:
        cluster.worker_spec.update(cluster.new_worker_spec())
        await cluster
        await eventually(lambda: connected(cluster) == {"night-0", "night-1"})
        del cluster.worker_spec["night-0"]
        await cluster
        await eventually(lambda: connected(cluster) == {"night-1"} and len(it.platform.live) == 2)
        assert target(cluster) == 1
