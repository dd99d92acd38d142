"""A process in the scheduler's session keeps a cluster that is left alone, until a process of a user can."""

import asyncio
import time

import pytest
from clusters import NIGHT, is_keeper, leave_alone, observe, rebuild, shut_down, simulate, take_name
from simulated.testing import eventually, simulated

from dask_cml import protocol
from dask_cml.protocol import Rank
from dask_cml.records import store
from dask_cml.scheduler import resident
from dask_cml.scheduler.resident import WHO, keep
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


def state():
    return store.read("night").scheduler


def connected():
    return state().workers.workers


@simulated
async def test_a_cluster_that_is_left_alone_replaces_a_worker_at_once_that_leaves_with_notice(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: state().manager == WHO and state().rank is Rank.RESIDENT)
    [scheduler] = it.sessions.program(it.platform.running["night-scheduler"])
    scheduler.handlers[protocol.NOTICE](names=["night-0"])
    begin = time.monotonic()
    await eventually(lambda: not connected())
    await eventually(lambda: connected() == 1)
    assert time.monotonic() - begin < 15.0
    await shut_down()
    await keep("night", asyncio.Event())  # one that begins too late ends by itself
    assert not it.platform.live


@simulated
async def test_a_queued_worker_that_starts_and_never_connects_is_replaced_although_nobody_lists_it(it):
    async with simulate(**NIGHT, worker_timeout=30) as cluster:
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        cluster.scale(1)
        await asyncio.sleep(15.0)
    await eventually(lambda: state().manager == WHO)
    [queued] = [session.id for session in it.platform.live_sessions if session.key == "night-0"]
    await asyncio.sleep(120.0)
    await asyncio.to_thread(take_name, store.read("night"), queued, time.time())
    it.platform.evict(queued)
    it.platform.configure()
    await eventually(lambda: "night-1" in it.platform.running, 60.0)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_a_cluster_that_cannot_keep_itself_says_so_and_tries_again_later(it, monkeypatch, caplog):
    async def fail(*_):
        starts.append(None)
        if len(starts) == 1:
            return 1
        raise RuntimeError("can't start new thread")

    starts, run = [], resident.run
    monkeypatch.setattr(resident, "run", fail)
    await leave_alone(it)
    words = "adapts, because its own process in its scheduler's session failed with"
    await eventually(lambda: f"{words} exit status 1" in (state().workers.problem or ""))
    await asyncio.sleep(60.0)
    assert 2 <= len(starts) <= 3
    assert f'{words} RuntimeError("can\'t start new thread")' in state().workers.problem
    shown = await observe("night")
    assert shown.problem == state().workers.problem
    assert caplog.text.count("Cluster night not managed by this session: exit status 1") == 1
    monkeypatch.setattr(resident, "run", run)
    await eventually(lambda: state().manager == WHO)
    await eventually(lambda: shown.problem is state().workers.problem is None)
    await shown.close()
    async with rebuild("night") as cluster:
        await eventually(lambda: is_keeper(cluster))
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_a_keeper_that_hangs_is_replaced_at_once_if_a_notebook_has_kept_the_cluster_meanwhile(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: state().manager == WHO)
    for n, is_kept in enumerate((False, True)):
        [resident] = [process for process in it.processes if process.name[:8] == "resident" and process.runs]
        resident.freeze()
        if is_kept:
            async with rebuild("night") as cluster:
                await eventually(lambda: is_keeper(cluster))
                await asyncio.sleep(2 * timing.silence)
        begin = time.monotonic()
        it.platform.evict(it.platform.running[f"night-{n}"])
        if not is_kept:
            await eventually(lambda: "no answer within 120 s" in (state().workers.problem or ""), 300.0)
        await eventually(lambda n=n: f"night-{n + 1}" in it.platform.running and connected() == 1, 300.0)
        assert time.monotonic() - begin < (60.0 if is_kept else 300.0)
        await eventually(lambda: state().workers.problem is None)
    await shut_down()
