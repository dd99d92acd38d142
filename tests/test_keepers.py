"""Several managers of one cluster: one leads, all may wish, and what nobody knows is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import dask
import pytest
from clusters import (
    arrived,
    create_and_kill,
    launch,
    limits,
    lines_of,
    live,
    log_of,
    make,
    rebuild,
    sessions,
    simulate,
    target,
    write_record,
)
from distributed import Worker
from distributed.core import Status
from simulated.faults import Mishap
from simulated.testing import eventually, simulated

from dask_cml.layout import SESSIONS_FOLDER
from dask_cml.manager import losses
from dask_cml.manager.reconciler import Reconciler
from dask_cml.options import state_directory
from dask_cml.records import operations, store
from dask_cml.records.record import Record
from dask_cml.sessions.entry import Launch

pytestmark = pytest.mark.usefixtures("light")

SLEEP = "import time; time.sleep(600)"


# -- who leads


@simulated
async def test_two_managers_see_the_same_and_neither_undoes_the_others_scaling(it):
    def settled(n):
        return all(
            len(manager.workers) == len(manager.scheduler_info["workers"]) == target(manager) == n
            for manager in (maker, other)
        )

    async with simulate(n_workers=1, name="shared") as maker:
        await eventually(lambda: arrived(maker) == 1)
        async with rebuild("shared") as other:
            await eventually(lambda: settled(1))
            other.scale(3)
            await eventually(lambda: settled(3))
            maker.scale(2)
            await eventually(lambda: settled(2))
            other.scale(1)
            await eventually(lambda: settled(1))
            assert maker.workers.keys() == other.workers.keys()
            assert len(it.platform.running) == 2
            assert (maker.manager.state.leads, other.manager.state.leads) == (True, False)
            for each in maker, other:
                assert "failed" not in log_of(each)
                assert each.manager.state.problem is None


@simulated
async def test_a_lost_worker_is_replaced_once(it):
    async with simulate(n_workers=1, name="shared") as maker:
        await eventually(lambda: arrived(maker) == 1)
        async with rebuild("shared") as other:
            [lost] = maker.workers
            it.platform.evict(maker.workers[lost].session_id)
            await eventually(lambda: maker.observed and lost not in maker.observed)
            await eventually(lambda: other.observed == maker.observed)
            assert len(it.platform.running) == 2


@simulated
async def test_the_plans_of_a_cluster_without_keys_have_none_in_another_manager(it):
    async with simulate(name="shared") as maker, rebuild("shared") as other:
        assert "--tls" not in other.job_script()
        assert other.scheduler_address == maker.scheduler_address
        other.scale(1)  # its session finds no keys either
        await eventually(lambda: arrived(maker) == 1)


@simulated
async def test_another_manager_leads_when_the_leader_leaves(it):
    maker = await simulate(n_workers=1, name="shared")
    async with rebuild("shared") as other:
        await eventually(lambda: arrived(other) == 1)
        assert not other.manager.state.leads
        before = store.read("shared").sessions
        await maker.leave()
        assert store.read("shared").sessions == before
        await eventually(lambda: other.manager.state.leads)
        other.scale(2)
        await eventually(lambda: arrived(other) == len(other.workers) == 2)
        await other.close()
    assert not it.platform.running


async def test_other_processes_get_the_link_to_the_dashboard(platform, holds):
    async with make(name="mine") as cluster:
        await holds(lambda: store.read("mine").scheduler.app_url is not None)
        assert store.read("mine").scheduler.app_url == cluster.sessions[0].app_url


async def test_other_processes_get_the_link_although_its_creator_leaves_before_its_first_look(
    platform, holds, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Reconciler, "run", lambda self: asyncio.Event().wait())
        cluster = await make(name="mine")
        await cluster.leave()
    await holds(lambda: store.read("mine").scheduler.app_url is not None)
    assert not any((await operations.end_all(store.records())).values())


@simulated
async def test_a_manager_records_the_scheduler_that_its_creator_could_not_record(it):
    async with simulate(name="mine") as cluster:
        [session] = cluster.sessions
        [file] = (cluster.manager.state.launcher.place.folder / "sessions").iterdir()
        file.unlink()
        async with rebuild("mine"):
            await eventually(lambda: store.read("mine").sessions == {session.id: "scheduler"})
    assert not it.platform.running


@simulated
async def test_wishes_of_a_manager_that_leaves_at_once_come_true(it):
    async with simulate(name="shared") as maker:
        file = maker.manager.state.launcher.place.folder / "record.json"
        made = file.stat()
        async with rebuild("shared") as other:
            other.scale(2)
        assert os.path.samestat(file.stat(), made)  # nobody replaces it
        await eventually(lambda: arrived(maker) == len(maker.workers) == 2)
        assert {*it.platform.running.values()} == {each.id for each in maker.sessions}
    assert not it.platform.running


SECOND = """
import time
from dask_cml import CMLCluster, local

if __name__ == "__main__":
    with local.engine("second"):
        cluster = CMLCluster.from_name("shared")
        cluster.scale(3)
        while cluster.n_pending:
            time.sleep(0.05)
        print("ready", flush=True)
        time.sleep(3600)
"""


@pytest.mark.slow
async def test_sessions_that_end_with_the_leaders_session_are_replaced_by_the_next_leader(
    platform, holds, monkeypatch
):
    monkeypatch.setenv("CDSW_ENGINE_ID", "first")

    def owners(cluster):
        return sorted(session.owner for session in cluster.sessions)

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"}):
        maker = await make(n_workers=1, name="shared", shutdown_on_close=False)
        await holds(lambda: arrived(maker) == 1)
        await maker.leave()
        second = await asyncio.create_subprocess_exec(sys.executable, "-c", SECOND, stdout=subprocess.PIPE)
        assert await second.stdout.readline() == b"ready\n"
        async with rebuild("shared") as again:
            await holds(lambda: owners(again) == ["first", "first", "second", "second"])
            assert sorted(each.owner for each in store.read("shared").launches.values()) == owners(again)
            assert not again.manager.state.leads
            second.kill()
            assert await second.wait() == -signal.SIGKILL
            await holds(lambda: again.manager.state.leads and arrived(again) == target(again) == 3)
            await holds(lambda: owners(again) == ["first"] * 4)
            await holds(
                lambda: {each["id"] for each in live(platform)} == {each.id for each in again.sessions}
            )
            await again.close()
        assert not live(platform)


# -- adaptive scaling


@simulated
async def test_scaling_stops_the_adaptive_scaling_of_another_manager(it):
    async with simulate(name="shared") as maker:
        adaptive = maker.adapt(minimum=0, maximum=3)
        await maker
        async with rebuild("shared") as other:
            assert limits(other) == (0, 3)
            other.scale(1)  # and leaves at once
        await eventually(lambda: target(maker) == 1 and limits(maker) is None)
        await eventually(lambda: adaptive.periodic_callback is None)
        await eventually(lambda: arrived(maker) == len(it.platform.running) - 1 == 1)


@simulated
async def test_the_leader_adapts_for_a_manager_that_has_left(it):
    maker = await simulate(name="shared")
    async with rebuild("shared") as other:
        other.adapt(minimum=1, maximum=2)
        await other
    await eventually(lambda: arrived(maker) == 1)
    assert limits(maker) == (1, 2)
    async with rebuild("shared") as third:  # goes on as the next leader
        await maker.leave()
        await eventually(lambda: third.manager.state.leads and third.manager.wishes.adaptive() is not None)
        [lost] = third.workers
        it.platform.evict(third.workers[lost].session_id)
        await eventually(lambda: arrived(third) == 1 and lost not in third.observed)
        await third.close()


# -- the end


@pytest.mark.parametrize("elsewhere", [False, True])
@simulated
async def test_a_manager_reports_that_another_one_shut_the_cluster_down(it, elsewhere):
    async with simulate(name="shared") as maker:
        other = await rebuild("shared")
        ending, seeing = (other, maker) if elsewhere else (maker, other)
        await ending.close()
        await eventually(lambda: seeing.status == Status.closed)
        assert lines_of(seeing)[-1] == "Cluster shared shut down: another process shut it down"


@pytest.mark.slow
async def test_a_manager_disconnects_from_a_silent_scheduler_that_it_cannot_list(
    platform, holds, monkeypatch
):
    monkeypatch.setattr(losses, "_SILENCE", 1.0)
    async with make(n_workers=1, name="shared") as maker:
        await holds(lambda: arrived(maker) == 1)
        await maker.leave()
    monkeypatch.setenv("CDSW_ENGINE_ID", "anothersession00")
    other = await rebuild("shared")
    platform.evict(store.read("shared").scheduler.session)
    await holds(lambda: other.status == Status.closed)
    assert "has not answered for 1 s" in lines_of(other)[-1]
    assert await operations.end_all(store.records()) == {"shared": None}
    assert not live(platform)


async def test_a_session_launched_at_the_last_moment_of_a_deletion_is_stopped(platform, monkeypatch):
    early, late = (each["id"] for each in platform.launch_workers(2, cpu=1, memory=1, code=SLEEP))
    write_record(Record("shared", options={"platform": "local"}, launches=sessions(**{early: "shared-0"})))
    remove = store.remove

    def after_another_manager_has_launched(name, **more):
        launch(store.read(name), late, key="shared-1")
        return remove(name, **more)

    monkeypatch.setattr(store, "remove", after_another_manager_has_launched)
    assert await operations.end_all(store.records()) == {"shared": None}
    assert all(each["stop_requested"] for each in platform.sessions())
    assert store.records() == []


@simulated
async def test_a_manager_whose_record_was_removed_stops_its_sessions_when_it_leaves(it, caplog):
    caplog.set_level("INFO")
    async with simulate(name="shared", silence_logs=False) as maker:  # which would silence caplog, too
        assert await asyncio.to_thread(store.remove, "shared") is not None
        maker.scale(1)
        await eventually(lambda: "Record of cluster shared removed" in caplog.text)
        await maker.leave()
    assert not it.platform.running
    assert not maker.manager.state.launcher.place.folder.exists()


# -- sessions and workers that no manager has launched


@contextlib.asynccontextmanager
async def dask_worker(cluster, name):
    """A Dask worker of a cluster, in this process."""
    async with Worker(cluster.scheduler.address, name=name, nthreads=1, dashboard=False) as worker:
        yield worker


@simulated
async def test_a_session_in_the_record_that_nobody_launched_is_stopped(it):
    [stray] = (each["id"] for each in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    async with simulate(name="told", n_workers=1) as cluster:
        await asyncio.to_thread(launch, store.read("told"), stray, key="told-7")
        await eventually(lambda: stray not in it.platform.live)
        await eventually(lambda: stray not in store.read("told").sessions)
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.running) == 2


@simulated
async def test_the_first_manager_stops_an_old_session_that_no_manager_launched(it):
    creator = await simulate(name="told", shutdown_on_close=False)
    await creator.leave()
    [stray] = (each["id"] for each in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    changes = [Launch(stray, "told-7", None, int(time.time()) - 60)]
    await asyncio.to_thread(store.write_sessions, changes, [], "told", id=store.read("told").id)
    async with rebuild("told") as cluster:
        await eventually(lambda: it.platform.all[stray].stop_requested, seconds=2.0)
        await cluster.close()


@simulated
async def test_a_session_whose_launch_was_not_answered_and_is_not_wanted_any_more_is_stopped(it):
    async with simulate(name="told") as cluster:
        it.platform.doom("silent", key="told-0")  # so it does not enter itself into the record
        it.platform.plan("launch_workers", Mishap(error=KeyError("engineId")))
        cluster.scale(1)
        await eventually(lambda: "told-0" in {each.key for each in it.platform.live_sessions})
        cluster.scale(0)
        await eventually(lambda: len(it.platform.live) == 1)


@simulated
async def test_a_session_that_is_recorded_again_after_its_end_is_ended_again_in_the_record(it):
    """The platform's answer to a launch may come after another manager has stopped the session."""
    [late] = (each["id"] for each in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    async with simulate(name="told"):
        for _ in range(2):
            await asyncio.to_thread(launch, store.read("told"), late, key="told-7")
            await eventually(lambda: late not in store.read("told").sessions)


@simulated
async def test_a_dask_worker_whose_session_nobody_knew_hands_over_and_ends(it):
    [stray] = (each["id"] for each in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    async with simulate(name="told") as cluster, dask_worker(cluster, "told-7") as worker:
        await asyncio.to_thread(launch, store.read("told"), stray, key="told-7")
        await eventually(lambda: worker.status == Status.closed)
        await eventually(lambda: stray not in it.platform.live)
        assert not cluster.workers


@simulated
async def test_a_dask_worker_without_a_session_is_retired(it):
    async with simulate(name="told") as cluster, dask_worker(cluster, "told-7") as worker:
        await eventually(lambda: worker.status == Status.closed and not cluster.observed)


@simulated
async def test_a_wanted_worker_whose_session_is_not_in_the_record_is_replaced(it):
    """Its manager died before it wrote the record, and the session could not write it either."""
    await create_and_kill(it, name="told", n_workers=1)
    [lost] = (each for each, key in store.read("told").sessions.items() if key == "told-0")
    for file in (state_directory() / "told" / SESSIONS_FOLDER).glob(f"*{lost}*"):
        file.unlink()
    async with rebuild("told") as cluster:
        await eventually(lambda: arrived(cluster) == 1 and "told-0" not in cluster.manager.fleet.names)
        assert "told-1" in store.read("told").sessions.values()
        await cluster.close()


@simulated
async def test_dask_workers_that_are_not_named_like_the_clusters_stay(it, caplog):
    async with (
        simulate(name="told") as cluster,
        dask_worker(cluster, "told-7"),
        dask_worker(cluster, "mine") as named,
        dask_worker(cluster, 5) as numbered,
    ):
        await eventually(lambda: cluster.observed == {"mine", 5})
        assert named.status == numbered.status == Status.running
    assert "Cannot manage" not in caplog.text


@simulated
async def test_a_launched_session_that_is_not_in_the_record_is_forgotten(it):
    """Its manager has stopped it, and died before it said so."""
    async with simulate(name="told", worker_groups={"big": {}}) as cluster:
        comm, manager = cluster.scheduler_comm, cluster.manager.fleet.manager
        operation = {"op": "launched", "names": ["told-big-0"]}
        await comm.cml_apply(manager=manager, operations=[operation], since=0)
        await asyncio.wait_for(cluster.delete_worker_group("big"), 600)
