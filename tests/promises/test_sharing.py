"""Sharing: several notebooks, scripts and commands use one cluster, which they find by its name."""

import asyncio
import json
import os
import re
import subprocess
import sys
from concurrent.futures import CancelledError

import pytest
from clusters import arrived, cut_off, has, limits, lines_of, log_of, rebuild, simulate, supplied, target
from distributed import Client
from distributed.core import Status
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists, CMLCluster, CMLError, NoSuchCluster

pytestmark = pytest.mark.usefixtures("light")

LAB = {"name": "lab", "security": True}
SHELL = {"CDSW_ENGINE_ID": "anothersession00"}


def shown(cluster):
    return sorted((session.id, session.name, session.role, session.status) for session in cluster.sessions)


@simulated
async def test_a_client_needs_only_the_name_and_finds_the_keys(it):
    async with (
        simulate(name="my lab, 50%", security=True, n_workers=1),
        Client("cml://my%20lab%2C%2050%25", asynchronous=True) as client,
    ):
        assert await client.submit(sum, [1, 2]) == 3


#: Nothing in it is of dask-cml, but what Dask itself imports.
STRANGER = """
import json, sys
import dask.array as da
from dask.distributed import Client, get_client

class Counter:
    n = 0
    def add(self, k):
        self.n += k
        return self.n

def in_a_task(n):
    client = get_client()
    return sum(client.gather(client.map(abs, range(-n, 0))))

def main():
    found = {}
    try:
        Client("tcp://127.0.0.1:1", timeout=0.1)
    except OSError:
        found["loaded for others"] = "dask_cml" in sys.modules
    with Client() as client:
        client.wait_for_workers(2, timeout=60)
        found["submit"] = client.submit(sum, [1, 2]).result()
        [data] = client.scatter([[1, 2, 3]])
        everywhere = client.scatter({"a": 1}, broadcast=True)
        found["scatter"] = client.submit(sum, data).result(), client.gather(everywhere)
        found["gather"] = client.gather(client.map(abs, [-1, -2]))
        found["array"] = int(da.ones((100, 100), chunks=(50, 50)).sum().compute())
        counter = client.submit(Counter, actor=True).result()
        counter.add(2).result()
        found["actor"] = counter.add(3).result()
        found["client in a task"] = client.submit(in_a_task, 3).result()
        nested = {"a": [client.submit(int, 4)]}
        found["futures as arguments"] = client.submit(lambda nested: sum(nested["a"]), nested).result()
        client.restart(timeout=60)
        client.wait_for_workers(2, timeout=60)
        found["after a restart"] = client.submit(sum, [3, 4]).result()
    with open("scheduler.json", "w") as file:
        json.dump({"address": sys.argv[1]}, file)
    with Client(scheduler_file="scheduler.json") as client:
        found["scheduler file"] = client.submit(sum, [5, 6]).result()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""
EXPECTED = {
    "loaded for others": False,
    "submit": 3,
    "scatter": [6, {"a": 1}],
    "gather": [1, 2],
    "array": 10000,
    "actor": 5,
    "client in a task": 6,
    "futures as arguments": 4,
    "after a restart": 7,
    "scheduler file": 11,
}


@pytest.mark.slow
def test_a_process_without_our_import_uses_a_cluster_by_its_name(platform, tmp_path):
    with CMLCluster(n_workers=2, name="night shift, 50%", platform="local", worker_args=[], quiet=True):
        address = "cml://night%20shift%2C%2050%25"
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            env={**os.environ, "DASK_SCHEDULER_ADDRESS": address},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED


@simulated
async def test_an_unknown_name_lists_the_clusters_that_exist(it):
    with pytest.raises(
        NoSuchCluster,
        match="no cluster named 'night'; no clusters exist: to create it, run `dask cml create night`",
    ):
        CMLCluster.from_name("night")
    async with simulate(**LAB):
        with pytest.raises(NoSuchCluster, match="no cluster named 'night'; existing clusters: 'lab'"):
            CMLCluster.from_name("night")
        with pytest.raises(NoSuchCluster, match="no cluster named 'night'; existing clusters: 'lab'"):
            await Client("cml://night", asynchronous=True, timeout=600)


@simulated
async def test_a_name_is_unique_in_a_project(it):
    async with simulate(**LAB):
        with pytest.raises(ClusterExists, match="a cluster named 'lab' exists already: to delete it, run "):
            await simulate(**LAB, n_workers=1)
        assert {*it.platform.running} == {"lab-scheduler"}


@pytest.mark.slow
@simulated
async def test_create_or_connect_connects_to_a_running_cluster_and_changes_none_of_its_options(it):
    async with simulate(**LAB, n_workers=1) as first:
        await eventually(lambda: arrived(first) == 1)
        other = {"n_workers": 3, "cpu": 2, "nthreads": 3, "create_mode": "create-or-connect"}
        async with simulate(**LAB, **other) as again:
            assert again.scheduler_address == first.scheduler_address
            await eventually(lambda: has(again, 1))
            assert target(first) == 1
            [line] = [line for line in lines_of(again) if "Connected to running cluster lab of " in line]
            assert "it runs with its own n_workers, cpu, nthreads" in line
            assert "cluster.close() leaves it running; to end it, call cluster.shutdown()" in line
            again.scale(2)
            await eventually(lambda: has(first, 2))
        assert first.status == Status.running
        assert len(it.platform.running) == 3


@simulated
async def test_of_two_at_once_one_creates_and_the_other_connects(it):
    one, two = (simulate(**LAB, create_mode="create-or-connect") for _ in range(2))
    await asyncio.gather(one, two)
    assert one.scheduler_address == two.scheduler_address
    assert len(it.platform.live) == 1
    creator, connected = (one, two) if one.shutdown_on_close else (two, one)
    await connected.close()
    assert len(it.platform.running) == 1
    await creator.close()
    assert not it.platform.running


@simulated
async def test_connect_creates_no_cluster(it):
    with pytest.raises(NoSuchCluster):
        await simulate(**LAB, create_mode="connect")
    assert it.platform.all == {}


@simulated
async def test_all_scale_it_all_see_the_same_and_the_last_request_counts(it):
    async with simulate(**LAB, n_workers=1) as first, rebuild("lab") as second:
        for scale, n in (first, 1), (second, 3), (first, 2), (second, 1):
            scale.scale(n)
            await eventually(lambda n=n: has(first, n) and has(second, n))
            await eventually(lambda n=n: len(it.platform.running) == n + 1)
        await shell("scale", "lab", 2)
        await eventually(lambda: has(first, 2) and has(second, 2))
        await eventually(lambda: shown(first) == shown(second))
        assert first.problem is second.problem is None


@pytest.mark.slow
@simulated
async def test_a_scale_in_one_process_ends_adaptive_scaling_that_another_began(it):
    async with simulate(**LAB) as first, rebuild("lab") as second:
        second.adapt(minimum=1, maximum=2)
        await eventually(lambda: has(first, 1) and limits(first) == (1, 2))
        first.scale(3)
        await eventually(lambda: has(second, 3) and limits(second) is None)
        first.adapt(minimum=0, maximum=1)
        await eventually(lambda: limits(second) == (0, 1))
        await shell("scale", "lab", 1)
        await eventually(lambda: limits(first) is None and has(first, 1))


@pytest.mark.slow
@simulated
async def test_the_manager_adapts_on_when_the_process_that_began_it_has_left(it):
    async with simulate(**LAB) as first:
        async with rebuild("lab") as second:
            second.adapt(minimum=1, maximum=2)
        await eventually(lambda: has(first, 1))
        async with Client(first, asynchronous=True) as client:
            futures = client.map(asyncio.sleep, [3600] * 1000, pure=False)
            await eventually(lambda: has(first, 2))
            await client.cancel(futures)


@pytest.mark.slow
@simulated
async def test_another_process_adds_scales_adapts_and_deletes_groups(it):
    async with simulate(**LAB) as first, rebuild("lab") as second:
        await second.add_worker_group("gpu", n_workers=1, cpu=2, memory=2)
        await second.scale(2, worker_group="gpu")
        await eventually(lambda: "gpu" in first.worker_groups and arrived(first) == 2)
        assert first.worker_groups["gpu"].size.cpu == 2
        second.adapt(0, 1, worker_group="gpu")
        await eventually(lambda: limits(first, "gpu") == (0, 1) and arrived(first) == 0)
        await second.delete_worker_group("gpu")
        await eventually(lambda: first.worker_groups.keys() == {"default"})
        with pytest.raises((CMLError, ValueError), match=r"^invalid worker_group='gpu': expected one of "):
            await second.scale(1, worker_group="gpu")


@simulated
async def test_what_a_process_asks_for_comes_true_although_it_leaves_at_once(it):
    async with simulate(**LAB) as first:
        async with rebuild("lab") as second:
            second.scale(2)
        await eventually(lambda: has(first, 2))


@pytest.mark.slow
@simulated
async def test_a_process_that_cannot_reach_the_scheduler_gets_an_error_and_nothing_is_remembered(it):
    async with simulate(**LAB) as first, rebuild("lab") as second:
        heal = cut_off(second)
        with pytest.raises(CMLError, match=r"the scheduler of cluster 'lab' at .* does not answer"):
            await second.scale(2)
        await eventually(lambda: "no route to host" in repr(second))
        heal()
        await eventually(lambda: "problem" not in repr(second))
        assert target(first) == target(second) == 0
        assert {*it.platform.running} == {"lab-scheduler"}


@pytest.mark.slow
@simulated
async def test_a_lost_worker_is_replaced_once_however_many_processes_see_it(it):
    async with simulate(**LAB, n_workers=1) as first, rebuild("lab") as second, rebuild("lab") as third:
        await eventually(lambda: has(first, 1))
        it.platform.evict(it.platform.running["lab-0"])
        await eventually(lambda: "lab-1" in it.platform.running)
        await eventually(lambda: has(first, 1) and has(second, 1) and has(third, 1))
        await asyncio.sleep(60.0)
        assert {*it.platform.running} == {"lab-scheduler", "lab-1"}


@simulated
async def test_a_task_scales_its_own_cluster(it):
    async def scale():
        await (await rebuild("lab")).scale(1)

    async with supplied(**LAB, n_workers=2):
        it.process_of("lab-0").start(scale())
        await eventually(lambda: len(it.platform.running) == 2)


async def lose_a_worker(it, cluster):
    """Let something happen to a cluster that its log names."""
    await eventually(lambda: has(cluster, 1))
    it.platform.evict(it.platform.running["lab-0"])
    await eventually(lambda: "launching a replacement" in log_of(cluster))


@simulated
async def test_the_log_named_cluster_contains_what_happened_to_it(it):
    async with simulate(**LAB, n_workers=1) as cluster:
        await lose_a_worker(it, cluster)
        assert "Worker lab-0 lost: " in (await cluster.get_logs())["Cluster"]
        assert "Worker lab-0 lost: " in await shell("logs", "lab", "Cluster")


@pytest.mark.slow
@simulated
async def test_another_process_reads_it_too(it):
    async with simulate(**LAB, n_workers=1) as first, rebuild("lab") as second:
        await lose_a_worker(it, first)
        await asyncio.sleep(30.0)
        assert "Worker lab-0 lost: " in (await second.get_logs())["Cluster"]


@pytest.mark.slow
@pytest.mark.parametrize("connect", ["from_name", "connect", "create-or-connect"])
@simulated
async def test_the_end_of_a_connected_object_ends_nobody_elses_work(it, connect):
    def find(**options):
        if connect == "from_name":
            return rebuild("lab", **options)
        return simulate(**LAB, create_mode=connect, **options)

    async with simulate(**LAB, n_workers=1) as first, Client(first, asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 30)
        async with find():
            pass
        await (await find()).close()
        await future
        assert first.status == Status.running
        assert len(it.platform.running) == 2
        async with find(shutdown_on_close=True):
            pass
        await eventually(lambda: first.status == Status.closed)
    assert not it.platform.live


@pytest.mark.slow
@pytest.mark.parametrize("connect", [False, True])
@simulated
async def test_leave_disconnects_and_leaves_it_running(it, connect):
    async with simulate(**LAB, n_workers=1) as first:
        await eventually(lambda: arrived(first) == 1)
        if connect:
            async with rebuild("lab", shutdown_on_close=True) as second:
                await second.leave()
            assert first.status == Status.running
        await first.leave()
        assert repr(first).endswith(", left)")
    assert len(it.platform.running) == 2
    await (await rebuild("lab")).shutdown()


@simulated
async def test_shutdown_ends_it_for_everybody_from_any_object_also_a_closed_one(it):
    async with simulate(**LAB, n_workers=1, shutdown_on_close=False):
        pass
    second, third = await rebuild("lab"), await rebuild("lab")
    await eventually(lambda: arrived(second) == 1)
    await second.close()
    assert len(it.platform.running) == 2
    await second.shutdown()
    await eventually(lambda: third.status == Status.closed)
    assert not it.platform.live
    assert it.clusters == []
    await second.shutdown()
    with pytest.raises(NoSuchCluster):
        await rebuild("lab")


async def close(cluster):
    await cluster.close()


async def shut_down_elsewhere(cluster):
    await (await rebuild("lab")).shutdown()


async def delete(cluster):
    await shell("delete", "lab")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (close, r"closed by .+ in session notebook12345678 \(process \d+\)"),
        (shut_down_elsewhere, r"closed by .+ in session notebook12345678 \(process \d+\)"),
        (delete, "deleted by .+"),
    ],
)
@simulated
async def test_everybody_learns_who_ended_it_and_where(it, end, words):
    cluster = await simulate(**LAB, n_workers=1)
    async with rebuild("lab") as other, Client("cml://lab", asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 3600)
        await client.wait_for_workers(1)
        await end(cluster)
        await eventually(lambda: other.status == cluster.status == Status.closed)
        [ended] = await shell_json("history")
        assert re.fullmatch(words, ended["why"])
        assert other.problem == ended["why"]
        assert lines_of(other)[-1] == f"Cluster lab shut down: {ended['why']}"
        assert cluster.problem == (None if end is close else ended["why"])
        await eventually(lambda: client.status == "closed")
        with pytest.raises(CancelledError) as raised:
            await future
        if "reason" in vars(raised.value):  # Dask has reasons since 2024.11
            assert f"cluster lab has ended: {ended['why']}" in str(raised.value)


@simulated
async def test_a_process_in_another_session_learns_it_at_once(it):
    async def follow():
        async with rebuild("lab") as other:
            following.set()
            await eventually(lambda: other.status == Status.closed)
            heard.append(other.problem)

    following, heard = asyncio.Event(), []
    cluster = await simulate(**LAB)
    process = it.process("another", SHELL)
    process.start(follow())
    await following.wait()
    await cluster.close()
    await eventually(lambda: heard, 30.0)
    assert "closed by " in heard[0]
