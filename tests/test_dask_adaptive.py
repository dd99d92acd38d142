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
from clusters import arrived, limits, simulate, target
from distributed import Client
from distributed.deploy.adaptive import Adaptive
from simulated.testing import eventually, simulated

from dask_cml import CMLAdaptive

FAST = {"interval": "1 s", "wait_count": 2}


async def work(seconds, _=None):
    await asyncio.sleep(seconds)
    return seconds


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


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Adaptive, CMLAdaptive])
@simulated
async def test_it_stops_by_itself_before_another_one_and_when_the_cluster_closes(it, cls):
    async with simulate() as cluster, Client(cluster, asynchronous=True) as client:
        first = cluster.adapt(Adaptive=cls, minimum=0, maximum=4, **FAST)
        futures = client.map(work, [60.0] * 100, range(100))
        await eventually(lambda: arrived(cluster) == 4)
        second = cluster.adapt(Adaptive=cls, minimum=0, maximum=3, **FAST)
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 3)
        assert (first.state, first.periodic_callback) == ("stopped", None)
        second.stop()
        second.stop()
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 2)
        await asyncio.sleep(20)
        assert target(cluster) == 2
        del futures
        third = cluster.adapt(Adaptive=cls, maximum=2)
        await eventually(lambda: third.state == "running")
        running = third.periodic_callback
        assert running.is_running()
    assert (third.state, third.periodic_callback) == ("stopped", None)
    assert not running.is_running()


# -- classes of users


def wanting(cls):
    """Return a class of adaptive scaling that wants as many sessions as its user says."""

    class Wanting(cls):
        wanted = 0

        async def target(self):
            return self.wanted

    return Wanting


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "fails"), [(Adaptive, "scale_down"), (CMLAdaptive, "safe_target")])
@simulated
async def test_a_class_of_a_user_has_its_own_target_and_an_error_is_logged_once(it, cls, fails, caplog):
    failures = []

    async def fail(**_):
        failures.append(fails)
        raise OSError("it failed")

    async with simulate() as cluster:
        adaptive = cluster.adapt(Adaptive=wanting(cls), minimum=0, maximum=4, **FAST)
        for n in (3, 9, 2):
            adaptive.wanted = n
            await eventually(lambda n=n: len(cluster.workers) == arrived(cluster) == min(n, 4))
            assert len(adaptive.plan) == min(n, 4)
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
        adaptive.stop()
        adaptive.wanted = 2
        await asyncio.sleep(20)
        assert target(cluster) == 0
