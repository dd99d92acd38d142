"""Clusters apart from the process that created them, and who connects to the one of a name."""

import asyncio
import json
import os
import time
import urllib.request
from unittest import mock

import dask
import psutil
import pytest
from clusters import (
    arrived,
    create_and_kill,
    create_elsewhere,
    is_connected,
    is_subscribed,
    lines_of,
    live,
    log_of,
    make,
    manager,
    n_connected,
    name_other_clusters,
    rebuild,
    scheduler_number,
    shut_down,
    sign_of,
    simulate,
    step_in,
    supplied,
    unsubscribe,
)
from distributed.core import Status
from simulated.faults import Mishap
from simulated.platform import SimulatedPlatform
from simulated.process import SimulatedProcess
from simulated.shell import shell
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists, CMLCluster, CMLError, protocol
from dask_cml import cluster as cluster_module
from dask_cml.discovery import CMLCluster as DiscoveredCluster
from dask_cml.discovery import discover
from dask_cml.layout import RECORD_FILE
from dask_cml.options import state_directory
from dask_cml.records import operations, store
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions import here
from dask_cml.sharing.sharing import Sharing
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")

MADE = {"name": "made", "n_workers": 2, "security": True}
ANOTHER = {"CDSW_ENGINE_ID": "anothersession00"}


@simulated
async def test_nobody_connects_to_a_cluster_whose_scheduler_has_ended_and_all_hear_that_at_once(it):
    await create_and_kill(it, **MADE)
    session = store.read("made").scheduler.session
    it.platform.evict(session)
    await eventually(lambda: not it.sessions.processes[session].runs)
    begin = time.monotonic()
    why = f"its scheduler's session {session} has ended"
    with pytest.raises(CMLError, match=f"'made', which has ended: {why}.*`dask cml delete made`"):
        await rebuild("made")
    [row] = await operations.describe(store.records())
    assert (row["status"], row["problem"]) == ("stale", why)
    assert time.monotonic() - begin < 5.0
    assert await operations.prune() == ({"made": None}, {})
    assert not it.platform.running
    assert store.records() == []


@simulated
async def test_who_creates_a_cluster_that_another_process_creates_right_now_is_not_told_to_delete_it(it):
    one = simulate(**MADE)
    starts = asyncio.ensure_future(one)
    await eventually(lambda: it.clusters == ["made"])
    words = r"another process creates it right now\): to see it, run `dask cml info made`; if this persists, "
    with pytest.raises(ClusterExists, match=words):
        await simulate(**MADE)
    await starts
    await one.close()


@pytest.mark.parametrize("security", [pytest.param(True, marks=pytest.mark.slow), False])
@simulated
async def test_a_silent_cluster_that_is_not_listed_keeps_its_name_until_it_is_deleted(it, security):
    async def create():
        for silent in (0, timing.silence, 30 * 86400):
            os.utime(sign, (0, sign.stat().st_mtime - silent))
            with pytest.raises(ClusterExists, match="to delete it, run `dask cml delete made`"):
                await simulate(name="made")
        await shell("delete", "made")
        async with simulate(name="made") as cluster:
            assert it.platform.running["made-scheduler"] == cluster.sessions[0].id

    await create_and_kill(it, **{**MADE, "security": security})
    sign = sign_of("made")
    it.platform.evict(store.read("made").scheduler.session)
    await it.process("another", ANOTHER).start(create())


IDLE, SESSION, JOB = "IDLE_MAXIMUM_MINUTES", "SESSION_MAXIMUM_MINUTES", "JOB_MAXIMUM_MINUTES"
LONGER = "To compute for longer, run your script as a CML Job, or run `dask cml serve` as an Application"
WITH_IT = "Its clusters end with it"
COMPUTES = "in some editors even while it computes"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({IDLE: "60"}, f"session mysession after 60 min without use, {COMPUTES}. {WITH_IT}. {LONGER}"),
        ({SESSION: "10080"}, f"session mysession in 6.9 d at the latest. {WITH_IT}. {LONGER}"),
        (
            {IDLE: "180", SESSION: "1440", JOB: "5", "CDSW_ENGINE_TYPE": "session"},
            f"session mysession after 3 h without use, {COMPUTES}, and in 22 h at the latest. {WITH_IT}. "
            f"{LONGER}",
        ),
        ({SESSION: "60"}, f"session mysession after 60 min. {WITH_IT}. {LONGER}"),  # it goes on nevertheless
        (
            {IDLE: "9", JOB: "300", "CDSW_ENGINE_TYPE": "job"},
            f"Job mysession in 3 h at the latest. {WITH_IT}",
        ),
        ({}, None),
        ({IDLE: "", SESSION: "0", JOB: "300"}, None),
        ({IDLE: "an hour", SESSION: "-1"}, None),
        ({IDLE: "60", "CDSW_ENGINE_TYPE": "application"}, None),
        ({IDLE: "60", "CDSW_MASTER_ID": "another"}, None),
        ({IDLE: "60", "CDSW_ENGINE_ID": ""}, None),
    ],
)
def test_the_known_limits_of_a_session_are_told_with_the_time_that_is_left(monkeypatch, variables, words):
    for name in (IDLE, SESSION, JOB, "CDSW_MASTER_ID", "CDSW_ENGINE_TYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(here, "_age", lambda: 7200.0)
    for name, value in {"CDSW_ENGINE_ID": "mysession", **variables}.items():
        monkeypatch.setenv(name, value)
    assert here.session_limits() == (f"CML ends {words}" if words else "")


@simulated
async def test_a_new_cluster_tells_the_limits_of_its_session_once(it, monkeypatch):
    monkeypatch.setattr(here, "session_limits", lambda: "CML ends it")
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        assert "CML ends it" in lines_of(cluster)
        assert "CML ends it" not in lines_of(remote)


def test_the_age_of_a_session_is_that_of_its_first_process(monkeypatch):
    assert here._age() == pytest.approx(time.time() - psutil.Process(1).create_time(), abs=60)
    monkeypatch.setattr(psutil.Process, "create_time", mock.Mock(side_effect=psutil.AccessDenied))
    assert here._age() == 0.0


@pytest.mark.slow
def test_shutdown_ends_a_cluster_whose_object_is_closed_and_has_no_event_loop_any_more(platform):
    cluster = CMLCluster(name="lab", platform="local", shutdown_on_close=False, quiet=True)
    assert lines_of(cluster) == ["Cluster lab can run until this machine restarts"]
    with DiscoveredCluster.from_name("lab", quiet=True):  # its block leaves it
        pass
    cluster.close()
    assert len(live(platform)) == 1
    for ask in (
        cluster.__enter__,
        lambda: cluster.scale(1),
        lambda: cluster.adapt(0, 1),
        lambda: cluster.wait_for_workers(1),
        lambda: cluster.add_worker_group("big"),
        lambda: cluster.delete_worker_group("big"),
        lambda: asyncio.run(cluster.scale_down(["lab-0"])),
    ):
        with pytest.raises(CMLError, match="cluster lab is closed: run CMLCluster"):
            ask()
    assert "Scheduler at" in cluster.get_logs()["Scheduler"]
    assert cluster.usage()["scheduler"].sessions == 1
    cluster.shutdown()
    assert not live(platform)
    assert store.records() == []
    assert "Scheduler at" in cluster.get_logs()["Scheduler"]


@pytest.mark.slow
def test_who_asks_something_of_a_cluster_that_another_object_has_ended_reads_why(platform, until):
    creator = CMLCluster(name="lab", platform="local", quiet=True)
    with CMLCluster.from_name("lab", quiet=True) as other:
        creator.shutdown()
        until(lambda: other.status.name == "closed")
        for ask in (lambda: other.wait_for_workers(1), lambda: other.delete_worker_group("big")):
            with pytest.raises(CMLError, match="cluster lab is closed: closed by "):
                ask()
        assert other.usage()["scheduler"].sessions == 1


@pytest.mark.parametrize("connect", [False, True])
@simulated
async def test_a_cluster_that_is_being_left_can_be_shut_down(it, connect):
    async with supplied(name="left", n_workers=1) as creator:
        cluster = await rebuild("left") if connect else creator
        leaving = asyncio.create_task(cluster.leave())
        while cluster.status == Status.running:
            await asyncio.sleep(0)
        assert cluster.status == Status.closing
        await cluster.shutdown()
        await leaving
        assert cluster.status == Status.closed
        assert not it.platform.running
        assert it.clusters == []


@pytest.mark.images
@simulated
async def test_a_cluster_that_is_being_left_does_not_run_again_and_launches_no_other_scheduler(it):
    async def ask_later(op, *arguments, **options):
        if op == protocol.LIVE_ON:  # its last word, which reaches the scheduler later
            leaves.set()
            await may_leave.wait()
        return await ask(op, *arguments, **options)

    leaves, may_leave = asyncio.Event(), asyncio.Event()
    cluster = await simulate(name="left", n_workers=1, shutdown_on_close=False)
    ask = step_in(cluster, "asks the scheduler", ask_later)
    leaving = asyncio.create_task(cluster.leave())
    await leaves.wait()
    await unsubscribe(cluster)  # as when the connection breaks
    await eventually(lambda: is_subscribed(cluster))
    assert cluster.status == Status.closing
    with pytest.raises(CMLError, match="cluster left is closing"):
        cluster.scale(1)
    it.platform.evict(it.platform.running["left-scheduler"])
    await asyncio.sleep(20)
    may_leave.set()
    await leaving
    assert it.platform.count("launch_workers") == 2
    await operations.end_all(store.records())


def own(n_workers):
    """A cluster that lives without this process, which created it."""
    return supplied(name="night", n_workers=n_workers, shutdown_on_close=False)


def launched(it):
    sessions = [session for session in it.platform.live_sessions if not session.stop_requested]
    return {session.launched_with["name"].rpartition(" ")[0] for session in sessions}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, 20.0])
@simulated
async def test_a_session_whose_launch_is_answered_when_its_process_leaves_or_later_is_the_worker(it, seconds):
    """A process that leaves waits some seconds for the answer. Later ones are for whoever keeps next."""
    async with own(0) as cluster:
        it.platform.plan("launch_workers", Mishap(after=seconds))
        cluster.scale(1)
        await eventually(lambda: it.platform.count("launch_workers") == 2)
    assert (len(store.read("night").sessions) == 2) or seconds > 5.0
    await eventually(lambda: n_connected("night") == 1 and manager("night") == WHO)
    await asyncio.sleep(2 * timing.stray)
    assert (launched(it), n_connected("night")) == ({"night-scheduler", "night-0"}, 1)
    await shut_down()


@pytest.mark.parametrize("is_deleted", [False, True])
@simulated
async def test_a_session_without_a_program_that_is_answered_late_is_recorded_or_stopped(it, is_deleted):
    async with own(0) as cluster:
        it.platform.doom("silent")
        it.platform.plan("launch_workers", Mishap(after=20.0))
        cluster.scale(1)
        await eventually(lambda: "night-0" in it.platform.running)
        session = it.platform.running["night-0"]
    if not is_deleted:  # another process may launch night-0 meanwhile
        await eventually(lambda: session in store.read("night").sessions)
    await shut_down()
    await eventually(lambda: not it.platform.live)


@simulated
async def test_the_next_scheduler_whose_launch_is_answered_later_is_no_worker(it):
    async with own(0):
        it.platform.configure({"sessions": 0.5}, waits_for_room=True)
        it.platform.plan("launch_workers", Mishap(after=20.0))
        it.platform.evict(it.platform.running["night-scheduler"])
        await eventually(lambda: len(it.platform.all) == 2)
    await asyncio.sleep(30.0)
    it.platform.configure()
    await eventually(lambda: manager("night") == WHO)
    await asyncio.sleep(2 * timing.stray)
    assert launched(it) == {"night-scheduler"}
    await shut_down()


@simulated
async def test_a_cluster_whose_process_is_killed_while_it_closes_is_deleted_by_another_one(it):
    creator = await create_elsewhere(it, name="mine")
    with it.platform.hangs("launch_workers"):
        creator.call(creator.clusters[0].scale, 1)
        await asyncio.sleep(1.0)
        creator.start(creator.clusters[0].close())
        await asyncio.sleep(0.5)
        creator.kill()
    await operations.end_all([store.read("mine")])
    await eventually(lambda: not it.platform.live_sessions)


@simulated
async def test_who_keeps_a_cluster_next_stops_what_was_launched_for_an_earlier_wish(it):
    async with own(0) as cluster:
        with it.platform.held("launch_workers"):
            cluster.scale(1)
            await eventually(lambda: it.platform.count("launch_workers") == 2)
            cluster.scale(0)
            await cluster.leave()
    await eventually(lambda: len(launched(it)) == 2)
    await eventually(lambda: launched(it) == {"night-scheduler"})
    await shut_down()


@pytest.mark.slow
@pytest.mark.parametrize("end", [SimulatedProcess.kill, SimulatedProcess.freeze])
@simulated
async def test_what_a_process_asked_for_that_has_left_is_carried_out_although_the_keeper_is_lost(it, end):
    creator = await create_elsewhere(it, name="night", n_workers=1, shutdown_on_close=False)
    async with rebuild("night") as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        end(creator)
        cluster.scale(0)
    await eventually(lambda: launched(it) == {"night-scheduler"})
    await shut_down()


@pytest.mark.images
async def test_the_dashboard_is_forwarded(platform):
    async with make(forward_dashboard=True, scheduler_args=[]) as cluster:
        link = cluster.dashboard_link
        assert link.startswith("http://127.0.0.1:")
        assert link != f"{cluster.sessions[0].app_url}status"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(link, timeout=120).read())
        assert b"Dask" in page


@simulated
async def test_dask_ctl_finds_a_cluster_that_answers_and_ends_it_by_close_and_by_no_block(it):
    async with simulate(name="here") as creator:
        assert [item async for item in discover()] == [("here", DiscoveredCluster)]
        async with DiscoveredCluster.from_name("here", asynchronous=True, quiet=True):
            pass
        assert creator.status == Status.running
        await (await DiscoveredCluster.from_name("here", asynchronous=True, quiet=True)).close()
        await eventually(lambda: creator.status == Status.closed)
    assert not it.platform.live
    assert [item async for item in discover()] == []


@simulated
async def test_a_cluster_keeps_its_folder_when_its_process_moves(it, monkeypatch, tmp_path_factory):
    """So it does when the configuration changes."""
    elsewhere = state_directory().with_name("elsewhere")
    with dask.config.set({"cml.state-directory": str(elsewhere)}):
        cluster = await simulate(name="made", n_workers=1)
        [record] = store.records()
    assert store.records() == []
    dask.config.refresh()
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.chdir(tmp_path_factory.mktemp("folder"))
    await eventually(lambda: arrived(cluster) == 1)
    it.platform.evict(cluster.scheduler.session_id)
    await eventually(lambda: scheduler_number(cluster) == 1 and is_connected(cluster))
    await eventually(lambda: arrived(cluster) == 1)
    await cluster.leave()
    assert len(it.platform.running) == 2
    assert (await operations.end_all([record])) == {"made": None}
    await cluster.close()
    assert not it.platform.running
    assert not record.folder.exists()


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
async def test_a_cluster_of_another_release_and_the_scheduler_of_another_one_are_left_alone_and_named(it):
    async with lab(n_workers=1) as first:
        file = state_directory() / "lab" / RECORD_FILE
        content = file.read_text()
        file.write_text(json.dumps({**json.loads(content), "version": 1}))
        for mode in "connect", "create-or-connect":
            with pytest.raises(CMLError, match="cluster 'lab' was created by another dask-cml"):
                await lab(create_mode=mode)
        file.write_text(content)
        [scheduler] = it.sessions.program(it.platform.running["lab-scheduler"])
        answer = scheduler.handlers[protocol.HELLO]()
        for hello, words in (
            ({"protocol": 1}, "speaks protocol 1 of dask-cml, this process"),
            ({"record": "fedcba9876543210", "cluster": "other"}, "belongs to another cluster, 'other'"),
        ):
            scheduler.handlers[protocol.HELLO] = lambda hello=hello: {**answer, **hello}
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
    def make(cluster):
        end_at_exit(cluster)
        name_other_clusters(first)

    async with simulate() as first:
        end_at_exit = cluster_module.end_at_exit
        monkeypatch.setattr(cluster_module, "end_at_exit", make)
        await simulate().close()
        assert "another cluster" not in log_of(first)


@pytest.mark.slow
@simulated
async def test_a_session_of_a_cluster_connects_as_configured_and_creates_one_only_if_the_code_says_so(it):
    async def use(name, **options):
        async with simulate(name=name, **options) as used:
            return used.scheduler_address, {*it.platform.running}

    async with supplied(name="lab", n_workers=1) as cluster:
        process = it.process_of("lab-0")
        words = r"this process runs in a session of cluster lab.*create_mode='create'"
        with pytest.raises(CMLError, match=words):
            await process.start(use("other"))
        own = {"lab-scheduler", "lab-0"}
        with dask.config.set({"cml.create-mode": "create-or-connect"}):
            assert await process.start(use("lab")) == (cluster.scheduler_address, own)
        assert {*it.platform.running} == own
        assert "other-scheduler" in (await process.start(use("other", create_mode="create")))[1]
