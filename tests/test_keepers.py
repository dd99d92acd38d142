"""The keeper of a cluster, remotes that write on its board, and who keeps the cluster next."""

import asyncio
import contextlib
import errno
import threading
import time
from datetime import datetime, timezone
from unittest import mock

import dask
import pytest
from clusters import (
    NOTEBOOK,
    Named,
    arrived,
    change_known_board,
    create_and_kill,
    create_elsewhere,
    cut_off,
    delay_requests,
    ends_of,
    forget_session,
    has,
    is_keeper,
    launch,
    launch_late,
    leave_alone,
    limits,
    lines_of,
    log_of,
    lose_first_answer,
    make,
    manager,
    manages,
    n_supplied,
    rebuild,
    run_command,
    scheduler_number,
    scheduler_of,
    sessions,
    shut_down,
    simulate,
    spec_of,
    step_in,
    step_out,
    stop_managing,
    supplied,
    take_board,
    target,
    waits,
    wanted,
    who_gave_up,
    write_record,
)
from distributed import Client
from simulated.faults import Mishap
from simulated.process import current
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError
from dask_cml.layout import SESSIONS_FOLDER, STARTED_FOLDER
from dask_cml.options import state_directory
from dask_cml.protocol import LAST, Letter, Request
from dask_cml.records import operations, store
from dask_cml.records.store import Record
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions.entry import Launch
from dask_cml.sharing import keeper as sharing_keeper
from dask_cml.sharing import sharing
from dask_cml.sharing.keeper import Link
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")

SLEEP = "import time; time.sleep(600)"


def shared(**options):
    return simulate(name="shared", **options)


def succeeds():
    """Another process, which manages the cluster next and ends it."""
    return rebuild("shared", shutdown_on_close=True)


@contextlib.asynccontextmanager
async def taken_over():
    """A manager that is cut off, another one that has taken the cluster over, and what heals the former."""
    async with supplied(name="shared", n_workers=1) as former, succeeds() as other:
        heal = cut_off(former)
        await eventually(lambda: is_keeper(other))
        yield former, other, heal


@pytest.mark.slow
@simulated
async def test_a_remote_shows_which_sessions_are_queued(it):
    async with shared(), rebuild("shared") as remote:
        it.platform.configure({"sessions": 2}, waits_for_room=True)
        remote.scale(2)
        await eventually(lambda: waits(remote))
        assert "queued" in repr(remote)
        assert remote.n_pending == 1
        it.platform.configure()
        await eventually(lambda: has(remote, 2) and not waits(remote))
        assert "problem" not in repr(remote)


@simulated
async def test_a_remote_without_keys_has_none_in_its_plans_and_hears_why_its_changes_are_refused(it):
    async with supplied(name="shared", n_workers=1) as keeper, rebuild("shared") as remote:
        await eventually(lambda: has(remote, 1))
        assert "--tls" not in remote.job_script()
        assert remote.scheduler_address == keeper.scheduler_address
        await remote.add_worker_group("gpu")
        await eventually(lambda: "gpu" in keeper.worker_groups)
        await keeper.delete_worker_group("gpu")
        with pytest.raises(CMLError, match=r"^invalid worker_group='gpu': expected one of 'default'$"):
            await remote.scale(1, worker_group="gpu")
        await eventually(lambda: "gpu" not in remote.worker_groups)
        remote.worker_spec.update(remote.new_worker_spec())
        await eventually(lambda: [*remote.worker_spec] == ["shared-0"])
        with pytest.raises(CMLError, match=r"worker_spec of cluster shared not changed: another process"):
            await remote._correct_state()
        assert [*remote.worker_spec] == ["shared-0"]
        await asyncio.sleep(30.0)
        assert has(keeper, 1)


def scale_up(cluster):
    cluster.scale(2)


def adapt(cluster):
    cluster.adapt(2, 3)


def add_by_hand(cluster):
    cluster.worker_spec.update(cluster.new_worker_spec())
    cluster._correct_state()


def adapt_and_add(cluster):
    adapt(cluster)
    add_by_hand(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "leaves"), [(scale_up, False), (adapt, True), (add_by_hand, False), (adapt_and_add, False)]
)
@simulated
async def test_what_a_former_keeper_is_asked_for_before_it_notices_reaches_the_board(it, ask, leaves):
    async with taken_over() as (former, other, heal):
        heal()
        ask(former)
        assert manages(former)
        if leaves:
            await former.leave()
        await eventually(lambda: has(other, 2))
        assert limits(other) == ((2, 3) if "adapt" in ask.__name__ else None)


@simulated
async def test_a_change_by_hand_of_which_nobody_has_heard_ends_no_adaptive_scaling_of_the_next_keeper(it):
    async with taken_over() as (former, other, heal):
        add_by_hand(former)
        other.adapt(1, 3)
        heal()
        await eventually(lambda: not manages(former) and limits(former) == (1, 3))
        await asyncio.sleep(30.0)
        assert limits(other) == (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [scale_up, add_by_hand])
@simulated
async def test_what_is_not_answered_yet_when_its_process_takes_over_is_carried_out(it, ask):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as remote:
        await eventually(lambda: arrived(remote) == 1)
        delay_requests(remote, 30.0)
        creator.kill()
        adding = asyncio.create_task(remote.add_worker_group("extra", n_workers=1))
        await eventually(lambda: is_keeper(remote))
        ask(remote)
        await adding
        await eventually(lambda: arrived(remote) == 3 and remote.worker_groups["extra"].n_arrived == 1)


@pytest.mark.slow
@simulated
async def test_a_request_whose_answer_is_lost_is_no_failure_and_carried_out_once_also_by_the_next_keeper(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as remote:
        lose_first_answer(remote)
        await remote.scale(2)
        lose_first_answer(remote)
        creator.kill()
        scaling = asyncio.ensure_future(remote.scale(4))
        await eventually(lambda: is_keeper(remote))
        await run_command("scale", "lab", 2)
        await scaling
        await asyncio.sleep(30.0)
        assert target(remote) == arrived(remote) == 2


@simulated
async def test_a_request_that_hangs_while_its_process_takes_over_is_carried_out_before_the_next_one(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as remote:
        await eventually(lambda: arrived(remote) == 1)
        lose_first_answer(remote, is_taken=False)
        creator.kill()
        scaling = asyncio.ensure_future(remote.scale(2))
        await remote.add_worker_group("big", n_workers=1)
        await scaling
        await eventually(lambda: is_keeper(remote) and arrived(remote) == 3)


@simulated
async def test_the_next_manager_repeats_neither_a_refusal_nor_that_sessions_are_queued(it):
    former = await shared(n_workers=1, worker_groups={"big": {}})
    async with succeeds() as remote:
        it.platform.configure({"sessions": 2}, waits_for_room=True)
        former.scale(2)
        await eventually(lambda: "queued" in str(lines_of(former)))
        it.platform.configure({"sessions": 2})
        former.scale(1, worker_group="big")
        await eventually(lambda: remote.problem and "launched 0 of 1 workers" in str(lines_of(former)))
        cut_off(former)
        await eventually(lambda: is_keeper(remote))
        await asyncio.sleep(30)
        assert remote.problem
        assert not [line for line in lines_of(remote) if "launched" in line or "queued" in line]


@simulated
async def test_requests_count_that_nobody_answered_before_their_process_manages_the_cluster(it):
    former = await shared()
    async with succeeds() as remote:
        delay_requests(remote, 30.0)
        remote.scale(2)
        cut_off(former)
        await eventually(lambda: is_keeper(remote))
        heal = cut_off(remote)
        remote.scale(1)
        await asyncio.sleep(120.0)
        heal()
        await eventually(lambda: has(remote, 1))


@simulated
async def test_the_next_manager_does_not_repeat_that_a_limit_of_the_site_is_reached(it):
    with dask.config.set({"cml.limits.sessions": 2}):
        former = await shared()
        async with succeeds() as remote, Client(remote, asynchronous=True) as client:
            futures = client.map(asyncio.sleep, [3600] * 100, pure=False)
            former.adapt(0, 10)
            await eventually(lambda: "adapts to 1 of 10 workers" in log_of(former))
            await asyncio.sleep(timing.look)
            cut_off(former)
            await eventually(lambda: is_keeper(remote))
            await asyncio.sleep(30)
            assert "adapts to" not in log_of(remote)
            del futures


@simulated
async def test_a_request_that_comes_with_the_answer_to_a_report_is_carried_out_at_once(it, monkeypatch):
    async def post_and_report(**values):
        step_out(cluster, "sends a report")
        await remote.scale(2)
        return await report(**values)

    async with shared() as cluster, rebuild("shared") as remote:
        monkeypatch.setattr(timing, "heartbeat", 60.0)
        await asyncio.sleep(15.0)
        report = step_in(cluster, "sends a report", post_and_report)
        await remote.scale(0)
        await eventually(lambda: target(cluster) == 2, 1.0)


@simulated
async def test_the_next_manager_finds_the_dashboard_of_a_creator_that_was_killed_while_it_started(it):
    async def create():
        async with shared():
            await asyncio.Event().wait()

    creator = it.process("creator", NOTEBOOK)
    creator.start(create())
    await eventually(lambda: it.clusters and store.read("shared").scheduler.address)
    creator.kill()
    async with succeeds() as cluster:
        await eventually(lambda: is_keeper(cluster))
        await eventually(lambda: store.read("shared").scheduler.app_url, 30.0)


@pytest.mark.parametrize("seen", [False, True], ids=["before the manager", "after the manager"])
@simulated
async def test_a_request_is_carried_out_once_although_the_scheduler_ends_before_it_writes_it(
    it, seen, monkeypatch
):
    monkeypatch.setattr("dask_cml.scheduler.plugin._REST", 60.0)
    async with supplied(name="shared", n_workers=1) as manager, succeeds() as remote:
        await eventually(lambda: arrived(remote) == 1)
        await remote.scale(3)
        heal = cut_off(remote) if seen else None
        await eventually(lambda: target(manager) == 3 or not seen)
        it.platform.evict(it.platform.running["shared-scheduler"])
        if seen:
            await manager.scale(2)
        await eventually(lambda: scheduler_number(manager) == 1)
        if seen:
            heal()
        await eventually(lambda: scheduler_number(remote) == 1)
        await eventually(lambda: has(manager, 2 if seen else 3))
        await asyncio.sleep(20)
        assert target(manager) == target(remote) == (2 if seen else 3)


@simulated
async def test_a_request_with_which_another_scheduler_begins_is_not_carried_out_after_later_ones(it):
    async with supplied(name="shared", n_workers=1) as former, succeeds() as manager:
        heal = cut_off(former)
        await former.scale(3)
        it.platform.evict(it.platform.running["shared-scheduler"])
        await eventually(lambda: is_keeper(manager) and target(manager) == 3, 100.0)
        await manager.scale(2)
        heal()
        await eventually(lambda: target(former) == 2 and has(manager, 2))
        await asyncio.sleep(20)
        assert target(former) == target(manager) == 2


@contextlib.asynccontextmanager
async def unreported(it):
    """A manager that has launched shared-1 instead of shared-0 without a report, and who manages next."""
    async with supplied(name="shared", n_workers=1) as former, succeeds() as remote:
        await eventually(lambda: arrived(remote) == 1)
        step_in(former, "reports", lambda **_: asyncio.sleep(0))
        it.platform.evict(it.platform.running["shared-0"])
        await eventually(lambda: "shared-1" in it.platform.running)
        yield former, remote


@simulated
async def test_a_takeover_that_fails_leaves_no_sessions_with_the_process_that_follows_again(it):
    async def fail(op, *arguments, **named):
        if op == LAST:
            asked.append(op)
            raise OSError("no route to host")
        return await ask(op, *arguments, **named)

    asked = []
    async with unreported(it) as (former, remote):
        ask = step_in(remote, "asks the scheduler", fail)
        cut_off(former)
        await eventually(lambda: asked and not remote.workers)
        await eventually(lambda: {*remote.worker_spec} == {"shared-0"}, 0.5)
        step_out(remote, "asks the scheduler")
        await eventually(lambda: is_keeper(remote) and has(remote, 1))


@pytest.mark.slow
@simulated
async def test_a_request_during_a_takeover_leaves_workers_alone_that_are_newer_than_the_report(it):
    async def ask_and_scale(op, *arguments, **named):
        if op == LAST and not asked:
            asked.append(remote.scale(1))
            await asyncio.sleep(2.0)
        return await ask(op, *arguments, **named)

    asked = []
    async with unreported(it) as (former, remote):
        ask = step_in(remote, "asks the scheduler", ask_and_scale)
        cut_off(former)
        await eventually(lambda: asked and is_keeper(remote) and has(remote, 1))
        await asyncio.sleep(60.0)
        assert wanted(remote) == ["shared-1"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, timing.answer], ids=["at once", "late"])
@simulated
async def test_a_request_that_reaches_nobody_before_its_process_leaves_is_told(it, caplog, seconds):
    await create_and_kill(it, name="shared", n_workers=1)
    async with rebuild("shared") as keeper:
        await eventually(lambda: is_keeper(keeper))
        cut_off(keeper, seconds)
        keeper.scale(2)
    assert "Cluster shared left before its last change was written" in caplog.text
    await shut_down("shared")


@pytest.mark.slow
@simulated
async def test_a_request_counts_although_an_earlier_one_is_refused_when_its_process_leaves(it):
    async with shared() as keeper:
        async with rebuild("shared") as remote:
            await remote.add_worker_group("gpu")
            await eventually(lambda: "gpu" in keeper.worker_groups)
            await keeper.delete_worker_group("gpu")
            remote.scale(1, worker_group="gpu")
            remote.scale(2)
        await eventually(lambda: has(keeper, 2))


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

        def is_refused():
            for what, ask in ("scaled", remote.scale), ("adapted", remote.adapt):
                words = "cluster shared is not connected yet, await it first"
                with pytest.raises(CMLError, match=f"^worker group 'default' not {what}: {words}$"):
                    ask(1)

        async def join_later(*arguments):
            is_refused()  # although the options are known by now
            await join(*arguments)

        is_refused()
        join = step_in(remote, "joins a scheduler", join_later)
        await remote
        await remote.scale(1)
        await eventually(lambda: has(keeper, 1))
        await remote.leave()


@pytest.mark.slow
@simulated
async def test_a_user_who_scales_while_or_after_the_keeper_takes_a_request_is_the_last(it):
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
        odd = Letter(number=99, request=Request(kind="adapt", limits={}))
        mail = odd, Letter(number=100, request=Request(kind="scale", n=0))
        change_known_board(keeper, mail=mail)
        keeper.scale(4)
        await take_board(keeper, mail=mail)
        assert len(keeper.worker_spec) == 4


class LikeAGroup(CMLCluster):
    """A cluster whose subclass names workers of the default group as others name workers of a group."""

    def _new_worker_name(self, worker_number):
        return f"{self.options.name}-worker-{worker_number}"


@pytest.mark.slow
@simulated
async def test_the_next_keeper_and_remotes_know_the_groups_of_workers_with_any_names(it):
    def groups():
        known = cluster.worker_groups.items()
        return {name: (group.n_arrived, wanted(cluster, name)) for name, group in known}

    def add_large():
        first.worker_spec["large"] = spec_of(first, "gpu")
        first._correct_state()

    creator = await create_elsewhere(it, LikeAGroup, name="shared", n_workers=1, worker_groups={"gpu": {}})
    [first] = creator.clusters
    creator.call(add_large)
    await eventually(lambda: arrived(first) == 2)
    before = {*it.platform.live}
    expected = {"default": (1, ["shared-worker-0"]), "gpu": (1, ["large"])}
    async with succeeds() as cluster:
        await eventually(lambda: groups() == expected)
        creator.kill()
        await eventually(lambda: is_keeper(cluster))
        await asyncio.sleep(timing.strays + timing.stray)
        assert groups() == expected
        assert {*it.platform.live} == before
        sessions = {group: used.sessions for group, used in (await cluster.usage()).items()}
        assert sessions == {"scheduler": 1, "default": 1, "gpu": 1}
        assert (await n_supplied(cluster, "default"), await n_supplied(cluster, "gpu")) == (1, 1)


@pytest.mark.slow
@simulated
async def test_the_next_keeper_retires_the_workers_of_a_group_that_was_deleted_meanwhile(it):
    groups = {"gpu": {"n_workers": 1, "cpu": 2, "processes": 2}}
    creator = await create_elsewhere(it, name="shared", n_workers=1, worker_groups=groups, worker_args=[])
    async with succeeds() as cluster, Client(cluster, asynchronous=True) as client:
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
    async with supplied(name="shared", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
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


async def test_launches_that_share_a_failed_write_know_that_the_record_was_removed():
    journal = sharing_keeper.Journal(mock.Mock(), Record("gone", folder=state_directory() / "gone"))
    plans = [mock.Mock(key=f"gone-{n}", size=None) for n in range(4)]
    launched = {"owner": None, "group": "default", "since": datetime.now(timezone.utc)}
    workers = [mock.Mock(session_id=plan.key, plan=plan, **launched) for plan in plans]
    await asyncio.gather(*map(journal.enter, workers))
    assert journal.gone


@pytest.mark.parametrize("notices_it", [False, True])
@simulated
async def test_a_keeper_whose_record_was_removed_stops_its_sessions_when_it_leaves(it, caplog, notices_it):
    caplog.set_level("INFO")
    cluster = await shared(silence_logs=False)  # which would silence caplog, too
    assert await asyncio.to_thread(store.remove, store.read("shared")) is not None
    if notices_it:
        cluster.scale(1)
        await eventually(lambda: "Cluster shared launches no more sessions" in caplog.text)
    await cluster.leave()
    assert not it.platform.running
    assert it.clusters == []


@pytest.mark.slow
@simulated
async def test_a_keeper_whose_record_is_not_found_for_a_moment_stops_nothing_when_it_leaves(it, monkeypatch):
    cluster = await shared(shutdown_on_close=False)
    with monkeypatch.context() as changed:
        changed.setattr(store, "check_folder", mock.Mock(side_effect=FileNotFoundError))
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)
        await cluster.leave()
    assert {*it.platform.running} == {"shared-scheduler", "shared-0"}
    await shut_down("shared")


@pytest.mark.slow
@simulated
async def test_a_launch_and_a_group_count_that_come_while_the_keeper_yields(it, monkeypatch):
    async def add_and_scale():
        step_out(cluster, "lets the sessions go")
        await asyncio.wait_for(cluster.add_worker_group("big"), 60.0)
        cluster.scale(1, worker_group="big")
        await close()

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
        close = step_in(cluster, "lets the sessions go", add_and_scale)
        with it.platform.held("launch_workers") as answer:
            cluster.scale(1)
            await eventually(lambda: it.platform.under_way)
            await stop_managing(cluster)
        assert "shared-0" in [launch.key for launch in known.values()]
        await eventually(lambda: is_keeper(cluster) and arrived(cluster) == 2)


@pytest.mark.slow
@simulated
async def test_a_keeper_that_yields_enters_a_session_whose_launch_was_answered_late(it):
    async with shared(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        late = await launch_late(cluster, "shared-0")
        await stop_managing(cluster)
        assert store.read("shared").sessions[late] == "shared-0"
        await eventually(lambda: is_keeper(cluster) and late not in store.read("shared").sessions)
        assert arrived(cluster) == 1


@simulated
async def test_a_launch_that_is_answered_after_its_keeper_has_yielded_is_known_to_the_next_keeper(it):
    creator = await create_elsewhere(it, name="shared", n_workers=1)
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with rebuild("shared") as cluster:
        with it.platform.hangs("launch_workers"):
            await cluster.scale(2)
            await eventually(lambda: it.platform.count("launch_workers") == 3)
            creator.pause(30.0)
            await eventually(lambda: is_keeper(cluster) and "shared-1" in cluster.workers)
            await asyncio.sleep(40.0)
        await eventually(lambda: len(it.platform.all) == 4)
        await eventually(lambda: len(it.platform.live) == len(store.read("shared").sessions) == 3, 60.0)
        await cluster.shutdown()


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
        unused = await find_unused()
        if not stops:
            change_known_board(cluster, keeper="another")
        return unused

    async def note_stop(ids):
        stops.append(is_keeper(cluster))
        await stop(ids)

    stops = []
    async with supplied(name="shared", n_workers=1) as cluster:
        find_unused = step_in(cluster, "looks for sessions", lose_the_lease_once)
        stop = step_in(cluster, "stops sessions", note_stop)
        cluster.scale(0)
        await eventually(lambda: {*it.platform.running} == {"shared-scheduler"})
        assert all(stops)


@simulated
async def test_a_keeper_that_loses_the_lease_while_the_scheduler_chooses_retires_nobody(it):
    async def note_retirement(**arguments):
        retirements.append(is_keeper(cluster))
        return await retire(**arguments)

    async def choose_once(**arguments):
        handlers["workers_to_close"] = choose
        await asyncio.sleep(0.5)  # until the board with the report is known
        change_known_board(cluster, keeper="another")
        return choose(**arguments)

    retirements = []
    async with supplied(name="shared", n_workers=2) as cluster:
        handlers = scheduler_of(it, cluster).handlers
        choose, handlers["workers_to_close"] = handlers["workers_to_close"], choose_once
        retire, handlers["retire_workers"] = handlers["retire_workers"], note_retirement
        cluster.scale(1)
        await eventually(lambda: has(cluster, 1))
    assert retirements == [True]


@simulated
async def test_a_keeper_that_has_lost_the_lease_judges_no_worker(it):
    async def find():
        looks.append(cluster.keeps)
        return {}

    looks = []
    async with shared() as cluster:
        step_in(cluster, "looks for losses", find)
        for _ in range(20):
            change_known_board(cluster, keeper="another")
            await asyncio.sleep(0.3)
        await eventually(lambda: looks)
        assert all(looks)


def sleeping(it):
    [session] = (session["id"] for session in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    return session


@simulated
async def test_a_session_is_no_stray_at_the_first_look_after_an_outage_of_the_files(it, monkeypatch):
    async with shared():
        stray = sleeping(it)
        with monkeypatch.context() as patch:
            failure = CMLError("the file system does not answer")
            patch.setattr(sharing_keeper.store, "read_again", mock.Mock(side_effect=failure))
            await asyncio.to_thread(launch, store.read("shared"), stray, key="shared-7")
            await asyncio.sleep(timing.strays + timing.stray)
        await asyncio.sleep(timing.strays)
        assert stray in it.platform.live
        await eventually(lambda: stray not in it.platform.live)


@pytest.mark.slow
@simulated
async def test_sessions_that_nobody_launched_or_wants_are_stopped_and_ended_in_the_record(it):
    async with supplied(name="shared", n_workers=1) as cluster:
        stray = sleeping(it)
        for _ in range(2):  # the platform's answer to a launch may come after another process has stopped it
            await asyncio.to_thread(launch, store.read("shared"), stray, key="shared-7")
            await eventually(lambda: stray not in it.platform.live)
            await eventually(lambda: stray not in store.read("shared").sessions)
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.running) == 2
        it.platform.plan("launch_workers", Mishap(error=KeyError("engineId")))
        cluster.scale(2)
        await eventually(lambda: "shared-1" in {session.key for session in it.platform.live_sessions})
        cluster.scale(1)
        await eventually(lambda: len(it.platform.live) == 2)
        it.platform.refuse()
        it.platform.plan("stop_workers", Mishap(error=ConnectionError("lost"), carried_out=False))
        cluster.scale(2)
        await eventually(lambda: len(it.platform.live) == 3)
        await cluster.leave()
    assert {*it.platform.live} == store.read("shared").sessions.keys()
    old = sleeping(it)
    changes = [Launch(old, "shared-7", None, int(time.time()) - 60)]
    await asyncio.to_thread(store.write_sessions, store.read("shared"), changes, [])
    async with rebuild("shared") as cluster:  # the next keeper does so at once
        await eventually(lambda: it.platform.all[old].stop_requested, seconds=2.0)
        await cluster.shutdown()


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
async def test_events_are_kept_that_are_noted_while_the_scheduler_answers(it, monkeypatch):
    async def send_slowly(self, **values):
        answer = await send(self, **values)
        await asyncio.sleep(5.0)
        return answer

    send = Link.report
    monkeypatch.setattr(Link, "report", send_slowly)
    async with supplied(name="lab", n_workers=3) as cluster, Client(cluster, asynchronous=True) as client:

        async def launched():
            events = [event for _, event in await client.get_events("cml")]
            return {event["session"] for event in events if event.get("action") == "launched"}

        while await launched() != {"lab-0", "lab-1", "lab-2"}:
            await asyncio.sleep(1.0)


@pytest.mark.slow
@simulated
async def test_a_process_whose_files_hang_tries_more_and_more_rarely_to_keep_the_cluster(it, monkeypatch):
    def hangs(record):
        while current() is user and not may_read.is_set():
            time.sleep(1.0)
        return read_again(record)

    async def connect():
        async with rebuild("night"):
            monkeypatch.setattr(store, "read_again", hangs)
            await may_read.wait()

    await leave_alone(it, n_workers=1)
    await eventually(lambda: manager("night") == WHO)
    read_again, may_read, user = store.read_again, asyncio.Event(), it.process("user", NOTEBOOK)
    using = user.start(connect())
    await asyncio.sleep(900.0)
    assert 2 <= sum(process.name.startswith("resident") for process in it.processes) <= 7
    may_read.set()
    await using
    await shut_down()


@pytest.mark.slow
@simulated
async def test_files_that_hang_do_not_keep_a_process_from_telling_how_sessions_end(it, monkeypatch):
    async with shared() as cluster:
        with monkeypatch.context() as changed:
            changed.setattr(store, "refreshed", lambda _: time.sleep(600.0))
            assert await asyncio.wait_for(ends_of(cluster), 60.0) == []  # as far as it is known here


@pytest.mark.parametrize("how", ["hang", "fail"])
@pytest.mark.slow
@simulated
async def test_who_connects_waits_for_files_that_hang_or_fail_while_it_is_to_keep_the_cluster(
    it, how, monkeypatch
):
    def read_late(record):
        while time.monotonic() < readable:
            if how == "fail":
                raise store.RecordUnreadable(record.folder, OSError(errno.EIO, "Input/output error"))
            time.sleep(1.0)
        return read_again(record)

    await leave_alone(it, n_workers=1)
    await eventually(lambda: manager("night") is None)
    read_again, readable = store.read_again, time.monotonic() + 20.0
    monkeypatch.setattr(store, "read_again", read_late)
    async with rebuild("night") as cluster:
        await eventually(lambda: is_keeper(cluster))
        await cluster.shutdown()
