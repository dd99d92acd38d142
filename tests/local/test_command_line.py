from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dask_cml.local import __main__

from .conftest import FOREVER, PATIENCE, alive


def main(arguments):
    """Run a command, and return its exit status."""
    with pytest.raises(SystemExit) as info:
        __main__.main(arguments)
    return info.value.code


def test_list_shows_every_session(launch, reaches, capsys):
    [session] = launch(code=FOREVER, name="worker-0")
    reaches(session, "running")
    assert main(["list"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.split() == [
        session["id"], "running", session["created_at"], session["app_url"], "worker-0"
    ]  # fmt: skip


def test_stop_returns_when_the_sessions_have_ended(launch, find):
    first, second = launch(2, code=FOREVER)
    assert main(["stop", first["id"]]) == 0
    assert find(first["id"])["status"] == "stopped"
    assert find(second["id"])["status"] != "stopped"
    assert main(["stop", "--all"]) == 0
    assert find(second["id"])["status"] == "stopped"


def test_stop_names_unknown_sessions_and_stops_the_others(launch, find, capsys):
    [session] = launch(code=FOREVER)
    assert main(["stop", "0123456789abcdef", session["id"]]) == 1
    assert "0123456789abcdef" in capsys.readouterr().err
    assert find(session["id"])["status"] == "stopped"


@pytest.mark.parametrize("arguments", [["stop"], ["stop", "--all", "0123456789abcdef"], []])
def test_ambiguous_commands_are_refused(platform, arguments, capsys):
    assert main(arguments) == 2


def test_a_command_is_the_engine_of_what_it_launches(platform, until):
    code = f"from dask_cml import local; local.launch_workers(1, 1, 1, code={FOREVER!r}); raise SystemExit(3)"
    assert main(["engine", sys.executable, "-c", code]) == 3
    until(lambda: [each["status"] for each in platform.sessions()] == ["stopped"])


@pytest.fixture
def engine(platform, tmp_path, until):
    """Start a command as an engine. Return its process, and wait until it handles SIGTERM by code."""
    started = []

    def engine(then):
        code = (
            "import os, signal, sys, time\n"
            f"def leave(*_): {then}\n"
            "signal.signal(signal.SIGTERM, leave)\n"
            "from dask_cml import local\n"
            f"local.launch_workers(1, 1, 1, code={FOREVER!r})\n"
            "print(os.getpid(), flush=True); time.sleep(600)"
        )
        command = [sys.executable, "-m", "dask_cml.local", "engine", sys.executable, "-c", code]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], int(started[-1].stdout.readline())

    yield engine
    for process in started:
        process.communicate()


@pytest.mark.parametrize("then", ["sys.exit()", "pass"])
def test_end_of_an_engine_is_the_end_of_its_command(platform, engine, until, then):
    platform.configure(stop_grace=600 if then == "sys.exit()" else 0.3)
    process, command = engine(then)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not alive(command)
    until(lambda: [each["status"] for each in platform.sessions()] == ["stopped"])


def test_engine_returns_the_shells_status_of_a_killed_command(platform):
    assert (
        main(["engine", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + signal.SIGKILL
    )


def test_list_says_why_the_platform_let_a_session_fail(platform, launch, capsys):
    [session] = launch(code=FOREVER)
    platform.evict(session["id"])
    main(["list"])
    assert capsys.readouterr().out.splitlines()[0].endswith("(evicted)")
