"""Worker sessions that are lost: how the keeper notices it, and what it says."""

from __future__ import annotations

import asyncio

import dask
import pytest
from clusters import arrived, connected, log_of, scheduler_of, simulate, waits
from distributed import Worker
from simulated.faults import CALM, Weather
from simulated.testing import eventually, simulated

from dask_cml.protocol import LAST

PROCESSES = {"processes": 2, "cpu": 2, "worker_args": []}


def end_worker(it, cluster, name):
    """End one Dask worker of a session, which goes on."""
    session = cluster.workers[name.rpartition("-")[0]].session_id
    [worker] = [worker for worker in it.sessions.program(session) if worker.name == name]
    return it.sessions.processes[session].start(worker.close(nanny=False, executor_wait=False))


@pytest.mark.slow
@simulated
async def test_a_session_that_ends_or_waits_and_leaves_the_list_is_replaced(it):
    """Its wait would have no end: somebody has stopped it, and the platform has archived it."""
    it.platform.configure({"sessions": 1}, waits_for_room=True)
    async with simulate(name="mine", n_workers=1) as cluster:
        await eventually(lambda: waits(cluster))
        it.platform.set(cluster.workers["mine-0"].session_id, "stopped", listed=False)
        it.platform.configure()
        await eventually(lambda: connected(cluster) == {"mine-1"}, seconds=120)
        words = "it never connected; the platform says no longer listed"
        assert f"Worker mine-0 lost: {words}; launching a replacement" in log_of(cluster)

        def fail(names):
            raise RuntimeError("it failed")

        await eventually(lambda: cluster.workers["mine-1"].is_listed)
        scheduler_of(it, cluster).handlers["cml_last"] = fail  # it cannot say more of the lost worker
        it.platform.set(cluster.workers["mine-1"].session_id, listed=False)
        it.platform.evict(cluster.workers["mine-1"].session_id)
        await eventually(lambda: connected(cluster) == {"mine-2"}, seconds=120)
        assert "runs" not in log_of(cluster)
        assert "and the platform no longer lists its session" in log_of(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("nanny", "limit"), [("answers", 40), ("is unknown", 40), ("is gone", 5)])
@simulated
async def test_a_dask_worker_may_be_gone_for_as_long_as_at_first_while_its_nanny_lives(it, nanny, limit):
    def fail(names):
        raise RuntimeError("it failed")

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "5s"}):
        async with simulate(name="mine", n_workers=1, worker_timeout=40, **PROCESSES) as cluster:
            await eventually(lambda: arrived(cluster) == 1)
            scheduler = scheduler_of(it, cluster)
            answers = scheduler.aliases["mine-0-0"]  # as any of Dask's servers
            nannies = {"answers": answers, "is unknown": None, "is gone": "tcp://127.0.0.1:1"}
            scheduler.workers[scheduler.aliases["mine-0-1"]].nanny = nannies[nanny]
            if nanny == "is unknown":
                scheduler.handlers["cml_abandoned"] = fail
            await end_worker(it, cluster, "mine-0-1")
            await eventually(lambda: connected(cluster) == {"mine-0-0"})
            await asyncio.sleep(limit - 4)
            assert {*cluster.workers} == {"mine-0"}
            await eventually(lambda: connected(cluster) == {"mine-1-0", "mine-1-1"}, seconds=20.0)
            words = f"lost: a Dask worker has been gone for {limit} s, but its session runs"
            assert log_of(cluster).startswith(f"Worker mine-0 {words}")


@pytest.mark.slow
@simulated
async def test_a_worker_that_has_waited_for_the_scheduler_has_its_time_to_connect(it):
    it.luck.weather = Weather(fates={"waits": 0.0})
    it.platform.doom("waits", key="scheduler")
    cluster = simulate(name="mine", n_workers=1, worker_timeout=10)
    starting = asyncio.ensure_future(cluster)
    await eventually(lambda: "mine-0" in it.platform.running)
    await asyncio.sleep(20)
    it.sessions.processes[it.platform.running["mine-0"]].freeze()  # the first look is earlier than the worker
    it.luck.weather = CALM
    await starting
    async with cluster:
        await asyncio.sleep(8)
        assert {*cluster.workers} == {"mine-0"}
        await eventually(
            lambda: "mine-0 lost: it did not connect within 10 s" in log_of(cluster), seconds=9.0
        )


@pytest.mark.slow
@simulated
async def test_a_worker_that_comes_back_before_its_loss_is_explained_stays(it, monkeypatch):
    async def ask_slowly(op, *arguments, **more):
        answer = await ask(op, *arguments, **more)
        if op == LAST and not asked:
            asked.append(op)
            again = Worker(scheduler_of(it, cluster).address, name="mine-0-1", nthreads=1, dashboard=False)
            await it.sessions.processes[session].start(again.start())
            await eventually(lambda: "mine-0-1" in connected(cluster))
        return answer

    asked = []
    async with simulate(name="mine", n_workers=1, worker_timeout=20, **PROCESSES) as cluster:
        await eventually(lambda: len(connected(cluster)) == 2)
        session, ask = cluster.workers["mine-0"].session_id, cluster._ask_scheduler
        monkeypatch.setattr(cluster, "_ask_scheduler", ask_slowly)
        await end_worker(it, cluster, "mine-0-1")
        await eventually(lambda: asked)
        await asyncio.sleep(30)
        assert log_of(cluster) == ""
        assert [*cluster.worker_spec] == ["mine-0"]
