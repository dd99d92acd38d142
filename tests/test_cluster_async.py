"""A cluster in an event loop, as the JupyterLab sidebar uses it."""

from __future__ import annotations

import asyncio
import functools
import threading

import dask
import pytest
from clusters import lines_of, make
from distributed import Client
from distributed.core import Status
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError
from dask_cml.layout import HISTORY_FOLDER
from dask_cml.options import state_directory
from dask_cml.records import store

pytestmark = pytest.mark.usefixtures("light")


async def test_it_computes(platform):
    async with make(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(2)
        assert await client.submit(sum, [1, 2]) == 3
    assert cluster.status == Status.closed


async def test_nothing_is_launched_before_the_await(platform):
    cluster = make(n_workers=1)
    assert cluster.status == Status.created
    assert platform.list_workers() == []
    await cluster
    assert len(platform.list_workers()) == 2
    await cluster.close()


async def test_as_the_sidebar_does(platform, holds):
    cluster = await CMLCluster(platform="local", asynchronous=True)
    cluster.scale(2)
    await holds(lambda: len(cluster.scheduler_info["workers"]) == 2)
    for worker in cluster.scheduler_info["workers"].values():
        assert worker["memory_limit"] == int(cluster.options.worker_memory * 2**30)
        assert worker["nthreads"] == 1
    cluster.adapt(minimum=0, maximum=1, interval="100 ms", wait_count=1)
    await holds(lambda: not cluster.scheduler_info["workers"])
    await cluster.close()
    assert cluster.status == Status.closed


async def test_scale_can_be_awaited(platform):
    async with make() as cluster:
        await cluster.scale(1)
        await cluster
        assert len(cluster.workers) == 1


async def test_scale_down_takes_names_of_workers(platform, holds):
    async with make(n_workers=2, cpu=2, processes=2, worker_args=[]) as cluster:
        await holds(lambda: len(cluster.scheduler_info["workers"]) == 4)
        await cluster.scale_down([f"{cluster.name}-0-1"])
        await holds(lambda: set(cluster.workers) == {f"{cluster.name}-1"})
        await holds(lambda: len(cluster.scheduler_info["workers"]) == 2)


async def test_close_twice_and_at_once(platform):
    cluster = await make(n_workers=1)
    await asyncio.gather(cluster.close(), cluster.close())
    await cluster.close()
    assert cluster.status == Status.closed


async def test_an_unstarted_cluster_can_be_closed(platform):
    cluster = make(n_workers=1)
    await cluster.close()
    assert cluster.status == Status.closed
    assert platform.list_workers() == []


async def test_a_closed_cluster_does_not_start_again(platform):
    cluster = await make()
    await cluster.close()
    with pytest.raises(CMLError, match="closed"):
        await cluster


@simulated
async def test_a_start_that_nobody_can_await_any_more_ends_without_an_error(it):
    """As at the interpreter's exit, when the event loop has ended."""
    mine = CMLCluster(n_workers=1, asynchronous=True, quiet=True, security=False)
    starting = mine.manager.start()
    starting.send(None)
    await eventually(lambda: it.platform.live)
    await asyncio.to_thread(starting.close)  # a thread has no event loop
    await mine.close()
    assert it.platform.live == []


async def test_close_during_the_start(platform, holds):
    platform.inject("stuck", times=3)
    cluster = make(n_workers=2)
    start = asyncio.ensure_future(cluster)
    await holds(lambda: len(platform.sessions()) == 3)
    await cluster.close()
    with pytest.raises(CMLError, match="closed while it started"):
        await start


async def test_close_while_the_name_is_claimed_leaves_no_record(platform, holds, monkeypatch):
    claim, claiming, closing = store.claim, threading.Event(), threading.Event()

    def slow_claim(*arguments):
        claiming.set()
        assert closing.wait(120)
        return claim(*arguments)

    monkeypatch.setattr(store, "claim", slow_claim)
    cluster = make()
    start = asyncio.ensure_future(cluster)
    assert await asyncio.to_thread(claiming.wait, 120)
    close = asyncio.ensure_future(cluster.close())
    await holds(lambda: cluster.status == Status.closing)
    closing.set()
    await close
    with pytest.raises(CMLError, match="closed while it started"):
        await start
    assert [each.name for each in state_directory().iterdir()] == [HISTORY_FOLDER]
    assert platform.sessions() == []


async def test_a_cancelled_start_leaves_no_session(platform, holds):
    platform.inject("stuck", times=2)
    start = asyncio.ensure_future(make(n_workers=1))
    await holds(lambda: len(platform.sessions()) == 2)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


async def test_close_during_scale(platform, holds):
    cluster = await make()
    platform.configure(latency=0.2)
    cluster.scale(3)
    await holds(lambda: len(platform.sessions()) > 1)
    await asyncio.wait_for(cluster.close(), 120)
    assert cluster.status == Status.closed


async def test_close_with_a_dead_scheduler(platform, holds):
    cluster = await make(n_workers=1)
    await holds(lambda: cluster.scheduler_info["workers"])
    platform.evict(cluster.sessions[0].id)
    await cluster.close()
    assert cluster.status == Status.closed


async def test_a_cluster_whose_scheduler_is_gone_ends_and_says_so(platform, holds):
    with dask.config.set({"cml.scheduler-restarts": 0}):
        cluster = await make(n_workers=1)
        session = cluster.sessions[0].id
        platform.evict(session)
        await holds(lambda: cluster.status == Status.closed)
    assert session in lines_of(cluster)[-1]


@pytest.mark.slow
async def test_an_idle_cluster_ends(platform, holds):
    cluster = await make(n_workers=1, idle_timeout="5s")
    await holds(lambda: cluster.status == Status.closed)


async def test_an_exception_in_the_block_closes_the_cluster(platform):
    with pytest.raises(ZeroDivisionError):
        async with make(n_workers=1) as cluster:
            1 / 0  # noqa: B018
    assert cluster.status == Status.closed


async def test_the_loop_is_never_blocked_by_a_call_of_the_api(platform, holds, monkeypatch):
    threads = set()

    def noted(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            threads.add(threading.current_thread())
            return function(*args, **kwargs)

        return call

    for name in ("launch_workers", "list_workers", "stop_workers"):
        monkeypatch.setattr(platform, name, noted(getattr(platform, name)))
    async with make(n_workers=2) as cluster:
        cluster.scale(1)
        await holds(lambda: len(cluster.workers) == 1)
    assert threads
    assert threading.current_thread() not in threads
