"""Asynchronous clusters that other threads close, and that close_all() closes."""

from __future__ import annotations

import asyncio
import gc

import pytest
from clusters import live, make, simulate
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import CMLCluster
from dask_cml.core import at_exit
from dask_cml.records import store

pytestmark = pytest.mark.usefixtures("light")

#: Seconds within which everything must have ended.
PATIENCE = 120


@pytest.fixture
def all_closed(platform):
    def all_closed(*clusters, n_sessions):
        assert {cluster.status.name for cluster in clusters} == {"closed"}
        assert len(platform.sessions()) == n_sessions
        assert live(platform) == []
        assert store.records() == []
        assert CMLCluster.open() == []
        assert at_exit.unclosed() == []

    return all_closed


@pytest.mark.slow
async def test_another_thread_closes_the_clusters_of_an_event_loop(all_closed):
    clusters = [await make(n_workers=1), await make()]
    await asyncio.wait_for(asyncio.to_thread(clusters[0].close), PATIENCE)
    await asyncio.wait_for(asyncio.to_thread(dask_cml.close_all), PATIENCE)
    all_closed(*clusters, n_sessions=3)


@pytest.mark.slow
@pytest.mark.parametrize("is_loop_closed", [True, False])
def test_close_all_closes_clusters_whose_event_loop_has_ended(all_closed, is_loop_closed):
    async def main():
        return await make(n_workers=1)

    loop = asyncio.new_event_loop()
    cluster = loop.run_until_complete(main())
    if is_loop_closed:
        loop.close()
    dask_cml.close_all()
    loop.close()
    all_closed(cluster, n_sessions=2)


@pytest.mark.slow
@simulated
async def test_close_all_in_an_event_loop_logs_which_sessions_it_could_not_stop(it, caplog):
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    cluster = await simulate()
    session = cluster.sessions[0].id
    it.platform.answer_stop(*[403] * 1000)
    dask_cml.close_all()
    await eventually(lambda: f"CML did not stop {session}, which may still run" in caplog.text)
    gc.collect()
    assert unretrieved == []
    it.platform.heal()
    dask_cml.close_all()
    await eventually(lambda: cluster.status.name == "closed")
    assert not it.platform.running
