"""The files of sessions in a cluster's folder: the name says all, and each change is one file."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from clusters import LAUNCHED, WANTED, arrived, end, folder_of, launch, new_record, simulate
from simulated.testing import eventually, simulated

from dask_cml.errors import NoSuchCluster
from dask_cml.layout import ENDED_FOLDER, SESSIONS_FOLDER
from dask_cml.options import SessionSize
from dask_cml.records import entries
from dask_cml.records.entries import fact
from dask_cml.records.store import (
    RecordUnreadable,
    claim,
    given_names,
    has_ended,
    pack_ended,
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


def test_each_fact_of_a_session_is_a_file_of_its_own(state):
    record = new_record("a")
    claim(record, WANTED)
    launch(record, "session-1", "session-2", waiting=["session-1", "session-2"])
    assert [session.waits for session in read("a").launches.values()] == [True, True]
    for began in LAUNCHED + 20, LAUNCHED + 30:  # as at a second try
        launch(record, "session-2", began={"session-2": began})
        waiting, running = read("a").launches.values()
        assert (waiting.waits, waiting.began) == (True, None)
        assert (running.waits, running.began) == (False, LAUNCHED + 20)
    for at in LAUNCHED + 60, LAUNCHED + 70:
        end(record, "session-1", at=at)
        assert read("a").sessions == {"session-2": "a-0"}
    end(record, "session-2")
    assert read("a").ended == {
        "session-1": replace(waiting, ended=LAUNCHED + 60),
        "session-2": replace(running, ended=LAUNCHED + 60),
    }


def test_a_session_that_ended_while_another_process_notes_its_wait_stays_ended(state):
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder
    launch(record, "session-1")
    end(record, "session-1")
    (folder / SESSIONS_FOLDER / "session-1,waits").touch()
    assert read("a").sessions == {}


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
    assert remove(record) == {}


def test_a_thousand_sessions_are_listed_by_one_look_at_their_folder(state, monkeypatch):
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder
    launch(record, *(f"session-{i}" for i in range(1000)))
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
    # The cluster's folder, the sessions' and the packs'.
    assert calls.count("listdir") + calls.count("scandir") == 3
    assert len(calls) < 25
    assert len(os.listdir(folder / SESSIONS_FOLDER)) == 1000


# -- clusters with very many sessions


@pytest.fixture
def counted(monkeypatch):
    """Count what is done with the names of the sessions' files."""
    calls = {"listed": 0, "parsed": 0}

    def count(what, function):
        def counted(*arguments):
            calls[what] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(entries, "read_fact", count("parsed", entries.read_fact))
    listing = SimpleNamespace(**{**vars(os), "listdir": count("listed", os.listdir)})
    monkeypatch.setattr(entries, "os", listing)
    return calls


@pytest.fixture
def clock(monkeypatch):
    """The real clock, set by hand."""
    clock = SimpleNamespace(now=1000.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(entries, "time", clock)
    return clock


def test_a_name_is_parsed_once(state, counted):
    record = new_record("a")
    claim(record, WANTED)
    ids = [f"session-{i}" for i in range(1000)]
    launch(record, *ids)
    end(record, *ids[:-1])
    assert len(read("a").ended) == 999
    counted["parsed"] = 0
    for _ in range(3):
        assert len(read("a").ended) == 999
    assert counted["parsed"] == 0
    launch(record, "session-new")
    end(record, ids[-1])
    again = read("a")
    assert (again.sessions, len(again.ended)) == ({"session-new": "a-0"}, 1000)
    assert counted["parsed"] == 3  # the files of the two sessions


def test_the_ended_sessions_of_a_cluster_are_one_mapping_until_another_ends(state):
    record = new_record("a")
    claim(record, WANTED)
    launch(record, "session-1", "session-2")
    end(record, "session-1")
    ended = read("a").ended
    launch(record, "session-3")
    assert read("a").ended is ended
    end(record, "session-2")
    assert [*read("a").ended] == ["session-1", "session-2"]
    assert [*ended] == ["session-1"]


def test_a_folder_that_does_not_change_is_listed_once(state, counted, clock):
    record = new_record("a")
    claim(record, WANTED)
    launch(record, "session-1")
    for _ in range(5):
        read("a")
        clock.now += 10.0
    # The sessions and the packs, once more when the folder's time cannot come again.
    assert counted["listed"] == 4
    launch(record, "session-2")
    assert len(read("a").sessions) == 2


def test_two_changes_at_one_time_of_the_folder_are_both_seen(state, clock):
    """The time of a folder has a resolution of up to a second."""
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder / SESSIONS_FOLDER
    launch(record, "session-1")
    changed = folder.stat().st_mtime_ns
    assert len(read("a").sessions) == 1
    launch(record, "session-2")
    os.utime(folder, ns=(changed, changed))
    clock.now += 10.0
    assert len(read("a").sessions) == 2


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


# -- packs of ended sessions


@pytest.fixture
def small(monkeypatch):
    """Packs of a few names."""
    monkeypatch.setattr(entries, "_LEAST", 4)
    monkeypatch.setattr(entries, "_MOST", 6)


@pytest.fixture
def many(state, small):
    """A cluster of which some sessions have ended, and the record that a reader knows."""
    record = new_record("a")
    claim(record, WANTED)
    launch(record, *(f"session-{i}" for i in range(10)), waiting=["session-1"])
    for i in range(8):
        end(record, f"session-{i}", at=LAUNCHED + i)
    return read("a")


def known_anew(name="a"):
    """Return a record as a process reads it that has read nothing before."""
    entries._listings.clear()
    return read(name)


def pack_all(record):
    while True:
        before = names_in(record.folder / SESSIONS_FOLDER)
        pack_ended(record)
        if names_in(record.folder / SESSIONS_FOLDER) == before:
            return


def test_the_folder_of_sessions_keeps_only_those_that_run(many):
    pack_all(many)
    left = names_in(many.folder / SESSIONS_FOLDER)
    assert len([name for name in left if not name.startswith(("session-8", "session-9"))]) < 4
    assert len(names_in(many.folder / ENDED_FOLDER)) == 3
    for again in read("a"), known_anew():
        assert (again.launches, again.ended) == (many.launches, many.ended)
    assert {path.stat().st_mode & 0o777 for path in (many.folder / ENDED_FOLDER).iterdir()} == {0o600}


def test_few_ended_sessions_are_not_packed(state):
    record = new_record("a")
    claim(record, WANTED)
    launch(record, *(f"session-{i}" for i in range(100)))
    end(record, *(f"session-{i}" for i in range(99)))
    pack_ended(record)
    assert names_in(record.folder / ENDED_FOLDER) == []
    assert len(names_in(record.folder / SESSIONS_FOLDER)) == 199


def test_a_reader_of_packs_reads_each_once(many, monkeypatch):
    pack_all(many)
    read("a")
    monkeypatch.setattr(entries, "read_file", None)
    launch(many, "session-new")
    assert "session-new" in read("a").launches


def test_a_session_that_is_written_again_after_its_files_were_packed_stays_ended(many):
    pack_all(many)
    launch(many, "session-0", key="a-other", waiting=["session-0"])  # a late answer of the platform
    end(many, "session-0", at=LAUNCHED + 99)
    for again in read("a"), known_anew():
        assert again.launches == many.launches
        assert again.ended.keys() == many.ended.keys()
        assert again.ended["session-0"].ended == LAUNCHED
    end(many, "session-9")
    pack_all(many)
    assert known_anew().ended.keys() == many.ended.keys() | {"session-9"}


def test_a_fact_about_a_packed_session_is_written(many):
    pack_all(many)
    entries._listings.clear()
    write_sessions(many, [], [fact("session-7", "ended", LAUNCHED + 1, "killed")])
    for again in read("a"), known_anew():
        over = again.ended["session-7"]
        assert over == replace(many.ended["session-7"], ended=LAUNCHED + 1, cause="killed")


def test_a_name_whose_session_was_packed_is_not_given_again(many):
    before = given_names(many)
    pack_all(many)
    assert given_names(known_anew()) == before


def test_other_files_of_an_ended_session_stay_where_they_are(many, caplog):
    stray = many.folder / SESSIONS_FOLDER / "session-0,two\nlines"
    stray.touch()
    pack_all(many)
    assert stray.exists()
    assert known_anew().ended == many.ended


def test_whoever_removes_a_cluster_with_packs_gets_its_running_sessions(many):
    pack_all(many)
    launch(many, "session-0")  # which has ended
    assert remove(many) == {"session-8": "a-0", "session-9": "a-0"}


def test_another_cluster_of_the_same_name_has_not_the_packs_of_the_first(many):
    pack_all(many)
    read("a")
    remove(many)
    second = new_record("a")
    claim(second, WANTED)
    launch(second, "session-x")
    assert (read("a").sessions, read("a").ended) == ({"session-x": "a-0"}, {})
    with pytest.raises(NoSuchCluster):
        pack_ended(many)


def test_a_cluster_of_an_earlier_release_has_no_packs(many):
    (many.folder / ENDED_FOLDER).rmdir()
    assert known_anew().ended == many.ended
    assert {*remove(many)} == {"session-8", "session-9"}


@pytest.mark.parametrize("damage", ["link", "open to others", "a pack that is not text", "folder"])
def test_packs_that_cannot_be_trusted_make_the_record_unreadable_and_end_no_cluster(many, damage, tmp_path):
    pack_all(many)
    packs = many.folder / ENDED_FOLDER
    if damage == "link":
        packs.rename(tmp_path / "elsewhere")
        packs.symlink_to(tmp_path / "elsewhere")
    elif damage == "open to others":
        packs.chmod(0o777)
    elif damage == "folder":
        (packs / "new").mkdir()
    else:
        (packs / "new").write_bytes(b"\xff\n")
        (packs / "new").chmod(0o600)
    entries._listings.clear()
    with pytest.raises(RecordUnreadable):
        read("a")
    assert not has_ended(many)


@simulated
async def test_the_keeper_packs_the_files_of_ended_sessions(it, small):
    async with simulate(name="a", n_workers=3) as cluster:
        await eventually(lambda: arrived(cluster) == 3)
        cluster.scale(0)
        await eventually(lambda: len(names_in(folder_of(cluster) / ENDED_FOLDER)) == 1)
        assert len(read("a").ended) == 3
        assert (await cluster.usage())["default"].sessions == 3


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
