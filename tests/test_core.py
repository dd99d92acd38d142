"""The core alone: a whole cluster manager without a record, a board and a lease.

``tests/test_spec_cluster.py`` runs Dask's own behaviour with it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os

import dask
import pytest
from clusters import (
    AloneCluster,
    arrived,
    folder_of,
    is_connected,
    log_of,
    make,
    recorded,
    simulate,
    target,
    who_gave_up,
)
from distributed import Client
from distributed.core import Status
from simulated.faults import Mishap
from simulated.testing import eventually, simulated
from test_traps import SCENARIOS, names, play, session_of

from dask_cml import ClusterExists, CMLError, LaunchRefused, protocol
from dask_cml.options import state_directory
from dask_cml.records import store

pytestmark = pytest.mark.usefixtures("light")


@contextlib.asynccontextmanager
async def alone(**options):
    """Yield a cluster that is not shared, on the simulated platform."""
    async with simulate(AloneCluster, name="mine", **options) as cluster:
        yield cluster
        assert store.records() == []
        assert cluster.record is recorded(cluster) is None
    assert not (state_directory() / "mine").exists()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@simulated
async def test_it_holds_without_a_record(it, scenario):
    async def played(make, it, holds):
        await scenario(make, it, holds)
        assert store.records() == []

    await play(played, functools.partial(AloneCluster, asynchronous=True, quiet=True), it, eventually)
    assert it.clusters == []


# -- start and end


@simulated
async def test_the_scheduler_and_the_first_workers_launch_at_the_same_moment(it):
    cluster = simulate(AloneCluster, n_workers=2)
    starting = asyncio.ensure_future(cluster)
    await eventually(lambda: it.platform.count("launch_workers") == 3)
    assert {session.status for session in it.platform.live_sessions} == {"scheduling"}
    async with await starting:
        await eventually(lambda: arrived(cluster) == 2)


@simulated
async def test_close_stops_all_sessions_and_removes_the_folder(it):
    cluster = await simulate(AloneCluster, n_workers=2, worker_groups={"big": {"n_workers": 1}})
    await eventually(lambda: arrived(cluster) == 3)
    await cluster.close()
    assert (cluster.status, it.platform.live, it.clusters) == (Status.closed, [], [])


@simulated
async def test_close_before_all_workers_are_connected_stops_them(it):
    cluster = await simulate(AloneCluster, n_workers=3)
    cluster.scale(5)
    await cluster.close()
    assert (it.platform.live, it.clusters) == ([], [])


@pytest.mark.parametrize("fate", ["fails", "succeeds"])
@simulated
async def test_a_failed_start_leaves_nothing(it, fate):
    it.platform.doom(fate, key="scheduler")
    with pytest.raises(CMLError, match="ended before its scheduler answered"):
        async with simulate(AloneCluster, n_workers=2):
            pass
    assert (it.platform.live, it.clusters) == ([], [])


@simulated
async def test_a_cancelled_start_leaves_nothing(it):
    cluster = simulate(AloneCluster, n_workers=1)
    starting = asyncio.ensure_future(cluster)
    await eventually(lambda: it.platform.live)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert (cluster.status, it.platform.live, it.clusters) == (Status.closed, [], [])


@simulated
async def test_a_name_is_free_again_after_the_end(it):
    for _ in range(2):
        async with alone(n_workers=1) as cluster:
            await eventually(lambda: arrived(cluster) == 1)


@simulated
async def test_a_name_that_is_in_use_is_refused_and_its_cluster_runs_on(it):
    async with alone(n_workers=1) as cluster:
        for cls in (AloneCluster, AloneCluster.__base__):
            with pytest.raises(ClusterExists):
                await simulate(cls, name="mine")
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.live) == 2
        assert folder_of(cluster).exists()


@simulated
async def test_it_connects_to_no_cluster_of_another_process(it):
    with pytest.raises(CMLError, match="AloneCluster finds no cluster of another process"):
        await AloneCluster.from_name("mine", asynchronous=True, quiet=True)
    assert it.platform.all == {}


@simulated
async def test_a_lost_scheduler_ends_the_cluster_with_a_reason(it):
    cluster = await simulate(AloneCluster, name="mine", n_workers=1)
    await eventually(lambda: arrived(cluster) == 1)
    it.platform.evict(session_of(it, "scheduler"))
    await eventually(lambda: cluster.status == Status.closed)
    assert "Cluster mine shut down: the scheduler's session" in log_of(cluster)
    assert (it.platform.live, it.clusters) == ([], [])
    with pytest.raises(CMLError, match="its status is failed"):
        cluster.scale(1)


@simulated
async def test_an_idle_cluster_ends(it):
    cluster = await simulate(AloneCluster, n_workers=1, idle_timeout="5s")
    await eventually(lambda: cluster.status == Status.closed)
    assert (it.platform.live, it.clusters) == ([], [])


@simulated
async def test_a_broken_connection_to_the_scheduler_is_made_again(it):
    async with alone(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        cluster._watch_worker_status_comm.abort()
        await eventually(lambda: not is_connected(cluster))
        assert "not connected to the scheduler" in repr(cluster)
        await eventually(lambda: is_connected(cluster))
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 2)


@simulated
async def test_a_launch_whose_answer_is_lost_brings_no_second_scheduler_or_worker(it):
    with dask.config.set({"cml.api.timeout": "2s"}):
        it.platform.plan("launch_workers", Mishap(after=600.0))
        async with alone(n_workers=1) as cluster:
            await eventually(lambda: arrived(cluster) == 1)
            it.platform.plan("launch_workers", Mishap(after=600.0))
            cluster.scale(2)
            await eventually(lambda: arrived(cluster) == 2)
            await eventually(lambda: len(it.platform.live) == 3)
            known = {session.id for session in cluster.sessions}
            assert {*it.platform.live} == known
        assert it.sessions.doubles == []


# -- scaling


async def slowly(number):
    await asyncio.sleep(20.0)
    return number


@simulated
async def test_scaling_up_and_down(it):
    async with alone() as cluster:
        await cluster.scale(3)
        await cluster.wait_for_workers(3)
        assert (
            names(cluster) == {*cluster.workers} == {*cluster.worker_spec} == {"mine-0", "mine-1", "mine-2"}
        )
        cluster.scale(1)
        await eventually(lambda: len(names(cluster)) == len(it.platform.live) - 1 == 1)


@simulated
async def test_adapting_by_real_work(it):
    async with alone() as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 3, interval="1 s", wait_count=2)
        futures = client.map(slowly, range(6))
        await eventually(lambda: arrived(cluster) == 3)
        assert await client.gather(futures) == [*range(6)]
        del futures
        await eventually(lambda: not cluster.workers and len(it.platform.live) == 1)
        assert target(cluster) == 0


@simulated
async def test_groups_adapt_by_the_resources_of_tasks(it):
    gpu = {"resources": {"GPU": 1}}
    async with alone(worker_groups={"gpu": gpu}) as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 3, interval="1 s", wait_count=2)
        cluster.adapt(0, 3, interval="1 s", wait_count=2, worker_group="gpu")
        assert await client.submit(sum, [1, 2], resources={"GPU": 1}) == 3
        assert {*cluster.workers} == {"mine-gpu-0"}


@simulated
async def test_a_group_is_added_scaled_and_deleted_and_its_data_kept(it):
    async with alone(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        await cluster.add_worker_group("big", 1, resources={"BIG": 1})
        cluster.scale(2, worker_group="big")
        await eventually(lambda: arrived(cluster) == 3)
        assert names(cluster) == {"mine-0", "mine-big-0", "mine-big-1"}
        held = [client.submit(pow, 2, n, resources={"BIG": 1}) for n in range(5)]
        assert await client.gather(held) == [2**n for n in range(5)]
        await cluster.delete_worker_group("big")
        assert names(cluster) == {"mine-0"}
        assert await client.gather(held) == [2**n for n in range(5)]


@simulated
async def test_a_lost_worker_is_replaced_with_its_cause(it):
    async with alone(n_workers=2) as cluster:
        await eventually(lambda: arrived(cluster) == 2)
        lost = cluster.workers["mine-0"]
        it.platform.evict(lost.session_id)
        await eventually(lambda: names(cluster) == {"mine-1", "mine-2"} == {*cluster.worker_spec})
        assert lost.loss is not None


@simulated
async def test_a_worker_whose_session_gets_notice_moves_its_data_and_is_replaced(it):
    async with alone(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        await eventually(lambda: arrived(cluster) == 2)
        futures = await client.scatter([*range(10)])
        await cluster.ask(protocol.NOTICE, names=["mine-0"])
        await eventually(lambda: names(cluster) == {"mine-1", "mine-2"})
        assert await client.gather(futures) == [*range(10)]


@simulated
async def test_workers_are_changed_by_hand(it):
    async with alone(n_workers=1) as cluster:
        cluster.worker_spec.update(cluster.new_worker_spec())
        await cluster._correct_state()
        await eventually(lambda: names(cluster) == {"mine-0", "mine-1"})
        del cluster.worker_spec["mine-0"]
        await cluster._correct_state()
        await eventually(lambda: names(cluster) == {"mine-1"} and len(it.platform.live) == 2)
        assert target(cluster) == 1


# -- what users see


@simulated
async def test_what_users_see(it):
    async with alone(n_workers=1, worker_groups={"big": {}}) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        assert repr(cluster) == (f"AloneCluster(mine, {cluster.scheduler_address!r}, workers=1, threads=1)")
        html = cluster._repr_html_()
        assert "AloneCluster" in html
        assert "mine-0" in html
        assert "Manual" in cluster._scaling_status()
        assert [session.role for session in cluster.sessions] == ["scheduler", "worker"]
        assert (cluster.n_pending, cluster.problem) == (0, None)
        assert await cluster.usage() == {}
        assert "# mine-1: cpu=1" in cluster.job_script()
        it.platform.configure({"sessions": 2})
        cluster.scale(2)
        await eventually(lambda: cluster.problem)
        assert "1 pending" in repr(cluster)
        await eventually(lambda: "quota" in repr(cluster))
        cluster.scale(1)
    assert repr(cluster).endswith("closed)")


async def test_real_sessions_with_keys_and_logs(platform, holds):
    async with (
        make(AloneCluster, name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        await holds(lambda: arrived(cluster) == 1)
        assert await client.submit(os.getpid) != os.getpid()
        logs = await cluster.get_logs()
        assert "Scheduler at" in logs["Scheduler"]
        assert "Registered to" in logs["mine-0"]
        assert await cluster.get_logs(workers=["mine-0"], scheduler=False, cluster=False) != {}
        lost = cluster.workers["mine-0"].session_id
        platform.evict(lost)
        await holds(lambda: names(cluster) == {"mine-1"})
        assert store.records() == []
    assert not folder_of(cluster).exists()


def test_a_refusal_in_a_constructor_leaves_nothing(platform):
    platform.configure(quota={"sessions": 1})
    with pytest.raises(LaunchRefused, match="exceeded quota"):
        AloneCluster(n_workers=1, platform="local", quiet=True)
    assert [*state_directory().iterdir()] == []


@simulated
async def test_its_scaling_can_be_awaited(it):
    async with simulate(AloneCluster) as cluster:
        await cluster.scale(1)
        assert len(cluster.worker_spec) == 1


@simulated
async def test_a_group_that_is_added_again_is_launched_although_it_had_given_up(it):
    it.platform.doom("fails", times=20, key="big-0")
    with dask.config.set({"cml.failure-limit": 1}):
        async with simulate(AloneCluster, name="mine") as cluster:
            await cluster.add_worker_group("big", n_workers=1)
            await eventually(lambda: who_gave_up(cluster))
            await cluster.delete_worker_group("big")
            await cluster.add_worker_group("big", n_workers=1)
            await eventually(lambda: arrived(cluster) == 1)
