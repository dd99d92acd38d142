"""What is launched costs money: after failures the cluster waits, and gives up at last."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from clusters import NOTEBOOK, arrived, create_elsewhere, log_of, rebuild, simulate
from distributed import Client, Worker
from simulated.faults import Mishap
from simulated.testing import eventually, simulated
from simulated.world import World

from dask_cml import CMLCluster


def break_connection(dask_worker: Worker) -> None:
    """Break the connection to the scheduler, as a network does: Dask's worker exits with status 0 then."""
    dask_worker.loop.call_later(0.1, dask_worker.batched_stream.comm.abort)


@pytest.mark.slow
@simulated
async def test_workers_whose_connections_break_are_not_replaced_for_ever(it):
    async with simulate(name="lab", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        while "no new workers after 5 failures in a row" not in (cluster.problem or ""):
            assert it.platform.count("launch_workers") <= 6
            await client.run(break_connection, on_error="ignore")
            await asyncio.sleep(1)
        launched = it.platform.count("launch_workers")
        await asyncio.sleep(180)
        assert it.platform.count("launch_workers") == launched == 6
        assert "Worker lab-0 lost: its program ended" in log_of(cluster)
        assert "closed" not in log_of(cluster)
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)


async def retire(client: Client, name: str) -> None:
    await client.retire_workers(names=[name], close_workers=True)


async def close(client: Client, name: str) -> None:
    def end(dask_worker: Worker) -> None:
        dask_worker.loop.call_later(0.1, dask_worker.close)

    await client.run(end)


async def let_its_lifetime_end(client: Client, name: str) -> None:
    def end(dask_worker: Worker) -> None:
        dask_worker.loop.call_later(0.1, dask_worker.close_gracefully)

    await client.run(end)


async def restart(client: Client, name: str) -> None:
    """Restart the workers. Without nannies they end, and Dask hopes for somebody to launch others."""
    await client.restart(wait_for_workers=False)


@pytest.mark.parametrize("end", [retire, close, let_its_lifetime_end, restart])
@pytest.mark.slow
@simulated
async def test_workers_that_the_user_ends_are_replaced_and_are_no_failures(it, end):
    async with simulate(name="lab", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        for n in range(7):
            await eventually(lambda n=n: f"lab-{n}" in {worker["name"] for worker in workers(cluster)})
            await end(client, f"lab-{n}")
        await eventually(lambda: arrived(cluster) == 1 and f"lab-{n + 1}" in it.platform.running, 30)
        assert cluster.problem is None
        assert log_of(cluster).splitlines() == [
            f"Worker lab-{n} closed; launching a replacement" for n in range(7)
        ]


def workers(cluster):
    return cluster.scheduler_info["workers"].values()


async def gave_up(cluster: CMLCluster) -> None:
    await eventually(lambda: "failures in a row" in (cluster.problem or ""), 300)


@pytest.mark.slow
@simulated
async def test_a_manager_that_follows_launches_nothing_after_the_last_one_gave_up(it):
    creator = await create_elsewhere(it, name="lab")
    it.platform.doom("fails", times=100)
    for n in range(3):
        async with rebuild("lab") as cluster:
            if n == 0:
                cluster.scale(2)
                await gave_up(cluster)
                launched = it.platform.count("launch_workers")
                creator.kill()
            await asyncio.sleep(120)
            await gave_up(cluster)
            assert it.platform.count("launch_workers") == launched
    async with rebuild("lab", shutdown_on_close=True) as cluster:
        it.platform.heal()
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1, 300)


@pytest.mark.parametrize("keeper_ends", [False, True])
@pytest.mark.slow
@simulated
async def test_another_scheduler_launches_nothing_after_the_cluster_gave_up(it, keeper_ends):
    creator = await create_elsewhere(it, name="lab")
    async with rebuild("lab", shutdown_on_close=True) as cluster:
        it.platform.doom("fails", times=5)
        cluster.scale(1)
        await gave_up(cluster)
        launched = it.platform.count("launch_workers")
        it.platform.evict(it.platform.running["lab-scheduler"])
        if keeper_ends:
            creator.kill()
        await eventually(lambda: "lab-scheduler" in it.platform.running, 300)
        await asyncio.sleep(120)
        await gave_up(cluster)
        assert it.platform.count("launch_workers") == launched + 1
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1, 300)


@pytest.mark.slow
@simulated
async def test_a_cluster_that_gave_up_launches_nothing_when_it_is_left_alone(it):
    async with simulate(name="lab", security=True, shutdown_on_close=False) as cluster:
        it.platform.doom("fails", times=100)
        cluster.scale(1)
        await gave_up(cluster)
    launched = it.platform.count("launch_workers")
    await asyncio.sleep(300)
    assert it.platform.count("launch_workers") == launched
    await (await rebuild("lab")).shutdown()


#: A session to which the platform does not list the sessions of NOTEBOOK.
ELSEWHERE = {"CDSW_ENGINE_ID": "elsewhere1234567"}


async def manage(it: World, env: dict[str, str], seconds: float) -> None:
    """Let another process manage the cluster for some seconds, in the session of this environment."""

    async def connect() -> None:
        async with rebuild("lab"):
            await asyncio.sleep(seconds)

    await it.process("manager", env).start(connect())


@pytest.mark.parametrize("env", [NOTEBOOK, ELSEWHERE])
@pytest.mark.slow
@simulated
async def test_a_queued_session_keeps_its_place_whoever_manages_the_cluster(it, env):
    options = {"worker_timeout": 20, "pending_timeout": 60}
    creator = await create_elsewhere(it, name="lab", n_workers=1, **options)
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with rebuild("lab") as cluster:
        cluster.scale(2)
        await eventually(lambda: "lab-1" in {session.name for session in cluster.sessions})
        await asyncio.sleep(30)
    creator.kill()
    launched = it.platform.count("launch_workers")
    for _ in range(3):
        await manage(it, env, 60)
    assert it.platform.count("launch_workers") == launched == 3
    it.platform.configure()
    await manage(it, env, 30)
    assert {"lab-0", "lab-1"} <= {*it.platform.running}
    assert it.platform.count("launch_workers") == launched
    await (await rebuild("lab")).shutdown()


@pytest.mark.parametrize("env", [NOTEBOOK, ELSEWHERE])
@pytest.mark.slow
@simulated
async def test_a_session_that_never_connects_is_replaced_although_the_managers_change(it, env):
    it.platform.doom("silent", key="-0")
    options = {"worker_timeout": 100, "pending_timeout": 60, "shutdown_on_close": False}
    creator = it.process("creator", NOTEBOOK)
    await creator.start(create_with_a_worker(options))
    creator.kill()
    begin = time.monotonic()
    for _ in range(5):
        await manage(it, env, 40)
    assert "lab-1" in it.platform.running
    assert time.monotonic() - begin < 230
    await (await rebuild("lab")).shutdown()


async def create_with_a_worker(options: dict[str, Any]) -> None:
    async with simulate(name="lab", n_workers=1, **options):
        pass


class Until(Mishap):
    """A call that the platform's gateway keeps until some time, and then carries out."""

    end = 0.0

    def perform(self, action: Callable[[], Any]) -> Any:
        time.sleep(max(0.0, Until.end - time.monotonic()))
        return action()


@pytest.mark.slow
@simulated
async def test_launches_that_hang_are_repeated_once_for_each_worker(it):
    async with simulate(name="lab") as cluster:
        Until.end = time.monotonic() + 900
        it.platform.plan("launch_workers", *[Until() for _ in range(100)])
        cluster.scale(2)
        await asyncio.sleep(900)
        await eventually(lambda: arrived(cluster) == 2)
        await eventually(lambda: len(it.platform.live) == 3)
        assert len(it.platform.all) <= 5


@simulated
async def test_a_launch_whose_answer_is_lost_is_repeated_at_once(it):
    async with simulate(name="lab") as cluster:
        it.platform.plan("launch_workers", Mishap(after=3600.0))
        begin = time.monotonic()
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)
        assert time.monotonic() - begin < 60
