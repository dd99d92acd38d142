"""What a scheduler answers to the process that keeps its cluster."""

from __future__ import annotations

import asyncio

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import rpc
from schedulers import prepare, scheduler_in

from dask_cml.sessions.plan import PRELOAD

WITHOUT_DASHBOARD = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


@pytest.fixture
async def scheduler(tmp_path):
    async with scheduler_in(prepare(tmp_path / "mine")) as running:
        yield running


@pytest.fixture
async def comm(scheduler):
    async with rpc(scheduler.address) as connected:
        yield connected


def worker(scheduler, name):
    return Worker(scheduler.address, name=name, nthreads=1, **WITHOUT_DASHBOARD)


async def test_it_counts_the_sessions_of_its_cluster(scheduler, comm):
    async with worker(scheduler, "mine-0"), worker(scheduler, "mine-gpu-0"), worker(scheduler, "other"):
        answer = await comm.cml_demand()
    assert {group: about["sessions"] for group, about in answer["groups"].items()} == {"default": 1, "gpu": 1}


async def test_a_client_that_waits_in_scatter_counts_as_a_task(scheduler, comm, holds):
    async with Client(scheduler.address, asynchronous=True) as client:
        scattering = asyncio.ensure_future(client.scatter([1, 2, 3], timeout=60))

        async def waits():
            return [(work["tasks"], work["resources"]) for work in (await comm.cml_demand())["work"]]

        while await waits() != [(1, {})]:
            await asyncio.sleep(0.01)
        async with worker(scheduler, "mine-0"):
            assert await client.gather(await scattering) == [1, 2, 3]
            assert await waits() == []
        with pytest.raises(TimeoutError):
            await client.scatter([4], timeout=0.2)
        assert await waits() == []


async def test_without_a_record_a_worker_whose_session_gets_notice_moves_its_data_too():
    async with (
        Scheduler(port=0, preload=[PRELOAD], **WITHOUT_DASHBOARD) as running,
        worker(running, "mine-0") as first,
        Client(running.address, asynchronous=True) as client,
        rpc(running.address) as comm,
    ):
        futures = await client.scatter([1, 2, 3])
        async with worker(running, "mine-1"):
            await comm.cml_notice(names=["mine-0", "gone"])
            await asyncio.wait_for(first.finished(), 60)
            assert await client.gather(futures) == [1, 2, 3]
