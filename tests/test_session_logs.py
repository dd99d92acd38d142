"""The files that sessions write their output to."""

from __future__ import annotations

import pytest

from dask_cml.sessions import session_logs
from dask_cml.sessions.session_logs import SessionLogs


@pytest.fixture
def write(tmp_path):
    def write(session, text, mode="w"):
        with (tmp_path / f"{session}.log").open(mode) as file:
            file.write(text)

    return write


@pytest.mark.parametrize("name", ["mine", "mine-1", "a.b+(c)", "mine-scheduler"])
def test_a_clusters_own_logs_are_listed_in_the_order_of_launch(tmp_path, write, name):
    directory = tmp_path / "logs"
    directory.mkdir()
    for cluster in "mine", "mine-1", "a.b+(c)", "mine-scheduler", "axb+(c)":
        for each in "10", "2", "0", "scheduler":
            (directory / f"{cluster}-{each}.log").touch()
    (directory / "mine-0.log.1").touch()
    paths = SessionLogs(name, tmp_path, str(directory)).paths()
    assert [*paths] == ["Scheduler", f"{name}-0", f"{name}-2", f"{name}-10"]
    assert [path.name for path in paths.values()] == [f"{name}-{i}.log" for i in ("scheduler", 0, 2, 10)]


def test_a_folder_that_is_gone_has_no_logs(tmp_path):
    logs = SessionLogs("mine", tmp_path / "gone")
    assert logs.paths() == {}
    assert [*logs.lines()] == []
    assert logs.read() == {"Scheduler": []}


def test_workers_are_chosen_by_the_names_of_sessions_and_of_dask_workers(tmp_path, write):
    write("mine-0", "")
    logs = SessionLogs("mine", tmp_path, processes={"default": 2})
    workers = ["scheduler", "mine-1", "mine-0-1", "mine-0", "Scheduler"]
    assert logs.choose(workers, ["mine-1"]) == ["Scheduler", "mine-1", "mine-0"]
    assert logs.choose([]) == []
    for those, unknown in (logs, "mine-0-2"), (SessionLogs("mine", tmp_path), "mine-0-0"):
        with pytest.raises(
            ValueError, match=rf"invalid worker '{unknown}': expected one of Scheduler, mine-0$"
        ):
            those.choose([unknown])


def test_logs_are_read_for_those_who_are_chosen(tmp_path, write):
    write("mine-scheduler", "a\nb")
    write("mine-0", "c\n")
    logs = {"Scheduler": ["a", "b"], "mine-0": ["c"]}

    def read(*arguments):
        return SessionLogs("mine", tmp_path).read(*arguments)

    assert read() == logs
    assert read(True, False) == {"Scheduler": logs["Scheduler"]}
    assert read(False, ["mine-0"]) == {"mine-0": logs["mine-0"]}
    assert read(False, ["mine-1"], ["mine-1"]) == {"mine-1": []}
    assert read(False, False) == {}


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


def test_a_log_that_goes_while_it_is_read_is_passed_over(tmp_path, write, monkeypatch):
    logs = SessionLogs("mine", tmp_path)
    monkeypatch.setattr(logs, "paths", lambda: {"mine-0": tmp_path / "mine-0.log"})
    assert [*logs.lines()] == []


def test_of_a_long_log_the_end_is_read_first(tmp_path, write, monkeypatch):
    monkeypatch.setattr(session_logs, "_MOST", 8)
    write("mine-0", "one\ntwo\nthree\n")
    logs = SessionLogs("mine", tmp_path)
    [note, *lines] = [line for _, line in logs.lines()]
    assert note == f"[6 earlier bytes are in {tmp_path}/mine-0.log]"
    assert lines == ["o", "three"]
    write("mine-0", "much is written later\n" * 2, "a")
    assert [line for _, line in logs.lines()] == ["much is written later"] * 2
