"""Sessions that wait for room: none is called failed or launched twice, all is told, and they come."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import timedelta

import clusters
import dask
import pytest
from click.testing import CliRunner
from clusters import arrived, log_of
from extensions import faults
from simulated.testing import eventually, simulated

from dask_cml.cli import cml
from dask_cml.sessions import session

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What waits for half a second is said to wait; the time-outs are shorter than what the tests wait."""
    monkeypatch.setattr(session, "_MOMENT", 0.5)
    with dask.config.set({"cml.api.poll-interval": "200ms", "cml.quota-retry": "500ms"}):
        yield


@pytest.fixture
def room(platform):
    """Give room to so many sessions; the others wait."""

    def room(n):
        platform.configure(quota={"sessions": n}, over_quota="wait")

    return room


def make(**options):
    return clusters.make(cpu=1, memory=1, **options)


async def listed(name):
    """What `dask cml list` says of a cluster, for programs and for people."""

    def ask(*arguments):
        result = CliRunner().invoke(cml, ["list", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    [row] = json.loads(await asyncio.to_thread(ask, "--json"))
    assert row["name"] == name
    return row, await asyncio.to_thread(ask)


async def test_six_workers_where_one_has_room(platform, room, holds):
    room(2)
    async with make(n_workers=6) as cluster:
        await holds(lambda: arrived(cluster) == 1 and len(cluster.manager.fleet.waits()) == 5)
        before = {each.id for each in cluster.sessions}
        for worker in cluster.workers.values():  # as if an hour had passed
            worker.launched_at -= 3600
            worker.since -= timedelta(hours=1)
        for _ in range(3):
            await cluster
        assert "workers=1 (5 waiting for room, 60 min)" in repr(cluster)
        assert "5 waiting for room, 60 min" in cluster._repr_html_()
        assert cluster._repr_html_().count("waiting for room, 60 min") == 6
        row, text = await listed(cluster.name)
        while (row["status"], row["waiting"]) != ("running", 5):
            # The scheduler has a moment to answer, which may be too short, and the record is written later.
            row, text = await listed(cluster.name)
        assert (row["workers"], row["waiting"]) == (1, 5)
        assert "1 (5 waiting for room, " in text
        await holds(lambda: "waiting for room for" in log_of(cluster))
        [n] = re.findall(r"waiting for room for (\d+) of 6 worker sessions", log_of(cluster))
        assert 1 <= int(n) <= 5  # those that had waited long enough when the line was logged
        assert "failed" not in log_of(cluster)
        assert {each.id for each in cluster.sessions} == before
        assert len(platform.sessions()) == 7
        room(3)
        await holds(lambda: arrived(cluster) == 2)
        assert len(platform.sessions()) == 7
        cluster.scale(2)
        await holds(lambda: len(cluster.workers) == 2)
        assert arrived(cluster) == 2
        assert "failed" not in log_of(cluster)
    assert len(platform.sessions()) == 7


async def test_a_scheduler_that_waits_for_room_is_shown_and_connects_workers_that_were_earlier(
    platform, room, holds
):
    room(0)
    cluster = make(n_workers=1)
    starting = asyncio.ensure_future(cluster)
    await holds(lambda: cluster.scheduler is not None and cluster.scheduler.waits_for)
    assert re.search(r", scheduler waiting for room, \d+ s, starting\)", repr(cluster))
    while not (row := (await listed(cluster.name))[0])["waiting"]:
        pass
    assert (row["status"], row["waiting"]) == ("starting", 2) or row["waiting"] == 1
    assert "starting, waiting for room, " in (await listed(cluster.name))[1]
    room(2)
    await starting
    await holds(lambda: arrived(cluster) == 1)
    assert len(platform.sessions()) == 2
    await cluster.close()


@simulated
async def test_the_scheduler_logs_once_that_a_session_waits_and_once_that_it_runs(it):
    it.platform.configure(quota={"sessions": 2}, waits_for_room=True)
    async with clusters.simulate(name="lab", n_workers=2) as cluster:
        await eventually(lambda: arrived(cluster) == 1 and cluster.manager.fleet.waits())
        it.platform.configure()
        cluster.scale(3)

        async def logged(state):
            events = await cluster.manager.state.client.call("events", topic="cml")
            return sorted(each["session"] for _, each in events if each["action"] == state)

        while len(await logged("running")) < 3:
            await asyncio.sleep(1.0)
        await asyncio.sleep(30.0)
        assert await logged("running") == ["lab-0", "lab-1", "lab-2"]
        waited = await logged("waiting")
        assert waited
        assert len({*waited}) == len(waited)


@simulated
async def test_adaptive_scaling_launches_no_more_while_sessions_wait_for_room(it):
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with clusters.simulate() as cluster:
        cluster.scale(2)
        await eventually(
            lambda: cluster.manager.fleet.waits() and max(cluster.manager.fleet.waits().values()) > 0.5
        )
        assert cluster.manager.state.backoffs.affordable(10, "default") == 2
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 2)
        assert cluster.manager.state.backoffs.affordable(10, "default") == 10


@pytest.mark.parametrize("fault", ["unknown_status", "stopping"])
async def test_unknown_and_stopping_sessions_have_not_ended(platform, holds, fault):
    faults.inject(fault, seconds=2.0, match="A worker of")
    async with make(n_workers=1) as cluster:
        await holds(lambda: arrived(cluster) == 1)
        assert "failed" not in log_of(cluster)
        [session] = [each.id for each in cluster.sessions if each.role == "worker"]
        assert len(platform.sessions()) == 2
        if fault == "stopping":
            platform.stop_workers(session)
            await holds(lambda: f"Worker {cluster.name}-0 " in log_of(cluster))
            # It has notice, if it is quick enough to tell its scheduler so.
            assert re.search(r"-0 (evicted, with notice|lost: .*stopped); launching", log_of(cluster))
