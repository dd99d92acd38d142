"""The file system fails, is full or hangs: what was asked for stays asked for, and no session is left."""

import asyncio
import errno
import os
import time

import pytest
from clusters import NOTEBOOK, arrived, create_elsewhere, is_keeper, manager, rebuild, simulate, supplied
from distributed import Client
from simulated.process import current
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

from dask_cml import CMLError


def fill(it, where=""):
    """Let the disk be full for new files, of these folders alone. Return a function that makes room."""

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_CREAT and current() is not None and where in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opens(path, flags, *arguments, **options)

    def make_room():
        it.files.open = opens

    opens, it.files.open = it.files.open, refuse
    return make_room


def hang(it, process, ended):
    """Let the file system hang for a process until something has ended. Return a function that heals it."""

    def hanging(path, *arguments, **options):
        if current() is process and not it.loop.is_here():
            while not ended.is_set():
                time.sleep(1.0)
        return opens(path, *arguments, **options)

    def heal():
        it.files.open = opens

    opens, it.files.open = it.files.open, hanging
    return heal


def become_stale(it):
    """Let the file system answer that all handles are stale. Return a function that heals it."""

    def heal():
        it.files.stale = False

    it.files.stale = True
    return heal


@pytest.mark.parametrize(("fail", "seconds"), [(become_stale, 3.0), (fill, 60.0)])
@pytest.mark.slow
@simulated
async def test_a_cluster_that_was_shut_down_stays_so_although_its_file_is_not_written(it, fail, seconds):
    async with supplied(name="lab", security=True, n_workers=1) as cluster:
        client = await Client("cml://lab", asynchronous=True)
        heal = fail(it)
        shutting_down = asyncio.ensure_future(client.shutdown())
        await asyncio.sleep(seconds)
        heal()
        await asyncio.wait([shutting_down], timeout=30)
        await eventually(lambda: cluster.status.name == "closed")
        assert not it.platform.live_sessions


@pytest.mark.slow
@simulated
async def test_a_scheduler_is_listed_and_stopped_although_a_full_disk_kept_it_from_the_record(it):
    make_room = fill(it, "/sessions/")
    creator = await create_elsewhere(it, name="night", security=True, shutdown_on_close=False, n_workers=1)
    make_room()
    creator.kill()
    await eventually(lambda: manager("night") == "its scheduler's session", 200)
    scheduler = it.platform.running["night-scheduler"]
    assert scheduler in (await shell_json("info", "night"))["sessions"]
    cluster = await rebuild("night")
    await eventually(lambda: is_keeper(cluster), 60)
    it.process_of("night-scheduler").pause(60)  # it hears of no end
    await cluster.shutdown()
    assert [session.key for session in it.platform.live_sessions if not session.stop_requested] == []


@pytest.mark.slow
@simulated
async def test_a_process_creates_a_cluster_anew_that_it_has_left_and_that_is_over(it):
    async with supplied(name="night", security=True, shutdown_on_close=False, n_workers=1):
        pass
    await eventually(lambda: manager("night") == "its scheduler's session", 200)
    it.platform.evict(it.platform.running["night-scheduler"])
    await eventually(lambda: not it.platform.live, 1000)
    async with supplied(name="night", security=True, n_workers=1):
        pass


@simulated
async def test_a_stop_that_cml_refuses_leaves_one_session_in_the_record_and_not_all(it):
    cluster = await simulate(name="night", security=True, n_workers=2)
    await eventually(lambda: arrived(cluster) == 2)
    kept = it.platform.running["night-1"]
    it.platform.denied[kept] = 403
    with pytest.raises(CMLError, match=f"CML did not stop {kept}, which may still run"):
        await cluster.shutdown()
    assert (await shell_json("info", "night"))["sessions"] == {kept: "night-1"}
    it.platform.heal()
    await shell("delete", "night")
    assert it.platform.live == []


@pytest.mark.slow
@simulated
async def test_a_cluster_that_manages_itself_ends_when_it_is_idle_although_the_disk_is_full(it):
    creator = await create_elsewhere(
        it, name="night", security=True, shutdown_on_close=False, n_workers=2, idle_timeout=120
    )
    creator.kill()
    await eventually(lambda: manager("night") == "its scheduler's session")
    make_room = fill(it)
    await eventually(lambda: it.platform.live == [], 600.0)
    make_room()
    assert await shell_json("list") == []


@pytest.mark.slow
@simulated
async def test_a_shutdown_succeeds_although_the_file_system_removes_thousands_of_files_slowly(it):
    def remove_slowly(path, **options):
        time.sleep(60.0)
        removes(path, **options)

    removes = it.files.shutil.rmtree
    async with supplied(name="night", n_workers=1) as cluster:
        it.files.shutil.rmtree = remove_slowly
        await cluster.shutdown()
    assert it.platform.live == []
    assert await shell_json("list") == []


async def shut_down_while_files_hang(it, shut_down, pause=0.0):
    """Let the files hang for a process while it calls a function with its cluster."""

    async def use():
        async with supplied(name="night", security=True, n_workers=2) as cluster:
            is_ready.set()
            await hangs.wait()
            try:
                await shut_down(cluster)
            finally:
                is_shut_down.set()

    is_ready, hangs, is_shut_down = asyncio.Event(), asyncio.Event(), asyncio.Event()
    user = it.process("user", NOTEBOOK)
    using = user.start(use())
    await is_ready.wait()
    heal = hang(it, user, is_shut_down)
    if pause:
        it.process_of("night-scheduler").pause(pause)
    hangs.set()
    await is_shut_down.wait()
    await using
    heal()
    assert it.platform.live == []


@pytest.mark.slow
@simulated
async def test_a_shutdown_names_the_sessions_that_may_still_run_although_the_file_system_hangs(it):
    async def shut_down(cluster):
        kept = it.platform.running["night-1"]
        it.platform.denied[kept] = 403
        with pytest.raises(CMLError, match=f"CML did not stop {kept}, which may still run"):
            await cluster.shutdown()
        it.platform.heal()

    await shut_down_while_files_hang(it, shut_down)


@pytest.mark.parametrize("pause", [0.0, 600.0], ids=["answers", "is frozen"])
@pytest.mark.slow
@simulated
async def test_a_shutdown_stops_all_sessions_although_the_file_system_hangs(it, pause):
    async def shut_down(cluster):
        began = time.monotonic()
        words = r"sessions of cluster 'night' are stopped.* `dask cml delete night`"
        with pytest.raises(CMLError, match=words):
            await cluster.shutdown()
        assert it.platform.live == []
        assert time.monotonic() - began < 60.0

    await shut_down_while_files_hang(it, shut_down, pause)


@pytest.mark.slow
@simulated
async def test_a_manager_does_what_is_asked_for_and_replaces_lost_workers_while_its_files_hang(it):
    answers, manager = asyncio.Event(), await create_elsewhere(it, name="night", n_workers=1)
    async with rebuild("night", shutdown_on_close=True) as cluster:
        hang(it, manager, answers)
        await asyncio.sleep(30.0)  # meanwhile it looks for sessions that it does not know
        await cluster.scale(3)
        await eventually(lambda: arrived(cluster) == 3)
        it.platform.evict(it.platform.running["night-1"])
        await eventually(lambda: "night-3" in it.platform.running and arrived(cluster) == 3)
        await cluster.scale(1)
        await eventually(lambda: len(it.platform.running) == 2)
        answers.set()
