"""What the user asked for last is what the cluster has in the end, whatever happens at the same moment.

The sessions are those of the simulated platform: real schedulers and workers in this event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import pytest
from distributed import Client
from distributed.core import Status
from stub import eventually
from test_random import Simulation, quick  # noqa: F401  # a fixture

from dask_cml import CMLCluster, CMLError, LaunchRefused
from dask_cml.manager import lifecycle, reconciler


@pytest.fixture
async def simulated(monkeypatch):
    """Return a function that makes a cluster on a platform of its own."""
    platform = Simulation(random.Random(1))
    monkeypatch.setattr(lifecycle, "load_platform", lambda _: platform)
    made = []

    def make(**options):
        options = {"cpu": 1, "worker_timeout": "1 minute", "asynchronous": True, "quiet": True, **options}
        options["security"] = False  # the simulated schedulers have no keys
        made.append(CMLCluster(**options))
        return made[-1]

    make.platform = platform
    yield make
    for each in made:
        await each.close()
    await platform.finish()
    assert platform.live == []


def has(cluster, n):
    workers = cluster.scheduler_info["workers"]
    return len(cluster.worker_spec) == len(cluster.workers) == len(cluster._arrived) == len(workers) == n


def told(cluster):
    return "\n".join(line for _, line in cluster._cluster_manager_logs)


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

    threads = [threading.Thread(target=scale, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*[asyncio.to_thread(thread.join) for thread in threads])
    mine.scale(2)


@pytest.mark.parametrize(
    "wish", [smaller_during_a_refusal, last_of_many_threads], ids=lambda wish: wish.__name__
)
async def test_the_last_wish_counts(simulated, wish):
    mine = await simulated()
    await wish(mine, simulated.platform)
    await eventually(lambda: has(mine, 2))
    await mine._carry_out()
    assert (mine._fleet.group().target, len(mine._fleet.keys)) == (2, 2)
    await eventually(lambda: has(mine, 2))


async def test_scale_ends_adapting_that_is_under_way(simulated):
    mine = await simulated()
    adaptive = mine.adapt(minimum=3, maximum=3, interval="1 hour")
    with simulated.platform.held("launch_workers"):
        adapting = asyncio.ensure_future(adaptive.adapt())
        await eventually(lambda: simulated.platform.under_way)
        mine.scale(0)
    await adapting
    with contextlib.suppress(AttributeError):  # as one that was stopped may still do once
        await adaptive.scale_up(3)
    await eventually(lambda: has(mine, 0))
    assert mine._fleet.group().target == 0


async def test_what_is_not_wanted_any_more_is_no_failure(simulated):
    mine = await simulated()
    for _ in range(10):
        mine.scale(3)
        await asyncio.sleep(0)
        await eventually(lambda: len(mine.workers) == 3)
        mine.scale(1)
        await eventually(lambda: len(mine.workers) == 1)
    await eventually(lambda: has(mine, 1))
    assert "failed" not in told(mine)
    assert "problem" not in repr(mine)


async def test_workers_that_the_user_retires_are_replaced_and_no_failure(simulated):
    mine = await simulated(n_workers=2)
    async with Client(mine, asynchronous=True) as client:
        await eventually(lambda: has(mine, 2))
        for _ in range(3):
            before = sorted(mine._arrived)
            await client.retire_workers(names=before[:1], close_workers=True)
            await eventually(lambda gone=before[0]: gone not in mine.worker_spec and has(mine, 2))
    assert "failed" not in told(mine)
    assert "problem" not in repr(mine)
    assert "closed; launching a replacement" in told(mine)


async def test_workers_that_a_client_restarts_are_replaced_and_no_failure(simulated):
    mine = await simulated(n_workers=2)
    async with Client(mine, asynchronous=True) as client:
        await eventually(lambda: has(mine, 2))
        before = {*mine._arrived}
        # It closes workers that have no nanny, and waits for as many others.
        await client.restart(timeout=120)
        await eventually(lambda: has(mine, 2))
        assert not before & mine._arrived
        assert await client.submit(sum, [1, 2]) == 3
    assert "failed" not in told(mine)
    assert "problem" not in repr(mine)


async def test_a_stop_that_hangs_holds_up_no_launch(simulated, monkeypatch):
    monkeypatch.setattr(reconciler, "_STOPS_WITHIN", 0.1)
    mine = await simulated(n_workers=2)
    await eventually(lambda: has(mine, 2))
    with simulated.platform.held("stop_workers"):
        mine.scale(1)
        await eventually(lambda: simulated.platform.under_way)
        mine.scale(3)
        await eventually(lambda: len(mine._arrived) == 3)
    await eventually(lambda: has(mine, 3))


async def test_a_closed_cluster_says_so(simulated):
    mine = await simulated()
    await mine.close()
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        mine.scale(1)
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        mine.adapt()
    with pytest.raises(CMLError, match=f"cannot scale cluster {mine.name}: it is closed"):
        await mine.scale_down(["any"])
    assert simulated.platform.live == []


async def test_close_ends_a_step_that_scale_began(simulated):
    mine = await simulated()
    with simulated.platform.held("launch_workers"):
        mine.scale(2)
        await eventually(lambda: simulated.platform.under_way)
        step = mine._stepping
        closing = asyncio.ensure_future(mine.close())
        await eventually(step.done)
    await closing
    assert step.cancelled()


async def test_a_cluster_that_lost_its_scheduler_does_not_say_that_it_runs(simulated):
    mine = await simulated(n_workers=1)
    await eventually(lambda: has(mine, 1))
    with simulated.platform.held("list_workers"):
        simulated.platform.evict(mine.sessions[0].id)
        await eventually(lambda: "not connected" in repr(mine))
        assert mine.status == Status.running
    await eventually(lambda: mine.status == Status.closed)


async def test_a_smaller_start_right_after_a_refused_one_is_not_refused(platform, light):
    platform.configure(quota={"sessions": 3}, stop_grace=2.0)
    options = {"platform": "local", "asynchronous": True, "quiet": True}
    with pytest.raises(LaunchRefused):
        await CMLCluster(n_workers=5, **options)
    for _ in range(2):  # what a cluster has stopped that was closed fills the quota, too
        async with CMLCluster(n_workers=2, **options) as smaller:
            assert len(smaller.workers) == 2


async def test_a_cluster_that_is_closed_before_its_first_step_says_so(simulated):
    mine = simulated()
    begun = asyncio.Event()

    async def sync():
        begun.set()
        await asyncio.Event().wait()

    mine._leadership.sync = sync
    ready = asyncio.ensure_future(mine._ready())
    await asyncio.wait_for(begun.wait(), 120)
    await mine.close()
    with pytest.raises(CMLError, match="was closed meanwhile"):
        await ready
