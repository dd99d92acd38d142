"""Queued sessions: none is called failed or launched twice, all is reported, and they come."""

from __future__ import annotations

import asyncio
import re

import clusters
import dask
import pytest
from clusters import arrived, log_of, simulate, waits
from simulated.shell import shell
from simulated.testing import eventually, simulated

from dask_cml.sessions import session

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What waits for half a second is said to wait; the time-outs are shorter than what the tests wait."""
    monkeypatch.setattr(session, "WAITS_AFTER", 0.5)
    with dask.config.set({"cml.api.poll-interval": "200ms", "cml.quota-retry": "500ms"}):
        yield


@simulated
async def test_six_workers_where_one_has_room(it):
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with simulate(name="lab", n_workers=6) as cluster:
        await eventually(lambda: arrived(cluster) == 1 and len(waits(cluster)) == 5)
        before = {session.id for session in cluster.sessions}
        await asyncio.sleep(3600)
        await cluster
        assert "workers=1 (5 queued for 60 min)" in repr(cluster)
        assert cluster._repr_html_().count("queued for 60 min") == 6
        assert "1 (5 queued for " in await shell("list")
        assert ": 5 of 6 worker sessions queued" in log_of(cluster)
        assert {session.id for session in cluster.sessions} == before
        it.platform.configure({"sessions": 3}, waits_for_room=True)
        await eventually(lambda: arrived(cluster) == 2)
        cluster.scale(2)
        await eventually(lambda: len(cluster.workers) == 2)
        assert arrived(cluster) == 2
        assert "failed" not in log_of(cluster)
    assert len(it.platform.all) == 7


@simulated
async def test_a_scheduler_that_waits_for_room_is_shown_so_and_workers_that_are_earlier_connect(it):
    it.platform.configure({"sessions": 0}, waits_for_room=True)
    cluster = simulate(name="lab", n_workers=1)
    start = asyncio.ensure_future(cluster)
    await eventually(lambda: cluster.scheduler is not None and cluster.scheduler.waits_for)
    assert re.search(r", scheduler queued for \d+ s, starting\)", repr(cluster))
    await asyncio.sleep(30)
    assert "starting, queued for " in await shell("list")
    it.platform.configure()
    async with await start:
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.all) == 2


@simulated
async def test_the_reason_of_a_wait_is_reported_once_with_what_helps(it):
    it.platform.configure(quota={"sessions": 1}, waits_for_room=True)
    async with clusters.simulate(name="lab", n_workers=1) as cluster:
        await eventually(lambda: ": 1 of 1 worker sessions queued" in log_of(cluster))
        [worker] = cluster.workers.values()
        for used in (50, 51):
            it.platform.set(worker.session_id, k8sMessage=f"exceeded quota: pods, used: pods={used}")
            await eventually(lambda used=used: str(used) in worker.reason)
        await eventually(lambda: "OVERRIDE_PODQUOTA" in log_of(cluster))
        await asyncio.sleep(30.0)
        [line] = [line for line in clusters.lines_of(cluster) if "exceeded" in line]
        assert re.search(r"worker sessions queued: exceeded quota: pods, .* use fewer, larger workers", line)
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 1)


@simulated
async def test_unknown_and_stopping_sessions_have_not_ended(it):
    async with simulate(name="lab", n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        for status in "UNKNOWN", "STOPPING", "running":
            it.platform.set(it.platform.live[-1], status)
            await asyncio.sleep(60.0)
            assert [*it.platform.running] == ["lab-scheduler", "lab-0"][: 2 if status == "running" else 1]
            assert arrived(cluster) == 1
            assert not clusters.lines_of(cluster)
