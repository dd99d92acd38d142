"""The program of a session: when it ends, its session ends, and its log has a limit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from dask_cml import wrapper
from dask_cml.sessions.plan import session_code

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


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
        until(lambda: not any(map(runs, left)))
        assert runs(alone)
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


# -- a log's limit

#: What the logs of these tests keep of their beginning and of their end, in bytes.
KEPT = 4096


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(wrapper, "_KEPT_OF_LOG", KEPT)


def numbered(n, begin=0):
    return [f"line {i:06d}" for i in range(begin, begin + n)]


def print_lines(path, lines):
    """Let a program print lines."""
    log = wrapper.Log(str(path))
    for line in lines:
        log.write(f"{line}\n".encode())
        log.shorten()


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path, small):
    path, lines = tmp_path / "log", numbered(10_000)
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


# -- the scheduler's sign of life


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
