"""The fault matrix: what goes wrong, and that the cluster has what it was asked for in the end.

Of the scheduler's faults, those at the start are in promises/test_start.py, and its loss is in
test_failover.py.
"""

from __future__ import annotations

import asyncio

import dask
import pytest
from clusters import arrived, log_of, simulate, target
from simulated.faults import HTTPError
from simulated.testing import eventually, simulated

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture(autouse=True)
def impatience():
    settings = {
        "distributed.deploy.lost-worker-timeout": "2s",
        "cml.quota-retry": "500ms",
        "cml.api.poll-interval": "200ms",
    }
    with dask.config.set(settings):
        yield


def complete(cluster, n):
    """Whether there are so many sessions, with all their Dask workers."""
    return (
        len(cluster.workers) == len(cluster.worker_spec) == n
        and len(cluster.scheduler_info["workers"]) == n * cluster.options.processes
    )


#: What may become of a session, and what is said of it.
FAULTS = {
    "fails": "lost: it never connected; the platform says failed",
    "succeeds": "lost: it never connected; the platform says succeeded",
    "silent": "lost: it did not connect within 20 s",
    "silent, and evicted": "lost: it never connected; the platform says failed",
}


@simulated
async def test_a_worker_that_does_not_connect_is_replaced(it):
    async with simulate(processes=2, cpu=2, worker_args=[], worker_timeout=20.0) as cluster:
        for n, (fault, words) in enumerate(FAULTS.items(), start=1):
            before = log_of(cluster).count(words)
            it.platform.doom(fault.partition(",")[0])
            cluster.scale(n)
            if "evicted" in fault:
                await eventually(lambda n=n: len(it.platform.running) == n + 1)
                it.platform.evict([*it.platform.running.values()][-1])
            await eventually(lambda words=words, before=before: log_of(cluster).count(words) > before)
            await eventually(lambda n=n: complete(cluster, n))
            # What was given up is stopped.
            await eventually(lambda n=n: len(it.platform.running) == n + 1)


@pytest.mark.slow
@simulated
async def test_what_the_platform_forbids_is_tried_again_with_pauses(it):
    async def scale(n, function):
        asked = it.platform.count(function)
        it.platform.fail(function, *[HTTPError(403)] * 10_000)
        cluster.scale(n)
        await eventually(lambda: it.platform.count(function) > asked)
        await asyncio.sleep(30.0)
        assert it.platform.count(function) - asked <= 15
        it.platform.heal()
        await eventually(lambda: complete(cluster, n))

    async with simulate(n_workers=2) as cluster:
        await eventually(lambda: complete(cluster, 2))
        await scale(3, "launch_workers")
        await scale(1, "stop_workers")


@simulated
async def test_an_exhausted_quota_refuses_few_of_a_hundred_launches(it):
    with dask.config.set({"cml.quota-retry": "1h"}):
        async with simulate() as cluster:
            it.platform.configure({"sessions": 3})
            cluster.scale(100)
            await eventually(lambda: arrived(cluster) == 2)
            assert target(cluster) == 100
            assert it.platform.count("launch_workers") <= 3 + dask.config.get("cml.api.threads")
            assert log_of(cluster).count("launched 2 of 100 workers") == 1
