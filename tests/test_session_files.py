"""The files of sessions in a cluster's folder: they say which were launched, started and ended."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
from clusters import LAUNCHED, WANTED, arrived, end, folder_of, launch, new_record, simulate
from simulated.testing import eventually, simulated

from dask_cml.layout import SESSIONS_FOLDER, STARTED_FOLDER
from dask_cml.options import SessionSize
from dask_cml.records.entries import end_file
from dask_cml.records.store import (
    claim,
    read,
    remove,
    write_sessions,
)
from dask_cml.sessions.entry import Launch, file_name, form, parse


def names_in(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("cluster", ["mine", "雲" * 66, "a,b%2C @", "scheduler", "@"])
def test_a_files_name_describes_its_session(cluster):
    keys = ["{}-0", "scheduler", "{}-gpu,x-1", "@-0", "another 雲-0", "{}"]
    sizes = [None, SessionSize(4, 16, 1), SessionSize(1 / 3, 1e22)]
    for key, owner, size in itertools.product(keys, [None, "ijklmnop12345678"], sizes):
        session = Launch("abcdefgh12345678", key.format(cluster), owner, 1790000000, size)
        name = file_name(session, cluster)
        assert len(name.encode()) < 200
        assert parse(name, cluster) == session


@pytest.mark.parametrize("name", ["mine", "a,b%2C @{id}", "{owner}"])
def test_a_session_fills_in_the_form_of_its_file_by_itself(name):
    """As the wrapper does, which has only the standard library."""
    size = SessionSize(1, 2)
    made = form(f"{name}-0", name, size, "default").format(id="abcdefgh12345678", owner="", launched=LAUNCHED)
    assert parse(made, name) == Launch("abcdefgh12345678", f"{name}-0", None, LAUNCHED, size)


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_a_stray_file_is_reported_once_and_ignored(state, caplog, name):
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder / SESSIONS_FOLDER
    launch(record, "session-1")
    (folder / name).touch()
    (folder / ".nfs000000000001").touch()
    for _ in range(2):
        assert read("a").sessions == {"session-1": "a-0"}
    [warning] = caplog.records
    assert warning.getMessage().startswith(f"{name!a} in {folder} ignored")
    warning.getMessage().encode()
    assert remove(record) == {"session-1": "a-0"}


def test_of_two_files_of_one_session_the_first_launch_counts(state):
    record = new_record("a")
    claim(record, WANTED)
    launches = [Launch("session-1", "a-0", None, 1790000000 + i) for i in (1, 0)]
    write_sessions(record, launches, [])
    assert read("a").launches["session-1"].launched == 1790000000


def test_files_say_when_a_session_started_and_ended(state):
    record = new_record("a")
    claim(record, WANTED)
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


def test_a_name_that_is_being_taken_starts_no_session(state):
    record = new_record("a")
    claim(record, WANTED)
    launch(record, "session-1", waiting=["session-1"])
    taken = record.folder / STARTED_FOLDER / "a-0"
    taken.touch(0o600)
    assert read("a").launches["session-1"].started is None
    taken.write_text("session-1")
    assert read("a").launches["session-1"].started == taken.stat().st_mtime


def test_another_cluster_of_the_same_name_has_its_own_starts(state):
    for at in LAUNCHED, LAUNCHED + 60:
        record = new_record("a")
        claim(record, WANTED)
        launch(record, "session-1", began={"session-1": at})
        assert read("a").launches["session-1"].started == at
        remove(record)


def test_an_ended_session_keeps_its_last_known_state(state):
    record = new_record("a")
    claim(record, WANTED)
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
    write_sessions(record, [], [end_file("session-1", LAUNCHED + 95, "out of memory")])
    assert read("a").ended == {"session-1": replace(session, ended=LAUNCHED + 80, cause="out of memory")}
    assert remove(record) == {}


def test_a_thousand_sessions_are_listed_by_one_look_at_their_folder(state, monkeypatch):
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder
    launch(record, *(f"session-{i}" for i in range(1000)))
    read("a")  # each taken name is read once
    calls = []

    def count(name, function):
        def counted(path, *arguments, **more):
            if str(path).startswith(str(state)):  # other code of this process looks at other files, too
                calls.append(name)
            return function(path, *arguments, **more)

        monkeypatch.setattr(os, name, counted)

    for name in ("listdir", "scandir", "stat", "lstat", "open"):
        count(name, getattr(os, name))
    assert len(read("a").sessions) == 1000
    monkeypatch.undo()
    # The cluster's folder twice, the sessions and the taken names.
    assert calls.count("listdir") + calls.count("scandir") == 4
    assert len(calls) < 25
    assert len(os.listdir(folder / SESSIONS_FOLDER)) == 1000


def test_another_cluster_of_the_same_name_has_its_own_sessions(state):
    first = new_record("a")
    claim(first, WANTED)
    launch(first, "session-1", "session-2")
    end(first, "session-2")
    assert read("a").sessions == {"session-1": "a-0"}
    assert remove(first) == {"session-1": "a-0"}
    second = new_record("a")
    claim(second, WANTED)
    launch(second, "session-3")
    assert (read("a").sessions, read("a").ended) == ({"session-3": "a-0"}, {})


@simulated
async def test_a_clusters_own_folder_does_not_grow_with_its_sessions(it):
    """Sessions and the scheduler list it again and again."""
    async with simulate(name="a", n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        before = names_in(folder_of(cluster))
        cluster.scale(5)
        await eventually(lambda: arrived(cluster) == 5)
        assert names_in(folder_of(cluster)) == before
        logs = {plan.log.parent for plan in (worker.plan for worker in cluster.workers.values())}
        assert logs == {folder_of(cluster) / "logs"}
