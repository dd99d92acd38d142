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
from dask_cml.options import SessionSize
from dask_cml.records import session_files, store
from dask_cml.records.record import Maker, Record
from dask_cml.records.session_files import (
    ENDED_FOLDER,
    SESSIONS_FOLDER,
    Changes,
    Ended,
    Launch,
    file_name,
    parse,
)
from dask_cml.records.store import (
    RECORD_FILE,
    claim,
    read,
    read_ended,
    records,
    remove,
    write,
    write_sessions,
)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


FILES = [ENDED_FOLDER, "groups", RECORD_FILE, SESSIONS_FOLDER]


LAUNCHED = 1790000000


def launch(state, record, *ids, key="a-0", **more):
    """Write sessions into a record, as the manager does that has launched them."""
    launches = [Launch(each, key, None, LAUNCHED) for each in ids]
    write_sessions(Changes(launches, **more), record.name, state, id=record.id)


def end(state, record, *ids, at=LAUNCHED + 60):
    """Write that sessions have ended."""
    write_sessions(Changes(ended=dict.fromkeys(ids, at)), record.name, state, id=record.id)


def names_in(state, folder):
    return sorted(os.listdir(state / "a" / folder))


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
        sessions={"abcdefgh12345678": "scheduler", "ijklmnop12345678": 'My cluster, "naïve" 雲-0'},
        owners={"ijklmnop12345678": "qrstuvwx12345678"},
        launched={"abcdefgh12345678": 1790000000, "ijklmnop12345678": 1790000060},
        waiting={"ijklmnop12345678": 1790000060},
        began={"abcdefgh12345678": 1790000030},
        sizes={"abcdefgh12345678": SessionSize(1, 2), "ijklmnop12345678": SessionSize(1 / 3, 1e22, 8)},
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
    assert remove("a") == {}


def test_folder_and_record_are_their_owners_only(state):
    previous = os.umask(0)
    try:
        record = Record("a")
        folder = claim(record, state)
        write(record, state)
        launch(state, record, "session-1")
    finally:
        os.umask(previous)
    assert mode(state) == mode(folder) == mode(folder / SESSIONS_FOLDER) == 0o700
    [file] = (folder / SESSIONS_FOLDER).iterdir()
    assert mode(folder / RECORD_FILE) == mode(file) == 0o600


def test_fields_of_newer_releases_are_kept(state):
    folder = claim(Record("a"), state)
    content = json.loads((folder / RECORD_FILE).read_text())
    (folder / RECORD_FILE).write_text(json.dumps({**content, "region": "west"}))
    write(dataclasses.replace(read("a", state), app_url="https://x/"), state)
    content = json.loads((folder / RECORD_FILE).read_text())
    assert (content["region"], content["app_url"]) == ("west", "https://x/")


def test_options_that_json_cannot_hold_leave_the_old_record(state):
    record = Record("a")
    folder = claim(record, state)
    with pytest.raises(TypeError):
        write(dataclasses.replace(record, options={"security": object()}), state)
    assert read("a", state).options == {}
    assert sorted(os.listdir(folder)) == FILES


def test_full_disk_leaves_the_old_record_and_no_other_file(state, monkeypatch):
    record = Record("a")
    folder = claim(record, state)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(dataclasses.replace(record, app_url="new"), state)
    assert read("a", state).app_url is None
    assert sorted(os.listdir(folder)) == FILES


def test_unknown_name_is_an_error_that_lists_the_known_ones(state):
    with pytest.raises(NoSuchCluster, match="no clusters exist"):
        read("a", state)
    claim(Record("b"), state)
    claim(Record("c"), state)
    with pytest.raises(NoSuchCluster, match="'a'; existing clusters: 'b', 'c'") as error:
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
    with pytest.raises(ValueError, match="expected a folder's name"):
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


def test_one_of_many_who_replace_a_stale_record_gets_the_name(state):
    for _ in range(20):
        stale = Record("a")
        (claim(stale, state) / "key.pem").write_text("secret")
        start = threading.Barrier(8)

        def take(record, stale=stale, start=start):
            start.wait()
            remove("a", state, id=stale.id)
            with contextlib.suppress(ClusterExists):
                return claim(record, state)

        rivals = [Record("a") for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            got = [r for r, folder in zip(rivals, pool.map(take, rivals), strict=True) if folder]
        assert [read("a", state)] == got
        assert sorted(os.listdir(state / "a")) == FILES
        remove("a", state)


def test_cluster_that_took_the_place_of_a_stale_one_is_left_alone(state):
    stale, new = Record("a"), Record("a")
    claim(stale, state)
    remove("a", state, id=stale.id)
    claim(new, state)
    assert remove("a", state, id=stale.id) is None
    for late in lambda: launch(state, stale, "session-1"), lambda: write(stale, state):
        with pytest.raises(NoSuchCluster):
            late()
    assert read("a", state) == new
    assert os.listdir(state) == ["a"]


def test_cluster_that_takes_the_name_while_another_is_removed_is_left_alone(state, monkeypatch):
    stale, new = Record("a"), Record("a")
    claim(stale, state)
    rename = os.rename

    def late(*paths, **folders):  # after the look at whose it is
        monkeypatch.setattr(os, "rename", rename)
        remove("a", state, id=stale.id)
        claim(new, state)
        launch(state, new, "session-1")
        rename(*paths, **folders)

    monkeypatch.setattr(os, "rename", late)
    assert remove("a", state, id=stale.id) is None
    assert (read("a", state).id, [*read("a", state).sessions]) == (new.id, ["session-1"])
    assert os.listdir(state) == ["a"]


# -- the end


def test_removed_cluster_leaves_nothing(state):
    folder = claim(Record("a"), state)
    (folder / "security").mkdir()
    (folder / "security" / "key.pem").write_text("secret")
    assert remove("a", state) == {}
    assert os.listdir(state) == []
    assert remove("a", state) is None


def test_late_write_does_not_bring_a_removed_cluster_back(state):
    record = Record("a")
    claim(record, state)
    remove("a", state)
    with pytest.raises(NoSuchCluster):
        write(record, state)
    with pytest.raises(NoSuchCluster):
        launch(state, record, "session-1")
    assert os.listdir(state) == []


@pytest.mark.parametrize("step", ["first listing", "made", "last look"])
def test_session_that_is_written_while_the_cluster_is_removed_is_known_to_one_of_the_two(
    state, monkeypatch, step
):
    record = Record("a")
    claim(record, state)
    write_files, listdir, removed = session_files.write, os.listdir, []

    def during(*arguments):
        if step == "first listing":
            removed.append(remove("a", state, id=record.id))
        write_files(*arguments)
        if step == "made":
            removed.append(remove("a", state, id=record.id))

    def after(path):
        if path == state and step == "last look" and not removed:
            removed.append({})
            removed[0] = remove("a", state, id=record.id)
        return listdir(path)

    monkeypatch.setattr(session_files, "write", during)
    monkeypatch.setattr(os, "listdir", after)
    with pytest.raises(NoSuchCluster):  # so who has launched it, stops it
        launch(state, record, "session-1")
    assert removed == [{} if step == "first listing" else {"session-1": "a-0"}]
    assert listdir(state) == []


def test_removal_tells_of_the_sessions_that_were_launched_since_the_last_look(state):
    record = Record("a")
    claim(record, state)
    launch(state, record, "session-1", "session-2")
    assert remove("a", state, id=record.id) == {"session-1": "a-0", "session-2": "a-0"}


def test_what_crashes_left_is_swept_when_it_is_old(state):
    record = Record("a")
    folder = claim(record, state)
    old = [folder / ".record.json-old", state / ".claim-old", state / ".removed-old"]
    young = [folder / ".record.json-young", state / ".claim-young"]
    for path in [*old, *young]:
        path.write_text("half a rec")
    for path in old:
        os.utime(path, (time.time() - 3600,) * 2)
    write(record, state)
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
    yield "list", b"[1]", "not the record"
    yield "other", b'{"address": "tcp://x"}', "not the record"
    yield "newer", {**good, "version": 2}, "in format 2: upgrade"
    yield "elsewhere", {**good, "name": "a"}, "the record of another cluster, 'a'"
    yield "lacking", {key: good[key] for key in good if key != "maker"}, "lacks maker"
    yield "number", json.dumps({**good, "options": {"cpu": float("nan")}}).encode(), "it contains NaN"
    yield "no zone", {**good, "created": "2030-01-01T00:00:00"}, "its created is invalid"
    for change in {"pid": 10**30}, {"started": 1e300}, {"started": -1}:
        yield str(change), {**good, "maker": {**good["maker"], **change}}, "its maker is invalid"
    for key, value in {
        "id": 3,
        "created": "yesterday",
        "maker": {"host": "a", "pid": -1, "started": 1.0},
        "scheduler_session": "",
        "security": ["a"],
        "scheduler_address": 8786,
        "options": None,
        "version": 0,
    }.items():
        yield key, {**good, key: value}, f"its {key} is invalid"


@pytest.mark.parametrize(("content", "why"), [d[1:] for d in damages()], ids=[d[0] for d in damages()])
def test_damaged_record_is_reported_once_and_passed_over(state, caplog, content, why):
    claim(Record("good"), state)
    folder = claim(Record("bad"), state)
    damaged = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / RECORD_FILE).write_bytes(damaged)
    for _ in range(2):
        assert [record.name for record in records(state)] == ["good"]
    with pytest.raises(NoSuchCluster, match="existing clusters: 'good'"):
        read("bad", state)
    assert len(caplog.records) == 1
    assert str(folder / RECORD_FILE) in caplog.text
    assert why in caplog.text
    with pytest.raises(ClusterExists):  # whose it is cannot be known
        claim(Record("bad"), state)
    assert remove("bad", state) == {}


def test_nobody_writes_into_a_damaged_cluster(state):
    record = Record("bad")
    folder = claim(record, state)
    for content in (b"[" * 100_000, b"[1]"):
        (folder / RECORD_FILE).write_bytes(content)
        with pytest.raises(CMLError, match="cannot read the record"):
            launch(state, record, "session-1")


def test_record_of_which_no_folder_has_the_sessions_is_passed_over(state, caplog):
    (claim(Record("a"), state) / SESSIONS_FOLDER).rmdir()
    assert records(state) == []
    assert "its folder lacks sessions" in caplog.text


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

    def read_file(*arguments):
        if error := next(stale):
            raise error
        return content(*arguments)

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
    # No half-made claim or removal is in anybody's way.
    remove("a", state)
    claim(Record("a"), state)
    remove("a", state)
    assert all(name.startswith((".claim-", ".removed-")) for name in os.listdir(state))


def write_for_ever(state, first, filling):
    for count in itertools.count(first):
        options = {"count": count, "again": [count] * 50, "filler": "x" * filling}
        if count % 7 == 0:
            remove("a", state)
        try:
            write(dataclasses.replace(read("a", state), options=options), state)
        except NoSuchCluster:
            claim(Record("a", options=options), state)


@pytest.mark.slow
def test_sessions_are_read_whole_or_not_at_all_whenever_their_writer_is_killed(state, caplog, fork):
    record = Record("a")
    claim(record, state)
    for life in range(20):
        before = {*read("a", state).sessions}
        writer = fork(launch_for_ever, state, record, life)
        while {*read("a", state).sessions} == before:
            assert writer.is_alive()
        writer.kill()
        writer.join()
        for session, key in read("a", state).sessions.items():
            assert session.startswith("session-")
            assert key == f"a-{session.split('-')[1]}"
    assert not caplog.records
    end(state, record, *read("a", state).sessions)
    assert names_in(state, SESSIONS_FOLDER) == []


def launch_for_ever(state, record, life):
    for count in itertools.count():
        ended = {f"session-{life}-{count - 3}": LAUNCHED}
        launch(state, record, f"session-{life}-{count}", key=f"a-{life}", ended=ended)


def count_in(state):
    try:
        options = read("a", state).options
    except NoSuchCluster:
        return None
    assert options["again"] == [options["count"]] * 50
    assert set(options["filler"]) <= {"x"}
    return options["count"]


@pytest.mark.parametrize("what", ["write", "launch", "replace", "remove"])
def test_death_before_any_step_leaves_the_old_record_the_new_or_none(state, what, monkeypatch, fork):
    monkeypatch.setattr(store, "_LEFTOVER_AGE", -1.0)
    seen = []
    for step in range(1, 100):
        (claim(Record("a", app_url="old"), state) / "key.pem").write_text("secret")
        writer = fork(die_at, state, what, step)
        writer.join()
        found = records(state)
        seen.append(["new" if record.sessions else record.app_url for record in found])
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
        if found:
            write(dataclasses.replace(found[0], app_url="after"), state)
            assert read("a", state).app_url == "after"
        remove("a", state)
        claim(Record("another"), state)
        remove("another", state)
        assert os.listdir(state) == []
    assert len(seen) > 5
    assert seen[0] == ["old"]
    assert seen[-1] == ([] if what == "remove" else ["new"])
    assert all(each in (["old"], ["new"], []) for each in seen)
    assert what not in ("write", "launch") or [] not in seen


def die_at(state, what, step):
    """Do it, and die in front of one of the calls that it makes of the file system."""
    calls = ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.utime")
    steps = itertools.count(1)

    def audit(event, arguments):
        if event in calls and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    old = read("a", state)
    sys.addaudithook(audit)
    if what == "write":
        write(dataclasses.replace(old, app_url="new"), state)
    elif what == "launch":
        launch(state, old, "session-1")
    elif what == "end":
        end(state, old, "session-1", "session-2")
    elif what == "replace":
        remove("a", state, id=old.id)
        claim(Record("a", app_url="new"), state)
    else:
        remove("a", state, id=old.id)


def test_nothing_is_lost_when_two_processes_write_sessions_at_the_same_moment(state, fork):
    record = Record("a")
    claim(record, state)
    writers = [fork(add_sessions, state, record, each) for each in "xy"]
    while any(writer.is_alive() for writer in writers):
        read("a", state)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(read("a", state).sessions) == {f"{p}-session-{i}" for p in "xy" for i in range(40)}


def add_sessions(state, record, prefix):
    for i in range(40):
        launch(state, record, f"{prefix}-session-{i}")


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


# -- the files of sessions


@pytest.mark.parametrize("cluster", ["mine", "雲" * 66, "a,b%2C @", "scheduler", "@"])
@pytest.mark.parametrize("key", ["{}-0", "scheduler", "{}-gpu,x-1", "@-0", "another 雲-0", "{}"])
@pytest.mark.parametrize("owner", [None, "ijklmnop12345678"])
@pytest.mark.parametrize("size", [None, SessionSize(4, 16, 1), SessionSize(1 / 3, 1e22)])
def test_name_of_a_file_tells_of_its_session(cluster, key, owner, size):
    session = Launch("abcdefgh12345678", key.format(cluster), owner, 1790000000, size)
    name = file_name(session, cluster)
    assert len(name.encode()) < 200
    assert parse(name, cluster) == session


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        ",@-0,,1790000000,",
        "abc,@-0,,1790000000,",
        "a b c d,@-0,,1790000000,",
        "abcdefgh,,,1790000000,",
        "abcdefgh,@-0,no owner,1790000000,",
        "abcdefgh,@-0,,,",
        "abcdefgh,@-0,,0,",
        "abcdefgh,@-0,,1.5,",
        "abcdefgh,@-0,,99999999999999,",
        "abcdefgh,@-0,,\u0661,",
        "abcdefgh,@-0,,1790000000",
        "abcdefgh,@-0,,1790000000,more",
        "abcdefgh,@-0,,1790000000,1x2",
        "abcdefgh,@-0,,1790000000,1.0x2x0",
        "abcdefgh,@-0,,1790000000,1e999x2x0",
        "abcdefgh,@-0,,1790000000,-x2x0",
        "abcdefgh,@-0,,1790000000,1x2x0,1790000000,1790000060",
        "abcdefgh,a-0,,1790000000,",
        "abcdefgh,..%2F..%2Fetc,,1790000000,",
        "abcdefgh,%00,,1790000000,",
        "abcdefgh,%0A,,1790000000,",
        "abcdefgh,%2d,,1790000000,",
        "abcdefgh,%FF,,1790000000,",
        "abcdefgh,\udcff,,1790000000,",
        "abc,waits",
        "abcdefgh,stays",
        "abcdefgh,began",
        "abcdefgh,began,0",
    ],
)
def test_stray_file_is_reported_once_and_passed_over(state, caplog, name):
    record = Record("a")
    folder = claim(record, state) / SESSIONS_FOLDER
    launch(state, record, "session-1")
    (folder / name).touch()
    (folder / ".nfs000000000001").touch()
    for _ in range(2):
        assert read("a", state).sessions == {"session-1": "a-0"}
    [warning] = caplog.records
    assert warning.getMessage().startswith(f"{name!a} in {folder} ignored")
    warning.getMessage().encode()
    assert remove("a", state) == {"session-1": "a-0"}


def test_of_two_files_of_one_session_the_first_launch_counts(state):
    record = Record("a")
    claim(record, state)
    launches = [Launch("session-1", "a-0", None, 1790000000 + i) for i in (1, 0)]
    write_sessions(Changes(launches), "a", state, id=record.id)
    assert read("a", state).launched == {"session-1": 1790000000}


def test_what_is_known_of_a_session_comes_and_goes_with_files_of_its_own(state):
    record = Record("a")
    claim(record, state)
    launch(state, record, "session-1", "session-2", waiting=["session-1", "session-2"])
    assert read("a", state).waiting == dict.fromkeys(["session-1", "session-2"], 1790000000)
    for began in LAUNCHED + 20, LAUNCHED + 30:  # as at a second try
        launch(state, record, "session-2", began={"session-2": began})
        assert read("a", state).waiting == {"session-1": LAUNCHED}
        assert read("a", state).began == {"session-2": LAUNCHED + 20}
    for at in LAUNCHED + 60, LAUNCHED + 70:
        end(state, record, "session-1", at=at)
        assert read("a", state).sessions == {"session-2": "a-0"}
    end(state, record, "session-2")
    assert names_in(state, SESSIONS_FOLDER) == []
    assert {each.launch.id: (each.began, each.ended) for each in read_ended(record, state)} == {
        "session-1": (LAUNCHED + 60, LAUNCHED + 60),  # it never got room
        "session-2": (LAUNCHED + 20, LAUNCHED + 60),
    }


def test_an_ended_session_keeps_what_is_known_of_it(state):
    record = Record("a")
    claim(record, state)
    session = Launch("session-1", "a-gpu-0", "ijklmnop12345678", LAUNCHED, SessionSize(4, 16, 1))
    write_sessions(Changes([session]), "a", state, id=record.id)
    end(state, record, "session-1", at=LAUNCHED + 90)
    assert read_ended(record, state) == [Ended(session, LAUNCHED, LAUNCHED + 90)]
    # Two managers may find the same end, each at its time.
    write_sessions(Changes([session]), "a", state, id=record.id)
    end(state, record, "session-1", at=LAUNCHED + 80)
    (state / "a" / ENDED_FOLDER / "stray").touch()
    assert read_ended(record, state) == [Ended(session, LAUNCHED, LAUNCHED + 80)]
    assert remove("a", state) == {}
    with pytest.raises(NoSuchCluster):
        read_ended(record, state)
    claim(Record("a"), state)
    with pytest.raises(NoSuchCluster):  # that is another cluster
        read_ended(record, state)


def test_an_ended_session_is_in_one_folder_or_the_other_whoever_dies(state, fork):
    record = Record("a")
    seen = []
    for step in range(1, 100):
        claim(record, state)
        launch(state, record, "session-1", "session-2", waiting=["session-1"], began={"session-2": LAUNCHED})
        writer = fork(die_at, state, "end", step)
        writer.join()
        running = {*read("a", state).sessions}
        over = {each.launch.id for each in read_ended(record, state)}
        assert running | over == {"session-1", "session-2"}
        assert not running & over
        seen.append(len(over))
        # Whoever looks after the cluster next finishes it.
        end(state, record, "session-1", "session-2")
        assert names_in(state, SESSIONS_FOLDER) == []
        assert len(names_in(state, ENDED_FOLDER)) == 2
        remove("a", state)
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
    assert {*seen} == {0, 1, 2}
    assert os.listdir(state) == []


def test_a_reader_misses_no_session_that_ends_meanwhile(state, monkeypatch):
    record = Record("a")
    claim(record, state)
    launch(state, record, "session-1", "session-2")
    names_in = session_files.names_in

    def ends_before(*arguments):
        monkeypatch.setattr(session_files, "names_in", names_in)
        names = names_in(*arguments)
        end(state, record, "session-1")
        return names

    monkeypatch.setattr(session_files, "names_in", ends_before)
    running = {*read("a", state).sessions}
    assert running | {each.launch.id for each in read_ended(record, state)} == {"session-1", "session-2"}


def test_a_thousand_sessions_are_listed_by_one_look_at_their_folder(state, monkeypatch):
    record = Record("a")
    folder = claim(record, state)
    launch(state, record, *(f"session-{i}" for i in range(1000)))
    calls = []

    def count(name, function):
        def counted(*arguments, **more):
            calls.append(name)
            return function(*arguments, **more)

        monkeypatch.setattr(os, name, counted)

    for name in ("listdir", "scandir", "stat", "lstat", "fstat", "open"):
        count(name, getattr(os, name))
    assert len(read("a", state).sessions) == 1000
    monkeypatch.undo()
    assert (
        calls.count("listdir") + calls.count("scandir") == 3
    )  # the cluster's folder, the sessions' and the groups'
    assert len(calls) < 25
    assert len(os.listdir(folder / SESSIONS_FOLDER)) == 1000


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
