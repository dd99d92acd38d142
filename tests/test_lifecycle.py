"""Clusters apart from the process that made them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request

import dask
import pytest
from distributed import Client
from distributed.core import Status

from dask_cml import ClusterExists, CMLCluster, CMLError, NoSuchCluster, pulse
from dask_cml.discovery import discover
from dask_cml.local import processes
from dask_cml.manager import reconciler
from dask_cml.options import state_directory
from dask_cml.records import operations, store
from dask_cml.records.record import Record
from dask_cml.records.session_files import Changes, Launch

pytestmark = pytest.mark.usefixtures("light")

MAKER = """
import time
from dask_cml import CMLCluster

if __name__ == "__main__":
    cluster = CMLCluster(n_workers=2, name="made", platform="local", **{options})
    while arrived(cluster) < 2:
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(3600)
"""


def make_and_kill(**options):
    """Have another process make a cluster, and kill it."""
    code = MAKER.format(options=options)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout.readline() == "ready\n"
        maker.kill()


def rebuild(name, **options):
    return CMLCluster.from_name(name, quiet=True, asynchronous=True, **options)


def manager_log(cluster):
    return [message for _, message in cluster._cluster_manager_logs]


async def test_a_cluster_whose_maker_was_killed_is_rebuilt_steered_and_ended(platform, holds):
    await asyncio.to_thread(make_and_kill)
    [row] = await operations.describe(store.records())
    assert (row["name"], row["status"], row["workers"]) == ("made", "running", 2)
    async with rebuild("made") as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
        cluster.scale(3)
        await holds(lambda: len(cluster.scheduler_info["workers"]) == 3)
        cluster.scale(1)
        await holds(lambda: len(cluster.workers) == len(cluster.scheduler_info["workers"]) == 1)
        assert await client.submit(sum, [3, 4]) == 7
        assert "Scheduler at" in (await cluster.get_logs())["Scheduler"]
    assert len(live(platform)) == 2
    cluster = await rebuild("made")
    folder = cluster._folder
    await cluster.close()
    assert not live(platform)
    assert not folder.exists()


async def test_from_another_session_which_does_not_list_these(platform, holds, monkeypatch):
    await asyncio.to_thread(make_and_kill)
    monkeypatch.setenv("CDSW_ENGINE_ID", "anothersession00")
    assert platform.list_workers() == []
    async with rebuild("made") as cluster:
        cluster.scale(1)
        await holds(lambda: len(cluster.scheduler_info["workers"]) == 1)
        cluster.adapt(minimum=0, maximum=1, interval="100 ms", wait_count=1)
        await holds(lambda: not cluster.scheduler_info["workers"])
        await cluster.close()
    assert not live(platform)


async def test_an_unknown_name_lists_the_known_ones(platform):
    async with make(name="known"):
        with pytest.raises(NoSuchCluster, match="'known'"):
            CMLCluster.from_name("unknown")


async def test_the_name_of_a_live_cluster_is_taken(platform):
    async with make(name="taken") as cluster:
        with pytest.raises(ClusterExists, match="taken"):
            await make(name="taken")
        assert len(live(platform)) == 1
        assert cluster._folder.is_dir()


async def test_the_name_of_a_dead_cluster_is_free_and_what_is_left_of_it_is_ended(platform, holds):
    await asyncio.to_thread(make_and_kill)
    record = store.read("made")
    platform.evict(record.scheduler_session)
    async with make(name="made") as cluster:
        assert {each["id"] for each in live(platform)} == {each.id for each in cluster.sessions}


async def test_a_cluster_that_does_not_answer_is_not_rebuilt(platform):
    await asyncio.to_thread(make_and_kill)
    platform.evict(store.read("made").scheduler_session)
    with pytest.raises(CMLError, match="does not answer"):
        await rebuild("made")
    assert await operations.prune() == ({"made": None}, {})
    assert not live(platform)
    assert store.records() == []


@contextlib.contextmanager
def frozen(session):
    """Stop a session's processes for a while, as a scheduler stands still that is busy."""
    pids = processes.pids(session)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_cluster_whose_scheduler_is_busy_is_left_alone(platform):
    await asyncio.to_thread(make_and_kill)
    sessions = live(platform)
    assert len(sessions) == 3
    with frozen(store.read("made").scheduler_session):
        with pytest.raises(ClusterExists, match=r"accepts connections at .* but does not answer"):
            await make(name="made")
        ended, passed_over = await operations.prune(timeout=2)
        assert (ended, [*passed_over]) == ({}, ["made"])
        [row] = await operations.describe(store.records())
        assert row["status"] == "not answering"
    async with rebuild("made") as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
        assert live(platform) == sessions
        await cluster.close()


async def test_the_name_of_a_cluster_that_is_silent_for_long_is_free_in_a_session_that_lists_nothing(
    platform, monkeypatch, holds
):
    await asyncio.to_thread(make_and_kill)
    sign = state_directory() / "made" / pulse.PULSE_FILE
    await holds(sign.exists)
    platform.evict(store.read("made").scheduler_session)
    monkeypatch.setenv("CDSW_ENGINE_ID", "anothersession00")
    with pytest.raises(ClusterExists, match="nothing accepts connections"):
        await make(name="made")
    # Its workers end by themselves, sooner or later.
    assert "stopped" not in {each["status"] for each in platform.sessions()}
    os.utime(sign, (0, sign.stat().st_mtime - pulse.LONGEST_SILENCE))
    async with make(name="made") as cluster:
        assert {each["id"] for each in live(platform)} == {each.id for each in cluster.sessions}


async def test_shutdown_on_close_false_leaves_the_cluster_running(platform):
    async with make(n_workers=1, name="left", shutdown_on_close=False) as cluster:
        [told] = [line for line in manager_log(cluster) if "can run until" in line]
        assert told == "Cluster left can run until this machine restarts"
    assert len(live(platform)) == 2
    cluster = await rebuild("left", shutdown_on_close=True)
    async with cluster:
        assert not any("can run until" in line for line in manager_log(cluster))
    assert not live(platform)


async def test_an_orphan_ends_itself_and_its_sessions(platform, holds):
    await asyncio.to_thread(make_and_kill, orphan_timeout="2s")
    await holds(lambda: not live(platform))


@pytest.mark.slow
def test_a_maker_that_is_killed_before_it_connects_leaves_an_orphan_that_ends_itself(platform, until):
    platform.configure(start_delay=1.0)
    code = MAKER.format(options={"orphan_timeout": "1s", "scheduler_timeout": "10s"})
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as maker:
        until(lambda: len(platform.sessions()) == 3)
        maker.kill()
    until((state_directory() / "made" / "scheduler.json").exists)
    until(lambda: not live(platform))


@pytest.mark.slow
async def test_a_client_keeps_an_orphan_until_it_leaves(platform, holds):
    await asyncio.to_thread(make_and_kill, orphan_timeout="4s")
    async with Client(store.read("made").scheduler_address, asynchronous=True) as client:
        # The scheduler has looked for longer than that when it says so itself.
        started = await client.run_on_scheduler(lambda: __import__("time").time())
        while await client.run_on_scheduler(lambda: __import__("time").time()) < started + 6:
            assert await client.submit(sum, [1, 2], pure=False) == 3
    await holds(lambda: not live(platform))


async def test_a_cluster_that_is_to_outlive_its_maker_is_no_orphan(platform, holds):
    async with make(name="left", shutdown_on_close=False, orphan_timeout="1s"):
        pass
    async with rebuild("left") as cluster:
        async with Client(cluster, asynchronous=True) as client:
            timeout = lambda dask_scheduler: dask_scheduler.plugins["dask-cml"]._watch.timeout  # noqa: E731
            assert await client.run_on_scheduler(timeout) is None
        await cluster.close()


async def test_the_dashboard_is_forwarded(platform):
    async with make(forward_dashboard=True, scheduler_args=[]) as cluster:
        link = cluster.dashboard_link
        assert link.startswith("http://127.0.0.1:")
        assert link != f"{cluster.sessions[0].app_url}status"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(link, timeout=30).read())
        assert b"Dask" in page


async def test_discovery_yields_what_answers(platform):
    async with make(name="here"):
        assert [item async for item in discover()] == [("here", CMLCluster)]
    assert [item async for item in discover()] == []


async def test_what_another_manager_stops_is_no_failure(platform, holds):
    async with make(n_workers=1, name="shared") as maker:
        await holds(lambda: arrived(maker) == 1)
        async with rebuild("shared") as other:
            await holds(lambda: other._leadership.id and arrived(other) == 1)
            find_lost = maker._reconciler._find_lost

            async def late():  # the maker believes that it leads
                maker._reconciler._find_lost = find_lost
                other.scale(0)
                await holds(lambda: not other.workers)
                return await find_lost()

            maker._reconciler._find_lost = late
            maker._reconciler.poke()
            await holds(
                lambda: not maker.workers and maker._leadership._asked["default"] == other._leadership.id
            )
            assert maker.manager.state.problem is None
            assert "Worker failed" not in str(maker._cluster_manager_logs)


async def test_two_managers_see_the_same_and_neither_undoes_the_others_scaling(platform, holds):
    def settled(n):
        return all(
            len(manager.workers)
            == len(manager.scheduler_info["workers"])
            == target(manager)
            == n
            for manager in (maker, other)
        )

    async with make(n_workers=1, name="shared") as maker:
        await holds(lambda: arrived(maker) == 1)
        async with rebuild("shared") as other:
            await holds(lambda: settled(1))
            other.scale(3)
            await holds(lambda: settled(3))
            maker.scale(2)
            await holds(lambda: settled(2))
            other.scale(1)
            await holds(lambda: settled(1))
            assert maker.workers.keys() == other.workers.keys()
            assert len(live(platform)) == 2


async def test_a_lost_worker_is_replaced_once_by_whom_of_two_managers_leads(platform, holds):
    async with make(n_workers=1, name="shared") as maker:
        await holds(lambda: arrived(maker) == 1)
        async with rebuild("shared") as other:
            [lost] = maker.workers
            platform.evict(maker.workers[lost].session_id)
            await holds(lambda: maker._arrived and maker._arrived != {lost})
            await holds(lambda: other._arrived == maker._arrived)
            assert len(live(platform)) == 2


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_manager_says_that_another_one_has_ended_the_cluster(platform, holds, elsewhere):
    async with make(name="shared") as maker:
        other = await rebuild("shared")
        ending, seeing = (other, maker) if elsewhere else (maker, other)
        await ending.close()
        await holds(lambda: seeing.status == Status.closed)
        assert manager_log(seeing)[-1] == "Cluster shared shut down: another process shut it down"


@pytest.mark.slow
async def test_a_manager_leaves_a_cluster_of_which_it_hears_nothing_any_more(platform, holds, monkeypatch):
    monkeypatch.setattr(reconciler, "_SILENCE", 1.0)
    async with make(n_workers=1, name="shared") as maker:
        await holds(lambda: arrived(maker) == 1)
        await maker.leave()
    monkeypatch.setenv("CDSW_ENGINE_ID", "anothersession00")
    other = await rebuild("shared")
    platform.evict(store.read("shared").scheduler_session)
    await holds(lambda: other.status == Status.closed)
    assert "has not answered for 1 s" in manager_log(other)[-1]
    assert await operations.end_all(store.records()) == {"shared": None}
    assert not live(platform)


async def test_a_session_that_only_the_scheduler_was_told_of_is_not_taken_over(platform, holds, caplog):
    caplog.set_level("INFO")
    code = "import time; time.sleep(600)"
    foreign, other = (each["id"] for each in platform.launch_workers(2, cpu=1, memory=1, code=code))
    async with make(name="told", silence_logs=False) as cluster:  # which would silence caplog, too
        await cluster.scheduler_comm.cml_sync(
            manager=cluster._leadership.id, launched={"told-7": foreign, "told-8": other}
        )
        assert await cluster._leadership.sync()
        assert not cluster.workers
        # What another manager has launched, its record names, and it may be seen a moment later.
        launched = Changes([Launch(other, "told-8", None, int(time.time()))])
        await asyncio.to_thread(store.write_sessions, launched, "told", id=store.read("told").id)
        cluster.scale(0)
        await holds(lambda: other not in {each["id"] for each in live(platform)})
        assert await cluster._leadership.sync()
    assert caplog.text.count(f"Session {foreign} of told-7 not taken over") == 1
    [left] = [each["id"] for each in platform.sessions() if not each["stop_requested"]]
    assert left == foreign
    platform.stop_workers(foreign)


async def test_a_session_that_is_launched_at_the_last_moment_of_a_deletion_is_stopped(platform, monkeypatch):
    code = "import time; time.sleep(600)"
    early, late = (each["id"] for each in platform.launch_workers(2, cpu=1, memory=1, code=code))
    record = Record("shared", options={"platform": "local"}, sessions={early: "shared-0"})
    store.claim(record)
    remove = store.remove

    def after_another_manager_has_launched(name, **more):
        launched = Changes([Launch(late, "shared-1", None, int(time.time()))])
        store.write_sessions(launched, name, id=record.id)
        return remove(name, **more)

    monkeypatch.setattr(store, "remove", after_another_manager_has_launched)
    assert await operations.end_all(store.records()) == {"shared": None}
    assert all(each["stop_requested"] for each in platform.sessions())
    assert store.records() == []


async def test_who_launches_after_the_record_is_gone_stops_all_when_it_leaves(platform, holds):
    async with make(name="shared") as maker:
        assert store.remove("shared") is not None
        maker.scale(1)
        # Without the keys, which went with the record, its worker does not arrive.
        await holds(lambda: maker._record_keeper.gone)
        await maker.leave()
    assert not live(platform)
    assert not maker._folder.exists()


SECOND = """
import time
from dask_cml import CMLCluster

if __name__ == "__main__":
    cluster = CMLCluster.from_name("shared")
    cluster.scale(3)
    while arrived(cluster) < 3:
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
async def test_what_ends_with_a_second_session_is_replaced_by_the_first_ones_leader(
    platform, holds, monkeypatch
):
    monkeypatch.setenv("CDSW_ENGINE_ID", "first")

    def owners(cluster):
        return sorted(session.owner for session in cluster.sessions)

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1s"}):
        async with make(n_workers=1, name="shared") as maker:
            await holds(lambda: arrived(maker) == 1)
            environment = {**os.environ, "CDSW_ENGINE_ID": "second"}
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SECOND, stdout=subprocess.PIPE, env=environment
            )
            assert await second.stdout.readline() == b"ready\n"
            await holds(lambda: owners(maker) == ["first", "first", "second", "second"])
            await holds(lambda: sorted(store.read("shared").owners.values()) == owners(maker))
            # The next leader has seen them all, else it would wait for them for the whole `worker_timeout`.
            await holds(lambda: all(map(maker._fleet.has_registered, maker.workers)))
            assert not maker.manager.state.leads
            await asyncio.to_thread(platform.end_engine, "second")
            assert await second.wait() == -signal.SIGKILL
            await holds(
                lambda: (
                    maker.manager.state.leads and arrived(maker) == 3 and target(maker) == 3
                )
            )
            await holds(lambda: owners(maker) == ["first"] * 4)
            assert {each["id"] for each in live(platform)} == {each.id for each in maker.sessions}
        assert not live(platform)


async def test_what_a_manager_asks_for_just_before_it_leaves_is_there_and_in_others_hands(platform, holds):
    async with make(name="shared") as maker:
        record = maker._folder / "record.json"
        made = record.stat()
        async with rebuild("shared") as other:
            other.scale(2)
        assert os.path.samestat(record.stat(), made)  # nobody but the maker replaces it
        await holds(lambda: arrived(maker) == len(maker.workers) == 2)
        assert {each["id"] for each in live(platform)} == {each.id for each in maker.sessions}
    assert not live(platform)


async def test_who_scales_after_another_manager_adapts_ends_the_adapting(platform, holds):
    async with make(name="shared") as maker, rebuild("shared") as other:
        maker.adapt(minimum=0, maximum=3)
        await holds(lambda: not maker._fleet.group().claim_pending)
        other.scale(1)
        await holds(lambda: other.manager.state.leads and not maker.manager.state.leads)
        await holds(lambda: arrived(maker) == arrived(other) == 1)
        assert maker._adaptive.periodic_callback is None


async def test_who_scales_and_leaves_at_once_ends_the_adapting(platform, holds):
    async with make(name="shared") as maker:
        maker.adapt(minimum=0, maximum=3)
        await holds(lambda: not maker._fleet.group().claim_pending)
        async with rebuild("shared") as other:
            other.scale(1)
        await holds(lambda: target(maker) == 1 and maker._adaptive.periodic_callback is None)
        await holds(lambda: arrived(maker) == len(live(platform)) - 1 == 1)


async def test_the_next_manager_leads_when_the_leader_goes(platform, holds):
    async with make(n_workers=1, name="shared") as maker:
        other = await rebuild("shared")
        other.scale(2)
        await holds(lambda: other.manager.state.leads and not maker.manager.state.leads)
        await holds(lambda: arrived(other) == 2)
        await other.leave()
        await holds(lambda: maker.manager.state.leads)
        await holds(lambda: len(maker.workers) == target(maker) == 2)


def test_the_record_holds_every_session_and_is_its_owners_only(platform, until):
    with CMLCluster(n_workers=2, name="recorded", platform="local", quiet=True) as cluster:
        until(lambda: len(store.read("recorded").sessions) == 3)
        file = cluster._folder / "record.json"
        assert os.stat(file).st_mode & 0o777 == 0o600
        assert set(store.read("recorded").sessions) == {each.id for each in cluster.sessions}
        cluster.scale(1)
        until(lambda: len(store.read("recorded").sessions) == 2)
    assert store.records() == []
