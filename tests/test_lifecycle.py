"""Clusters apart from the process that made them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace
from unittest import mock

import pytest
from clusters import create_and_kill, launch, lines_of, live, make, rebuild, sign_of, simulate
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml import ClusterExists, CMLCluster, CMLError, NoSuchCluster
from dask_cml.discovery import discover
from dask_cml.layout import RECORD_FILE, REMOVED_FILE, scheduler_file
from dask_cml.local import processes
from dask_cml.manager import startup
from dask_cml.manager.fleet import Fleet
from dask_cml.options import Options, state_directory
from dask_cml.protocol import LONGEST_SILENCE
from dask_cml.records import operations, store
from dask_cml.records.record import Record

pytestmark = pytest.mark.usefixtures("light")

MAKER = """
import time
from dask_cml import CMLCluster

if __name__ == "__main__":
    cluster = CMLCluster(n_workers=2, name="made", platform="local", **{options})
    while cluster.n_pending:
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(3600)
"""


SLEEP = "import time; time.sleep(600)"
#: The same cluster on the simulated platform.
MADE = {"name": "made", "n_workers": 2}
ANOTHER = {"CDSW_ENGINE_ID": "anothersession00"}


def make_and_kill(**options):
    """Have another process make a cluster, and kill it."""
    code = MAKER.format(options=options)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout.readline() == "ready\n"
        maker.kill()


async def test_a_cluster_whose_creator_was_killed_is_adopted_scaled_and_shut_down(platform, holds):
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
    folder = cluster.manager.state.launcher.place.folder
    await cluster.close()
    assert not live(platform)
    assert not folder.exists()


@simulated
async def test_from_another_session_which_does_not_list_these(it):
    async def scale():
        assert it.platform.list_workers() == []
        async with rebuild("made") as cluster:
            cluster.scale(1)
            await eventually(lambda: len(cluster.scheduler_info["workers"]) == 1)
            cluster.adapt(minimum=0, maximum=1)
            await eventually(lambda: not cluster.scheduler_info["workers"])
            await cluster.close()

    await create_and_kill(it, **MADE)
    await it.process("another", ANOTHER).start(scale())
    await eventually(lambda: not it.platform.running)


@simulated
async def test_an_unknown_name_lists_the_known_ones(it):
    async with simulate(name="known"):
        with pytest.raises(NoSuchCluster, match="'known'"):
            CMLCluster.from_name("unknown")


@simulated
async def test_the_name_of_a_live_cluster_is_taken(it):
    async with simulate(name="taken") as cluster:
        with pytest.raises(ClusterExists, match="taken"):
            await simulate(name="taken")
        assert len(it.platform.running) == 1
        assert cluster.manager.state.launcher.place.folder.is_dir()


@simulated
async def test_the_name_of_a_dead_cluster_is_free_and_its_sessions_are_stopped(it):
    await create_and_kill(it, **MADE)
    record = store.read("made")
    it.platform.evict(record.scheduler.session)
    async with simulate(name="made") as cluster:
        assert {*it.platform.running.values()} == {each.id for each in cluster.sessions}


@simulated
async def test_the_name_of_a_cluster_whose_removal_was_interrupted_is_free_and_its_sessions_are_stopped(it):
    await create_and_kill(it, **MADE)
    [late] = (each["id"] for each in it.platform.launch_workers(1, cpu=1, memory=1, code=SLEEP))
    launch(store.read("made"), late, key="made-7")
    folder = state_directory() / "made"
    os.rename(folder / RECORD_FILE, folder / REMOVED_FILE)
    async with simulate(name="made") as cluster:
        assert {*it.platform.live} == {each.id for each in cluster.sessions}


@simulated
async def test_a_manager_does_not_adopt_a_cluster_that_does_not_answer(it):
    await create_and_kill(it, **MADE)
    it.platform.evict(store.read("made").scheduler.session)
    with pytest.raises(CMLError, match="does not answer"):
        await rebuild("made")
    assert await operations.prune() == ({"made": None}, {})
    assert not it.platform.running
    assert store.records() == []


@contextlib.contextmanager
def frozen(session):
    """Stop a session's processes for a while, as a scheduler stands still that is busy."""
    found = processes.find(session)
    for process in found:
        process.suspend()
    try:
        yield
    finally:
        for process in found:
            process.resume()


@pytest.mark.slow
async def test_a_cluster_whose_scheduler_is_busy_is_left_alone(platform):
    await asyncio.to_thread(make_and_kill)
    sessions = live(platform)
    assert len(sessions) == 3
    with frozen(store.read("made").scheduler.session):
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


@simulated
async def test_the_name_of_a_cluster_that_is_silent_for_long_is_free_in_a_session_that_lists_nothing(it):
    async def create():
        with pytest.raises(ClusterExists, match="nothing accepts connections"):
            await simulate(name="made")
        os.utime(sign, (0, sign.stat().st_mtime - LONGEST_SILENCE))
        async with simulate(name="made") as cluster:
            assert it.platform.running["made-scheduler"] == cluster.sessions[0].id

    await create_and_kill(it, **MADE)
    sign = sign_of("made")
    it.platform.evict(store.read("made").scheduler.session)
    await it.process("another", ANOTHER).start(create())


async def test_shutdown_on_close_false_leaves_the_cluster_running(platform):
    async with make(n_workers=1, name="left", shutdown_on_close=False) as cluster:
        [told] = [line for line in lines_of(cluster) if "can run until" in line]
        assert told == "Cluster left can run until this machine restarts"
    assert len(live(platform)) == 2
    cluster = await rebuild("left", shutdown_on_close=True)
    async with cluster:
        assert not any("can run until" in line for line in lines_of(cluster))
    assert not live(platform)


@simulated
async def test_an_orphan_ends_itself_and_its_sessions(it):
    await create_and_kill(it, **MADE, orphan_timeout="2s")
    await eventually(lambda: not it.platform.running)


def test_a_scheduler_waits_for_its_first_manager_as_long_as_its_start_may_take():
    def patience(**options):
        options = Options.read(name="mine", **options)
        state = SimpleNamespace(options=options, fleet=Fleet(options, "m1"))
        return startup.first_state(state, Record("mine"))["patience"]

    assert patience(orphan_timeout=5, scheduler_timeout=90) == 90
    assert patience(orphan_timeout=100, scheduler_timeout=90) == 100
    # It is never an orphan after that.
    for options in {"shutdown_on_close": False}, {"orphan_timeout": "never"}:
        assert patience(**options, scheduler_timeout=90) == 300
        assert patience(**options, scheduler_timeout=900) == 900


@pytest.mark.slow
def test_a_creator_that_is_killed_before_it_connects_leaves_an_orphan_that_shuts_down(platform, until):
    platform.configure(start_delay=1.0)
    code = MAKER.format(options={"orphan_timeout": "1s", "scheduler_timeout": "10s"})
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as maker:
        until(lambda: len(platform.sessions()) == 3)
        maker.kill()
    until((state_directory() / "made" / scheduler_file(0)).exists)
    until(lambda: not live(platform))


@simulated
async def test_a_client_keeps_an_orphan_until_it_leaves(it):
    await create_and_kill(it, **MADE, orphan_timeout="4s")
    async with Client(store.read("made").scheduler.address, asynchronous=True) as client:
        await asyncio.sleep(60.0)
        assert await client.submit(sum, [1, 2], pure=False) == 3
    await eventually(lambda: not it.platform.running)


@simulated
async def test_a_cluster_that_outlives_its_creator_is_not_an_orphan(it):
    async with simulate(name="left", shutdown_on_close=False, orphan_timeout="1s"):
        pass
    async with rebuild("left") as cluster:
        async with Client(cluster, asynchronous=True) as client:
            timeout = lambda dask_scheduler: dask_scheduler.plugins["dask-cml"]._presence.timeout  # noqa: E731
            assert await client.run_on_scheduler(timeout) is None
        await cluster.close()


@simulated
async def test_a_cluster_that_closes_while_its_folder_is_slowly_created_leaves_none(it):
    claim = store.claim

    def claim_slowly(*arguments):
        time.sleep(5.0)
        return claim(*arguments)

    with mock.patch.object(store, "claim", claim_slowly):
        cluster = simulate(**MADE)
        starting = asyncio.ensure_future(cluster)
        await asyncio.sleep(0.5)
        await cluster.close()
        with pytest.raises(CMLError, match="closed while it started"):
            await starting
        await asyncio.sleep(10.0)
    assert (it.clusters, it.platform.all) == ([], {})


async def test_the_dashboard_is_forwarded(platform):
    async with make(forward_dashboard=True, scheduler_args=[]) as cluster:
        link = cluster.dashboard_link
        assert link.startswith("http://127.0.0.1:")
        assert link != f"{cluster.sessions[0].app_url}status"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(link, timeout=30).read())
        assert b"Dask" in page


@simulated
async def test_discovery_yields_clusters_whose_scheduler_answers(it):
    async with simulate(name="here"):
        assert [item async for item in discover()] == [("here", CMLCluster)]
    assert [item async for item in discover()] == []


@simulated
async def test_the_record_holds_every_session_and_is_its_owners_only(it):
    async with simulate(n_workers=2, name="recorded") as cluster:
        await eventually(lambda: len(store.read("recorded").sessions) == 3)
        file = cluster.manager.state.launcher.place.folder / "record.json"
        assert os.stat(file).st_mode & 0o777 == 0o600
        assert set(store.read("recorded").sessions) == {each.id for each in cluster.sessions}
        cluster.scale(1)
        await eventually(lambda: len(store.read("recorded").sessions) == 2)
    assert store.records() == []
