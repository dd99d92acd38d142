"""The program of a session: when it ends, its session ends. Its log has a limit, and can be read."""

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from local.conftest import alive
from programs import STEERING

from dask_cml import wrapper
from dask_cml.errors import CMLError
from dask_cml.layout import log_folder, log_path
from dask_cml.sessions import session_logs
from dask_cml.sessions.causes import last_lines
from dask_cml.sessions.plan import session_code
from dask_cml.sessions.session_logs import SessionLogs, Warnings
from dask_cml.words import printable
from dask_cml.wrapper import Log

#: A program that starts others, which hold its output, and ends.
STARTER = """
import subprocess, sys
pids = []
for code, is_alone in {codes!r}:
    command = [sys.executable, "-u", "-c", code]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=sys.stderr, start_new_session=is_alone
    )
    child.stdout.readline()
    pids.append(child.pid)
sys.stdout.write(f"\\nstarted {{pids}}\\n")  # at once, perhaps within a line of another program
sys.stdout.flush()
sys.exit(3)
"""
SERVER = "import time; print('ready'); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
print("ready")
time.sleep(600)
"""
CHATTY = "import sys\nprint('ready')\nwhile True: print('x' * 99, file=sys.stderr)"


def test_what_a_program_leaves_running_ends_with_it_but_does_not_keep_the_session(tmp_path, until):
    """The platform ends what has left the program's group, with the session."""
    codes = [(code, False) for code in (SERVER, DEAF, POLITE, CHATTY)] + [(SERVER, True)]
    session = {
        "command": [sys.executable, "-c", STARTER.format(codes=codes)],
        "log": str(tmp_path / "log"),
        "program": "it",
        "folder": str(tmp_path),
    }
    command = [sys.executable, "-c", session_code("It", session)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "it failed with exit status 3" in ran.stderr
    log = (tmp_path / "log").read_text()
    assert "saved" in log
    [pids] = re.findall(r"started \[(.*)\]", log)
    *left, alone = map(int, pids.split(","))
    try:
        until(lambda: not any(map(alive, left)))
        assert alive(alone)
    finally:
        for pid in (*left, alone):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def test_the_end_of_a_schedulers_program_is_entered_into_the_record_once_and_delays_nothing(
    tmp_path, monkeypatch
):
    """NFS may repeat a request whose answer was lost. The keeper may enter the end, too."""
    monkeypatch.setenv("CDSW_ENGINE_ID", "session-1")
    monkeypatch.setattr(wrapper.time, "time", lambda: 1790000000.0)
    (tmp_path / "sessions").mkdir()
    command, log = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], str(tmp_path / "log")
    for is_scheduler in False, True:
        arguments = {"scheduler_file": "scheduler-0.json", "gives_signs": is_scheduler}
        with pytest.raises(RuntimeError, match="exit status -9"):
            wrapper.run(command, log, "it", str(tmp_path), **arguments)
        names = [path.name for path in (tmp_path / "sessions").iterdir()]
        assert names == ["session-1,ended,1790000000,"] * is_scheduler
    monkeypatch.setattr(wrapper.time, "sleep", lambda _: pytest.fail("it waits"))
    wrapper._enter_end(wrapper._Cluster(str(tmp_path)))
    assert len([*(tmp_path / "sessions").iterdir()]) == 1


def test_a_session_without_a_place_for_temporary_files_says_so_and_they_go_after_its_last_line(
    tmp_path, monkeypatch
):
    """So the keeper knows why it ended, and a long removal delays nothing."""
    log, full, removed = tmp_path / "log", OSError(errno.ENOSPC, "No space left on device"), []
    monkeypatch.setattr(wrapper.shutil, "rmtree", lambda *_, **__: removed.append(log.read_text()))
    wrapper.run([sys.executable, "-c", "print('on')"], str(log), "it", str(tmp_path))
    assert removed == ["on\n[it exited with status 0]\n"]
    monkeypatch.setattr(wrapper.tempfile, "mkdtemp", mock.Mock(side_effect=full))
    with pytest.raises(RuntimeError, match=r"it not started: .* No space left on device"):
        wrapper.run([sys.executable], str(log), "it", str(tmp_path))
    assert log.read_text().endswith("No space left on device\n[it exited with status 127]\n")


def test_a_session_that_ends_late_writes_nothing_into_the_folder_of_another_cluster_with_the_name(tmp_path):
    folder, kept = tmp_path / "mine", tmp_path / "kept.log"
    folder.mkdir()
    (folder / "record.json").write_text('{"id": "0123"}')
    for record, log in ("9999", folder / "log"), ("0123", folder / "log"), ("9999", kept):
        command = [sys.executable, "-c", f"print({record!r})"]
        wrapper.run(command, str(log), "it", str(folder), record=record)
    assert (folder / "log").read_text() == "0123\n[it exited with status 0]\n"
    assert kept.read_text() == "9999\n[it exited with status 0]\n"


# -- a log's limit

#: What the logs of these tests keep of their beginning and of their end, in bytes.
KEPT = 4096


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(wrapper, "_KEPT_OF_LOG", KEPT)


def print_lines(path, lines):
    """Let a program print lines."""
    log = wrapper.Log(str(path))
    for line in lines:
        log.write(f"{line}\n".encode())
        log.shorten()


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path, small):
    path, lines = tmp_path / "log", [f"line {i:06d}" for i in range(10_000)]
    sizes = set()
    for i in range(0, len(lines), 100):
        print_lines(path, lines[i : i + 100])  # also by a later session with this name
        sizes.add(path.stat().st_size)
    assert max(sizes) <= 3 * KEPT
    kept = path.read_text().splitlines()
    [note] = [line for line in kept if line.startswith("[")]
    assert note == "[output omitted: a log keeps its beginning and its end]"
    place = kept.index(note)
    assert kept[: place - 1] == lines[: place - 1]  # the limit may be in a line
    after = kept[place + 1 :]
    assert after == lines[-len(after) :]
    assert len("\n".join(after)) >= KEPT - len(lines[0])


def test_a_program_that_prints_without_end_fills_no_disk(tmp_path, small):
    code = "print('x\\n' * 1_000_000); exit(3)"
    with pytest.raises(RuntimeError, match="exit status 3"):
        wrapper.run([sys.executable, "-c", code], str(tmp_path / "log"), "it", str(tmp_path))
    log = (tmp_path / "log").read_text()
    assert len(log) < 2**17
    assert log.endswith("x\n\n[it exited with status 3]\n")


def test_a_session_starts_although_the_file_system_shows_its_folder_late(tmp_path, monkeypatch):
    """As NFS does where a session of an earlier cluster with this name has looked for its folder."""
    folder = tmp_path / "mine"
    (folder / "started").mkdir(parents=True)
    listdir, open_file, listed = os.listdir, os.open, []

    def list_folder(path):
        listed.append(str(path))
        check(path)
        return listdir(path)

    def check(path):
        if str(path).startswith(str(folder)) and str(tmp_path) not in listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def open_late(path, *arguments, **options):
        check(path)
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "listdir", list_folder)
    monkeypatch.setattr(os, "open", open_late)
    assert wrapper._start(wrapper._Cluster(str(folder)), "mine-0", None) is None
    assert (folder / "started" / "mine-0").exists()


@pytest.mark.parametrize("seconds", [10.0, 60.0])
def test_a_session_waits_some_time_for_the_file_system_to_take_its_name(tmp_path, monkeypatch, seconds):
    """Otherwise, two schedulers may run after a launch whose answer was lost."""

    def open_late(path, flags, *arguments):
        if flags & os.O_CREAT and now[0] < seconds:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return opens(path, flags, *arguments)

    def sleep(duration):
        now[0] += duration

    (tmp_path / "started").mkdir()
    now, opens, cluster = [0.0], os.open, wrapper._Cluster(str(tmp_path))
    monkeypatch.setattr(os, "open", open_late)
    monkeypatch.setattr(wrapper, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert wrapper._start(cluster, "mine-scheduler", None) is None
    assert now[0] == pytest.approx(min(seconds, wrapper._GRACE), abs=2.0)
    assert (tmp_path / "started" / "mine-scheduler").exists() == (seconds < wrapper._GRACE)


def test_a_session_whose_cluster_is_deleted_while_it_takes_its_name_does_not_start(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    (folder / "started").mkdir(parents=True)
    monkeypatch.setenv("CDSW_ENGINE_ID", "session-1")
    monkeypatch.setattr(os, "write", lambda *_: folder.rename(tmp_path / ".removed"))
    assert wrapper._start(wrapper._Cluster(str(folder)), "mine-0", "{id}") == "its cluster was deleted"


def test_a_schedulers_session_dates_its_file_while_it_is_the_last_of_its_own_cluster(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "record.json").write_text('{"id": "0123"}')
    file = folder / "scheduler-0.json"
    file.write_text("{}")

    def is_dated(record="0123", folder=folder):
        os.utime(file, (0, 0))
        wrapper._give_sign(wrapper._Cluster(str(folder), record, file.name, "board-1.json"))
        return file.stat().st_mtime > 0

    assert is_dated()
    assert not is_dated("9999")  # another cluster has the name
    assert not is_dated(folder=tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    (folder / "board-1.json").touch()
    assert not is_dated()
    (folder / "board-1.json").unlink()
    sessions = [f"mine-{i}" for i in range(200_000)]
    file.write_text(json.dumps({"sessions": sessions, "closed": "deleted by ann"}))
    assert not is_dated()


def test_signs_of_life_go_on_until_the_program_ends_or_several_in_a_row_find_no_folder(tmp_path, monkeypatch):
    def look(cluster):
        looks.append(1)
        return next(whys)

    looks, ends, gone = [], [], "its cluster was deleted"
    monkeypatch.setattr(wrapper, "_SIGN_INTERVAL", 0.0)
    monkeypatch.setattr(wrapper, "_end", ends.append)
    monkeypatch.setattr(wrapper, "_why_over", look)
    whys = iter([None, gone, gone, None, gone, gone, gone])
    process = SimpleNamespace(poll=lambda: None)
    wrapper._give_signs(process, wrapper._Cluster(str(tmp_path), scheduler_file="scheduler-0.json"))
    assert (len(looks), ends) == (7, [process])
    whys = iter([None, None])
    process = SimpleNamespace(poll=lambda: 0 if len(looks) == 9 else None)
    wrapper._give_signs(process, wrapper._Cluster(str(tmp_path), scheduler_file="scheduler-0.json"))
    assert len(looks) == 9


STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('on'); time.sleep(600)"


@pytest.mark.parametrize("end", ["deleted", "replaced", "another's"])
def test_a_scheduler_ends_with_its_cluster_even_one_that_is_frozen(tmp_path, monkeypatch, until, end):
    for name in "_SIGN_INTERVAL", "_END":
        monkeypatch.setattr(wrapper, name, 0.05)
    folder, log = tmp_path / "mine", tmp_path / "log"
    (folder / "started").mkdir(parents=True)
    (folder / "record.json").write_text('{"id": "0123"}')
    arguments = {"scheduler_file": "scheduler-0.json", "next_board": "board-1.json", "record": "0123"}

    def run():
        with contextlib.suppress(RuntimeError):
            command = [sys.executable, "-u", "-c", STUBBORN]
            wrapper.run(command, str(log), "it", str(folder), "scheduler", gives_signs=True, **arguments)

    running = threading.Thread(target=run)
    running.start()
    until(lambda: log.exists() and "on\n" in log.read_text())
    if end == "deleted":
        folder.rename(tmp_path / ".removed")
    elif end == "replaced":
        (folder / "board-1.json").touch()
    else:
        (folder / "record.json").write_text('{"id": "9999"}')
    running.join(60)
    assert "[it exited with status -9]" in log.read_text()


@pytest.fixture
def write(tmp_path):
    def write(session, text, mode="w"):
        with (tmp_path / f"{session}.log").open(mode) as file:
            file.write(text)

    return write


def test_a_clusters_logs_are_listed_in_the_order_of_launch(tmp_path):
    folder = tmp_path / "logs" / "a.b+(c)-1"
    assert log_folder(tmp_path / folder.name, str(tmp_path / "logs")) == folder
    folder.mkdir(parents=True)
    for number in "10", "2", "0", "scheduler":
        log_path(f"{folder.name}-{number}", tmp_path / folder.name, str(tmp_path / "logs")).touch()
    for other in f"{folder.name}-0.log.1", "notes.txt":
        (folder / other).touch()
    paths = SessionLogs(folder.name, folder).paths()
    names = [f"{folder.name}-{number}" for number in (0, 2, 10)]
    assert [*paths] == ["Scheduler", *names]
    assert [path.stem for path in paths.values()] == [f"{folder.name}-scheduler", *names]


def test_workers_are_chosen_by_the_names_of_sessions_and_of_dask_workers(tmp_path, write):
    write("mine-0", "")
    logs = SessionLogs("mine", tmp_path)
    workers = ["scheduler", "mine-1", "mine-0-1", "mine-0", "Scheduler", "cluster"]
    assert logs.choose(workers, ["mine-1"]) == ["Scheduler", "mine-1", "mine-0", "Cluster"]
    assert logs.choose([]) == []
    for unknown in "mine-2", "mine-2-0", "mine-gpu-0", "other-0", "cluster-0-0":
        expected = rf"invalid workers='{unknown}': expected one of Cluster, Scheduler, mine-0$"
        with pytest.raises(ValueError, match=expected):
            logs.choose([unknown])


def test_each_reading_gives_the_new_lines(tmp_path, write):
    def new(whole=False, sessions=None):
        return [*logs.lines(sessions, whole=whole)]

    logs = SessionLogs("mine", tmp_path)
    assert new() == []
    write("mine-0", "one\ntwo\nthr")
    assert new() == [("mine-0", "one"), ("mine-0", "two")]
    assert new() == []
    write("mine-0", "ee\n", "a")
    write("mine-scheduler", "begin\n")
    assert new() == [("Scheduler", "begin"), ("mine-0", "three")]
    write("mine-0", "anew\n")  # it is shorter than what was read
    write("mine-1", "begin\n")
    assert new(sessions=["mine-0"]) == [("mine-0", "anew")]
    (tmp_path / "mine-0.log").unlink()
    assert new() == [("mine-1", "begin")]
    write("mine-0", "another\nend")
    assert new() == [("mine-0", "another")]
    (tmp_path / "kept").write_text("in its place\nand longer than it\n")
    (tmp_path / "kept").replace(tmp_path / "mine-0.log")
    assert new() == [("mine-0", "in its place"), ("mine-0", "and longer than it")]
    write("mine-0", "\xe9 without an end", "a")
    assert new(whole=True) == [("mine-0", "\xe9 without an end")]


def test_of_a_long_log_the_end_is_read_first_and_of_a_long_line_a_piece(tmp_path, write, monkeypatch):
    def lines():
        return [line for _, line in logs.lines(whole=False)]

    monkeypatch.setattr(session_logs, "_MOST", 8)
    monkeypatch.setattr(session_logs, "_LONGEST", 10)
    write("mine-0", "one\ntwo\nthree\n")
    logs = SessionLogs("mine", tmp_path)
    assert lines() == [f"[6 earlier bytes are in {tmp_path}/mine-0.log]", "o", "three"]
    write("mine-0", "much late\n" * 2, "a")
    assert lines() == ["much late"] * 2
    write("mine-0", "x" * 35, "a")
    assert lines() == ["x" * 10] * 3
    write("mine-0", "\n", "a")
    assert lines() == ["x" * 5]


@pytest.fixture(params=["link", "pipe", "folder", "socket"])
def foreign(request, tmp_path):
    """What stands in place of a log."""
    path = tmp_path / "mine-7.log"
    with socket.socket(socket.AF_UNIX) as listener:
        if request.param == "link":
            path.symlink_to("/proc/self/environ")
        elif request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "folder":
            path.mkdir()
        else:
            listener.bind(str(path))
        yield path


def test_what_is_no_log_is_refused_with_a_reason(tmp_path, write, foreign):
    write("mine-0", "one\n")
    logs = SessionLogs("mine", tmp_path)
    with pytest.raises(CMLError, match=f"cannot read the log {foreign}"):
        logs.part("mine-7")
    [own, [session, note]] = logs.lines()
    assert own == ("mine-0", "one")
    assert session == "mine-7"
    assert f"cannot read the log {foreign}" in note
    assert [*logs.lines()] == []  # the note appears once
    assert f"cannot read the log {foreign}" in last_lines(foreign, 5)[0]


def test_output_is_not_written_through_a_link_in_place_of_a_log(tmp_path):
    path = tmp_path / "mine-0.log"
    path.symlink_to(tmp_path / "mine")
    log = Log(str(path))
    log.write(b"a secret\n")
    assert not path.exists()
    path.unlink()
    log.write(b"more\n")
    lost = "[9 bytes of output lost: the log could not be written]"
    assert path.read_text() == f"\n{lost}\nmore\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_lines_are_printable_and_few(tmp_path, write):
    write("mine-0", "old\n" * 10_000 + "\x1b]0;title\x07\n" + "x" * 100_000)
    lines = last_lines(tmp_path / "mine-0.log", 3)
    assert sum(map(len, lines)) < 10_000
    write("mine-0", "one\n\x1b[2Jtwo\n")
    assert last_lines(tmp_path / "mine-0.log", 1) == [r"\x1b[2Jtwo"]
    assert last_lines(tmp_path / "mine-1.log", 1) == []
    write("mine-0", "one\n[lost: out of memory, 0.97 of 1.00 GiB]\n")  # another session goes on with it
    assert last_lines(tmp_path / "mine-0.log", 15) == []
    write("mine-0", "two\n", "a")
    assert last_lines(tmp_path / "mine-0.log", 15) == ["two"]


@pytest.mark.parametrize(("end", "n_lines"), [("exit(1)", 1), ("os.kill(os.getpid(), 2)", 0)])
def test_what_a_failed_program_has_printed_steers_no_console(tmp_path, end, n_lines):
    """CML shows what a session prints in the console of the session that launched it. A late end is none."""
    code = f"import os, signal; signal.signal(2, signal.SIG_DFL); print('last words {STEERING}'); {end}"
    session = {"log": str(tmp_path / "log"), "program": "it", "folder": str(tmp_path)}
    code = session_code("It", {**session, "command": [sys.executable, "-uc", code]})
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ran.stdout.splitlines()[:1] == [f"last words {printable(STEERING)}"] * n_lines
    assert ("exit status 1" in ran.stderr, "Traceback" in ran.stderr) == (bool(n_lines), bool(n_lines))


def test_warnings_have_the_lines_that_belong_to_them():
    lines = """
2026-11-20 10:00:00,000 - distributed.worker - INFO - Start worker
2026-11-20 10:00:01,000 - distributed.worker - WARNING - Compute Failed
Key:       train-1
ValueError('no luck')
2026-11-20 10:00:02,000 - distributed.worker - INFO - Stopping worker
printed by a task
[memory: 1990000000 of 2000000000 bytes]
[dask worker exited with status 0]
[dask worker exited with status 1]
""".strip().splitlines()
    is_warning = Warnings()
    assert [i for i, line in enumerate(lines) if is_warning(line)] == [1, 2, 3, 6, 8]
