"""Records of clusters: written whole or not at all, whatever happens to the writers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from clusters import WANTED, launch, new_record

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.layout import (
    LOGS_FOLDER,
    RECORD_FILE,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    board_file,
    scheduler_file,
)
from dask_cml.records import operations, store
from dask_cml.records.record import VERSION, SchedulerState
from dask_cml.records.store import has_ended, read, records, remove
from dask_cml.scheduler.board import WantedGroup

FILES = sorted([RECORD_FILE, LOGS_FOLDER, SESSIONS_FOLDER, STARTED_FOLDER, board_file(0)])


def claim(record):
    store.claim(record, WANTED)
    return record.folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# -- one record


def test_only_the_owner_can_read_a_clusters_folder(state):
    previous = os.umask(0)
    try:
        record = new_record("a")
        folder = claim(record)
        launch(record, "session-1")
    finally:
        os.umask(previous)
    folders = [folder / name for name in (SESSIONS_FOLDER, STARTED_FOLDER)]
    assert {mode(path) for path in (state, folder, *folders)} == {0o700}
    [file] = (folder / SESSIONS_FOLDER).iterdir()
    assert {mode(path) for path in (folder / RECORD_FILE, folder / board_file(0), file)} == {0o600}


def test_a_claim_that_fails_leaves_nothing(state, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TypeError):
        claim(new_record("a", options={"security": object()}))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        claim(new_record("a"))
    assert os.listdir(state) == []


# -- what the scheduler has written


def test_before_and_beside_a_damaged_file_of_a_scheduler_what_was_written_for_it_counts(state, caplog):
    record, groups = new_record("a"), {"default": {"options": {}, "target": 3}}
    store.claim(record, {"groups": groups, "keeper": "k1"})
    begins = SchedulerState(groups={"default": WantedGroup(target=3)}, keeper="k1")
    assert read("a").scheduler == begins
    (record.folder / scheduler_file(0)).write_text('{"address": ')
    for _ in range(2):
        assert read("a").scheduler == begins
    assert [str(record.folder / scheduler_file(0)) in message for message in caplog.messages] == [True]


# -- names


def test_a_name_that_leads_elsewhere_is_refused(state):
    claim(new_record("b"))
    for name in "", ".", "..", "../b", ".hidden", "x/../b", "a\0":
        with pytest.raises(NoSuchCluster):
            read(name)


# -- claims


def test_one_of_many_processes_that_replace_a_stale_record_gets_the_name(state):
    for _ in range(5):
        stale = new_record("a")
        (claim(stale) / "key.pem").write_text("secret")
        start = threading.Barrier(8)

        def take(record, stale=stale, start=start):
            start.wait()
            remove(stale)
            with contextlib.suppress(ClusterExists):
                return claim(record)

        rivals = [new_record("a") for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            got = [r for r, folder in zip(rivals, pool.map(take, rivals), strict=True) if folder]
        # Of two that got it one after the other, the first one finds its record gone, and stops its sessions.
        assert [read("a")] == [record for record in got if not has_ended(record)]
        assert sorted(os.listdir(state / "a")) == FILES
        remove(read("a"))


def test_a_cluster_that_takes_the_name_while_another_is_removed_is_left_alone(state, monkeypatch):
    stale, new = new_record("a"), new_record("a")
    claim(stale)
    rename = os.rename

    def late(*paths, **folders):  # after the look at whose it is
        monkeypatch.setattr(os, "rename", rename)
        remove(stale)
        claim(new)
        launch(new, "session-1")
        rename(*paths, **folders)

    monkeypatch.setattr(os, "rename", late)
    assert remove(stale) is None
    assert (read("a").id, [*read("a").sessions]) == (new.id, ["session-1"])
    assert os.listdir(state) == ["a"]


# -- the end


@pytest.mark.parametrize("step", ["first listing", "made", "last look"])
def test_a_session_written_while_the_cluster_is_removed_is_known_to_its_launcher_or_the_remover(
    state, monkeypatch, step
):
    record = new_record("a")
    claim(record)
    write_entries, listdir, removed, written = store.write_entries, os.listdir, [], []

    def during(*arguments):
        if step == "first listing":
            removed.append(remove(record))
        write_entries(*arguments)
        written.append(arguments)
        if step == "made":
            removed.append(remove(record))

    def after(path):
        if path == record.folder and step == "last look" and written and not removed:
            removed.append({})
            removed[0] = remove(record)
        return listdir(path)

    monkeypatch.setattr(store, "write_entries", during)
    monkeypatch.setattr(os, "listdir", after)
    with pytest.raises(NoSuchCluster):  # so who has launched it, stops it
        launch(record, "session-1")
    assert removed == [{} if step == "first listing" else {"session-1": "a-0"}]
    assert listdir(state) == []


def test_old_leftovers_of_crashes_are_removed(state):
    for act in lambda: claim(new_record("a")), lambda: asyncio.run(operations.prune()):
        old = [state / ".claim-old", state / ".removed-old"]
        young = [state / ".claim-young", state / ".removed-young"]
        for path in [*old, *young]:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state.chmod(0o700)
        (state / ".removed-old" / "key.pem").write_text("secret")
        for path in old:
            os.utime(path, (time.time() - 3600,) * 2)
        act()
        assert not any(path.exists() for path in old)
        assert all(path.exists() for path in young)
        assert [record.name for record in records()] == ["a"]


# -- damage


def damages(good):
    yield b"", "Expecting value"
    yield json.dumps(good).encode()[:90], ""
    yield bytes(range(128, 256)), "codec"
    yield b"[" * 100_000, "recursion"
    yield b"[1]", "Expected `object`, got `array`"
    yield b'{"address": "tcp://x"}', "not the record"
    yield {**good, "version": VERSION + 1}, f"in format {VERSION + 1}: upgrade"
    yield {**good, "name": "a"}, "the record of another cluster, 'a'"
    yield {key: good[key] for key in good if key != "maker"}, "lacks maker"
    for created in "2030-01-01T00:00:00", "yesterday":
        yield {**good, "created": created}, "at `$.created`"
    for key, value in ("pid", 10**30), ("pid", -1), ("started", 1e300), ("started", -1), ("serves", 1):
        yield {**good, "maker": {**good["maker"], key: value}}, f"at `$.maker.{key}`"
    for key, value in {"id": 3, "security": ["a"], "options": None, "version": 0}.items():
        yield {**good, key: value}, f"at `$.{key}`"


def test_damaged_records_are_reported_once_and_ignored(state, caplog):
    claim(new_record("good"))
    damaged = {}
    for n, (content, why) in enumerate(damages(json.loads(new_record("bad").to_json()))):
        record = new_record(f"bad-{n}")
        if isinstance(content, dict) and content.get("name") == "bad":
            content["name"] = record.name
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        (claim(record) / RECORD_FILE).write_bytes(content)
        damaged[record.name] = record, why
    for _ in range(2):
        assert [record.name for record in records()] == ["good"]
    assert len(caplog.messages) == len(damaged)
    for name, (record, why) in damaged.items():
        [line] = [line for line in caplog.messages if str(record.folder / RECORD_FILE) in line]
        assert why in line
        with pytest.raises(store.RecordUnreadable, match=f"cannot read the record in {record.folder}: "):
            read(name)
        with pytest.raises(ClusterExists):  # whose it is cannot be known
            claim(new_record(name))
        with pytest.raises(CMLError):
            launch(record, "session-1")


def test_foreign_files_and_folders_are_ignored(state, caplog):
    claim(new_record("a"))
    (claim(new_record("b")) / SESSIONS_FOLDER).rmdir()
    (state / "notes.txt").write_text("not ours")
    (state / "logs").mkdir()
    (state / "strange" / RECORD_FILE).mkdir(parents=True)
    (state / "dangling").symlink_to(state / "nowhere")
    assert [record.name for record in records()] == ["a"]
    assert "strange" in caplog.text
    assert "No such file or directory" in caplog.text
    assert "notes.txt" not in caplog.text


def test_a_file_that_was_replaced_while_it_was_read_is_read_again(state, monkeypatch):
    record = new_record("a")
    claim(record)
    content = store.read_file
    errors = [OSError(errno.ESTALE, "Stale file handle")] * 3

    def read_file(*arguments):
        if errors:
            raise errors.pop()
        return content(*arguments)

    monkeypatch.setattr(store, "read_file", read_file)
    assert read("a").id == record.id
    assert errors == []


def test_a_record_that_others_can_write_is_unreadable_and_no_ended_cluster(state):
    record = new_record("a")
    claim(record)
    state.chmod(state.stat().st_mode | stat.S_IWGRP)
    assert not has_ended(record)
    assert store.refreshed(record) == record
    for again in lambda: read("a"), lambda: store.read_again(record):
        with pytest.raises(store.RecordUnreadable, match=r"^cannot read the record in /.*: run `chmod"):
            again()
    state.chmod(state.stat().st_mode & ~stat.S_IWGRP)
    assert store.read_again(record).id == record.id


def test_a_file_system_that_does_not_answer_has_ended_no_cluster(state, monkeypatch):
    """Otherwise its keeper would believe that another process has deleted it."""
    record = new_record("a")
    claim(record)
    for function in "check_folder", "read_file":
        for error in errno.ESTALE, errno.EACCES, errno.EIO:
            monkeypatch.setattr(store, function, Mock(side_effect=OSError(error, os.strerror(error))))
            assert not has_ended(record)
            for act in lambda: store.read_again(record), lambda: launch(record, "session-1"):
                with pytest.raises(store.RecordUnreadable, match=os.strerror(error)):
                    act()
        monkeypatch.undo()


def test_a_folder_that_was_not_found_once_has_ended_no_cluster_if_its_parent_lists_it(state, monkeypatch):
    """NFS may remember for a moment that something did not exist."""
    record = new_record("a")
    claim(record)
    check_folder, errors = store.check_folder, [FileNotFoundError(errno.ENOENT, "No such file")] * 2

    def check(path):
        if errors:
            raise errors.pop()
        check_folder(path)

    monkeypatch.setattr(store, "check_folder", check)
    assert not has_ended(record)
    assert errors == []


# -- several writers, and their deaths
