"""The file system fails, is full or hangs: what was asked for stays asked for, and no session is left."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from clusters import arrived, create_elsewhere, is_keeper, manager, rebuild, simulate
from distributed import Client
from simulated.process import current
from simulated.shell import shell_json
from simulated.testing import eventually, simulated


def fill(it):
    """Let the disk be full: no process can create a file. Return a function that makes room."""

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_CREAT and current() is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opens(path, flags, *arguments, **options)

    def make_room():
        it.files.open = opens

    opens, it.files.open = it.files.open, refuse
    return make_room


def fill_entries(it):
    """Let the disk be full for the entries of sessions. Return a function that makes room."""

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_CREAT and current() is not None and "/sessions/" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opens(path, flags, *arguments, **options)

    def make_room():
        it.files.open = opens

    opens, it.files.open = it.files.open, refuse
    return make_room


def become_stale(it):
    """Let the file system answer that all handles are stale. Return a function that heals it."""

    def heal():
        it.files.stale = False

    it.files.stale = True
    return heal


@pytest.mark.parametrize(("fail", "seconds"), [(become_stale, 3.0), (fill, 60.0)])
@simulated
async def test_a_cluster_that_was_shut_down_stays_so_although_its_file_is_not_written(it, fail, seconds):
    async with simulate(name="lab", security=True, n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        client = await Client("cml://lab", asynchronous=True)
        heal = fail(it)
        shutting_down = asyncio.ensure_future(client.shutdown())
        await asyncio.sleep(seconds)
        heal()
        await asyncio.wait([shutting_down], timeout=30)
        await eventually(lambda: cluster.status.name == "closed")
        assert not it.platform.live_sessions


@simulated
async def test_a_scheduler_is_listed_and_stopped_although_a_full_disk_kept_it_from_the_record(it):
    make_room = fill_entries(it)
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


@simulated
async def test_a_process_creates_a_cluster_anew_that_it_has_left_and_that_is_over(it):
    async with simulate(name="night", security=True, shutdown_on_close=False, n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
    await eventually(lambda: manager("night") == "its scheduler's session", 200)
    it.platform.evict(it.platform.running["night-scheduler"])
    await eventually(lambda: not it.platform.live, 1000)
    async with simulate(name="night", security=True, n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
