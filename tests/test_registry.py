"""Records of clusters: written whole or not at all, whatever happens to the writers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.records import store
from dask_cml.records.record import Maker, Record
from dask_cml.records.store import RECORD_FILE, claim, read, records, remove, update, write


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def fork(monkeypatch):
    """Start processes of functions of this module, and soon: from one that has imported it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = []

    def start(function, *arguments):
        processes.append(context.Process(target=function, args=arguments))
        processes[-1].start()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


# -- one record


def test_record_reads_back_as_it_was_written(state):
    record = Record(
        name='My cluster, "naïve" 雲',
        scheduler_session="abcdefgh12345678",
        scheduler_address="tls://10.0.0.1:8786",
        scheduler_id="Scheduler-1",
        app_url="https://abc.example.com/",
        options={"n_workers": 2, "env": {"A": "b"}, "idle_timeout": None},
        sessions={"abcdefgh12345678": "scheduler"},
        security={"tls_ca_file": "/home/cdsw/ca.pem"},
    )
    folder = claim(record, state)
    assert folder == state / record.name
    assert read(record.name, state) == record
    assert records(state) == [record]


def test_state_directory_of_the_configuration_is_the_default(platform):
    record = Record("a")
    claim(record)
    assert records() == [read("a")] == [record]
    assert remove("a")


def test_folder_and_record_are_their_owners_only(state):
    previous = os.umask(0)
    try:
        folder = claim(Record("a"), state)
        update("a", lambda record: record, state)
    finally:
        os.umask(previous)
    assert mode(state) == mode(folder) == 0o700
    assert mode(folder / RECORD_FILE) == 0o600


def test_fields_of_newer_releases_are_kept(state):
    folder = claim(Record("a"), state)
    content = json.loads((folder / RECORD_FILE).read_text())
    (folder / RECORD_FILE).write_text(json.dumps({**content, "region": "west"}))
    update("a", lambda record: dataclasses.replace(record, app_url="https://x/"), state)
    content = json.loads((folder / RECORD_FILE).read_text())
    assert (content["region"], content["app_url"]) == ("west", "https://x/")


def test_record_of_an_older_release_lacks_owners(state):
    folder = claim(Record("a"), state)
    content = json.loads((folder / RECORD_FILE).read_text())
    del content["owners"]
    (folder / RECORD_FILE).write_text(json.dumps(content))
    assert read("a", state).owners == {}


def test_options_that_json_cannot_hold_leave_the_old_record(state):
    folder = claim(Record("a"), state)
    with pytest.raises(TypeError):
        write(Record("a", options={"security": object()}), state)
    assert read("a", state).options == {}
    assert os.listdir(folder) == [RECORD_FILE]


def test_full_disk_leaves_the_old_record_and_no_other_file(state, monkeypatch):
    folder = claim(Record("a"), state)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(Record("a", app_url="new"), state)
    assert read("a", state).app_url is None
    assert os.listdir(folder) == [RECORD_FILE]


def test_unknown_name_is_an_error_that_lists_the_known_ones(state):
    with pytest.raises(NoSuchCluster, match="there is none at all"):
        read("a", state)
    claim(Record("b"), state)
    claim(Record("c"), state)
    with pytest.raises(NoSuchCluster, match="'a'; there are 'b', 'c'") as error:
        read("a", state)
    assert error.value.known == ("b", "c")
    assert isinstance(error.value, (CMLError, LookupError))


@pytest.mark.parametrize("name", ["", ".", "..", "../b", ".hidden", "x/../b", "a\0"])
def test_name_that_leads_elsewhere_is_no_cluster(state, name):
    claim(Record("b"), state)
    with pytest.raises(NoSuchCluster):
        read(name, state)
    with pytest.raises(ValueError, match="name="):
        claim(Record(name), state)
    with pytest.raises(ValueError, match="name="):
        remove(name, state)


def test_name_that_is_too_long_for_the_file_system_is_refused(state):
    with pytest.raises(ValueError, match="expected a name for a folder"):
        claim(Record("雲" * 100), state)
    assert os.listdir(state) == []


# -- claims


def test_name_that_is_taken_is_refused(state):
    first = Record("a")
    claim(first, state)
    with pytest.raises(ClusterExists, match="'a'"):
        claim(Record("a"), state)
    assert read("a", state) == first
    assert os.listdir(state) == ["a"]


def test_stale_record_is_replaced_with_all_that_its_folder_held(state):
    stale = Record("a")
    (claim(stale, state) / "key.pem").write_text("secret")
    new = Record("a")
    folder = claim(new, state, stale=stale)
    assert os.listdir(folder) == [RECORD_FILE]
    assert read("a", state) == new
    assert os.listdir(state) == ["a"]


def test_one_of_many_who_replace_a_stale_record_gets_the_name(state):
    for _ in range(20):
        stale = Record("a")
        claim(stale, state)
        start = threading.Barrier(8)

        def take(record, stale=stale, start=start):
            start.wait()
            with contextlib.suppress(ClusterExists):
                return claim(record, state, stale=stale)

        rivals = [Record("a") for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            got = [r for r, folder in zip(rivals, pool.map(take, rivals), strict=True) if folder]
        assert [read("a", state)] == got
        remove("a", state)


def test_cluster_that_took_the_place_of_a_stale_one_is_left_alone(state):
    stale, new = Record("a"), Record("a")
    claim(stale, state)
    claim(new, state, stale=stale)
    assert not remove("a", state, id=stale.id)
    with pytest.raises(ClusterExists):
        claim(Record("a"), state, stale=stale)
    with pytest.raises(NoSuchCluster):
        update("a", lambda record: record, state, id=stale.id)
    assert read("a", state) == new


# -- the end


def test_removed_cluster_leaves_nothing(state):
    folder = claim(Record("a"), state)
    (folder / "security").mkdir()
    (folder / "security" / "key.pem").write_text("secret")
    assert remove("a", state)
    assert os.listdir(state) == []
    assert not remove("a", state)


def test_late_write_does_not_bring_a_removed_cluster_back(state):
    record = Record("a")
    claim(record, state)
    remove("a", state)
    with pytest.raises(NoSuchCluster):
        write(record, state)
    with pytest.raises(NoSuchCluster):
        update("a", lambda record: record, state)
    assert os.listdir(state) == []


def test_what_crashes_left_is_swept_when_it_is_old(state):
    folder = claim(Record("a"), state)
    old = [folder / ".record.json-old", state / ".claim-old", state / ".lock-old"]
    young = [folder / ".record.json-young", state / ".claim-young"]
    for path in [*old, *young]:
        path.write_text("half a rec")
    for path in old:
        os.utime(path, (time.time() - 3600,) * 2)
    write(Record("a"), state)
    claim(Record("b"), state)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in young)
    assert [record.name for record in records(state)] == ["a", "b"]


# -- damage


def damages():
    good = json.loads(Record("bad").to_json())
    yield "empty", b"", "Expecting value"
    yield "half", Record("bad").to_json().encode()[:90], ""
    yield "bytes", bytes(range(128, 256)), "codec"
    yield "nested", b"[" * 100_000, "recursion"
    yield "list", b"[1]", "no record"
    yield "other", b'{"address": "tcp://x"}', "no record"
    yield "newer", {**good, "version": 2}, "newer format 2"
    yield "elsewhere", {**good, "name": "a"}, "that of the cluster 'a'"
    yield "lacking", {key: good[key] for key in good if key != "maker"}, "lacks maker"
    for key, value in {
        "id": 3,
        "maker": {"host": "a", "pid": -1, "started": 1.0},
        "sessions": {"abcdefgh12345678": 3},
        "owners": {"../etc": "first"},
        "scheduler_session": "",
        "security": ["a"],
        "scheduler_address": 8786,
        "options": None,
        "version": 0,
    }.items():
        yield key, {**good, key: value}, f"its {key} cannot be"
    yield "no session", {**good, "sessions": {"": "scheduler"}}, "its sessions cannot be"


@pytest.mark.parametrize(("content", "why"), [d[1:] for d in damages()], ids=[d[0] for d in damages()])
def test_damaged_record_is_reported_once_and_passed_over(state, caplog, content, why):
    claim(Record("good"), state)
    folder = claim(Record("bad"), state)
    damaged = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / RECORD_FILE).write_bytes(damaged)
    for _ in range(2):
        assert [record.name for record in records(state)] == ["good"]
    with pytest.raises(NoSuchCluster, match="there are 'good'"):
        read("bad", state)
    assert len(caplog.records) == 1
    assert str(folder / RECORD_FILE) in caplog.text
    assert why in caplog.text
    with pytest.raises(ClusterExists):  # whose it is cannot be known
        claim(Record("bad"), state)
    assert remove("bad", state)


def test_foreign_files_and_folders_are_passed_over(state, caplog):
    claim(Record("a"), state)
    (state / "notes.txt").write_text("not ours")
    (state / "logs").mkdir()
    (state / "strange" / RECORD_FILE).mkdir(parents=True)
    (state / "dangling").symlink_to(state / "nowhere")
    assert [record.name for record in records(state)] == ["a"]
    assert "strange" in caplog.text
    assert "notes.txt" not in caplog.text


def test_record_that_was_replaced_while_it_was_read_is_read_again(state, monkeypatch):
    record = Record("a")
    claim(record, state)
    content = store.read_file
    stale = iter([OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError(), None])

    def read_file(path):
        if error := next(stale):
            raise error
        return content(path)

    monkeypatch.setattr(store, "read_file", read_file)
    assert read("a", state) == record


# -- several writers, and their deaths


@pytest.mark.slow
def test_reader_sees_a_whole_record_or_none_whenever_the_writer_is_killed(state, caplog, fork):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    seen = set()
    for life in range(40):
        before = count_in(state)
        writer = fork(write_for_ever, state, life * 1000 + 1, chance.choice([0, 300_000]))
        for _ in range(chance.randrange(1, 4)):
            while (count := count_in(state)) == before:
                assert writer.is_alive()
            seen.add(count)
        writer.join(chance.random() * 0.02)  # so that it dies anywhere
        writer.kill()
        writer.join()
        seen.add(count_in(state))
    assert len(seen) > 20
    assert not caplog.records
    # Neither a lock nor a half-made claim is in anybody's way.
    with contextlib.suppress(NoSuchCluster):
        update("a", lambda record: record, state)
    remove("a", state)
    claim(Record("a"), state)
    remove("a", state)
    assert all(name.startswith((".claim-", ".lock-")) for name in os.listdir(state))


def write_for_ever(state, first, filling):
    for count in itertools.count(first):
        options = {"count": count, "again": [count] * 50, "filler": "x" * filling}
        if count % 7 == 0:
            remove("a", state)
        try:
            update("a", lambda record, new=options: dataclasses.replace(record, options=new), state)
        except NoSuchCluster:
            claim(Record("a", options=options), state)


def count_in(state):
    try:
        options = read("a", state).options
    except NoSuchCluster:
        return None
    assert options["again"] == [options["count"]] * 50
    assert set(options["filler"]) <= {"x"}
    return options["count"]


@pytest.mark.parametrize("what", ["update", "replace", "remove"])
def test_death_before_any_step_leaves_the_old_record_the_new_or_none(state, what, monkeypatch, fork):
    monkeypatch.setattr(store, "_LOCK_AGE", 0.1)
    seen = []
    for step in range(1, 40):
        (claim(Record("a", app_url="old"), state) / "key.pem").write_text("secret")
        writer = fork(die_at, state, what, step)
        writer.join()
        found = records(state)
        seen.append([record.app_url for record in found])
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
        if found:
            update("a", lambda record: dataclasses.replace(record, app_url="after"), state)
            assert read("a", state).app_url == "after"
        remove("a", state)
        assert records(state) == []
        assert not [*state.rglob("*.pem")]
    assert len(seen) > 8
    assert seen[0] == ["old"]
    assert seen[-1] == ([] if what == "remove" else ["new"])
    assert all(each in (["old"], ["new"], []) for each in seen)
    assert what != "update" or [] not in seen


def die_at(state, what, step):
    """Do it, and die in front of one of the calls that it makes of the file system."""
    calls = ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir")
    steps = itertools.count(1)

    def audit(event, arguments):
        if event in calls and str(state) in str(arguments[0]) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    old = read("a", state)
    sys.addaudithook(audit)
    if what == "update":
        update("a", lambda record: dataclasses.replace(record, app_url="new"), state)
    elif what == "replace":
        claim(Record("a", app_url="new"), state, stale=old)
    else:
        remove("a", state)


def test_nothing_is_lost_when_two_processes_change_a_record(state, fork):
    claim(Record("a"), state)
    writers = [fork(add_sessions, state, each) for each in "xy"]
    while any(writer.is_alive() for writer in writers):
        read("a", state)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(read("a", state).sessions) == {f"{p}-session-{i}" for p in "xy" for i in range(40)}


def add_sessions(state, prefix):
    for i in range(40):
        new = {f"{prefix}-session-{i}": f"worker-{i}"}
        update("a", lambda r, new=new: dataclasses.replace(r, sessions={**r.sessions, **new}), state)


def test_last_of_two_writers_wins(state):
    record = Record("a")
    claim(record, state)
    writers = [dataclasses.replace(record, options={"writer": i, "pad": "x" * 10_000 * i}) for i in (1, 2)]
    stop = threading.Event()

    def keep_writing(version):
        while not stop.is_set():
            write(version, state)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(keep_writing, version) for version in writers]
        seen = [read("a", state) for _ in range(200)]
        stop.set()
    assert [future.result() for future in futures] == [None, None]
    assert all(each in (record, *writers) for each in seen)
    write(writers[0], state)
    assert read("a", state) == writers[0]


def die_locked(folder):
    with store._locked(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def test_lock_of_a_killed_process_is_broken_at_once(state, monkeypatch, fork):
    monkeypatch.setattr(store, "_LOCK_AGE", 3600.0)
    claim(Record("a"), state)
    fork(die_locked, state / "a").join()
    assert [name for name in os.listdir(state) if name.startswith(".lock")]
    assert update("a", lambda record: record, state).name == "a"
    assert os.listdir(state) == ["a"]


def test_lock_that_tells_nothing_of_its_holder_is_broken_when_it_is_old(state, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_AGE", 0.1)
    folder = claim(Record("a"), state)
    with store._locked(folder):
        [lock] = state.glob(".lock-*")
    lock.write_text("")
    assert update("a", lambda record: record, state).name == "a"
    assert not lock.exists()


def test_lock_that_is_held_is_an_error_in_the_end(state, monkeypatch):
    monkeypatch.setattr(store, "_LOCK_TIMEOUT", 0.1)
    folder = claim(Record("a"), state)
    with store._locked(folder), pytest.raises(CMLError, match="locked"):
        update("a", lambda record: record, state)
    assert os.listdir(state) == ["a"]


# -- makers


def test_own_process_lives():
    assert Maker.this_process().lives() is True


def test_process_that_was_killed_does_not_live():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        maker = dataclasses.replace(Maker.this_process(), pid=process.pid, started=started)
        assert maker.lives() is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert maker.lives() is False  # a zombie
    assert maker.lives() is False


def test_process_id_that_was_used_again_is_another_process():
    own = Maker.this_process()
    assert dataclasses.replace(own, started=own.started - 3600).lives() is False


def test_of_another_host_or_session_nothing_is_said(monkeypatch):
    own = Maker.this_process()
    assert dataclasses.replace(own, host=f"not-{own.host}", pid=1).lives() is None
    monkeypatch.setenv("CDSW_ENGINE_ID", "abcdefgh12345678")
    assert own.lives() is None
    assert Maker.this_process().session == "abcdefgh12345678"
