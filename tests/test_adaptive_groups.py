"""Several worker groups that adapt at once, on real sessions."""

from __future__ import annotations

import pytest
from clusters import simulate
from distributed import Client, Event, get_worker
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster

pytestmark = pytest.mark.usefixtures("platform", "light")

GROUPS = {"name": "mine", "worker_groups": {"gpu": {"nvidia_gpu": 1, "cpu": 2}}}
FAST = {"interval": "100 ms", "wait_count": 2}


@pytest.fixture
def where():
    """A task that says on which Dask worker it runs. Workers do not have this module."""

    def where(_):
        return get_worker().name

    return where


@pytest.fixture
def cluster():
    with CMLCluster(platform="local", quiet=True, **GROUPS) as made:
        yield made


@pytest.fixture
def client(cluster):
    with Client(cluster) as connected:
        yield connected


def launched(it, group):
    """How many sessions of a group were ever launched."""
    return sum(session.key.rpartition("-")[0] == group for session in it.platform.all.values())


@simulated
async def test_from_nothing_tasks_bring_sessions_of_the_group_that_they_need(it, where):
    async with simulate(**GROUPS) as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 1)
        cluster.adapt(0, 2, worker_group="gpu")
        futures = client.map(where, range(12), resources={"GPU": 1})
        assert {name.rpartition("-")[0] for name in await client.gather(futures)} == {"mine-gpu"}
        assert launched(it, "mine") == 0
        del futures
        await eventually(lambda: not cluster.worker_spec and not cluster.workers)
        gpus = launched(it, "mine-gpu")
        futures = client.map(where, range(12, 24))
        assert {*await client.gather(futures)} == {"mine-0"}
        assert launched(it, "mine-gpu") == gpus
        del futures
        await eventually(lambda: not cluster.worker_spec and not cluster.workers)


@pytest.mark.slow
def test_groups_adapt_at_once_and_a_fixed_one_stays(cluster, client, where, until):
    cluster.add_worker_group("big", n_workers=1, resources={"DISK": 2})
    cluster.adapt(0, 1, **FAST)
    cluster.adapt(0, 1, worker_group="gpu", **FAST)
    until(lambda: cluster.observed == {"mine-big-0"})
    go = Event("go")
    plain = client.map(lambda _: Event("go").wait(), range(4))
    gpu = client.map(where, range(4), resources={"GPU": 1})
    disk = client.map(where, range(4, 8), resources={"DISK": 1})
    assert {*client.gather(gpu)} == {"mine-gpu-0"}
    until(lambda: "mine-0" in cluster.observed)
    go.set()
    assert {*client.gather(disk)} == {"mine-big-0"}
    assert client.gather(plain) == [True] * 4
    del gpu, disk, plain
    until(lambda: {*cluster.workers} == {"mine-big-0"})
