"""What the user asked for last is what the cluster has in the end, whatever happens at the same moment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading

import pytest
from clusters import arrived, log_of, make, target
from distributed import Client
from distributed.core import Status

from dask_cml import CMLCluster, CMLError, LaunchRefused
from dask_cml.manager import reconciler

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
def held(platform, monkeypatch):
    """Let calls of a platform's function wait for a block's end. Its value says whether one waits."""

    @contextlib.contextmanager
    def held(name):
        call, waits, gate = getattr(platform, name), threading.Event(), threading.Event()

        @functools.wraps(call)
        def waiting(*args, **kwargs):
            waits.set()
            gate.wait()
            return call(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(platform, name, waiting)
            try:
                yield waits.is_set
            finally:
                gate.set()

    return held


def has(cluster, n):
    workers = cluster.scheduler_info["workers"]
    return len(cluster.worker_spec) == len(cluster.workers) == arrived(cluster) == len(workers) == n


async def test_a_wish_during_a_launch_counts_although_the_launch_is_refused(platform, holds, held):
    platform.configure(quota={"sessions": 6})
    async with make() as cluster:
        with held("launch_workers") as waits:
            cluster.scale(8)
            await holds(waits)
            cluster.scale(2)
        await holds(lambda: has(cluster, 2))
        await cluster
        assert (target(cluster), has(cluster, 2)) == (2, True)


async def test_the_last_wish_of_many_threads_counts(platform, holds):
    def scale(seed):
        luck = random.Random(seed)
        for _ in range(20):
            cluster.scale(luck.randrange(4))

    async with make() as cluster:
        await asyncio.gather(*[asyncio.to_thread(scale, seed) for seed in range(8)])
        cluster.scale(2)
        await holds(lambda: has(cluster, 2))
        await cluster
        assert (target(cluster), has(cluster, 2)) == (2, True)


async def test_scale_ends_adapting_that_is_under_way(platform, holds, held):
    async with make() as cluster:
        adaptive = cluster.adapt(minimum=3, maximum=3, interval="1 hour")
        with held("launch_workers") as waits:
            adapting = asyncio.ensure_future(adaptive.adapt())
            await holds(waits)
            cluster.scale(0)
        await adapting
        with contextlib.suppress(AttributeError, ValueError):  # as one that was stopped may still do once
            await adaptive.scale_up(3)
        await holds(lambda: has(cluster, 0))
        await cluster
        assert (target(cluster), has(cluster, 0)) == (0, True)


async def test_sessions_that_are_not_wanted_any_more_are_no_failures(platform, holds):
    async with make() as cluster:
        for _ in range(5):
            cluster.scale(3)
            await holds(lambda: len(cluster.workers) == 3)
            cluster.scale(1)
            await holds(lambda: len(cluster.workers) == 1)
        await holds(lambda: has(cluster, 1))
        assert "failed" not in log_of(cluster)
        assert "lost" not in log_of(cluster)
        assert "problem" not in repr(cluster)


async def test_workers_that_the_user_retires_are_replaced_and_no_failures(platform, holds):
    async with make(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: has(cluster, 2))
        for _ in range(2):
            [name, _] = sorted(cluster.observed)
            await client.retire_workers(names=[name], close_workers=True)
            await holds(lambda gone=name: gone not in cluster.worker_spec and has(cluster, 2))
            assert f"Worker {name} closed; launching a replacement" in log_of(cluster)
        assert "lost" not in log_of(cluster)
        assert "problem" not in repr(cluster)


async def test_workers_that_a_client_restarts_are_replaced_and_no_failures(platform, holds):
    async with make(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: has(cluster, 2))
        before = {*cluster.observed}
        # It closes workers that have no nanny, and waits for as many others.
        await client.restart(timeout=120)
        await holds(lambda: has(cluster, 2))
        assert not before & cluster.observed
        assert await client.submit(sum, [1, 2]) == 3
        assert "lost" not in log_of(cluster)
        assert "problem" not in repr(cluster)


async def test_a_stop_that_hangs_holds_up_no_launch(platform, holds, held, monkeypatch):
    monkeypatch.setattr(reconciler, "_STOPS_WITHIN", 0.1)
    async with make(n_workers=2) as cluster:
        await holds(lambda: has(cluster, 2))
        with held("stop_workers") as waits:
            cluster.scale(1)
            await holds(waits)
            cluster.scale(3)
            await holds(lambda: arrived(cluster) == 3)
        await holds(lambda: has(cluster, 3))


async def test_a_closed_cluster_says_so(platform):
    async with make() as cluster:
        pass
    words = f"cannot scale cluster {cluster.name}: it is closed"
    with pytest.raises(CMLError, match=words):
        cluster.scale(1)
    with pytest.raises(CMLError, match=words):
        cluster.adapt()
    with pytest.raises(CMLError, match=words):
        await cluster.scale_down(["any"])
    assert len(platform.sessions()) == 1


async def test_a_cluster_that_lost_its_scheduler_does_not_say_that_it_runs(platform, holds, held):
    async with make(n_workers=1) as cluster:
        await holds(lambda: has(cluster, 1))
        with held("list_workers"):
            await asyncio.to_thread(platform.evict, cluster.sessions[0].id)
            await holds(lambda: "not connected" in repr(cluster))
            assert cluster.status == Status.running
        await holds(lambda: cluster.status == Status.closed)


async def test_a_smaller_start_right_after_a_refused_one_is_not_refused(platform):
    platform.configure(quota={"sessions": 3}, stop_grace=2.0)
    options = {"platform": "local", "asynchronous": True, "quiet": True}
    with pytest.raises(LaunchRefused):
        await CMLCluster(n_workers=5, **options)
    for _ in range(2):  # what a cluster has stopped that was closed fills the quota, too
        async with CMLCluster(n_workers=2, **options) as smaller:
            assert len(smaller.workers) == 2
