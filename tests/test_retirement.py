"""Workers that cannot hand over what they hold."""

from __future__ import annotations

import time
from types import SimpleNamespace

import dask
import pytest
from clusters import target
from distributed import Client
from fleets import Cluster

from dask_cml import CMLCluster
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.retirement import Retirements


class Scheduler:
    """Answers about two sessions, of which the second one holds data that no other worker can take."""

    def __init__(self, cluster):
        self._cluster = cluster

    async def retire(self, names):
        return set()

    async def held(self, names):
        return {"mine-1": {"last_seen": 1, "nbytes": 10}}

    async def decide(self, op, **arguments):
        result = getattr(self._cluster.wanted, op)("m1", **arguments)
        self._cluster.answer()
        return result


class Reset(Scheduler):
    async def retire(self, names):
        raise ConnectionResetError("the other side closed the connection")


class Silent(Scheduler):
    async def held(self, names):
        raise TimeoutError


class Scaled(Scheduler):
    async def retire(self, names):
        self._cluster.want("scale", "default", 2)
        return set()


@pytest.mark.parametrize("scheduler", [Scheduler, Reset, Silent, Scaled])
async def test_a_session_is_not_stopped_while_it_may_hold_data_that_no_worker_has_taken(scheduler):
    cluster = Cluster(2)
    cluster.launch("mine-0", "mine-1")
    cluster.connect("mine-1")
    cluster.want("scale", "default", 1)
    cluster.wanted.trim("m1", "default", ["mine-1"])
    cluster.answer()
    for worker in cluster.fleet.workers.values():
        worker.update = lambda listing: False

    async def sessions():
        return {}

    state = SimpleNamespace(
        fleet=cluster.fleet, client=scheduler(cluster), api=SimpleNamespace(sessions=sessions), log=print
    )
    retirements = Retirements(state, lambda: None)
    assert await retirements.carry_on() == []
    await retirements.close()


@pytest.fixture
def looks(monkeypatch):
    """A list that gets longer with each look at the workers."""
    looks, look = [], Reconciler._look

    async def counted(self):
        looks.append(1)
        return await look(self)

    monkeypatch.setattr(Reconciler, "_look", counted)
    return looks


@pytest.mark.slow
def test_a_session_that_keeps_one_of_its_workers_is_not_lost(platform, light, looks, until):
    """The scheduler retires the other one, and Dask moves no actors."""

    class Counter:
        n = 0

        def add(self, k):
            self.n += k
            return self.n

    patience = dask.config.set({"distributed.deploy.lost-worker-timeout": "300ms"})
    options = {"cpu": 2, "processes": 2, "worker_args": [], "platform": "local", "quiet": True}
    with patience, CMLCluster(n_workers=2, name="mine", **options) as cluster, Client(cluster) as client:
        client.wait_for_workers(4, timeout=120)
        counters = [
            client.submit(Counter, actor=True, workers=[name], pure=False).result(120)
            for name in ("mine-0-0", "mine-1-0")
        ]
        cluster.scale(1)
        until(lambda: "kept: no other worker can take its data" in str(cluster.get_logs()["Cluster"]))
        until(lambda: len(cluster.scheduler_info["workers"]) == 3 and target(cluster) == 2)
        later = time.monotonic() + 1
        until(lambda: time.monotonic() > later)
        seen = len(looks)
        until(lambda: cluster.sync(cluster.manager.wishes.settle) or len(looks) > seen + 2)
        assert "failed" not in cluster.get_logs()["Cluster"]
        assert sorted(cluster.workers) == ["mine-0", "mine-1"]
        assert target(cluster) == 2
        assert cluster.manager.state.problem is None
        assert len(platform.sessions()) == 3
        assert [counter.add(1).result(120) for counter in counters] == [1, 1]


@pytest.mark.slow
def test_a_kept_session_that_lacks_a_worker_is_replaced_when_others_can_take_its_data(platform, light, until):
    patience = dask.config.set({"distributed.deploy.lost-worker-timeout": "300ms"})
    options = {"cpu": 2, "processes": 2, "worker_args": [], "platform": "local", "quiet": True}
    with patience, CMLCluster(n_workers=1, name="mine", **options) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        data = client.submit(lambda: [1, 2], workers=["mine-0-1"], pure=False)
        assert data.result(120) == [1, 2]
        until(lambda: not cluster.n_pending)
        client.retire_workers(names=["mine-0-0"])
        until(lambda: "Worker mine-0 kept: no other worker" in str(cluster.get_logs()["Cluster"]))
        until(lambda: "mine-0" not in cluster.workers)
        until(lambda: len(cluster.scheduler_info["workers"]) == 2 * target(cluster) == 4)
        assert data.result(120) == [1, 2]
