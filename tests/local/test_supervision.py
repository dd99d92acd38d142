"""Sessions as processes: they outlive the process that launched them, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from dask_cml.local import processes, state

from .conftest import FOREVER, alive, supervisor_of

LAUNCH = (
    f"from dask_cml import local; print(local.launch_workers(1, 1, 1, code={FOREVER!r})[0]['id'], flush=True)"
)
# A daemon: in a session of its own, not a descendant of the session's first process, deaf to SIGTERM.
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open({path!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({path!r} + ".new", {path!r})
        time.sleep(600)
    os._exit(0)
while not os.path.exists({path!r}):
    time.sleep(0.01)
"""


@pytest.fixture
def daemon(directory, until):
    """Code that makes a daemon, and a function that waits for its process id."""
    path = directory / "daemon"

    def pid():
        until(path.exists)
        return int(path.read_text())

    return DAEMON.format(path=str(path)), pid


def test_session_outlives_the_process_that_launched_it(platform, launch, reaches):
    """All processes of a user see and stop it."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"{LAUNCH}\n{FOREVER}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    there = launcher.stdout.readline().strip()
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    reaches(there, "running")
    [here] = launch(code=FOREVER)
    assert {session["id"] for session in platform.list_workers()} == {here["id"], there}
    stop = f"from dask_cml import local; local.stop_workers({here['id']!r}, {there!r})"
    subprocess.check_call([sys.executable, "-c", stop])
    reaches(here, "stopped")
    reaches(there, "stopped")


def test_stop_leaves_no_process(platform, launch, reaches, daemon):
    code, pid = daemon
    [session] = launch(code=f"{code}\n{FOREVER}")
    daemon_pid = pid()
    reaches(session, "running")
    platform.stop_workers(session["id"])
    reaches(session, "stopped")
    assert not alive(daemon_pid)
    assert processes.find(session["id"]) == set()


def test_the_processes_of_a_session_end_with_its_code(launch, reaches, daemon):
    code, pid = daemon
    [session] = launch(code=code)
    daemon_pid = pid()
    reaches(session, "succeeded")
    assert not alive(daemon_pid)


@pytest.fixture
def asked(launch, directory, until):
    """Launch a session of two processes, of which each writes its name when it is asked to end."""

    def asked(main="sys.exit()"):
        code = (
            "import os, signal, subprocess, sys, time\n"
            f"os.chdir({str(directory)!r})\n"
            "def ask(name, then):\n"
            "    def leave(*_): open(name, 'w').close(); exec(then)\n"
            "    signal.signal(signal.SIGTERM, leave)\n"
            "    open(f'{name} ready', 'w').close()\n"
            "if os.fork() == 0: ask('child', 'pass')\n"
            f"else: ask('main', {main!r})\n"
            "while True: time.sleep(600)"
        )
        [session] = launch(code=code)
        until(lambda: len(names(directory)) == 2)
        return session

    return asked


def names(directory):
    return {path.name for path in directory.iterdir()}


def test_only_the_main_process_is_asked_to_end_and_all_are_killed_after_the_grace(
    platform, asked, reaches, directory
):
    platform.configure(stop_grace=0.5)
    session = asked(main="pass")
    begin = time.monotonic()
    platform.stop_workers(session["id"])
    reaches(session, "stopped")
    assert time.monotonic() - begin >= 0.5
    assert names(directory) == {"main ready", "child ready", "main"}


def test_a_session_without_its_supervisor_fails_and_leaves_no_process(platform, launch, reaches, daemon):
    platform.configure(memory_limit=False)
    code, pid = daemon
    [session] = launch(code=f"{code}\n{FOREVER}")
    daemon_pid = pid()
    reaches(session, "running")
    os.kill(supervisor_of(session), signal.SIGKILL)
    reaches(session, "failed")
    assert not alive(daemon_pid)
    assert processes.find(session["id"]) == set()
    assert not (state.folder_of(session["id"]) / "tmp").exists()
    assert not state.temporary_of(session["id"]).is_symlink()


@pytest.mark.slow
def test_a_launch_removes_what_has_ended_long_ago(platform, launch, reaches, monkeypatch):
    [ended], [live] = launch(code="pass"), launch(code=FOREVER)
    reaches(ended, "succeeded")
    [newer] = launch(code=FOREVER)
    assert ended["id"] in {session["id"] for session in platform.sessions()}
    monkeypatch.setattr(state, "_KEPT", 0.0)
    [newest] = launch(code=FOREVER)
    left = {live["id"], newer["id"], newest["id"]}
    assert {session["id"] for session in platform.sessions()} == left


def test_commands_without_ipython_show_how_to_install_it(platform, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"dask-cml\[local\]"):
        platform.launch_workers(1, 1, 1, code="!true")
    assert platform.sessions() == []
