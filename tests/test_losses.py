"""Which sessions a look finds lost, while their Dask workers connect and disconnect."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import dask
import pytest
from fleets import Cluster

from dask_cml.manager import losses
from dask_cml.keeper.backoff import Backoffs
from dask_cml.manager.losses import LossFinder


class Running:
    """A session that runs."""

    was_closed = False
    is_known_to_run = True
    runs_for = 3.0
    waits_for = None
    options = SimpleNamespace(worker_timeout=600.0)
    info = MappingProxyType({})

    def update(self, listing):
        return False

    async def last_lines(self):
        return []


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(losses.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def look(clock):
    """Look for lost sessions of a cluster, while something happens."""
    cluster = Cluster(1, processes=2)
    cluster.fleet.attach("mine-0", Running())
    happens = []

    async def sessions():
        for each in happens:
            each()
        return {}

    client, api = SimpleNamespace(connected=True), SimpleNamespace(sessions=sessions)
    backoffs, launcher = Backoffs(cluster.fleet, print), SimpleNamespace(processes=[])
    more = {"backoffs": backoffs, "launcher": launcher, "observes": True}
    finder = LossFinder(SimpleNamespace(fleet=cluster.fleet, client=client, api=api, **more))

    async def look(*meanwhile):
        happens[:] = meanwhile
        with dask.config.set({"distributed.deploy.lost-worker-timeout": "15s"}):
            look.lost = await finder.look()
        return [*look.lost]

    look.cluster = cluster
    return look


async def test_a_session_that_connects_during_a_look_is_not_lost_however_long_it_took(look, clock):
    assert await look() == []
    clock.now += 60
    assert await look(lambda: look.cluster.connect("mine-0-0", "mine-0-1")) == []
    assert await look() == []


async def test_the_time_of_a_session_begins_when_one_of_its_workers_leaves(look, clock):
    assert await look() == []
    look.cluster.connect("mine-0-0")
    clock.now += 60
    assert await look() == []
    look.cluster.disconnect("mine-0-0")
    look.cluster.connect("mine-0-1")
    assert await look() == []
    clock.now += 14
    assert await look() == []
    clock.now += 2
    assert await look() == ["mine-0"]
    assert look.lost["mine-0"].words == "a Dask worker has been gone for 15 s, but its session runs"


async def test_a_session_whose_group_only_newer_releases_can_read_is_not_lost_here(look, clock):
    look.cluster.want("add_group", "new", {"colour": "blue"}, 1)
    late = Running()
    late.runs_for = 601.0
    for name in "mine-0", "mine-new-0":
        look.cluster.fleet.attach(name, late)
    assert await look() == ["mine-0"]


async def test_a_scheduler_that_leaves_with_its_workers_is_found_lost(clock):
    cluster = Cluster(1)
    cluster.fleet.attach("mine-0", Running())
    cluster.connect("mine-0")
    cluster.wanted.leave(["mine-0"])
    cluster.answer()

    async def sessions():
        return {}

    def update(listing):
        return True

    async def failure(what):
        return what

    scheduler = SimpleNamespace(info={"status": "failed"}, update=update, failure=failure, session_id="s")
    state = SimpleNamespace(
        fleet=cluster.fleet,
        client=SimpleNamespace(connected=True, heard=0.0),
        api=SimpleNamespace(sessions=sessions),
        launcher=SimpleNamespace(scheduler=scheduler),
        backoffs=Backoffs(cluster.fleet, print),
        observes=False,
    )
    finder = LossFinder(state)
    assert [*await finder.look()] == ["mine-0"]
    state.client.connected = False
    with pytest.raises(losses.SchedulerLost):
        await finder.look()
