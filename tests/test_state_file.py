"""The scheduler's file in its cluster's folder: how to reach the scheduler, and its sign of life."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import threading

import dask
import pytest
from clusters import new_record
from conftest import PATIENCE
from schedulers import prepare

from dask_cml.cancellation import cancel
from dask_cml.layout import board_file, scheduler_file, scheduler_number
from dask_cml.records import liveness
from dask_cml.scheduler import state_file
from dask_cml.scheduler.state_file import StateFile
from dask_cml.timing import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(state_file, "_REST", 0.01)
    monkeypatch.setattr(timing, "sign_of_life", 0.02)
    monkeypatch.setattr(state_file, "_GONE_FOR", 0.05)


@pytest.fixture
def folder(tmp_path):
    with dask.config.set({"cml.state-directory": str(tmp_path)}):
        yield prepare(tmp_path / "mine", keeper="k1", gpu={"target": 2})


def content_of(folder, number=0):
    return json.loads((folder / scheduler_file(number)).read_text())


# -- the names of files


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (scheduler_file(0), 0),
        (scheduler_file(12), 12),
        (board_file(3), None),
        ("scheduler-.json", None),
        ("scheduler--1.json", None),
        ("scheduler-1.json.tmp", None),
        (".scheduler-1.json-abc", None),
        ("scheduler-٣.json", None),
        ("scheduler-9999999999.json", None),
    ],
)
def test_a_schedulers_number_is_in_the_name_of_its_file(name, number):
    assert scheduler_number(name) == number


# -- what it begins with


def test_a_scheduler_begins_with_what_its_keeper_wrote(folder):
    begin = StateFile(folder, 0).begin()
    assert (begin["cluster"], begin["keeper"]) == ("mine", "k1")
    assert begin["groups"]["gpu"] == {"target": 2}
    with pytest.raises(FileNotFoundError):
        StateFile(folder, 1).begin()


# -- what it writes


def test_the_file_is_replaced_atomically_and_is_its_owners_only(folder):
    file = StateFile(folder, 0)
    previous = os.umask(0)
    try:
        file.write({"address": "tcp://10.0.0.1:8786"})
    finally:
        os.umask(previous)
    with open(folder / scheduler_file(0)) as old:
        file.write({"address": "tcp://10.0.0.2:8786"})
        assert "10.0.0.1" in old.read()
    assert content_of(folder) == {"address": "tcp://10.0.0.2:8786"}
    assert stat.S_IMODE((folder / scheduler_file(0)).stat().st_mode) == 0o600
    assert {*os.listdir(folder)} == {scheduler_file(0), board_file(0)}


async def test_it_is_written_when_something_changes_and_regularly(folder, holds):
    file, content = StateFile(folder, 2), {"n": 1}
    running = asyncio.create_task(file.run(lambda: dict(content)))
    written = folder / scheduler_file(2)
    await holds(written.exists)
    content["n"] = 2
    file.changed()
    await holds(lambda: content_of(folder, 2) == {"n": 2})
    os.utime(written, (0, 0))
    await holds(lambda: written.stat().st_mtime > 0)
    running.cancel()


async def test_a_cancelled_write_does_not_replace_a_later_one(folder, holds, monkeypatch):
    """As when the scheduler closes: the last state says why, and nobody may take it for lost."""
    file, replace, goes_on = StateFile(folder, 0), os.replace, threading.Event()
    waiting = []

    def replaces_late(*arguments, **options):
        if not waiting:
            waiting.append(True)
            goes_on.wait(PATIENCE)
        replace(*arguments, **options)

    monkeypatch.setattr(os, "replace", replaces_late)
    running = asyncio.create_task(file.run(lambda: {"closed": None}))
    await holds(lambda: waiting)

    async def close():
        await cancel(running)
        file.write({"closed": "idle for 1 s"})

    closing = asyncio.create_task(close())
    await asyncio.wait([closing], timeout=0.2)
    goes_on.set()
    await closing
    await holds(lambda: len(os.listdir(folder)) == 2)  # no temporary file
    assert content_of(folder) == {"closed": "idle for 1 s"}


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("not private")])
async def test_an_error_is_logged_and_tried_again(folder, holds, monkeypatch, caplog, error):
    file, write, errors = StateFile(folder, 0), StateFile.write, [error]

    def fails(self, content):
        if errors:
            raise errors.pop()
        write(self, content)

    monkeypatch.setattr(StateFile, "write", fails)
    running = asyncio.create_task(file.run(lambda: {"n": 1}))
    await holds((folder / scheduler_file(0)).exists)
    assert f"State of the cluster not written: {error}" in caplog.text
    running.cancel()


@pytest.mark.parametrize("whole", [False, True], ids=["folder", "state directory"])
async def test_it_ends_when_the_clusters_folder_has_been_removed_for_a_while(folder, whole):
    file = StateFile(folder, 0)
    shutil.rmtree(folder.parent if whole else folder)
    assert await asyncio.wait_for(file.run(dict), 60) == "its folder was removed"
    assert not folder.exists()


async def test_a_folder_that_comes_back_does_not_end_it(folder, holds, monkeypatch):
    """As NFS may show it."""
    monkeypatch.setattr(state_file, "_GONE_FOR", 3600)
    file = StateFile(folder, 0)
    aside, listdir, looks = folder.with_name("aside"), os.listdir, []
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or listdir(path))
    folder.rename(aside)
    running = asyncio.create_task(file.run(lambda: {"n": 1}))
    await holds(lambda: len(looks) > 1)
    aside.rename(folder)
    await holds((folder / scheduler_file(0)).exists)
    monkeypatch.setattr(state_file, "_GONE_FOR", 0)
    written = (folder / scheduler_file(0)).stat().st_mtime_ns
    await holds(lambda: (folder / scheduler_file(0)).stat().st_mtime_ns > written)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize(
    "error", [FileNotFoundError("here again"), OSError("the server does not answer")], ids=repr
)
async def test_a_folder_that_was_gone_for_a_moment_does_not_end_it_if_it_cannot_be_written_then(
    folder, monkeypatch, error
):
    aside, tries = folder.with_name("aside"), []

    def write(self, content):
        tries.append(1)
        if len(tries) == 2:
            aside.rename(folder)
        raise error if len(tries) > 1 else FileNotFoundError

    folder.rename(aside)
    monkeypatch.setattr(StateFile, "write", write)
    running = asyncio.create_task(StateFile(folder, 0).run(dict))
    while len(tries) < 20 and not running.done():
        await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


async def test_a_state_directory_that_cannot_be_listed_does_not_end_it(folder, monkeypatch):
    tries = []

    def write(self, content):
        tries.append(1)
        raise FileNotFoundError

    def listdir(path):
        raise OSError("the server does not answer")

    monkeypatch.setattr(StateFile, "write", write)
    monkeypatch.setattr(os, "listdir", listdir)
    running = asyncio.create_task(StateFile(folder, 0).run(dict))
    while len(tries) < 10:
        await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize(
    ("number", "why"), [(0, "another cluster has its name"), (1, "its folder was removed")]
)
async def test_an_old_scheduler_writes_nothing_into_a_new_cluster_of_its_name_and_ends(folder, number, why):
    file = StateFile(prepare(folder, number=number), number)
    file.begin()
    shutil.rmtree(folder)
    prepare(folder, keeper="k2")
    assert await asyncio.wait_for(file.run(dict), 60) == why
    assert os.listdir(folder) == [board_file(0)]


# -- the sign of life


def test_the_sign_of_life_is_the_age_of_the_last_schedulers_file(folder):
    record = new_record(folder.name)
    assert liveness.silence(record) is None
    for number in 9, 10:
        StateFile(folder, number).write({})
    now = (folder / scheduler_file(10)).stat().st_mtime
    os.utime(folder / scheduler_file(9), (now, now - 3600))
    assert liveness.silence(record) < 60
    os.utime(folder / scheduler_file(10), (now, now - 130))
    assert 130 <= liveness.silence(record) < 3600


def test_a_folder_that_does_not_exist_has_no_sign_of_life(folder):
    assert liveness.silence(new_record("gone")) is None
