"""The scheduler's session is lost: another one takes its place, and everybody goes on under the old name."""

import asyncio
import time
from concurrent.futures import CancelledError

import dask
import pytest
from clusters import arrived, limits, live, log_of, make, name_of, rebuild, simulate, supplied, target
from distributed import Client, Variable
from distributed.core import Status
from simulated.shell import shell_json
from simulated.testing import eventually, simulated

pytestmark = pytest.mark.usefixtures("light")

LAB = {"name": "lab", "security": True}


async def lose_scheduler(it, *, n=1):
    """End the scheduler's session, and wait until another one runs with n workers."""
    lost = it.platform.running["lab-scheduler"]
    it.platform.evict(lost)
    await eventually(lambda: it.platform.running.get("lab-scheduler", lost) != lost)
    while True:
        [row] = await shell_json("list")
        if (row["status"], row["workers"]) == ("running", n):
            return
        await asyncio.sleep(1.0)


@simulated
async def test_another_scheduler_takes_its_place_and_clients_reconnect_by_themselves(it):
    async with simulate(**LAB, n_workers=2) as cluster, Client("cml://lab", asynchronous=True) as client:
        await client.wait_for_workers(2)
        before = {*it.platform.running.values()}
        await lose_scheduler(it, n=2)
        assert await client.submit(sum, [1, 2]) == 3
        await eventually(lambda: arrived(cluster) == 2 and cluster.status == Status.running)
        assert len(it.platform.running) == 3
        assert not before & {*it.platform.running.values()}  # new workers as well
        assert cluster.scheduler_address == "cml://lab"


@pytest.mark.slow
@simulated
async def test_results_published_data_and_variables_are_lost_and_futures_are_cancelled(it):
    async with simulate(**LAB, n_workers=1), Client("cml://lab", asynchronous=True) as client:
        done = client.submit(sum, [1, 2])
        assert await done == 3
        waits = client.submit(asyncio.sleep, 3600)
        await client.publish_dataset(three=done)
        await Variable("shown", client=client).set(4)
        await lose_scheduler(it)
        with pytest.raises(CancelledError):
            await waits
        assert done.status == "cancelled"
        assert await client.list_datasets() == ()
        with pytest.raises(asyncio.TimeoutError):
            await Variable("shown", client=client).get(timeout="1s")
        assert await client.submit(sum, [1, 2]) == 3


@simulated
async def test_the_user_reads_the_loss_the_next_launch_and_that_it_is_connected(it):
    async with supplied(**LAB, n_workers=1) as cluster:
        it.platform.set(it.platform.running["lab-scheduler"], k8sMessage="OOMKilled")
        began = time.monotonic()
        await lose_scheduler(it)
        await eventually(lambda: "connected to another scheduler after" in log_of(cluster))
        lost, launching, connected = log_of(cluster).splitlines()[-3:]
        words = "out of memory, the platform says OOMKilled"
        assert lost == f"Scheduler of cluster lab lost, with tasks and results: {words}"
        assert launching == "Cluster lab launching another scheduler (1 of 3 in a row)"
        connected, _, seconds = connected.removesuffix(" s").rpartition(" after ")
        assert connected == "Cluster lab connected to another scheduler"
        assert time.monotonic() - began - float(seconds) < 2  # since it was lost
        assert "scheduler restarted" in repr(cluster)


@pytest.mark.slow
@simulated
async def test_groups_numbers_and_adaptive_limits_stay_and_other_notebooks_follow(it):
    async with simulate(**LAB) as cluster, rebuild("lab") as other:
        cluster.adapt(minimum=1, maximum=3)
        await cluster.add_worker_group("gpu", n_workers=1, cpu=1, memory=1, nvidia_gpu=1)
        await eventually(lambda: arrived(cluster) == 2)
        await lose_scheduler(it, n=2)
        await eventually(lambda: arrived(cluster) == arrived(other) == 2)
        assert limits(cluster) == (1, 3)
        assert other.worker_groups["gpu"].n_workers == 1
        other.scale(2, worker_group="gpu")
        await eventually(lambda: arrived(cluster) == arrived(other) == 3)


@pytest.mark.parametrize("limit", [0, 3])
@simulated
async def test_after_so_many_in_a_row_the_cluster_ends(it, limit):
    with dask.config.set({"cml.scheduler-restarts": limit}):
        async with simulate(**LAB, n_workers=1) as cluster:
            it.platform.doom("fails", times=10, key="scheduler")
            it.platform.evict(it.platform.running["lab-scheduler"])
            await eventually(lambda: cluster.status == Status.closed)
            assert log_of(cluster).count("launching another scheduler") == limit
    assert not it.platform.live
    [ended] = await shell_json("history")
    words = "its scheduler was lost" if limit == 0 else f"it was the last of {limit} schedulers in a row"
    assert words in ended["why"]


@pytest.mark.slow
@simulated
async def test_a_finished_task_begins_the_count_anew(it):
    with dask.config.set({"cml.scheduler-restarts": 1}):
        async with simulate(**LAB, n_workers=1) as cluster, Client("cml://lab", asynchronous=True) as client:
            for n in range(3):
                assert await client.submit(pow, n, 2) == n**2
                await asyncio.sleep(30.0)  # the count is written with the scheduler's next sign of life
                await lose_scheduler(it)
            await eventually(lambda: arrived(cluster) == target(cluster) == 1)


@simulated
async def test_without_keys_a_new_client_finds_the_next_scheduler(it):
    async with supplied(name="lab", security=False, n_workers=1) as cluster:
        await lose_scheduler(it)
        await eventually(lambda: arrived(cluster) == 1)
        async with Client(cluster, asynchronous=True) as client:
            assert await client.submit(sum, [1, 2]) == 3


@simulated
async def test_a_cluster_that_a_client_shuts_down_gets_no_other_scheduler(it):
    async with simulate(**LAB, n_workers=1) as cluster:
        async with Client("cml://lab", asynchronous=True) as client:
            await client.shutdown()
        await eventually(lambda: cluster.status == Status.closed)
        assert "launching another scheduler" not in log_of(cluster)
    assert not it.platform.live


@simulated
async def test_a_cluster_that_closes_while_its_next_scheduler_starts_leaves_nothing(it):
    async with simulate(**LAB, n_workers=1) as cluster:
        it.platform.doom("silent", key="scheduler")
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: "launching another scheduler" in log_of(cluster))
        await cluster.close()
    assert not it.platform.live


async def test_a_killed_scheduler_process_is_replaced_and_clients_compute_again(platform, holds):
    async with make(name="lab", n_workers=2) as cluster, Client("cml://lab", asynchronous=True) as client:
        await client.wait_for_workers(2)
        waits = client.submit(asyncio.sleep, 3600)
        [lost] = [session.id for session in cluster.sessions if session.role == "scheduler"]
        platform.evict(lost)
        await holds(lambda: "connected to another scheduler after" in log_of(cluster))
        await holds(lambda: arrived(cluster) == 2 and len(live(platform)) == 3)
        names = sorted(name_of(session) for session in live(platform))
        assert (names[0][:4], names[1][:4], names[2]) == ("lab-", "lab-", "lab-scheduler")
        assert await client.submit(sum, [1, 2]) == 3
        with pytest.raises(CancelledError):
            await waits
