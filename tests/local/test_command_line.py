from __future__ import annotations

import subprocess
import sys

import pytest

from dask_cml.local import __main__

from .conftest import FOREVER


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


def test_stop_waits_for_the_grace_period_of_the_launch(platform, launch, find, reaches, monkeypatch):
    monkeypatch.setattr(__main__, "_PATIENCE", 1.0)
    platform.configure(stop_grace=3)
    [session] = launch(
        code=f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); {FOREVER}"
    )
    platform.configure(stop_grace=0)
    reaches(session, "running")
    assert main(["stop", session["id"]]) == 0
    assert find(session["id"])["status"] == "stopped"


def test_stop_names_unknown_sessions_and_stops_the_others(launch, find, capsys):
    [session] = launch(code=FOREVER)
    assert main(["stop", "0123456789abcdef", session["id"]]) == 1
    assert "0123456789abcdef" in capsys.readouterr().err
    assert find(session["id"])["status"] == "stopped"


@pytest.mark.parametrize("arguments", [["stop"], ["stop", "--all", "0123456789abcdef"], []])
def test_ambiguous_commands_are_refused(platform, arguments, capsys):
    assert main(arguments) == 2


ENGINE = [sys.executable, "-m", "dask_cml.local", "engine"]


def test_a_command_is_the_engine_of_the_sessions_that_it_launches(platform, until):
    code = f"from dask_cml import local; local.launch_workers(1, 1, 1, code={FOREVER!r}); raise SystemExit(3)"
    assert subprocess.call([*ENGINE, sys.executable, "-c", code]) == 3
    until(lambda: [session["status"] for session in platform.sessions()] == ["stopped"])


def test_list_says_why_the_platform_let_a_session_fail(platform, launch, capsys):
    [session] = launch(code=FOREVER)
    platform.evict(session["id"])
    main(["list"])
    assert capsys.readouterr().out.splitlines()[0].endswith("(evicted)")


def test_a_command_that_does_not_exist_is_named(platform):
    command = [sys.executable, "-m", "dask_cml.local", "engine", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "Error: cannot run 'no-such-command': No such file or directory\n",
    )
