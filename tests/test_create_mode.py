"""Create a cluster or connect to the one of its name: the same cell gives the same cluster."""

from __future__ import annotations

import asyncio
import json
from unittest import mock

import dask
import pytest
from clusters import arrived, rebuild, simulate, target, write_record
from distributed import Client
from distributed.core import Status
from simulated.platform import SimulatedPlatform
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists, CMLCluster, CMLError, NoSuchCluster
from dask_cml.manager import state
from dask_cml.records import liveness
from dask_cml.records.record import Record

pytestmark = pytest.mark.usefixtures("light")


def make(**options):
    return CMLCluster(**{"name": "lab", "platform": "local", "asynchronous": True, **options})


def lab(**options):
    return simulate(name="lab", **options)


async def test_the_same_cell_again_gives_the_same_cluster(platform, holds, capsys):
    async with make(n_workers=1, create_mode="create-or-connect") as first:
        cell = make(n_workers=1, create_mode="create-or-connect")
        async with cell as again, Client(again, asynchronous=True) as client:
            assert again.scheduler_address == first.scheduler_address
            assert await client.submit(sum, [1, 2]) == 3
            assert "Connected to running cluster lab\n" in capsys.readouterr().out
        assert again.status == Status.closed
        # Other options than the cluster's do not change it, and that is told.
        async with make(cpu=2, processes=2, worker_args=[], create_mode="connect") as other:
            assert (other.options.cpu, other.options.processes) == (1, 1)
            assert "Connected to running cluster lab; it keeps its cpu, processes" in capsys.readouterr().out
            other.scale(2)
            await holds(lambda: len(first.scheduler_info["workers"]) == 2)
        words = r"pass create_mode='create-or-connect' or call CMLCluster\.from_name\('lab'\); to delete it"
        with pytest.raises(ClusterExists, match=words):
            await make()
        assert first.status == Status.running
        assert len(first.sessions) == 3


@simulated
async def test_connecting_does_not_scale_the_cluster(it):
    async with lab(n_workers=1) as first:
        await eventually(lambda: arrived(first) == 1)
        async with lab(
            n_workers=3, cpu=2, processes=2, worker_args=[], create_mode="create-or-connect"
        ) as again:
            await again
            assert target(again) == 1
            assert again.observed == first.observed == {"lab-0"}
            assert first.manager.state.leads
            assert not again.manager.state.leads
        assert target(first) == 1
        assert len(it.platform.live) == 2


@simulated
async def test_of_two_at_once_one_creates_and_the_other_connects(it):
    one, two = (lab(create_mode="create-or-connect") for _ in range(2))
    await asyncio.gather(one, two)
    assert one.scheduler_address == two.scheduler_address
    assert len(it.platform.live) == 1
    assert sorted([one.shutdown_on_close, two.shutdown_on_close]) == [False, True]
    # An object that connected ends the cluster by close(), as one that from_name() gave.
    await (one if two.shutdown_on_close else two).close()
    await (two if two.shutdown_on_close else one).close()
    assert not it.platform.running


async def test_a_busy_scheduler_may_answer_as_late_as_dasks_clients_allow(platform, monkeypatch):
    write_record(Record("lab", options={"platform": "local"}))
    patience = []

    async def is_alive(record, timeout):
        patience.append(timeout)

    monkeypatch.setattr(liveness, "is_alive", is_alive)
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "77s"}),
        pytest.raises(CMLError, match="answer"),
    ):
        await CMLCluster.from_name("lab", asynchronous=True)
    assert patience == [77]


@simulated
async def test_a_running_cluster_does_not_take_worker_groups_from_the_configuration(it):
    async with lab(memory=2, worker_groups={}):
        unfit = {"cml.memory": 16, "cml.worker-groups": {"big": {"memory-reserve": 3}}}
        with dask.config.set(unfit):
            for connect in (lambda: rebuild("lab"), lambda: lab(create_mode="connect")):
                async with connect() as other:
                    assert other.worker_groups.keys() == {"default"}


@pytest.mark.parametrize("mode", ["connect", "create-or-connect"])
@simulated
async def test_a_cluster_of_an_older_release_is_left_alone(it, mode):
    async with lab(n_workers=1) as first:
        file = first.manager.state.launcher.place.folder / "record.json"
        content = file.read_text()
        file.write_text(json.dumps({**json.loads(content), "version": 1}))
        with pytest.raises(CMLError, match="cluster 'lab' was created by an older dask-cml"):
            await lab(create_mode=mode)
        file.write_text(content)
        await eventually(lambda: arrived(first) == 1)
        assert len(it.platform.live) == 2


@simulated
async def test_connecting_uses_the_platform_of_the_cluster(it):
    platforms = {"auto": it.platform, "local": SimulatedPlatform()}
    with mock.patch.object(state, "load_platform", platforms.__getitem__):
        async with lab() as first, lab(platform="local", create_mode="connect") as again:
            again.scale(1)
            await first.leave()
            await eventually(lambda: arrived(again) == 1)
            assert again.options.platform == "auto"
            assert again.manager.state.api.module is it.platform
            await again.close()
    assert platforms["local"].all == {}


async def test_connecting_creates_no_cluster(platform):
    with pytest.raises(NoSuchCluster):
        await make(create_mode="connect")
    assert platform.list_workers() == []
