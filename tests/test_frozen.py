"""Workers and nodes that fall silent: nobody waits for them who need not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import dask
import pytest
from clusters import arrived, log_of, make, rebuild, simulate, target
from distributed import Client, wait
from simulated.testing import eventually, simulated
from testbed import networks

from dask_cml import CMLCluster
from dask_cml.protocol import HELD
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


def session_of(cluster, key):
    return cluster.workers[key].session_id


@pytest.mark.slow
@simulated
async def test_a_frozen_worker_that_is_retired_delays_no_other(it, monkeypatch):
    monkeypatch.setattr(timing, "long_retirement", 0.5)
    with dask.config.set({"cml.retire-timeout": "1 hour"}):
        cluster = await simulate(n_workers=2)
    async with cluster, Client(cluster, asynchronous=True) as client:
        await eventually(lambda: arrived(cluster) == 2)
        frozen = f"{cluster.name}-0"
        session = session_of(cluster, frozen)
        held = await client.scatter([1, 2, 3], workers=[frozen])
        it.sessions.processes[session].freeze()
        await cluster.scale_down([frozen])
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
        line = f"waiting for other workers to copy the data of {frozen}"
        await eventually(
            lambda: line in log_of(cluster) and f"waiting for the data of {frozen}" in repr(cluster)
        )
        async with rebuild(cluster.name) as other:
            await other.scale(3)
            await eventually(lambda: target(other) == 3)
        await eventually(
            lambda: frozen not in cluster.worker_spec and arrived(cluster) == target(cluster) == 3
        )
        assert frozen in cluster.workers
        assert session in it.platform.running.values()
        assert len(held) == 3
        await asyncio.wait_for(cluster.close(), 120)
    assert not it.platform.running


class SlowToRead:
    """A result that nobody else has read before a file is there."""

    def __init__(self, made: Path, gate: Path) -> None:
        self.made, self.gate = made, gate
        with made.open("a") as file:
            file.write("once\n")

    def __setstate__(self, state):
        self.__dict__.update(state)
        while not self.gate.exists():
            time.sleep(0.05)


@pytest.mark.slow
async def test_a_cluster_waits_for_a_worker_that_moves_its_data_slowly(
    platform, holds, tmp_path, monkeypatch
):
    heard = []
    ask = CMLCluster._ask_scheduler

    async def counted(self, op, *arguments, **more):
        answer = await ask(self, op, *arguments, **more)
        if op == HELD:
            heard.append(answer)
        return answer

    monkeypatch.setattr(CMLCluster, "_ask_scheduler", counted)
    with dask.config.set({"cml.retire-timeout": "8s"}):
        cluster = await make(n_workers=2, env={"PYTHONPATH": str(Path(__file__).parent)})
    made, gate = tmp_path / "made", tmp_path / "gate"
    async with cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: arrived(cluster) == 2)
        slow = f"{cluster.name}-0"
        future = client.submit(SlowToRead, made, gate, workers=[slow], allow_other_workers=True)
        await wait(future)  # this process would read it, too
        await cluster.scale_down([slow])
        await holds(lambda: len(heard) == 2)
        assert slow in cluster.workers
        gate.touch()
        await holds(lambda: slow not in cluster.workers)
        assert "abandoned" not in log_of(cluster)
        assert (await client.gather(future)).made == made
    assert made.read_text() == "once\n"


@pytest.mark.slow
async def test_a_worker_whose_node_fails_silently_is_dropped_and_replaced(namespaces, holds):
    # So long nothing else tells anybody that the node is lost.
    hour = {
        f"DASK_DISTRIBUTED__{name}": "1 hour" for name in ("COMM__TIMEOUTS__TCP", "SCHEDULER__WORKER_TTL")
    }
    async with make(n_workers=2, env=hour) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: arrived(cluster) == 2)
        lost = f"{cluster.name}-0"
        future = client.submit(sum, [1, 2], workers=[lost], allow_other_workers=True)
        await future
        networks.cut(session_of(cluster, lost))
        await asyncio.to_thread(namespaces.evict, session_of(cluster, lost))
        await holds(lambda: arrived(cluster) == 2 and lost not in cluster.observed)
        assert f"Worker {lost} lost: evicted or killed by the platform" in log_of(cluster)
        assert lost not in {
            worker["name"] for worker in (await client.scheduler.identity())["workers"].values()
        }
        assert await client.gather(future) == 3
