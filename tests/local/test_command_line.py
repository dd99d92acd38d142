from __future__ import annotations

import subprocess
import sys

import pytest

from dask_cml.local.__main__ import main

from .conftest import FOREVER


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
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2


def test_logs_prints_the_output(launch, reaches, capsys):
    [session] = launch(code="print('hello')")
    reaches(session, "succeeded")
    assert main(["logs", session["id"]]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["logs", "0123456789abcdef"]) == 1


def test_prune_says_how_many_it_removed(platform, launch, reaches):
    [session] = launch(code="pass")
    reaches(session, "succeeded")
    command = [sys.executable, "-m", "dask_cml.local", "prune"]
    assert subprocess.check_output(command, text=True) == "1 sessions removed\n"
    assert platform.sessions() == []


def test_a_command_is_the_engine_of_what_it_launches(platform, until):
    code = f"from dask_cml import local; local.launch_workers(1, 1, 1, code={FOREVER!r}); raise SystemExit(3)"
    assert main(["engine", sys.executable, "-c", code]) == 3
    until(lambda: [each["status"] for each in platform.sessions()] == ["stopped"])
