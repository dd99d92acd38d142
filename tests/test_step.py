"""What the user asked for last is what the keeper's steps make of the cluster, whatever happens meanwhile."""

import asyncio
import time
from types import SimpleNamespace
from unittest import mock

import dask
import pytest
from clusters import (
    arrived,
    launch_late,
    log_of,
    make,
    rebuild,
    simulate,
    step_in,
    step_out,
    supplied,
    target,
)
from distributed import Client, Worker
from simulated import running
from simulated.faults import HTTPError, Mishap
from simulated.testing import eventually, simulated

from dask_cml import CMLError, LaunchRefused
from dask_cml.core.workers import Workers
from dask_cml.private_files import read_file
from dask_cml.records import store
from dask_cml.sessions import process
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


def has(cluster, n):
    workers = cluster.scheduler_info["workers"]
    return len(cluster.worker_spec) == len(cluster.workers) == arrived(cluster) == len(workers) == n


def is_well(cluster):
    return "failed" not in log_of(cluster) and "problem" not in repr(cluster)


@simulated
async def test_scale_ends_adapting_whose_launches_are_under_way_or_refused(it):
    async with simulate() as cluster:
        cluster.adapt(minimum=3, maximum=3, interval="1s")
        with it.platform.held("launch_workers"):
            await eventually(lambda: it.platform.under_way)
            it.platform.configure({"sessions": 2})
            cluster.scale(1)
            await asyncio.sleep(10)
        await eventually(lambda: has(cluster, 1) and len(it.platform.live) == 2)
        await asyncio.sleep(10)
        assert has(cluster, 1)
        assert target(cluster) == 1


@simulated
async def test_workers_that_a_user_restarts_are_replaced_and_no_failure(it):
    async with supplied(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        before = {*cluster.workers}
        # It closes workers that have no nanny, and waits for as many others.
        await client.restart(timeout=120)
        await eventually(lambda: has(cluster, 2))
        assert not before & {*cluster.workers}
        assert await client.submit(sum, [1, 2]) == 3
        assert is_well(cluster)


@simulated
async def test_an_error_of_our_own_while_the_user_is_told_something_delays_no_launch(it):
    async with supplied(name="mine", n_workers=1) as cluster:
        step_in(cluster, "tells its user", lambda: 1 / 0)
        it.platform.evict(it.platform.running["mine-0"])
        await eventually(lambda: "mine-1" in it.platform.running)
        assert cluster.problem.startswith("cannot manage the cluster: ZeroDivisionError")
        step_out(cluster, "tells its user")
        await eventually(lambda: cluster.problem is None)


@simulated
async def test_a_launch_that_hangs_delays_no_other_launch_no_look_for_losses_and_no_stop(it):
    async with supplied(name="mine", n_workers=1) as cluster:
        with it.platform.hangs("launch_workers"):
            cluster.scale(2)
            await eventually(lambda: it.platform.count("launch_workers") == 3)
            it.platform.evict(it.platform.running["mine-0"])
            await eventually(lambda: "Worker mine-0 lost" in log_of(cluster), seconds=20.0)
            cluster.scale(3)
            await eventually(lambda: arrived(cluster) == 2, seconds=20.0)
        await eventually(lambda: has(cluster, 3))
        with it.platform.hangs("launch_workers", times=1000):
            cluster.scale(40)  # more than are launched at once
            await eventually(lambda: it.platform.count("launch_workers") > 15)
            cluster.scale(0)
            await eventually(lambda: len(it.platform.running) == 1, seconds=20.0)
            assert it.platform.under_way
        await eventually(lambda: has(cluster, 0) and len(it.platform.live) == 1)


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


@simulated
async def test_a_worker_that_nobody_wants_when_its_launch_is_answered_is_stopped(it):
    async with simulate() as cluster:
        for n, after in enumerate((False, True), 1):
            with it.platform.hangs("launch_workers", after=after):
                cluster.scale(1)
                await eventually(lambda n=n: it.platform.count("launch_workers") == 1 + n)
                cluster.scale(0)
                await asyncio.sleep(10.0)
            await eventually(lambda n=n: len(it.platform.all) > n)
            await eventually(lambda: has(cluster, 0) and len(it.platform.live) == 1)


@simulated
async def test_a_stop_that_hangs_or_is_refused_delays_no_launch_and_both_are_tried_again_with_pauses(it):
    async with supplied(n_workers=1) as cluster:
        before = it.platform.count("launch_workers")
        it.platform.fail("launch_workers", *[HTTPError(403)] * 10_000)
        cluster.scale(2)
        await eventually(lambda: it.platform.count("launch_workers") > before)
        await asyncio.sleep(30.0)
        assert it.platform.count("launch_workers") - before <= 15
        it.platform.heal()
        await eventually(lambda: has(cluster, 2))
        with it.platform.held("stop_workers"):
            cluster.scale(1)
            await eventually(lambda: it.platform.under_way)
            cluster.scale(2)
            await eventually(lambda: arrived(cluster) == 2)
        await eventually(lambda: has(cluster, 2))
        it.platform.answer_stop(*[403] * 1000)
        before = it.platform.count("stop_workers")
        cluster.scale(1)
        await eventually(lambda: it.platform.count("stop_workers") > before)
        cluster.scale(3)
        await eventually(lambda: arrived(cluster) == 3)
        assert "problem: CML did not stop" in repr(cluster)
        before = it.platform.count("stop_workers")
        await asyncio.sleep(30.0)
        assert 5 < it.platform.count("stop_workers") - before < 15
        it.platform.heal()
        await eventually(lambda: has(cluster, 3))


@simulated
async def test_a_cluster_that_ends_while_it_is_entered_says_so(it):
    creator = await simulate(name="mine", n_workers=1)
    for cluster in await rebuild("mine"), creator:
        closing = asyncio.create_task(cluster.close())
        with pytest.raises(CMLError, match="not connected: cluster mine is clos"):
            await asyncio.create_task(cluster.__aenter__())  # its step has not begun when the cluster closes
        await closing


@simulated
async def test_no_step_outlasts_the_cluster_and_no_request_is_taken_after_its_end(it):
    cluster = await simulate(name="mine")
    with it.platform.held("launch_workers"):
        cluster.scale(1)
        await eventually(lambda: it.platform.under_way)
        waiting = asyncio.ensure_future(cluster._correct_state())
        await cluster.close()
        await waiting
    await eventually(lambda: not it.platform.running)
    for request in (
        lambda: cluster.scale(1),
        lambda: cluster.adapt(0, 1),
        lambda: cluster.add_worker_group("big"),
        lambda: cluster.delete_worker_group("big"),
    ):
        with pytest.raises(CMLError, match="cluster mine is closed"):
            await request()
    assert it.platform.live == []


@pytest.mark.slow
async def test_a_smaller_start_right_after_a_refused_one_is_not_refused(platform):
    platform.configure(quota={"sessions": 3}, stop_grace=2.0)
    with pytest.raises(LaunchRefused):
        await make(n_workers=5)
    for _ in range(2):  # what a cluster has stopped that was closed fills the quota, too
        async with make(n_workers=2) as smaller:
            assert len(smaller.workers) == 2


# -- two sessions with one name, because the answer to a launch was lost


class LateWorker(Worker):
    """Connects late, as if its imports took long."""

    async def start_unsafe(self):
        await asyncio.sleep(60.0)
        return await super().start_unsafe()


def names_of_live(it):
    return sorted(session.key for session in it.platform.live_sessions)


@simulated
async def test_a_session_that_runs_a_worker_is_used_though_its_launch_was_not_answered(it):
    async with simulate(name="mine") as cluster, Client(cluster, asynchronous=True) as client:
        it.platform.configure({"sessions": 2}, waits_for_room=True)  # the second launch waits
        it.platform.plan("launch_workers", Mishap(after=60.0))
        cluster.scale(1)
        await client.wait_for_workers(1)
        first = it.platform.running["mine-0"]
        data = await client.scatter([1, 2, 3])
        await eventually(lambda: [session.id for session in cluster.sessions[1:]] == [first])
        await eventually(lambda: names_of_live(it) == ["mine-0", "scheduler"])
        it.platform.configure()
        await asyncio.sleep(120.0)
        assert has(cluster, 1)
        assert it.platform.running["mine-0"] == first
        assert [future.status for future in data] == ["finished"] * 3
        assert it.platform.count("launch_workers") == 3
        assert "lost" not in log_of(cluster)
        assert "not started" not in log_of(cluster)
        recorded = store.read("mine").sessions
        assert sorted(recorded.values()) == ["mine-0", "scheduler"]


async def test_a_session_whose_launch_ends_while_another_one_is_judged_is_not_stopped_unjudged(monkeypatch):
    async def claim(*_):
        launching.clear()
        return False

    launching, api = {"mine-1"}, SimpleNamespace(live={"first": "mine-0", "second": "mine-1"})
    known = {"scheduler": None, "scheduler_info": {"workers": {}}, "workers": {}, "worker_spec": {}}
    cluster = SimpleNamespace(api=api, **known)
    workers = Workers(cluster)
    monkeypatch.setattr(Workers, "launching", launching)
    monkeypatch.setattr(workers, "claim", claim)
    assert await workers.find_unused() == {"first"}
    assert await workers.find_unused() == {"first", "second"}


@simulated
async def test_files_that_hang_delay_a_step_once_and_not_for_each_session(it, monkeypatch):
    async with simulate(name="mine") as cluster:
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        cluster.scale(4)
        await eventually(lambda: len(cluster.workers) == 4)
        for name in cluster.workers:
            await launch_late(cluster, name)
        with monkeypatch.context() as patch:
            patch.setattr(process, "read_file", lambda _: time.sleep(60.0))
            cluster.scale(5)
            await eventually(lambda: "mine-4" in cluster.workers, 3 * timing.files)


@pytest.mark.parametrize("second", ["exits", "waits", "waits unread"])
@simulated
async def test_a_session_with_a_workers_name_is_waited_for_without_an_answer(it, second, monkeypatch):
    monkeypatch.setattr(running, "Worker", LateWorker)
    async with simulate(name="mine") as cluster:
        it.platform.configure(None if second == "exits" else {"sessions": 2}, waits_for_room=True)
        it.platform.plan("launch_workers", Mishap(error=ConnectionError("lost")), Mishap(before=10.0))
        cluster.scale(1)
        await eventually(lambda: "mine-0" in it.platform.running)
        if second == "waits unread":  # for some seconds, nobody can read who has the name
            readable = time.monotonic() + 35.0
            fails = mock.Mock(side_effect=OSError)
            read = lambda path: (fails if time.monotonic() < readable else read_file)(path)  # noqa: E731
            monkeypatch.setattr(process, "read_file", read)
        first = it.platform.running["mine-0"]
        await eventually(lambda: len(it.platform.all) == 3)
        await eventually(lambda: names_of_live(it) == ["mine-0", "scheduler"], seconds=50.0)
        assert arrived(cluster) == 0
        await eventually(lambda: has(cluster, 1))
        assert it.platform.running["mine-0"] == first
        assert it.platform.count("launch_workers") == 3
        assert is_well(cluster)
