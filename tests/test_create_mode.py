"""Create a cluster or connect to the one of its name: the same cell gives the same cluster."""

from __future__ import annotations

import asyncio
import json
import time
from unittest import mock

import dask
import pytest
from clusters import arrived, create_and_kill, log_of, name_other_clusters, rebuild, simulate
from simulated.platform import SimulatedPlatform
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError, protocol
from dask_cml import cluster as cluster_module
from dask_cml.layout import RECORD_FILE
from dask_cml.options import state_directory
from dask_cml.records import store
from dask_cml.sharing.sharing import Sharing

pytestmark = pytest.mark.usefixtures("light")


def lab(**options):
    return simulate(name="lab", **options)


def test_connecting_without_await_wants_none_of_the_first_workers_again(platform, until, monkeypatch):
    with CMLCluster(name="lab", n_workers=1, platform="local", quiet=True) as first:
        until(lambda: arrived(first) == 1)
        first.scale(0)
        until(lambda: not first.workers)
        monkeypatch.setattr(Sharing, "_follow", lambda self: asyncio.Event().wait())  # which shows what is
        with CMLCluster.from_name("lab", quiet=True) as again:
            assert again.worker_spec == {}


@simulated
async def test_a_busy_scheduler_may_answer_as_late_as_dasks_clients_allow(it):
    await create_and_kill(it, name="lab", orphan_timeout="1 hour")
    it.sessions.processes[store.read("lab").scheduler.session].freeze()
    began = time.monotonic()
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "77s"}),
        pytest.raises(CMLError, match="the scheduler of cluster 'lab' does not answer at tcp://"),
    ):
        await rebuild("lab")
    assert 77 <= time.monotonic() - began < 100
    for session in it.platform.live:
        it.platform.evict(session)


@pytest.mark.slow
@simulated
async def test_a_running_cluster_does_not_take_worker_groups_from_the_configuration(it):
    async with lab(memory=2, worker_groups={}):
        unfit = {"cml.memory": 16, "cml.worker-groups": {"big": {"memory-reserve": 3}}}
        with dask.config.set(unfit):
            for connect in (lambda: rebuild("lab"), lambda: lab(create_mode="connect")):
                async with connect() as other:
                    assert other.worker_groups.keys() == {"default"}


@simulated
async def test_a_cluster_of_an_older_release_is_left_alone(it):
    async with lab(n_workers=1) as first:
        file = state_directory() / "lab" / RECORD_FILE
        content = file.read_text()
        file.write_text(json.dumps({**json.loads(content), "version": 1}))
        for mode in "connect", "create-or-connect":
            with pytest.raises(CMLError, match="cluster 'lab' was created by another dask-cml"):
                await lab(create_mode=mode)
        file.write_text(content)
        await eventually(lambda: arrived(first) == 1)
        assert len(it.platform.live) == 2


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"protocol": 1}, "speaks protocol 1 of dask-cml, this process"),
        ({"record": "fedcba9876543210", "cluster": "other"}, "belongs to another cluster, 'other'"),
    ],
)
@simulated
async def test_a_scheduler_of_another_release_or_cluster_is_left_alone_and_named(it, hello, words):
    async with lab(n_workers=1) as first:
        [scheduler] = it.sessions.program(it.platform.running["lab-scheduler"])
        answer = scheduler.handlers[protocol.HELLO]()
        scheduler.handlers[protocol.HELLO] = lambda: {**answer, **hello}
        with pytest.raises(CMLError, match=words):
            await rebuild("lab")
        await eventually(lambda: arrived(first) == 1)
        assert len(it.platform.live) == 2


@pytest.mark.slow
@simulated
async def test_connecting_uses_the_platform_of_the_cluster(it):
    platforms = {"auto": it.platform, "local": SimulatedPlatform()}
    with mock.patch.object(cluster_module, "load_platform", platforms.__getitem__):
        async with lab() as first, lab(platform="local", create_mode="connect") as again:
            again.scale(1)
            await first.leave()
            await eventually(lambda: arrived(again) == 1)
            assert again.options.platform == "auto"
            await again.shutdown()
    assert platforms["local"].all == {}


@pytest.mark.slow
@simulated
async def test_a_cluster_that_another_thread_is_making_is_not_named(it, monkeypatch):
    def spec(*arguments):
        name_other_clusters(first)
        return make_spec(*arguments)

    async with simulate() as first:
        make_spec = cluster_module.scheduler_spec
        monkeypatch.setattr(cluster_module, "scheduler_spec", spec)
        await simulate().close()
        assert "another cluster" not in log_of(first)


@pytest.mark.slow
@simulated
async def test_a_session_of_a_cluster_creates_a_cluster_only_if_the_code_says_so(it):
    async def create(**options):
        async with simulate(name="other", **options):
            return {*it.platform.running}

    async with lab(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        process = it.sessions.processes[it.platform.running["lab-0"]]
        with pytest.raises(
            CMLError, match=r"this process runs in a session of cluster lab.*create_mode='create'"
        ):
            await process.start(create())
        assert {*it.platform.running} == {"lab-scheduler", "lab-0"}
        assert "other-scheduler" in await process.start(create(create_mode="create"))


@simulated
async def test_a_session_of_a_cluster_connects_if_the_configuration_says_so(it):
    async def connect():
        with dask.config.set({"cml.create-mode": "create-or-connect"}):
            async with simulate(name="lab") as cluster:
                return cluster.scheduler_address

    async with lab(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        process = it.process_of("lab-0")
        assert await process.start(connect()) == cluster.scheduler_address
        assert {*it.platform.running} == {"lab-scheduler", "lab-0"}
