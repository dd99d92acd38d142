"""The files of sessions in a cluster's folder: they say which were launched, started and ended."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

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


def test_a_files_name_describes_its_session():
    keys = ["{}-0", "scheduler", "{}-gpu,x-1", "@-0", "another 雲-0", "{}"]
    sizes = [None, SessionSize(4, 16, 1), SessionSize(1 / 3, 1e22)]
    clusters = ["mine", "雲" * 66, "a,b%2C @{id}", "{owner}", "scheduler", "@"]
    owners = [None, "ijklmnop12345678"]
    for cluster, key, owner, size in itertools.product(clusters, keys, owners, sizes):
        session = Launch("abcdefgh12345678", key.format(cluster), owner, LAUNCHED, size)
        name = file_name(session, cluster)
        assert len(name.encode()) < 200
        assert parse(name, cluster) == session
        # The wrapper, which has only the standard library, fills in the form by itself.
        made = form(session.key, cluster, size, "default")
        made = made.format(id=session.id, owner=owner or "", launched=LAUNCHED)
        assert replace(parse(made, cluster), group=None) == session


STRAY = [
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
]


def test_stray_files_are_reported_once_and_ignored(state, caplog):
    record = new_record("a")
    claim(record, WANTED)
    folder = record.folder / SESSIONS_FOLDER
    launch(record, "session-1")
    for name in (*STRAY, ".nfs000000000001"):
        (folder / name).touch()
    for _ in range(2):
        assert read("a").sessions == {"session-1": "a-0"}
    warnings = sorted(warning.getMessage().partition(" in ")[0] for warning in caplog.records)
    assert warnings == sorted(f"{name!a}" for name in STRAY)
    assert all(f" in {folder} ignored" in warning.getMessage() for warning in caplog.records)
    assert remove(record) == {"session-1": "a-0"}


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
    launch(record, "session-3", waiting=["session-3"])
    taken = record.folder / STARTED_FOLDER / "a-1"
    taken.touch(0o600)  # the name is being taken
    assert read("a").launches["session-3"].started is None
    taken.write_text("session-3")
    assert read("a").launches["session-3"].started == taken.stat().st_mtime


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


def test_another_cluster_of_the_same_name_has_its_own_sessions(state):
    for session, at in {"session-1": LAUNCHED, "session-3": LAUNCHED + 60}.items():
        record = new_record("a")
        claim(record, WANTED)
        launches = [Launch(session, "a-0", None, LAUNCHED + later) for later in (1, 0)]
        write_sessions(record, launches, [])  # of two files of one session, the first launch counts
        launch(record, session, "session-2", began={session: at})
        assert read("a").launches[session].launched == LAUNCHED
        assert read("a").launches[session].started == at
        end(record, "session-2")
        assert (read("a").sessions, [*read("a").ended]) == ({session: "a-0"}, ["session-2"])
        assert remove(record) == {session: "a-0"}


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
