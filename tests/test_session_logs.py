"""The files that sessions write their output to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from terminals import STEERING

from dask_cml.errors import CMLError
from dask_cml.sessions import session_logs
from dask_cml.sessions.plan import session_code
from dask_cml.sessions.session_logs import SessionLogs, Warnings, last_lines, log_folder, log_path
from dask_cml.words import printable
from dask_cml.wrapper import Log


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
        expected = rf"invalid worker '{unknown}': expected one of Cluster, Scheduler, mine-0$"
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


# -- files that are not logs


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
    assert f"cannot read the log {foreign}" in last_lines(foreign, 5)


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


# -- size


def test_the_last_lines_are_printable_and_few(tmp_path, write):
    write("mine-0", "old\n" * 10_000 + "\x1b]0;title\x07\n" + "x" * 100_000)
    text = last_lines(tmp_path / "mine-0.log", 3)
    assert len(text) < 10_000
    write("mine-0", "one\n\x1b[2Jtwo\n")
    assert last_lines(tmp_path / "mine-0.log", 1) == r"\x1b[2Jtwo"
    assert last_lines(tmp_path / "mine-1.log", 1) == ""
    write("mine-0", "one\n[lost: out of memory, 0.97 of 1.00 GiB]\n")  # another session goes on with it
    assert last_lines(tmp_path / "mine-0.log", 15) == ""
    write("mine-0", "two\n", "a")
    assert last_lines(tmp_path / "mine-0.log", 15) == "two"


def test_what_a_failed_program_has_printed_steers_no_console(tmp_path):
    """CML shows what a session prints in the console of the session that launched it."""
    command = [sys.executable, "-c", f"print('last words {STEERING}'); exit(1)"]
    session = {"command": command, "log": str(tmp_path / "log"), "program": "it", "folder": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", session_code("It", session)], capture_output=True, text=True, timeout=60
    )
    words, _ = ran.stdout.splitlines()
    assert words == f"last words {printable(STEERING)}"
    assert "exit status 1" in ran.stderr


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
