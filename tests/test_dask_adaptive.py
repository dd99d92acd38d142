"""What Dask's tests expect of adaptive scaling holds for a cluster on sessions, with real schedulers.

On purpose, these differ from Dask's:

- `CMLAdaptive` counts sessions: also its log, its plan and its limits.
- Its target is not that of ``Scheduler.adaptive_target``. It asks for what the known work is worth.
- Each `adapt()` begins with the defaults. A cluster of Dask keeps ``interval`` and others of the call before.
- It does not call the cluster's `scale`, which ends adaptive scaling. Dask's own class does.
- The cluster holds what adapts it until it stops. Dask's ends when ``cluster._adaptive`` is overwritten.
- Its end is not logged. Its representation and the cluster's show whether the cluster adapts.
"""

from __future__ import annotations

import asyncio
import math

import dask
import pytest
from clusters import arrived, limits, scheduler_of, simulate, target
from distributed import Client
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from simulated.testing import eventually, simulated
from test_spec_cluster import Named

from dask_cml import CMLAdaptive, CMLCluster

FAST = {"interval": "1 s", "wait_count": 2}


async def work(seconds, _=None):
    await asyncio.sleep(seconds)
    return seconds


def statuses(adaptive):
    return [entry["status"] for _, entry in adaptive.log]


# -- how many


@pytest.mark.parametrize("cls", [CMLCluster, Named])
@simulated
async def test_sessions_come_for_work_and_go_after_it(it, cls):
    async with simulate(cls) as cluster, Client(cluster, asynchronous=True) as client:
        adaptive = cluster.adapt(0, 5, **FAST)
        for _ in range(2):
            futures = client.map(work, [30.0] * 3, range(3))
            assert await asyncio.wait_for(client.gather(futures), 300) == [30.0] * 3
            del futures
            await eventually(lambda: not cluster.workers)
            await asyncio.sleep(20)
            assert not cluster.worker_spec
        assert len(it.platform.all) == 7
        assert statuses(adaptive)[-2:] == ["up", "down"]
        assert statuses(adaptive).count("down") == 2


@simulated
async def test_minimum_and_maximum_bound_the_number(it):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        adaptive = cluster.adapt(minimum=1, maximum=2, **FAST)
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(20)
        assert len(cluster.workers) == 1
        futures = client.map(work, [5.0] * 100, range(100))
        await eventually(lambda: arrived(cluster) == 2)
        await asyncio.sleep(20)
        assert len(cluster.workers) == len(cluster.worker_spec) == 2
        del futures
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 1)
        assert statuses(adaptive) == ["up", "down"]


@simulated
async def test_a_pause_between_tasks_ends_no_session(it):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        adaptive = cluster.adapt(0, 5, interval="1 s", wait_count=5)
        for i in range(10):
            await asyncio.wait_for(client.submit(work, 2.0, i), 60)
            await asyncio.sleep(2)
        assert statuses(adaptive) == ["up"]
        assert len(it.platform.all) == 2


@simulated
async def test_many_tasks_bring_many_sessions_and_a_chain_of_tasks_one(it):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 10, **FAST)
        futures = client.map(work, [60.0] * 100, range(100))
        await eventually(lambda: arrived(cluster) == 10)
        del futures
        await eventually(lambda: not cluster.workers)
        last = client.submit(work, 1.0)
        for i in range(40):
            last = client.submit(work, 1.0, [last, i])
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(20)
        assert len(cluster.workers) == 1


@simulated
async def test_a_lower_maximum_ends_sessions(it):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 5, **FAST)
        futures = client.map(work, [60.0] * 100, range(100))
        await eventually(lambda: arrived(cluster) == 5)
        cluster.adapt(0, 2, **FAST)
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 2)
        del futures


@simulated
async def test_a_lost_session_is_replaced_for_its_task(it):
    async with simulate(name="mine") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(1, 1, **FAST)
        await eventually(lambda: arrived(cluster) == 1)
        future = client.submit(work, 30.0)
        await eventually(lambda: scheduler_of(it, cluster).total_occupancy > 0)
        it.platform.evict(cluster.workers["mine-0"].session_id)
        assert await asyncio.wait_for(future, 300) == 30.0
        assert {*cluster.workers} == {"mine-1"}


# -- begin and end


@simulated
async def test_the_configuration_has_the_defaults_of_a_class(it):
    given = {"minimum": 10, "wait-count": 8, "interval": "5s", "target-duration": "9s"}
    with dask.config.set({f"distributed.adaptive.{key}": value for key, value in given.items()}):
        async with simulate() as cluster:
            for cls in Adaptive, CMLAdaptive:
                adaptive = cls(cluster)
                assert (adaptive.minimum, adaptive.maximum, adaptive.wait_count) == (10, math.inf, 8)
                assert (adaptive.interval, adaptive.target_duration) == (5, 9)
                adaptive.stop()
            assert (cluster.adapt(maximum=20).minimum, limits(cluster)) == (0, (0, 20))


@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_adapting_again_and_closing_stop_what_adapted_before(it, cls):
    async with simulate() as cluster:
        first = cluster.adapt(Adaptive=cls, maximum=1)
        await eventually(lambda: first.state == "running")
        second = cluster.adapt(Adaptive=cls, maximum=2)
        await eventually(lambda: second.state == "running")
        assert (first.state, first.periodic_callback) == ("stopped", None)
        running = second.periodic_callback
        assert running.is_running()
    assert (second.state, second.periodic_callback) == ("stopped", None)
    assert not running.is_running()


@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_after_its_stop_the_cluster_is_scaled_by_hand(it, cls):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        adaptive = cluster.adapt(Adaptive=cls, minimum=0, maximum=4, **FAST)
        futures = client.map(work, [60.0] * 100, range(100))
        await eventually(lambda: arrived(cluster) == 4)
        adaptive.stop()
        adaptive.stop()
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 2)
        await asyncio.sleep(20)
        assert target(cluster) == 2
        del futures


@simulated
async def test_dasks_own_class_stops_when_the_cluster_does_not_run_any_more(it):
    async with simulate() as cluster:
        adaptive = Adaptive(cluster, interval="1 s")
        assert adaptive.state == "starting"
        await eventually(lambda: adaptive.state == "running")
        cluster.status = Status.closing
        await eventually(lambda: adaptive.state == "stopped")
        assert adaptive.periodic_callback is None
        cluster.status = Status.running


# -- classes of users


def wanting(cls):
    """Return a class of adaptive scaling that wants as many sessions as its user says."""

    class Wanting(cls):
        wanted = 0

        async def target(self):
            return self.wanted

    return Wanting


@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_a_class_of_a_user_has_its_own_target(it, cls):
    async with simulate() as cluster:
        adaptive = cluster.adapt(Adaptive=wanting(cls), minimum=0, maximum=4, **FAST)
        for n in (3, 1, 9):
            adaptive.wanted = n
            await eventually(lambda n=n: len(cluster.workers) == arrived(cluster) == min(n, 4))
            assert len(adaptive.plan) == min(n, 4)
        adaptive.stop()
        adaptive.wanted = 2
        await asyncio.sleep(20)
        assert target(cluster) == 4


@pytest.mark.parametrize("fails", ["safe_target", "scale_down"])
@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_an_error_of_a_users_class_is_logged_once_and_ends_nothing(it, cls, fails, caplog):
    failures = []

    async def fail(**_):
        failures.append(fails)
        raise OSError("it failed")

    async with simulate() as cluster:
        adaptive = cluster.adapt(Adaptive=wanting(cls), minimum=0, maximum=4, **FAST)
        adaptive.wanted = 2
        await eventually(lambda: arrived(cluster) == 2)
        setattr(adaptive, fails, fail)
        adaptive.wanted = 0
        await eventually(lambda: len(failures) > 3)
        assert "it failed" in caplog.text
        if cls is CMLAdaptive:  # Dask's class logs by itself
            assert caplog.text.count("Adaptive scaling of cluster") == 1
        assert adaptive.state == "running"
        assert adaptive.periodic_callback.is_running()
        delattr(adaptive, fails)
        await eventually(lambda: not cluster.workers)


class Awaited(CMLCluster):
    """A cluster whose `scale` must be awaited."""

    def scale(self, *arguments, **options):
        scale = super().scale

        async def later():
            return scale(*arguments, **options)

        return self.sync(later)


@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_a_cluster_adapts_whose_scale_must_be_awaited(it, cls):
    async with simulate(Awaited) as cluster:
        adaptive = cluster.adapt(Adaptive=wanting(cls), minimum=0, maximum=4, **FAST)
        adaptive.wanted = 2
        await eventually(lambda: arrived(cluster) == 2)
        adaptive.wanted = 0
        await eventually(lambda: not cluster.workers)
