"""A worker group is a set of sessions of one size, which is scaled by itself."""

import asyncio

import pytest
from clusters import arrived, connected, simulate, supplied
from distributed import Client, get_worker
from simulated.testing import eventually, simulated

from dask_cml import CMLError


@simulated
async def test_a_group_is_added_scaled_and_deleted_while_the_cluster_runs(it):
    async with simulate(name="night", n_workers=1) as cluster:
        await cluster.add_worker_group("big", n_workers=1, cpu=2, memory="8 GiB")
        await eventually(lambda: connected(cluster) == {"night-0", "night-big-0"})
        cluster.scale(2, worker_group="big")
        await eventually(lambda: connected(cluster) == {"night-0", "night-big-0", "night-big-1"})
        assert cluster.worker_groups["big"].n_workers == 2
        sizes = {session.name: (session.size.cpu, session.size.memory) for session in cluster.sessions}
        assert (sizes["night-0"], sizes["night-big-1"]) == ((1, 2), (2, 8))
        await cluster.delete_worker_group("big")
        assert {*cluster.worker_groups} == {"default"}
        assert connected(cluster) == {"night-0"}
        await eventually(lambda: {*it.platform.running} == {"night-scheduler", "night-0"})


@simulated
async def test_groups_are_created_with_the_cluster_and_each_is_scaled_and_repaired_by_itself(it):
    groups = {"big": {"n_workers": 2, "memory": "8 GiB"}}
    async with simulate(name="night", n_workers=1, worker_groups=groups) as cluster:
        await eventually(lambda: connected(cluster) == {"night-0", "night-big-0", "night-big-1"})
        sizes = {session.name: session.size.memory for session in cluster.sessions}
        assert (sizes["night-0"], sizes["night-big-0"]) == (2, 8)
        it.platform.evict(it.platform.running["night-big-0"])
        await eventually(lambda: connected(cluster) == {"night-0", "night-big-1", "night-big-2"})
        cluster.scale(0)
        await eventually(lambda: connected(cluster) == {"night-big-1", "night-big-2"})
        cluster.scale(1, worker_group="big")
        await eventually(lambda: len(connected(cluster)) == 1)
        await asyncio.sleep(30.0)
        numbers = {name: group.n_workers for name, group in cluster.worker_groups.items()}
        assert numbers == {"default": 0, "big": 1}


@simulated
async def test_a_deleted_group_hands_over_its_data(it):
    groups = {"big": {"n_workers": 1, "resources": {"BIG": 1}}}
    async with (
        simulate(name="night", n_workers=1, worker_groups=groups) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        held = client.submit(lambda: get_worker().name, resources={"BIG": 1})
        assert await held == "night-big-0"
        await cluster.delete_worker_group("big")
        assert await held == "night-big-0"
        assert connected(cluster) == {"night-0"}


@simulated
async def test_larger_workers_take_over_the_data_of_the_first_group(it):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        futures = await client.scatter([*range(20)])
        await cluster.add_worker_group("large", n_workers=2, memory="16 GiB")
        await cluster.wait_for_workers(4)
        cluster.scale(0)
        await eventually(lambda: connected(cluster) == {"night-large-0", "night-large-1"})
        assert await client.gather(futures) == [*range(20)]


@simulated
async def test_a_task_that_asks_for_a_gpu_runs_on_a_session_with_one(it):
    groups = {"gpu": {"n_workers": 1, "nvidia_gpu": 1}}
    async with (
        simulate(name="night", n_workers=2, worker_groups=groups) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(3)
        futures = client.map(lambda _: get_worker().name, range(10), resources={"GPU": 1})
        assert {*await client.gather(futures)} == {"night-gpu-0"}


@simulated
async def test_an_invalid_group_is_refused_and_launches_nothing(it):
    async with simulate(name="night") as cluster:
        for name, options, words in (
            ("big", {"memory": "lots"}, "invalid memory='lots': expected GiB"),
            ("default", {}, "invalid name='default': expected "),
        ):
            with pytest.raises(ValueError, match=words):
                await cluster.add_worker_group(name, n_workers=1, **options)
        await asyncio.sleep(30.0)
        assert len(it.platform.all) == 1


@simulated
async def test_a_group_that_the_files_of_a_cluster_cannot_hold_is_refused(it):
    async with supplied(name="lab", n_workers=1) as cluster:
        words = r"invalid options of worker group 'big' with 6\d+ bytes: expected at most"
        with pytest.raises((ValueError, CMLError), match=words):
            await cluster.add_worker_group("big", env={"TABLE": "x" * 600_000})
        assert [*cluster.worker_groups] == ["default"]
        await cluster.add_worker_group("small", n_workers=1)
        await eventually(lambda: arrived(cluster) == 2)
