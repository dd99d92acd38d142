"""A cluster works on while the platform, the network or the file system fails, and says so."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clusters import arrived, connected, cut_off, lines_of, log_of, rebuild, simulate, supplied
from distributed import Client
from simulated.faults import CALM, HTTPError, Mishap, Weather
from simulated.testing import eventually, simulated

from dask_cml import CMLError


@contextmanager
def outage(it: Any) -> Iterator[None]:
    it.platform.luck.weather = Weather(error=1.0)
    try:
        yield
    finally:
        it.platform.luck.weather = CALM


@contextmanager
def refused_key(it: Any) -> Iterator[None]:
    """Let the platform answer each call as it does when the key of this session was replaced."""
    for function in ("launch_workers", "list_workers", "stop_workers"):
        it.platform.say(function, *[{"message": "Unauthorized"}] * 10_000)
    try:
        yield
    finally:
        it.platform.heal()


def managing(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged lines about the beginning and the end of outages, without their reasons."""
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    return [line for line in lines if line.startswith(("Cannot manage", "Managing"))]


@pytest.mark.slow
@simulated
async def test_a_scheduler_whose_launch_was_answered_by_an_error_is_used_and_not_stopped(it):
    it.platform.plan("launch_workers", Mishap(answer={"message": "Unauthorized"}))
    async with simulate(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        address = cluster.scheduler_address
        await asyncio.sleep(120.0)
        assert await client.submit(sum, [1, 2]) == 3
        assert cluster.scheduler_address == address
        assert "scheduler" not in log_of(cluster)


@simulated
async def test_calls_that_fail_for_some_seconds_are_repeated_and_nobody_notices(it, caplog):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        with outage(it):
            cluster.scale(3)
            await asyncio.sleep(10.0)
            assert await client.submit(sum, [1, 2]) == 3
        await client.wait_for_workers(3)
        assert managing(caplog) == []
        assert log_of(cluster) == ""


@simulated
async def test_an_outage_is_told_when_it_begins_and_ends_and_workers_and_tasks_run_on(it, caplog):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        with outage(it):
            it.platform.evict(it.platform.running["night-0"])
            await asyncio.sleep(300.0)
            assert "night-1" in connected(cluster)
            assert await client.submit(sum, [1, 2]) == 3
            assert managing(caplog) == ["Cannot manage cluster night"]
            assert re.search("^CML did not (list|stop) ", cluster.problem or "")
        await eventually(lambda: arrived(cluster) == 2)
        assert managing(caplog) == ["Cannot manage cluster night", "Managing cluster night again"]
        await eventually(lambda: cluster.problem is None)


@pytest.mark.slow
@simulated
async def test_an_outage_ends_no_start(it):
    it.platform.configure({"sessions": 0}, waits_for_room=True)
    starting = asyncio.ensure_future(simulate(name="night", n_workers=1))
    await eventually(lambda: len(it.platform.live) == 2)
    with outage(it):
        it.platform.configure()
        await asyncio.sleep(120.0)
    async with await starting as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        assert "lost" not in log_of(cluster)
        assert len(it.platform.all) == 2


@simulated
async def test_a_launch_that_hangs_delays_no_other_launch_and_no_stop(it):
    async with supplied(name="night", n_workers=2) as cluster:
        with it.platform.hangs("launch_workers"):
            began = time.monotonic()
            cluster.scale(4)
            await eventually(lambda: arrived(cluster) == 3)
            cluster.scale(1)
            await eventually(lambda: len(connected(cluster)) == 1)
            assert time.monotonic() - began < 60.0


@pytest.mark.slow
@simulated
async def test_a_launch_whose_answer_is_lost_brings_no_second_worker(it):
    async with simulate(name="night") as cluster:
        for n in range(1, 4):
            it.platform.lose("launch_workers", HTTPError(502))
            cluster.scale(n)
            await eventually(lambda n=n: arrived(cluster) == n)
        await eventually(lambda: len(it.platform.live) == 4, seconds=60.0)
        assert {session.id for session in cluster.sessions} == {*it.platform.live}


@pytest.mark.slow
@simulated
async def test_a_worker_that_is_connected_stays_although_the_platform_does_not_list_it(it):
    async with supplied(name="night", n_workers=1) as cluster:
        it.platform.set(it.platform.running["night-0"], listed=False)
        await eventually(lambda: cluster.sessions[1].status == "no longer listed", seconds=120)
        await asyncio.sleep(60.0)
        assert connected(cluster) == {"night-0"}
        assert log_of(cluster) == ""


@pytest.mark.slow
@simulated
async def test_a_wrong_answer_stops_no_session(it):
    async with supplied(name="night", n_workers=2) as cluster:
        for answer in None, [], "<html>", {"message": "Internal Server Error"}:
            it.platform.plan("list_workers", *[Mishap(answer=answer, carried_out=False)] * 5)
            await asyncio.sleep(60.0)
            assert connected(cluster) == {"night-0", "night-1"}
            assert len(it.platform.all) == 3


@simulated
async def test_a_replaced_key_is_told_once_with_what_runs_on_and_shutdown_ends_all_programs(it):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        with refused_key(it):
            await eventually(lambda: "CDSW_API_KEY" in log_of(cluster))
            await asyncio.sleep(60.0)
            [line] = [line for line in lines_of(cluster) if "CDSW_API_KEY" in line]
            assert "The cluster's 2 sessions and its tasks continue." in line
            for shown in (repr(cluster), cluster._repr_html_()):
                assert "CDSW_API_KEY" in shown
            assert await client.submit(sum, [1, 2]) == 3
            with pytest.raises(CMLError, match="The scheduler has closed, so their programs exit"):
                await cluster.shutdown()
            await eventually(lambda: it.platform.live == [])
        await cluster.close()


@pytest.mark.slow
@simulated
async def test_a_broken_network_stops_nothing_and_is_told_when_it_begins_and_ends(it):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        heal = cut_off(cluster)
        await eventually(lambda: "Cluster night not connected for " in log_of(cluster), seconds=120.0)
        await asyncio.sleep(120.0)
        assert await client.submit(sum, [1, 2]) == 3
        assert len(it.platform.running) == 3
        heal()
        await eventually(lambda: "Cluster night connected again after " in log_of(cluster))
        cluster.scale(3)
        await eventually(lambda: arrived(cluster) == 3)
        assert len(it.platform.all) == 4


@simulated
async def test_shutdown_needs_no_connection(it):
    cluster = await simulate(name="night", n_workers=2)
    await eventually(lambda: arrived(cluster) == 2)
    cut_off(cluster)
    await eventually(lambda: "not connected" in repr(cluster))
    await cluster.shutdown()
    assert (it.platform.live, it.clusters) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [True, False], ids=["connections break", "packets vanish"])
@simulated
async def test_a_worker_whose_network_is_back_works_on_or_is_replaced(it, refuses):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        session = it.platform.running["night-0"]
        it.sessions.cut_off(session, 60.0, refuses)
        await asyncio.sleep(120.0)
        await eventually(lambda: arrived(cluster) == 2)
        await eventually(lambda: len(it.platform.live) == 3)
        assert await client.gather(client.map(abs, range(10))) == [*range(10)]


@pytest.mark.slow
@simulated
async def test_a_file_system_that_fails_stops_nothing_and_delays_only_what_needs_it(it):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        it.files.stale = True
        await asyncio.sleep(600.0)
        assert await client.submit(sum, [1, 2]) == 3
        assert connected(cluster) == {"night-0"}
        it.files.stale = False
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)
        assert "lost" not in log_of(cluster)


@pytest.mark.parametrize("manages", [True, False])
@simulated
async def test_close_stops_all_sessions_while_the_file_system_fails_and_later_removes_the_folder(it, manages):
    creator = await simulate(name="night", n_workers=2)
    cluster = creator if manages else await rebuild("night", shutdown_on_close=True)
    await eventually(lambda: arrived(cluster) == 2)
    it.files.stale = True
    with pytest.raises(
        CMLError, match=r"known sessions of cluster 'night' are stopped.* `dask cml delete night`"
    ):
        await cluster.close()
    assert all(session.stop_requested for session in it.platform.live_sessions)
    it.files.stale = False
    await cluster.close()
    assert it.clusters == []
    await creator.close()
