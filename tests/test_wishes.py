"""What the user asked for last is what the cluster has in the end, whatever happens at the same moment."""

from __future__ import annotations

import asyncio
import random
import time

import dask
import pytest
from clusters import arrived, log_of, target
from distributed import Client
from distributed.core import Status
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError, LaunchRefused
from dask_cml.cli import change
from dask_cml.manager import reconciler
from dask_cml.manager.reconciler import Reconciler


async def make(**options):
    # The simulated schedulers have no keys.
    return await CMLCluster(**{"asynchronous": True, "quiet": True, "security": False, "cpu": 1, **options})


def has(cluster, n):
    workers = cluster.scheduler_info["workers"]
    return len(cluster.worker_spec) == len(cluster.workers) == arrived(cluster) == len(workers) == n


async def smaller_during_a_refusal(mine, platform):
    platform.configure(quota={"sessions": 6})
    with platform.held("launch_workers"):
        mine.scale(8)
        await eventually(lambda: platform.under_way)
        mine.scale(2)


async def last_of_many_threads(mine, platform):
    def scale(seed):
        luck = random.Random(seed)
        for _ in range(20):
            mine.scale(luck.randrange(6))

    await asyncio.gather(*[asyncio.to_thread(scale, seed) for seed in range(8)])
    mine.scale(2)


@pytest.mark.parametrize(
    "wish", [smaller_during_a_refusal, last_of_many_threads], ids=lambda wish: wish.__name__
)
@simulated
async def test_the_last_wish_counts(it, wish):
    async with await make() as mine:
        await wish(mine, it.platform)
        await eventually(lambda: has(mine, 2))
        await mine.manager.wishes.settle()
        assert target(mine) == 2
        assert has(mine, 2)


@simulated
async def test_one_look_that_knows_the_wish_settles_it(it, monkeypatch):
    know, look = [], Reconciler._look

    async def noted(self):
        know.append(not self._state.fleet.wishes and len(self._state.fleet.names) == 3)
        return await look(self)

    monkeypatch.setattr(Reconciler, "_look", noted)
    async with await make() as mine:
        mine.scale(3)
        await mine.manager.wishes.settle()
        assert len(mine.workers) == 3
        assert sum(know) == 1


@simulated
async def test_a_manager_that_rests_between_two_looks_acts_on_a_wish_at_once(it, monkeypatch):
    monkeypatch.setattr(reconciler, "_REST", 1000.0)
    monkeypatch.setattr(reconciler, "_LONGEST_REST", 1000.0)
    async with await make() as mine:
        for n in 2, 1, 3:
            mine.scale(n)
            await eventually(lambda n=n: len(mine.workers) == n)


@simulated
async def test_scale_ends_adapting_that_is_under_way(it):
    async with await make() as mine:
        mine.adapt(minimum=3, maximum=3, interval="1s")
        with it.platform.held("launch_workers"):
            await eventually(lambda: it.platform.under_way)
            mine.scale(0)
            await asyncio.sleep(10)
        await eventually(lambda: has(mine, 0))
        await asyncio.sleep(10)
        assert has(mine, 0)
        assert target(mine) == 0


@simulated
async def test_a_session_that_is_no_longer_wanted_is_not_a_failure(it):
    async with await make() as mine:
        for _ in range(10):
            mine.scale(3)
            await eventually(lambda: len(mine.workers) == 3)
            mine.scale(1)
            await eventually(lambda: len(mine.workers) == 1)
        await eventually(lambda: has(mine, 1))
        assert "failed" not in log_of(mine)
        assert "problem" not in repr(mine)


@simulated
async def test_workers_that_the_user_retires_are_replaced_and_no_failure(it):
    async with await make(n_workers=2) as mine, Client(mine, asynchronous=True) as client:
        await eventually(lambda: has(mine, 2))
        for _ in range(3):
            before = sorted(mine.workers)
            await client.retire_workers(names=before[:1], close_workers=True)
            await eventually(lambda gone=before[0]: gone not in mine.worker_spec and has(mine, 2))
        assert "failed" not in log_of(mine)
        assert "problem" not in repr(mine)
        assert "closed; launching a replacement" in log_of(mine)


@simulated
async def test_workers_that_a_client_restarts_are_replaced_and_no_failure(it):
    async with await make(n_workers=2) as mine, Client(mine, asynchronous=True) as client:
        await eventually(lambda: has(mine, 2))
        before = {*mine.workers}
        # It closes workers that have no nanny, and waits for as many others.
        await client.restart(timeout=120)
        await eventually(lambda: has(mine, 2))
        assert not before & {*mine.workers}
        assert await client.submit(sum, [1, 2]) == 3
        assert "failed" not in log_of(mine)
        assert "problem" not in repr(mine)


@simulated
async def test_a_stop_that_hangs_delays_no_launch(it):
    async with await make(n_workers=2) as mine:
        await eventually(lambda: has(mine, 2))
        with it.platform.held("stop_workers"):
            mine.scale(1)
            await eventually(lambda: it.platform.under_way)
            mine.scale(3)
            await eventually(lambda: arrived(mine) == 3)
        await eventually(lambda: has(mine, 3))


@simulated
async def test_a_stop_that_is_refused_delays_no_launch(it):
    async with await make(n_workers=2) as mine:
        await eventually(lambda: has(mine, 2))
        it.platform.answer_stop(*[403] * 1000)
        mine.scale(1)
        await eventually(lambda: it.platform.count("stop_workers"))
        mine.scale(3)
        await eventually(lambda: arrived(mine) == 3)
        assert "problem: CML did not stop" in repr(mine)
        before = it.platform.count("stop_workers")
        await asyncio.sleep(30.0)
        assert 5 < it.platform.count("stop_workers") - before < 15
        it.platform.heal()
        await eventually(lambda: has(mine, 3))


@simulated
async def test_a_slow_stop_is_requested_once_and_noticed_at_once(it):
    async with await make(n_workers=1) as mine:
        await eventually(lambda: arrived(mine) == 1)
        with it.platform.held("stop_workers"):
            mine.scale(0)
            await eventually(lambda: it.platform.under_way)
            await asyncio.sleep(20.0)  # several looks
            assert mine.workers
        began = time.monotonic()
        await eventually(lambda: not mine.workers)
        assert time.monotonic() - began < 1.0
        assert it.platform.count("stop_workers") == 1


@simulated
async def test_a_request_to_a_closed_cluster_raises_an_error(it):
    mine = await make()
    await mine.close()
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        mine.scale(1)
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        mine.adapt()
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        await mine.scale_down(["any"])
    assert it.platform.live == []


@simulated
async def test_a_cluster_that_lost_its_scheduler_is_not_shown_as_running(it):
    with dask.config.set({"cml.scheduler-restarts": 0}):
        mine = await make(n_workers=1)
        await eventually(lambda: has(mine, 1))
        with it.platform.held("list_workers"):
            it.platform.evict(mine.sessions[0].id)
            await eventually(lambda: "not connected" in repr(mine))
            assert mine.status == Status.running
        await eventually(lambda: mine.status == Status.closed)


@simulated
async def test_deleting_a_group_waits_for_the_leader_without_a_busy_loop(it):
    """Each look of a manager that does not lead is over at once."""
    async with await make(worker_groups={"big": {"n_workers": 1}}) as leader:
        other = it.process("other", {"CDSW_ENGINE_ID": "other12345678901"})

        async def delete():
            looks = []
            async with await CMLCluster.from_name(leader.name, asynchronous=True, quiet=True) as mine:
                look = mine.manager.fleet.group
                mine.manager.fleet.group = lambda name: looks.append(name) or look(name)
                await mine.delete_worker_group("big")
            return looks

        await eventually(lambda: leader.worker_groups["big"].n_arrived == 1)
        with it.platform.held("stop_workers"):
            deleting = other.start(delete())
            done, _ = await asyncio.wait([deleting], timeout=5.0)
            assert not done
        assert 10 < len(await deleting) < 200


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (lambda name: change.scale.callback(name, 1, "big", 600.0), "invalid worker_group='big'"),
        (lambda name: change.adapt.callback(name, 1, 2, "big"), "no longer adapts"),
    ],
    ids=["scale", "adapt"],
)
@simulated
async def test_a_command_ends_when_another_process_deletes_its_worker_group(it, program, error):
    creator = await make(worker_groups={"big": {}}, shutdown_on_close=False)
    await creator.leave()
    it.platform.fail("launch_workers", *[ConnectionError("lost")] * 1000)
    running = it.process("command", {"CDSW_ENGINE_ID": "command123456789"}).start(program(creator.name))
    await eventually(lambda: it.platform.count("launch_workers") > 10)
    async with await CMLCluster.from_name(creator.name, asynchronous=True, quiet=True) as mine:
        await mine.delete_worker_group("big")
        await asyncio.wait([running], timeout=30.0)
        assert running.done()
        await mine.close()
    with pytest.raises((CMLError, ValueError), match=error):
        await running


@simulated
async def test_a_command_ends_when_another_manager_scales_the_cluster(it):
    async with await make() as mine:
        it.platform.configure(quota={"sessions": 1}, waits_for_room=True)
        command = it.process("command", {"CDSW_ENGINE_ID": "command123456789"})
        running = command.start(change.scale.callback(mine.name, 2, "default", 600.0))
        await eventually(lambda: target(mine) == 2)
        mine.scale(1)
        with pytest.raises(
            CMLError, match=f"^another manager scales the cluster {mine.name}: 1 worker wanted"
        ):
            await running


async def test_a_smaller_start_right_after_a_refused_one_is_not_refused(platform, light):
    platform.configure(quota={"sessions": 3}, stop_grace=2.0)
    options = {"platform": "local", "asynchronous": True, "quiet": True}
    with pytest.raises(LaunchRefused):
        await CMLCluster(n_workers=5, **options)
    for _ in range(2):  # what a cluster has stopped that was closed fills the quota, too
        async with CMLCluster(n_workers=2, **options) as smaller:
            assert len(smaller.workers) == 2
