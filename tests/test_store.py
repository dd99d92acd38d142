"""Records of clusters: written whole or not at all, whatever happens to the writers. Odd files are named."""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import dask
import psutil
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from clusters import (
    LAUNCHED,
    WANTED,
    arrived,
    end,
    folder_of,
    launch,
    new_record,
    sign_of,
    supplied,
    write_record,
)
from simulated.testing import eventually, simulated

from dask_cml import cli, doctor, private_files
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.layout import (
    HISTORY_FOLDER,
    LOGS_FOLDER,
    RECORD_FILE,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    board_file,
    scheduler_file,
)
from dask_cml.options import SessionSize
from dask_cml.private_files import NotPrivate, append, make_folder, read_file, write_file
from dask_cml.protocol import WantedGroup
from dask_cml.records import operations, store
from dask_cml.records.history import EndedCluster, ended_clusters
from dask_cml.records.store import Maker, Record, SchedulerState, read, records, remove, write_sessions
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.sessions.entry import Launch, file_name, form, parse
from dask_cml.words import printable

FILES = sorted([RECORD_FILE, LOGS_FOLDER, SESSIONS_FOLDER, STARTED_FOLDER, board_file(0)])


def claim(record):
    store.claim(record, WANTED)
    return record.folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_a_clusters_folder(state, umask):
    record = new_record("a")
    folder = claim(record)
    launch(record, "session-1")
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


def test_before_and_beside_a_damaged_file_of_a_scheduler_what_was_written_for_it_counts(state, caplog):
    record, groups = new_record("a"), {"default": {"options": {}, "target": 3}}
    report = {"groups": groups}
    store.claim(record, {"report": report, "keeper": "k1"})
    begins = SchedulerState(groups={"default": WantedGroup(target=3)}, report=report, keeper="k1")
    assert read("a").scheduler == begins
    (record.folder / scheduler_file(0)).write_text('{"address": ')
    for _ in range(2):
        assert read("a").scheduler == begins
    assert [str(record.folder / scheduler_file(0)) in message for message in caplog.messages] == [True]


def test_a_name_that_leads_elsewhere_is_refused(state):
    claim(new_record("b"))
    for name in "", ".", "..", "../b", ".hidden", "x/../b", "a\0":
        with pytest.raises(NoSuchCluster):
            read(name)


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
        assert [read("a")] == [record for record in got if not store.is_removed(record)]
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


@pytest.mark.parametrize("step", ["first listing", "made", "last look"])
def test_a_session_written_while_the_cluster_is_removed_is_known_to_its_launcher_or_the_remover(
    state, monkeypatch, step
):
    record = new_record("a")
    claim(record)
    check, listdir, removed, checked = store._check_exists, os.listdir, [], []

    def during(record):
        if step == "made" and checked:
            removed.append(remove(record))
        check(record)
        checked.append(record)
        if step == "first listing":
            removed.append(remove(record))

    def after(path):
        if path == record.folder and step == "last look" and checked and not removed:
            removed.append({})
            removed[0] = remove(record)
        return listdir(path)

    monkeypatch.setattr(store, "_check_exists", during)
    monkeypatch.setattr(os, "listdir", after)
    with pytest.raises(NoSuchCluster):  # so who has launched it, stops it
        launch(record, "session-1")
    assert removed == [{} if step == "first listing" else {"session-1": "a-0"}]
    assert listdir(state) == []


def test_a_cluster_stays_if_the_sessions_that_were_launched_last_cannot_be_read(state, monkeypatch):
    record = new_record("a")
    claim(record)
    launch(record, "session-1")
    with monkeypatch.context() as patch:
        patch.setattr(store, "read_entries", Mock(side_effect=OSError(errno.ESTALE, "Stale")))
        with pytest.raises(OSError, match="Stale"):
            remove(record)
    assert remove(record) == {"session-1": "a-0"}
    (claim(record) / SESSIONS_FOLDER).rmdir()
    assert (remove(record), os.listdir(state)) == ({}, [])


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


def damages(good):
    yield b"", "Expecting value"
    yield json.dumps(good).encode()[:90], ""
    yield bytes(range(128, 256)), "codec"
    yield b"[" * 100_000, "recursion"
    yield b"[1]", "Expected `object`, got `array`"
    yield b'{"address": "tcp://x"}', "not the record"
    yield {**good, "version": store.VERSION + 1}, f"in format {store.VERSION + 1}: upgrade"
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


def test_what_was_replaced_or_not_found_for_a_moment_is_read_again_and_has_ended_no_cluster(
    state, monkeypatch
):
    record = new_record("a")
    claim(record)
    for function, errors, act in (
        ("read_file", [OSError(errno.ESTALE, "Stale file handle")] * 3, lambda: read("a").id == record.id),
        # NFS may remember for a moment that something did not exist, which its parent lists.
        ("check_folder", [FileNotFoundError(errno.ENOENT, "No")] * 2, lambda: not store.is_removed(record)),
    ):
        original = getattr(store, function)

        def fail_at_first(*arguments, errors=errors, original=original):
            if errors:
                raise errors.pop()
            return original(*arguments)

        monkeypatch.setattr(store, function, fail_at_first)
        assert act()
        assert errors == []


def test_a_record_that_others_can_write_is_unreadable_and_no_ended_cluster(state):
    record = new_record("a")
    claim(record)
    state.chmod(state.stat().st_mode | stat.S_IWGRP)
    assert not store.is_removed(record)
    assert store.refreshed(record) == record
    for again in lambda: read("a"), lambda: store.read_again(record):
        with pytest.raises(store.RecordUnreadable, match=r"^cannot read the record in /.*: run `chmod"):
            again()
    state.chmod(state.stat().st_mode & ~stat.S_IWGRP)
    assert store.read_again(record).id == record.id
    state.rename(state.with_name("aside"))
    state.touch()
    with pytest.raises(NoSuchCluster):
        store.read_again(record)
    assert records() == []


def test_a_file_system_that_does_not_answer_has_ended_no_cluster(state, monkeypatch):
    """Otherwise its keeper would believe that another process has deleted it."""
    record = new_record("a")
    claim(record)
    for function in "check_folder", "read_file":
        for error in errno.ESTALE, errno.EACCES, errno.EIO:
            monkeypatch.setattr(store, function, Mock(side_effect=OSError(error, os.strerror(error))))
            assert not store.is_removed(record)
            for act in lambda: store.read_again(record), lambda: launch(record, "session-1"):
                with pytest.raises(store.RecordUnreadable, match=os.strerror(error)):
                    act()
        monkeypatch.undo()


def test_fields_of_a_scheduler_may_be_missing_null_or_unknown_and_its_session_invalid():
    nothing = dict.fromkeys(("revision", "restarts", "address", "hours", "activity"))
    content = {"report": {}, "region": "west", "session": "../etc", **nothing}
    assert SchedulerState.from_json(0, json.dumps(content)) == SchedulerState()


def test_other_content_is_not_the_state_of_a_scheduler():
    invalid = {"address": 8786, "app_url": {}, "revision": -1, "restarts": 10**30, "session": 7, "hours": 0}
    invalid |= {"groups": 3, "orphan_timeout": 1e300, "activity": [1]}
    contents = [{name: value} for name, value in invalid.items()]
    contents += [{"protocol": "2"}, {"protocol": True}, {"report": {"groups": {"gpu": []}}}]
    contents += [{"report": {"groups": {"gpu": {"options": None}}}}]
    nan = '{"report": {"groups": {"default": {"options": {}, "target": NaN}}}}'
    for text in "", "[1]", "null", nan, *map(json.dumps, contents):
        with pytest.raises(ValueError):  # noqa: PT011  # of json, too
            SchedulerState.from_json(0, text)


def test_a_record_reads_back_as_it_was_written():
    """A byte of a file name that is no text may be in an option."""
    record = Record("a", options={"local_directory": "/scratch/\udcff"}, security={"tls_ca_file": "/ca.pem"})
    assert Record.from_json(record.to_json()) == record


def test_a_record_contains_no_sessions_and_an_earlier_format_is_read_for_its_deletion():
    others = {"launches": {"abcd1234": {}}, "ended": 3, "scheduler": {"address": "tcp://10.0.0.1:8786"}}
    record = Record("old", options={"platform": "local"})
    for version in 1, 2, record.version:
        content = (
            json.loads(record.to_json()) | others | {"version": version, "scheduler_address": "tcp://x:1"}
        )
        assert Record.from_json(json.dumps(content)) == replace(record, version=version)


def test_a_process_lives_until_it_ends_also_if_its_id_is_used_again():
    own = Maker.this_process()
    assert own.lives() is True
    assert replace(own, started=own.started - 3600).lives() is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        maker = replace(own, pid=process.pid, started=psutil.Process(process.pid).create_time())
        assert maker.lives() is True
        manager = SchedulerState(manager=maker.words)
        assert Record("lab", maker=maker, scheduler=manager).manager == maker.words
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert maker.lives() is False  # a zombie
    assert maker.lives() is False
    assert Record("lab", maker=maker, scheduler=manager).manager is None


def test_the_life_of_a_process_in_another_session_is_unknown(monkeypatch):
    own = Maker.this_process()
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", Mock(side_effect=psutil.AccessDenied))
        assert own.lives() is None
    assert replace(own, host=f"not-{own.host}", pid=1).lives() is None
    monkeypatch.setenv("CDSW_ENGINE_ID", "abcdefgh12345678")
    assert own.lives() is None
    assert Maker.this_process().session == "abcdefgh12345678"


def names_in(folder):
    return sorted(os.listdir(folder))


def test_a_files_name_describes_its_session():
    keys = ["{}-0", "scheduler", "{}-gpu,x-1", "@-0", "another 雲-0", "{}"]
    sizes = [None, SessionSize(4, 16, 1), SessionSize(1 / 3, 1e22)]
    clusters = ["mine", "雲" * 66, "a,b%2C @{id}", "{owner}", "scheduler", "@"]
    owners = [None, "ijklmnop12345678"]
    for cluster, key, owner, size in itertools.product(clusters, keys, owners, sizes):
        session = Launch("abcdefgh12345678", key.format(cluster), owner, LAUNCHED, size)
        name = file_name(session, cluster)
        assert len(name.encode()) < 200
        assert parse(name, cluster) == session
        # The wrapper, which has only the standard library, fills in the form by itself.
        made = form(session.key, cluster, size, "default")
        made = made.format(id=session.id, owner=owner or "", launched=LAUNCHED)
        assert replace(parse(made, cluster), group=None) == session


STRAY = [
    "notes.txt",
    ",@-0,,1790000000,,",
    "abc,@-0,,1790000000,,",
    "a b c d,@-0,,1790000000,,",
    "abcdefgh,,,1790000000,,",
    "abcdefgh,@-0,no owner,1790000000,,",
    "abcdefgh,@-0,,,,",
    "abcdefgh,@-0,,0,,",
    "abcdefgh,@-0,,1.5,,",
    "abcdefgh,@-0,,99999999999999,,",
    "abcdefgh,@-0,,\u0661,,",
    "abcdefgh,@-0,,1790000000",
    "abcdefgh,@-0,,1790000000,more,",
    "abcdefgh,@-0,,1790000000,1x2,",
    "abcdefgh,@-0,,1790000000,1.0x2x0,",
    "abcdefgh,@-0,,1790000000,1e999x2x0,",
    "abcdefgh,@-0,,1790000000,-x2x0,",
    "abcdefgh,@-0,,1790000000,1x2x0,1790000000,1790000060",
    "abcdefgh,@-0,,1790000000,1x2x0,1790000000,0,",
    "abcdefgh,a-0,,1790000000,,",
    "abcdefgh,..%2F..%2Fetc,,1790000000,,",
    "abcdefgh,%00,,1790000000,,",
    "abcdefgh,%0A,,1790000000,,",
    "abcdefgh,%2d,,1790000000,,",
    "abcdefgh,%FF,,1790000000,,",
    "abcdefgh,\udcff,,1790000000,,",
    "abcdefgh,@-0,,1790000000,,default",
    "abcdefgh,@-gpu-0,,1790000000,,gpu",
    "abcdefgh,@-0,,1790000000,,0",
]


def test_stray_files_are_reported_once_and_ignored(state, caplog):
    record = new_record("a")
    claim(record)
    folder = record.folder / SESSIONS_FOLDER
    launch(record, "session-1")
    for name in (*STRAY, ".nfs000000000001"):
        (folder / name).touch()
    for _ in range(2):
        assert read("a").sessions == {"session-1": "a-0"}
    warnings = sorted(warning.getMessage().partition(" in ")[0] for warning in caplog.records)
    assert warnings == sorted(f"{name!a}" for name in STRAY)
    assert all(f" in {folder} ignored" in warning.getMessage() for warning in caplog.records)
    assert remove(record) == {"session-1": "a-0"}


def test_files_say_when_a_session_started_and_ended(state):
    record = new_record("a")
    claim(record)
    launch(record, "session-1", "session-2", waiting=["session-1"], began={"session-2": LAUNCHED + 20})
    waiting, running = read("a").launches.values()
    assert (waiting.started, running.started) == (None, LAUNCHED + 20)
    for at in LAUNCHED + 60, LAUNCHED + 70:  # as at a second try
        end(record, "session-1", at=at)
        assert read("a").sessions == {"session-2": "a-0"}
    end(record, "session-2")
    assert read("a").ended == {
        "session-1": replace(waiting, ended=LAUNCHED + 60),
        "session-2": replace(running, ended=LAUNCHED + 60),
    }
    launch(record, "session-3", waiting=["session-3"])
    for name, content in ("a-1", "session-3"), ("a-0", ""):  # on a full disk, nothing can be written into it
        assert read("a").launches["session-3"].started is None
        taken = record.folder / STARTED_FOLDER / name
        taken.write_text(content)
        assert read("a").launches["session-3"].started == taken.stat().st_mtime
        taken.unlink()


def test_an_ended_session_keeps_its_last_known_state(state):
    record = new_record("a")
    claim(record)
    session = Launch("session-1", "a-gpu-0", "ijklmnop12345678", LAUNCHED, SessionSize(4, 16, 1))
    write_sessions(record, [session], [])
    end(record, "session-1", at=LAUNCHED + 90)
    assert read("a").ended == {"session-1": replace(session, ended=LAUNCHED + 90)}
    # Two processes may find the same end, each at its time.
    write_sessions(record, [session], [])
    end(record, "session-1", at=LAUNCHED + 80)
    (state / "a" / SESSIONS_FOLDER / "stray").touch()
    assert read("a").ended == {"session-1": replace(session, ended=LAUNCHED + 80)}
    # The session itself says when, and the keeper why.
    write_sessions(record, [], [store.end_file("session-1", LAUNCHED + 95, "out of memory")])
    assert read("a").ended == {"session-1": replace(session, ended=LAUNCHED + 80, cause="out of memory")}
    assert remove(record) == {}


def test_another_cluster_of_the_same_name_has_its_own_sessions(state):
    for session, at in {"session-1": LAUNCHED, "session-3": LAUNCHED + 60}.items():
        record = new_record("a")
        claim(record)
        launches = [Launch(session, "a-0", None, LAUNCHED + later) for later in (1, 0)]
        write_sessions(record, launches, [])  # of two files of one session, the first launch counts
        launch(record, session, "session-2", began={session: at})
        assert read("a").launches[session].launched == LAUNCHED
        assert read("a").launches[session].started == at
        end(record, "session-2")
        assert (read("a").sessions, [*read("a").ended]) == ({session: "a-0"}, ["session-2"])
        assert remove(record) == {session: "a-0"}


@simulated
async def test_a_clusters_own_folder_does_not_grow_with_its_sessions(it):
    """Sessions and the scheduler list it again and again."""
    async with supplied(name="a", n_workers=1) as cluster:
        before = names_in(folder_of(cluster))
        cluster.scale(5)
        await eventually(lambda: arrived(cluster) == 5)
        assert names_in(folder_of(cluster)) == before
        logs = {plan.log.parent for plan in (worker.plan for worker in cluster.workers.values())}
        assert logs == {folder_of(cluster) / "logs"}


STRANGER = 12345


@pytest.fixture(params=["of another user", "writable by the group", "writable by others"])
def open_up(request):
    """Give a path to another user, or let others write to it."""
    if request.param == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give files to others")
        return lambda path: os.chown(path, STRANGER, -1)
    more = stat.S_IWGRP if request.param == "writable by the group" else stat.S_IWOTH
    return lambda path: path.chmod(path.stat().st_mode | more)


@pytest.fixture
def umask():
    previous = os.umask(0)
    yield
    os.umask(previous)


def test_a_new_folder_is_private_whatever_the_umask(tmp_path, umask):
    make_folder(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700
    make_folder(tmp_path / "state")


def test_a_folder_that_others_can_write_to_is_refused_with_the_command_that_fixes_it(tmp_path, open_up):
    folder = tmp_path / "it's mine"
    make_folder(folder)
    open_up(folder)
    with pytest.raises(NotPrivate) as refused:
        make_folder(folder)
    assert str(refused.value).startswith(f"{folder} ")
    assert isinstance(refused.value, CMLError)
    [command] = str(refused.value).split("`")[1:-1]
    subprocess.run(command, shell=True, check=True)
    make_folder(folder)
    assert mode(folder) == 0o700


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other").write_text("elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in "folder", "pipe", "link", "device", "socket":
            with pytest.raises(ValueError, match="it is not a regular file"):
                read_file(tmp_path / name)


def test_what_is_appended_is_for_its_owner_and_follows_no_link(tmp_path):
    log, link = tmp_path / "log", tmp_path / "link"
    link.symlink_to(log)
    append(log, b"1\n")
    append(log, b"2\n")
    with pytest.raises(ValueError, match="not a regular file"):
        append(link, b"3\n")
    assert log.read_bytes() == b"1\n2\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_new_file_belongs_to_its_writer_although_the_file_system_repeats_the_request(tmp_path, monkeypatch):
    """As NFS does if the answer was lost."""
    link = os.link

    def repeat(*arguments, **options):
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", repeat)
    assert write_file(tmp_path / "file", b"mine", new=True)
    assert not write_file(tmp_path / "file", b"another", new=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"mine")]


@pytest.fixture
async def planted():
    """A record with the address of a program, and the connections that this program gets."""
    connections = []
    async with await asyncio.start_server(lambda *_: connections.append(1), "127.0.0.1", 0) as trap:
        address = f"tcp://127.0.0.1:{trap.sockets[0].getsockname()[1]}"
        yield new_record("planted", scheduler=SchedulerState(address=address)), connections


async def test_in_a_folder_of_others_records_are_skipped_with_one_warning_and_no_connection(
    platform, caplog, open_up, planted
):
    record, connections = planted
    directory = write_record(record).parent
    open_up(directory)
    with pytest.raises(NotPrivate):
        store.claim(new_record("a"), WANTED)
    assert os.listdir(directory) == ["planted"]
    for _ in range(2):
        assert await operations.describe(store.records()) == []
    with pytest.raises(store.RecordUnreadable, match=r"so others can write to it|belongs to the user"):
        store.read("planted")
    with pytest.raises(store.RecordUnreadable):
        store.write_sessions(record, [Launch("session-1", "planted-0", None, 1)])
    assert connections == []
    [warning] = [
        log_record.getMessage() for log_record in caplog.records if log_record.name == private_files.__name__
    ]
    assert warning.startswith(f"{directory} ignored: it ")


#: A name of a file that is no UTF-8, as Python represents it, and a character that is in no such name.
NO_UTF8, SURROGATE = "b\udcff", "\ud800"
ENDED = "0123456789abcdef"


@pytest.fixture
def lab(platform, monkeypatch):
    """The folder of a cluster that has died, next to an ended one, ``night``."""
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")
    gone = Maker("elsewhere", 1, 1.0, "gone")
    scheduler = SchedulerState(address="tls://127.0.0.1:9", closed="idle for 60 s")
    keys = {"tls_ca_file": "/missing"}
    options = {"platform": "local"}
    record = new_record("lab", maker=gone, scheduler=scheduler, security=keys, options=options)
    folder = write_record(record)
    (folder / LOGS_FOLDER / "lab-scheduler.log").write_text("hello\n")
    os.utime(sign_of("lab"), (1, 1))
    make_folder(folder.parent / HISTORY_FOLDER)
    write_ended(folder, ENDED, name="night")
    with dask.config.set({"cml.platform": "local"}):
        yield folder


def write_ended(folder: Path, id: str, **fields: object) -> Path:
    """Write the history of a cluster."""
    content = EndedCluster.of(store.read(folder.name)).to_json() | {"id": id, **fields}
    path = folder.parent / HISTORY_FOLDER / f"{id}.json"
    write_file(path, json.dumps(content).encode())
    return path


def copied(folder: Path, to: str = "", **fields: object) -> Path:
    """Return the folder of another cluster, whose record has these fields."""
    id = f"b{len(os.listdir(folder.parent))}"
    copy = shutil.copytree(folder, folder.with_name(to or id))
    changed(copy / RECORD_FILE, **{"name": copy.name, "id": id, **fields})
    return copy


def pipe(path: Path) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def changed(file: Path, **fields: object) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return file


@pytest.fixture
def odd(lab):
    """All that is odd, next to a cluster. Returns what warnings name."""
    history, local = lab.parent / HISTORY_FOLDER, {"platform": "local"}
    # What can be read, or is read by nobody here.
    copied(lab, maker={"host": SURROGATE, "pid": 1, "started": 1.0, "user": SURROGATE})
    copied(lab, options=local | {"log_directory": f"/{SURROGATE}"})
    names = ("cpu", "memory", "memory_limit", "idle_timeout", "scheduler_args", "log_directory")
    copied(lab, options=dict.fromkeys(names) | local)
    group = {"options": {"memory": None}, "adapt": {"minimum": None, "maximum": SURROGATE}}
    more = {"app_url": f"https://{SURROGATE}", "closed": SURROGATE}
    mail = [
        {"number": number, "request": {"kind": "adapt", "group": SURROGATE, "limits": limits}}
        for number, limits in enumerate([None, group["adapt"]])
    ]
    report = {"groups": {SURROGATE: group}}
    changed(copied(lab) / scheduler_file(0), report=report, mail=mail, **more)
    pipe(lab.with_name("a-pipe"))
    copied(lab, security={"tls_ca_file": str(pipe(lab.parent / "ca.pem"))})
    folder = copied(lab)
    pipe(folder / LOGS_FOLDER / f"{folder.name}-scheduler.log")
    write_ended(lab, "surrogate", name=SURROGATE, why=SURROGATE, user=SURROGATE, log_directory=SURROGATE)
    write_ended(lab, "other")
    make_folder(history / "other")
    pipe(history / "other" / "cluster.log")
    no_utf8 = history / f"{NO_UTF8}.json"
    no_utf8.write_text("{}")
    return [
        no_utf8,
        copied(lab, NO_UTF8) / RECORD_FILE,
        copied(lab, name=SURROGATE) / RECORD_FILE,
        copied(lab, options={"platform": []}) / RECORD_FILE,
        copied(lab, options=local | {"log_directory": 3}) / RECORD_FILE,
        changed(copied(lab) / scheduler_file(0), workers={"memory": None}),
        pipe(copied(lab) / RECORD_FILE),
        pipe(copied(lab) / scheduler_file(0)),
        pipe(copied(lab) / SESSIONS_FOLDER).with_name(RECORD_FILE),
        write_ended(lab, "none", most_workers=None),
        pipe(history / "pipe.json"),
    ]


def run(*arguments):
    result = CliRunner().invoke(cli.cml, arguments)
    assert result.exit_code == 0, result.output
    result.output.encode()
    return result.output


def test_what_cannot_be_read_is_named_once_and_the_doctor_and_prune_go_on(odd, caplog):
    for _ in range(2):
        assert "lab" in [record.name for record in store.records()]
        assert "night" in [cluster.name for cluster in ended_clusters()]
    messages = [record.getMessage() for record in caplog.records]
    for named in odd:
        assert sum(f"{printable(str(named))} ignored: " in message for message in messages) == 1
    assert len(messages) == len(odd)
    findings = doctor.clusters.versions([], timeout=30)
    assert "cluster lab" in [finding.name for finding in findings]
    assert "lab deleted" in run("prune")


@pytest.mark.slow
def test_commands_show_clusters_beside_something_odd(odd):
    assert "\nlab  " in run("list")
    assert '"name": "lab"' in run("list", "--json")
    assert "stale" in run("info", "lab")
    assert "hello" in run("logs", "lab")
    assert "\nnight  " in run("history")
    assert '"name": "night"' in run("history", "--json")
    completed = ShellComplete(cli.cml, {}, "cml", "_COMPLETE").get_completions(["info"], "")
    names = [completion.value for completion in completed]
    assert "lab" in names
    "".join(names).encode()


async def test_the_page_and_the_sidebar_show_clusters_next_to_something_odd(odd, caplog):
    """The sidebar reads the records by the page's base class."""
    clusters = ProjectClusters(interval=0.01)
    clusters.start()
    try:
        while not clusters.findings:
            await asyncio.sleep(0.01)
        described = clusters.describe()
        assert {cluster["name"]: cluster["status"] for cluster in described}["lab"] == "stale"
        assert len(described) > 5
        details = [await clusters.details(cluster["name"]) for cluster in described]
        ended = await clusters.ended()
        assert "night" in [cluster.name for cluster in ended]
        for cluster in ended:
            with contextlib.suppress(ValueError, CMLError):  # the log is missing, or a pipe
                cluster.logs().part("Cluster")
        shown = [*described, *details, *(cluster.describe() for cluster in ended)]
        assert "cannot be described" not in json.dumps(shown)
    finally:
        await clusters.close()
    assert [record for record in caplog.records if record.exc_info] == []
