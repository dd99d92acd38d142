"""The keeper of a cluster, remotes that write on its board, and who keeps the cluster next."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import dask
import pytest
from clusters import (
    arrived,
    change_known_board,
    create_and_kill,
    create_elsewhere,
    cut_off,
    forget_session,
    is_keeper,
    launch,
    limits,
    lines_of,
    make,
    manages,
    n_supplied,
    rebuild,
    sessions,
    simulate,
    spec_of,
    step_in,
    stop_managing,
    take_board,
    target,
    waits,
    wanted,
    who_gave_up,
    write_record,
)
from distributed import Client, Worker
from distributed.core import Status
from simulated.faults import Mishap
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError
from dask_cml.layout import SESSIONS_FOLDER, STARTED_FOLDER
from dask_cml.options import state_directory
from dask_cml.records import operations, store
from dask_cml.records.record import Record
from dask_cml.scheduler.board import Letter, Request
from dask_cml.sessions.entry import Launch
from dask_cml.sharing import keeper as sharing_keeper
from dask_cml.sharing import sharing
from dask_cml.sharing.link import Link
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def locally(platform):
    with dask.config.set({"cml.platform": "local"}):
        yield platform


def shared(**options):
    return simulate(name="shared", **options)


def has(cluster, n):
    """Whether a keeper or a remote sees so many requested and connected workers."""
    return arrived(cluster) == target(cluster) == len(cluster.scheduler_info["workers"]) == n


# -- remotes


@pytest.mark.slow
@simulated
async def test_a_remote_shows_what_the_keeper_says(it):
    with dask.config.set({"cml.failure-limit": 1}):
        async with shared() as keeper, rebuild("shared") as remote:
            it.platform.doom("fails", times=9)
            remote.scale(1)
            await eventually(lambda: "no new workers after 1 failures in a row" in repr(remote))
            assert who_gave_up(remote) == who_gave_up(keeper)
            assert remote.problem == keeper.problem
            it.platform.heal()
            it.platform.configure({"sessions": 2}, waits_for_room=True)
            remote.scale(2)
            await eventually(lambda: waits(remote))
            assert "queued" in repr(remote)
            assert remote.n_pending == 1
            it.platform.configure()
            await eventually(lambda: has(remote, 2) and not waits(remote))
            assert "problem" not in repr(remote)


@pytest.mark.slow
@simulated
async def test_the_plans_of_a_cluster_without_keys_have_none_in_a_remote(it):
    async with shared() as keeper, rebuild("shared") as remote:
        assert "--tls" not in remote.job_script()
        assert remote.scheduler_address == keeper.scheduler_address
        remote.scale(1)
        await eventually(lambda: arrived(keeper) == 1)


@simulated
async def test_a_change_that_the_board_refuses_is_an_error_in_its_words(it):
    async with shared() as keeper, rebuild("shared") as remote:
        await remote.add_worker_group("gpu")
        await eventually(lambda: "gpu" in keeper.worker_groups)
        await keeper.delete_worker_group("gpu")
        with pytest.raises(CMLError, match=r"^invalid worker_group='gpu': expected one of 'default'$"):
            await remote.scale(1, worker_group="gpu")
        await eventually(lambda: "gpu" not in remote.worker_groups)


@pytest.mark.slow
@simulated
async def test_a_specification_by_hand_is_refused_by_a_process_that_does_not_manage_the_cluster(it):
    async with shared(n_workers=1) as keeper, rebuild("shared") as remote:
        await eventually(lambda: has(remote, 1))
        remote.worker_spec.update(remote.new_worker_spec())
        with pytest.raises(CMLError, match=r"worker_spec of cluster shared not changed: another process"):
            await remote._correct_state()
        assert [*remote.worker_spec] == ["shared-0"]
        await asyncio.sleep(30.0)
        assert has(keeper, 1)


# -- who keeps the cluster


def scale_up(cluster):
    cluster.scale(2)


def adapt(cluster):
    cluster.adapt(2, 3)


def add_by_hand(cluster):
    cluster.worker_spec.update(cluster.new_worker_spec())
    cluster._correct_state()


@pytest.mark.slow
@pytest.mark.parametrize(("ask", "leaves"), [(scale_up, False), (adapt, True), (add_by_hand, False)])
@simulated
async def test_what_a_former_keeper_is_asked_for_before_it_notices_reaches_the_board(it, ask, leaves):
    async with shared(n_workers=1) as former, rebuild("shared", shutdown_on_close=True) as other:
        await eventually(lambda: has(former, 1))
        heal = cut_off(former)
        await eventually(lambda: is_keeper(other))
        heal()
        ask(former)
        assert manages(former)
        if leaves:
            await former.leave()
        await eventually(lambda: has(other, 2))
        assert limits(other) == ((2, 3) if ask is adapt else None)


@simulated
async def test_a_request_after_the_first_board_is_written_reaches_the_board(it, monkeypatch):
    cluster = shared()
    fill_folder = sharing.fill_folder

    def adapt_meanwhile(*arguments):
        assert not manages(cluster)
        cluster.adapt(1, 2)
        fill_folder(*arguments)

    monkeypatch.setattr(sharing, "fill_folder", adapt_meanwhile)
    async with cluster, rebuild("shared") as remote:
        await eventually(lambda: limits(remote) == (1, 2))
        await eventually(lambda: has(remote, 1))
        assert limits(cluster) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("create_mode", ["connect", "create-or-connect"])
@simulated
async def test_a_cluster_that_may_run_already_takes_no_request_before_it_is_connected(it, create_mode):
    async with shared() as keeper:
        remote = make(name="shared", create_mode=create_mode, platform="auto")
        for what, ask in ("scaled", remote.scale), ("adapted", remote.adapt):
            words = (
                f"^worker group 'default' not {what}: cluster shared is not connected yet, await it first$"
            )
            with pytest.raises(CMLError, match=words):
                ask(1)
        await remote
        await remote.scale(1)
        await eventually(lambda: has(keeper, 1))
        await remote.leave()


@simulated
async def test_a_user_who_scales_after_a_request_that_the_keeper_knows_is_the_last(it):
    async with simulate(name="lab", n_workers=0) as cluster:
        request = Letter(number=1, request=Request(kind="scale", n=0))
        change_known_board(cluster, mail=(request,))
        cluster.scale(2)
        await take_board(cluster, mail=(request,))
        assert len(cluster.worker_spec) == 2


@pytest.mark.slow
@simulated
async def test_a_user_who_scales_while_the_keeper_takes_a_request_is_the_last(it):
    async with shared() as keeper, rebuild("shared") as remote:
        threads = []

        def scale_meanwhile(group):
            if not threads:
                threads.append(threading.Thread(target=keeper.scale, args=[3]))
                threads[0].start()
                threads[0].join(0.2)  # for ever, if it must wait
            return absent(group)

        absent = step_in(keeper, "looks for absent workers", scale_meanwhile)
        await remote.scale(1)
        await eventually(lambda: threads and not threads[0].is_alive())
        await eventually(lambda: has(keeper, 3) and has(remote, 3))


class Named(CMLCluster):
    """A cluster whose subclass names the workers."""

    def _new_worker_name(self, worker_number):
        return f"a-w{worker_number}"


class LikeAGroup(CMLCluster):
    """A cluster whose subclass names workers of the default group as others name workers of a group."""

    def _new_worker_name(self, worker_number):
        return f"{self.options.name}-worker-{worker_number}"


@pytest.mark.slow
@simulated
async def test_the_next_keeper_and_remotes_know_the_groups_of_workers_with_any_names(it):
    def groups(cluster):
        return {name: group.n_arrived for name, group in cluster.worker_groups.items()}

    def add_large():
        first.worker_spec["large"] = spec_of(first, "gpu")
        first._correct_state()

    creator = await create_elsewhere(it, LikeAGroup, name="shared", n_workers=1, worker_groups={"gpu": {}})
    [first] = creator.clusters
    creator.call(add_large)
    await eventually(lambda: arrived(first) == 2)
    before = {*it.platform.live}
    async with rebuild("shared", shutdown_on_close=True) as cluster:
        await eventually(lambda: groups(cluster) == {"default": 1, "gpu": 1})
        assert (wanted(cluster, "default"), wanted(cluster, "gpu")) == (
            ["shared-worker-0"],
            ["large"],
        )
        creator.kill()
        await eventually(lambda: is_keeper(cluster))
        await asyncio.sleep(timing.strays + timing.stray)
        assert groups(cluster) == {"default": 1, "gpu": 1}
        assert (wanted(cluster, "default"), wanted(cluster, "gpu")) == (
            ["shared-worker-0"],
            ["large"],
        )
        assert {*it.platform.live} == before
        sessions = {group: used.sessions for group, used in (await cluster.usage()).items()}
        assert sessions == {"scheduler": 1, "default": 1, "gpu": 1}
        assert (await n_supplied(cluster, "default"), await n_supplied(cluster, "gpu")) == (1, 1)


@pytest.mark.slow
@simulated
async def test_the_next_keeper_retires_the_workers_of_a_group_that_was_deleted_meanwhile(it):
    groups = {"gpu": {"n_workers": 1, "cpu": 2, "processes": 2}}
    creator = await create_elsewhere(it, name="shared", n_workers=1, worker_groups=groups, worker_args=[])
    async with (
        rebuild("shared", shutdown_on_close=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        holder = next(name for name in cluster.observed if name.startswith("shared-gpu-0"))
        [future] = await client.scatter([bytes(1000)], workers=[holder])
        creator.kill()
        await cluster.delete_worker_group("gpu")
        assert is_keeper(cluster)
        await eventually(lambda: len(it.platform.live) == 2)
        assert await future == bytes(1000)


@pytest.mark.slow
@simulated
async def test_a_worker_that_nobody_wants_or_has_launched_is_retired_before_it_is_stopped(it):
    async with shared(n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        await eventually(lambda: has(cluster, 2))
        [future] = await client.scatter([bytes(1000)], workers=["shared-1"])
        unknown = cluster.workers.pop("shared-1")
        del cluster.worker_spec["shared-1"]
        forget_session(cluster, unknown.session_id)
        for file in (state_directory() / "shared" / SESSIONS_FOLDER).glob(f"{unknown.session_id}*"):
            file.unlink()
        await eventually(lambda: unknown.session_id not in it.platform.live)
        assert await future == bytes(1000)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [CMLCluster, Named])
@simulated
async def test_the_next_keeper_gives_no_name_again(it, cls):
    """Some names of the record and of the folder `started` are missing in the other one."""
    creator = await create_elsewhere(it, cls, name="shared", n_workers=3, shutdown_on_close=False)
    async with simulate(cls, name="shared", create_mode="connect", shutdown_on_close=True) as cluster:
        before = {*cluster.worker_spec}
        await cluster.scale(1)
        await eventually(lambda: has(cluster, 1) and len(it.platform.live) == 2)
        first, second = sorted(before - it.platform.running.keys())
        [session] = (session.id for session in it.platform.all.values() if session.key == second)
        folder = state_directory() / "shared"
        (folder / STARTED_FOLDER / first).unlink()
        for file in (folder / SESSIONS_FOLDER).glob(f"{session}*"):
            file.unlink()
        creator.kill()
        await eventually(lambda: is_keeper(cluster))
        launched = len(it.platform.all)
        cluster.scale(5)
        await eventually(lambda: has(cluster, 5))
        assert len(it.platform.all) == launched + 4
        assert {*cluster.worker_spec}.isdisjoint({first, second})
        assert cluster.problem is None


@pytest.mark.slow
@simulated
async def test_a_session_whose_name_was_given_before_is_replaced_and_no_failure(it):
    with dask.config.set({"cml.failure-limit": 1}):
        async with shared(worker_groups={"gpu": {}}) as cluster:
            for name in ("shared-0", "shared-gpu-0"):
                (state_directory() / "shared" / STARTED_FOLDER / name).write_text("formersession000")
            cluster.scale(1)
            cluster.scale(1, worker_group="gpu")
            await eventually(lambda: arrived(cluster) == 2)
            assert {*cluster.workers} == {"shared-1", "shared-gpu-1"}
            assert who_gave_up(cluster) == {}
            assert cluster.problem is None
            line = "Worker shared-0 not started: another session had its name; launching a replacement"
            assert line in lines_of(cluster)
            assert not any("lost: " in line for line in lines_of(cluster))


@pytest.mark.slow
async def test_others_get_the_link_although_the_creator_leaves_before_its_first_look(
    locally, holds, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(CMLCluster, "_look_for_ever", lambda self: asyncio.Event().wait())
        await (await make(name="mine")).leave()
    async with rebuild("mine", shutdown_on_close=True):
        await holds(lambda: store.read("mine").scheduler.app_url is not None, 20)


# -- the end


@pytest.mark.slow
async def test_a_session_launched_at_the_last_moment_of_a_deletion_is_stopped(platform, monkeypatch):
    early, late = (session["id"] for session in platform.launch_workers(2, cpu=1, memory=1, code=SLEEP))
    write_record(Record("shared", options={"platform": "local"}, launches=sessions(**{early: "shared-0"})))
    remove = store.remove

    def after_the_keeper_has_launched(record):
        launch(record, late, key="shared-1")
        return remove(record)

    monkeypatch.setattr(store, "remove", after_the_keeper_has_launched)
    assert await operations.end_all(store.records()) == {"shared": None}
    assert all(session["stop_requested"] for session in platform.sessions())
    assert store.records() == []


@simulated
async def test_a_keeper_whose_record_was_removed_stops_its_sessions_when_it_leaves(it, caplog):
    caplog.set_level("INFO")
    cluster = await shared(silence_logs=False)  # which would silence caplog, too
    assert await asyncio.to_thread(store.remove, store.read("shared")) is not None
    cluster.scale(1)
    await eventually(lambda: "Record of cluster shared removed" in caplog.text)
    await cluster.leave()
    assert not it.platform.running
    assert it.clusters == []


@pytest.mark.slow
@simulated
async def test_a_keeper_whose_record_is_not_found_for_a_moment_stops_nothing_when_it_leaves(it, monkeypatch):
    def not_found(folder):
        raise FileNotFoundError(folder)

    cluster = await shared(shutdown_on_close=False)
    with monkeypatch.context() as changed:
        changed.setattr(store, "check_folder", not_found)
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)
        await cluster.leave()
    assert {*it.platform.running} == {"shared-scheduler", "shared-0"}
    await (await rebuild("shared")).shutdown()


@pytest.mark.slow
@simulated
async def test_a_launch_that_is_answered_while_the_keeper_yields_is_recorded(it, monkeypatch):
    async def _stop_looking():
        answer()
        await eventually(lambda: recorded.is_set())
        await stop()

    async def launched(process):
        await note(process)
        known.update(store.read("shared").launches)
        recorded.set()

    known, recorded = {}, asyncio.Event()
    async with shared() as cluster:
        stop = cluster._stop_looking
        monkeypatch.setattr(cluster, "_stop_looking", _stop_looking)
        note = step_in(cluster, "notes a launch", launched)
        with it.platform.held("launch_workers") as answer:
            cluster.scale(1)
            await eventually(lambda: it.platform.under_way)
            await stop_managing(cluster)
        assert "shared-0" in [launch.key for launch in known.values()]
        await eventually(lambda: is_keeper(cluster) and has(cluster, 1))


@pytest.mark.slow
@simulated
async def test_a_session_that_is_launched_while_the_record_is_read_is_no_stray(it, monkeypatch, caplog):
    def read_slowly(record):
        cluster.scale(1)
        time.sleep(2 * timing.stray)
        reads.append(record)
        return read(record)

    reads, read = [], store.read_again
    async with shared() as cluster:
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        with monkeypatch.context() as patch:
            patch.setattr(sharing_keeper.store, "read_again", read_slowly)
            await eventually(lambda: reads)
        await asyncio.sleep(timing.stray)
        assert len(cluster.workers) == 1
        assert "no process has launched it" not in caplog.text


@simulated
async def test_a_keeper_that_loses_the_lease_in_a_step_stops_nothing(it):
    async def lose_the_lease_once():
        await find_sessions()
        if not stops:
            change_known_board(cluster, keeper="another")

    async def note_stop(ids):
        stops.append(is_keeper(cluster))
        await stop(ids)

    stops = []
    async with shared(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        find_sessions = step_in(cluster, "looks for sessions", lose_the_lease_once)
        stop = step_in(cluster, "stops sessions", note_stop)
        cluster.scale(0)
        await eventually(lambda: {*it.platform.running} == {"shared-scheduler"})
        assert all(stops)


# -- sessions and workers that the keeper has not launched


@contextlib.asynccontextmanager
async def dask_worker(cluster, name):
    """A Dask worker of a cluster, in this process."""
    async with Worker(cluster.scheduler.address, name=name, nthreads=1, dashboard=False) as worker:
        yield worker


def sleeping(it):
    """Launch a session that is no part of a cluster."""
    [session] = (session["id"] for session in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    return session


@pytest.mark.slow
@simulated
async def test_a_session_in_the_record_that_nobody_launched_is_stopped_and_ended_there(it):
    stray = sleeping(it)
    async with shared(n_workers=1) as cluster:
        for _ in range(2):  # the platform's answer to a launch may come after another process has stopped it
            await asyncio.to_thread(launch, store.read("shared"), stray, key="shared-7")
            await eventually(lambda: stray not in it.platform.live)
            await eventually(lambda: stray not in store.read("shared").sessions)
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.running) == 2


@pytest.mark.slow
@simulated
async def test_the_next_keeper_stops_an_old_session_that_nobody_launched_at_once(it):
    creator = await shared(shutdown_on_close=False)
    await creator.leave()
    stray = sleeping(it)
    changes = [Launch(stray, "shared-7", None, int(time.time()) - 60)]
    await asyncio.to_thread(store.write_sessions, store.read("shared"), changes, [])
    async with rebuild("shared") as cluster:
        await eventually(lambda: it.platform.all[stray].stop_requested, seconds=2.0)
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_a_session_whose_launch_was_not_answered_and_is_not_wanted_any_more_is_stopped(it):
    async with shared() as cluster:
        it.platform.plan("launch_workers", Mishap(error=KeyError("engineId")))
        cluster.scale(1)
        await eventually(lambda: "shared-0" in {session.key for session in it.platform.live_sessions})
        cluster.scale(0)
        await eventually(lambda: len(it.platform.live) == 1)


@simulated
async def test_a_wanted_worker_whose_session_is_not_in_the_record_is_taken_over_or_replaced(it):
    """Its keeper died before it wrote the record, and the session could not write it either."""
    await create_and_kill(it, name="shared", n_workers=1)
    [lost] = (session for session, key in store.read("shared").sessions.items() if key == "shared-0")
    for file in (state_directory() / "shared" / SESSIONS_FOLDER).glob(f"*{lost}*"):
        file.unlink()
    async with rebuild("shared") as cluster:
        await eventually(lambda: has(cluster, 1) and len(it.platform.running) == 2)
        await eventually(
            lambda: {*store.read("shared").sessions} == {session.id for session in cluster.sessions}
        )
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_dask_workers_that_are_not_named_like_the_clusters_stay(it, caplog):
    async with (
        shared() as cluster,
        dask_worker(cluster, "mine") as named,
        dask_worker(cluster, 5) as numbered,
    ):
        await asyncio.sleep(timing.strays + timing.stray)
        assert cluster.observed == {"mine", 5}
        assert named.status == numbered.status == Status.running
    assert "Cannot manage" not in caplog.text


@pytest.mark.slow
@simulated
async def test_events_are_kept_that_are_noted_while_the_scheduler_answers(it, monkeypatch):
    async def send_slowly(self, **values):
        answer = await send(self, **values)
        await asyncio.sleep(5.0)
        return answer

    send = Link.report
    monkeypatch.setattr(Link, "report", send_slowly)
    async with simulate(name="lab") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.scale(3)
        await eventually(lambda: arrived(cluster) == 3)

        async def launched():
            events = [event for _, event in await client.get_events("cml")]
            return {event["session"] for event in events if event.get("action") == "launched"}

        while await launched() != {"lab-0", "lab-1", "lab-2"}:
            await asyncio.sleep(1.0)
