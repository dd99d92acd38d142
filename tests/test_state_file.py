"""The scheduler's file in its cluster's folder: how to reach the scheduler, and its sign of life."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading

import dask
import pytest
from clusters import new_record
from conftest import PATIENCE
from schedulers import prepare, scheduler_in

from dask_cml.layout import board_file, scheduler_file
from dask_cml.records import liveness
from dask_cml.scheduler import plugin
from dask_cml.scheduler.state_file import StateFile
from dask_cml.timing import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(plugin, "_REST", 0.01)
    monkeypatch.setattr(timing, "sign_of_life", 0.02)


@pytest.fixture
def folder(tmp_path):
    with dask.config.set({"cml.state-directory": str(tmp_path)}):
        yield prepare(tmp_path / "mine", keeper="k1", gpu={"target": 2})


def content_of(folder, number=0):
    return json.loads((folder / scheduler_file(number)).read_text())


async def test_it_is_written_when_something_changes_and_regularly_also_after_an_error(
    folder, holds, monkeypatch, caplog
):
    write, errors = StateFile.write, []

    def may_fail(self, content):
        if errors:
            raise errors.pop()
        write(self, content)

    monkeypatch.setattr(StateFile, "write", may_fail)
    async with scheduler_in(folder) as running:
        board, written = running.plugins["dask-cml"], folder / scheduler_file(0)
        assert content_of(folder)["orphan_timeout"] is None
        errors.append(OSError("No space left on device"))
        board._watchers.timeout = 7.0
        board._publish()
        await holds(lambda: content_of(folder)["orphan_timeout"] == 7.0)
        assert "State of the cluster not written: No space left on device" in caplog.text
        os.utime(written, (0, 0))
        await holds(lambda: written.stat().st_mtime > 0)


async def test_a_cancelled_write_does_not_replace_a_later_one(folder, holds, monkeypatch):
    """As when the scheduler closes: the last state says why, and nobody may take it for lost."""
    replace, goes_on, waiting = os.replace, threading.Event(), []

    def replaces_late(*arguments, **options):
        if not waiting:
            waiting.append(True)
            goes_on.wait(PATIENCE)
        replace(*arguments, **options)

    async with scheduler_in(folder) as running:
        monkeypatch.setattr(os, "replace", replaces_late)
        await holds(lambda: waiting)
        running.plugins["dask-cml"]._lifetime.closed = "idle for 1 s"
        closing = asyncio.create_task(running.close())
        await asyncio.wait([closing], timeout=0.5)
        goes_on.set()
        await closing
    await holds(lambda: len(os.listdir(folder)) == 2)  # no temporary file
    assert content_of(folder)["closed"] == "idle for 1 s"


def test_an_old_scheduler_writes_nothing_without_its_folder_and_into_a_new_cluster_of_its_name(folder):
    file = StateFile(folder, 0)
    file.begin()
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        file.write({})
    assert not folder.exists()
    prepare(folder, keeper="k2")
    with pytest.raises(OSError, match="another cluster has its name"):
        file.write({})
    assert os.listdir(folder) == [board_file(0)]


def test_the_sign_of_life_is_the_age_of_the_last_schedulers_file(folder):
    record = new_record(folder.name)
    assert liveness.silence(record) is liveness.silence(new_record("gone")) is None
    for number in 9, 10:
        StateFile(folder, number).write({})
    now = (folder / scheduler_file(10)).stat().st_mtime
    os.utime(folder / scheduler_file(9), (now, now - 3600))
    assert liveness.silence(record) < 60
    os.utime(folder / scheduler_file(10), (now, now - 130))
    assert 130 <= liveness.silence(record) < 3600
