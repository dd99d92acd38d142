"""The history of clusters: its entry after each kind of end, and how long the history keeps it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from datetime import datetime, timezone

import dask
import pytest
from click.testing import CliRunner
from clusters import (
    LAUNCHED,
    arrived,
    end,
    launch,
    sessions,
    sign_of,
    simulate,
    write_record,
)
from distributed.core import Status
from simulated.shell import shell
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, cli
from dask_cml.layout import HISTORY_FOLDER, LOGS_FOLDER
from dask_cml.options import state_directory
from dask_cml.records import history, operations, store
from dask_cml.records.history import ended_clusters
from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.sessions.here import this_user

HOUR = 3600
GONE = Maker("elsewhere", 1, 1.0, "session-of-ann", "ann")
ACTIVITY = {"tasks_done": 7, "most_workers": 2}


def the_only_one():
    [found] = ended_clusters()
    return found


def files():
    return sorted((state_directory() / ".history").glob("*.json"))


# -- each kind of end


@simulated
async def test_the_history_names_who_deleted_a_cluster_interrupted_its_start_or_closed_it(it):
    me = Maker.this_process().words
    async with simulate(name="day") as cluster:
        await shell("delete", "day")
        await eventually(lambda: cluster.status == Status.closed)
    starting = asyncio.ensure_future(simulate(name="lab", n_workers=1)._start())
    await eventually(lambda: "lab-scheduler" in it.platform.running)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    try:
        raise ZeroDivisionError("no luck")
    except ZeroDivisionError:  # around the block, which it has not ended
        async with simulate(name="night"):
            pass
    whys = {cluster.name: cluster.why for cluster in ended_clusters()}
    interrupted = f"interrupted while it started by {me}"
    assert whys == {"day": f"deleted by {this_user()}", "lab": interrupted, "night": f"closed by {me}"}


class Named(CMLCluster):
    """A cluster whose subclass names the workers."""

    def _new_worker_name(self, worker_number):
        return f"a-w{worker_number}"


@simulated
async def test_workers_that_a_subclass_names_count(it):
    async with simulate(Named, name="lab", n_workers=2) as cluster:
        await eventually(lambda: arrived(cluster) == 2)
        assert [*await cluster.get_logs(cluster=False, workers=["a-w0"])] == ["Scheduler", "a-w0"]
        await eventually(lambda: store.read("lab").scheduler.workers.groups == {"default": 2})
    assert the_only_one().most_workers == 2
    assert the_only_one().usage["default"].sessions == 2


# -- entries


def dead_record(name="lab", ago=5 * HOUR, maker=GONE, **scheduler):
    """Write the record of a cluster that ran for an hour, until `ago` seconds ago."""
    silent = time.time() - ago
    created = datetime.fromtimestamp(int(silent - HOUR), timezone.utc)
    state = SchedulerState(address="tcp://127.0.0.1:1", **scheduler)
    record = Record(name, maker=maker, created=created, options={"platform": "local"}, scheduler=state)
    launched = sessions(**{"session-0": "scheduler", "session-1": f"{name}-0"})
    launched = {
        id: replace(launch, launched=int(silent - HOUR), started=silent - HOUR)
        for id, launch in launched.items()
    }
    write_record(replace(record, launches=launched))
    os.utime(sign_of(name), (silent, silent))
    return store.read(name)


def test_hours_of_a_dead_cluster_count_until_its_last_sign_of_life(state):
    record = dead_record(activity=ACTIVITY)
    launch(record, "session-9", key="lab-9")
    end(record, "session-9", at=LAUNCHED + HOUR)
    history.remember(record)
    found = the_only_one()
    assert found.duration == pytest.approx(HOUR, abs=2)
    assert found.usage["scheduler"].hours == pytest.approx(1, abs=0.01)
    assert found.usage["default"].sessions == 2
    assert (found.user, found.session, found.why) == ("ann", "session-of-ann", "its session ended")
    assert (found.tasks_done, found.most_workers) == (7, 2)


def test_a_cluster_whose_scheduler_never_answered_ended_with_its_last_launch(state):
    created = datetime(2026, 9, 21, tzinfo=timezone.utc)
    write_record(Record("lab", maker=GONE, created=created, launches=sessions(**{"session-1": "lab-0"})))
    history.remember(store.read("lab"))
    assert the_only_one().ended == LAUNCHED
    assert the_only_one().usage.total.hours == 0


def test_the_reason_of_the_scheduler_counts_or_else_the_first_one(state):
    for name, closed, why in ("lab", None, "deleted by ann"), ("night", "idle for 60 s", "idle for 60 s"):
        record = dead_record(name, closed=closed)
        history.remember(record, "deleted by ann")
        history.remember(record, "deleted by ben")
        assert {cluster.name: cluster.why for cluster in ended_clusters()}[name] == why


def test_a_cluster_that_had_ended_before_was_not_ended_by_who_deletes_it(platform):
    killed = replace(Maker.this_process(), pid=2**22 + 1)
    end(dead_record(session="session-0", maker=killed), "session-0")
    assert asyncio.run(operations.end_all(store.records())) == {"lab": None}
    assert the_only_one().why == "its session ended"


def test_a_cluster_ends_even_if_the_history_cannot_be_written(platform, caplog):
    dead_record()
    (state_directory() / ".history").write_text("no folder")
    assert asyncio.run(operations.end_all(store.records())) == {"lab": None}
    assert store.records() == []
    assert "History of cluster lab not written" in caplog.text
    assert ended_clusters() == []


# -- hostile files


def write(content, name="0123456789abcdef.json"):
    folder = state_directory() / ".history"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    (folder / name).touch(0o600)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def valid(**more):
    usage = {"groups": {}, "total": {}}
    content = {"name": "lab", "id": "0123456789abcdef", "user": "ann", "session": None, "why": "closed"}
    return {**content, **ACTIVITY, "created": LAUNCHED, "ended": LAUNCHED + HOUR, "usage": usage, **more}


HOURS = {"sessions": 1, "hours": 1.0, "vcpu_hours": 1.0, "gib_hours": 1.0, "gpu_hours": 0.0, "lost": {}}
HOSTILE = {
    "no JSON": "{",
    "no object": "[]",
    "null": "null",
    "empty": "{}",
    "nested": "[" * 100_000,
    "NaN": json.dumps(valid(created=float("nan"))),
    "infinite": json.dumps(valid()).replace(str(LAUNCHED + HOUR), "1e999"),
    "far": valid(ended=1e15),
    "huge": valid(ended=10**400),
    "negative": valid(most_workers=-1),
    "boolean": valid(tasks_done=True),
    "name": valid(name=["lab"]),
    "user": valid(user=0),
    "other id": valid(id="0123456789abcdee"),
    "path": valid(id="../0123456789abcdef"),
    "usage": valid(usage=[]),
    "hours": valid(usage={"groups": {"default": {**HOURS, "hours": "1"}}}),
    "lost": valid(usage={"groups": {"default": {**HOURS, "lost": {"killed": "x"}}}}),
    "failures": valid(failures={"a": 1}),
}


def test_hostile_files_do_not_hide_the_other_clusters(state, caplog):
    for content, name in zip(HOSTILE.values(), HOSTILE, strict=True):
        is_own = isinstance(content, dict) and content["id"] == valid()["id"]
        write({**content, "id": name} if is_own else content, f"{name}.json")
    write(valid(id="fedcba9876543210", name="good"), "fedcba9876543210.json")
    for _ in range(2):
        assert [cluster.name for cluster in ended_clusters()] == ["good"]
    for name in HOSTILE:
        assert caplog.text.count(f"{name}.json ignored") == 1


# -- `dask cml history`


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.cml, ["history", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def write_two():
    """Write two ended clusters: one of ann's that ended an hour ago, and one of ben's of last month."""
    now = time.time()
    usage = {"groups": {"scheduler": HOURS, "default": {**HOURS, "sessions": 3, "lost": {"evicted": 1}}}}
    write(valid(created=now - 3 * HOUR, ended=now - HOUR, usage=usage))
    month = 30 * 24 * HOUR
    more = {"id": "fedcba9876543210", "name": "night", "user": "ben", "why": "idle for 60 s"}
    write(valid(created=now - month - HOUR, ended=now - month, usage=usage, **more), "fedcba9876543210.json")


def test_the_command_lists_ended_clusters_with_their_hours(platform):
    write_two()
    assert run("--by", "carl") == "No ended clusters.\n"
    head, lab, night, total = run().splitlines()
    columns = "name  by  ended  duration  sessions  vCPU hours  GiB hours  GPU hours  why"
    assert head.split() == columns.split()
    assert lab.split()[:2] == ["lab", "ann"]
    assert lab.split()[4:] == ["2", "h", "4", "2.00", "2.00", "0.00", "closed"]
    assert night.endswith("idle for 60 s")
    assert total.split() == ["total", "8", "4.00", "4.00", "0.00"]
    # One cluster.
    with dask.config.set({"cml.prices.cpu": 0.5}):
        lines = [" ".join(line.split()) for line in run("lab").splitlines()]
    assert lines[:3] == ["name lab", "by ann", lines[2]]
    assert lines[3].endswith(", after 2 h")
    assert lines[4:7] == ["why closed", "tasks 7 done", "workers 2 at most"]
    assert lines[-1] == "usage total 4 2.00 2.00 2.00 0.00 1.00 1 evicted"
    [described] = json.loads(run("lab", "--json"))
    assert (described["most_workers"], described["cost"]) == (2, None)
    assert described["usage"]["total"]["lost"] == {"evicted": 1}
    assert "no ended cluster named 'day'" in run("day", code=1)


# -- its logs


def test_logs_are_read_by_the_name_unless_a_later_cluster_has_it(state):
    write(valid())
    folder = state / HISTORY_FOLDER / the_only_one().id
    assert history.where_logs_are(the_only_one()) is None
    folder.mkdir(mode=0o700)
    (folder / "lab-scheduler.log").write_text("begun\n")
    assert history.where_logs_are(the_only_one()) == "dask cml logs lab"
    write_record(Record("lab", maker=GONE))
    assert history.where_logs_are(the_only_one()) == str(folder)


def logged(name, size, ago=0.0):
    """Write the record of a dead cluster whose scheduler has written a log, and remember it."""
    record = dead_record(name)
    (record.folder / LOGS_FOLDER / f"{name}-scheduler.log").write_bytes(b"x" * size)
    history.remember(record)
    store.remove(record)
    for path in (state_directory() / ".history").glob(f"{record.id}*"):
        os.utime(path, (time.time() - ago,) * 2)
    return record


def test_only_the_newest_logs_are_kept(state):
    with dask.config.set({"cml.history.logs": "25 kB"}):
        records = [logged(name, 10_000, ago) for name, ago in (("a", 300), ("b", 200), ("c", 0))]
    kept = [bool(history.kept_logs(record).paths()) for record in records]
    assert kept == [False, True, True]
    assert len(ended_clusters()) == 3
    with dask.config.set({"cml.history.keep": 2}):
        logged("d", 10)
    assert {cluster.name for cluster in ended_clusters()} == {"c", "d"}
    folders = [path for path in (state_directory() / ".history").iterdir() if path.is_dir()]
    assert len(folders) == len(files()) == 2


def test_of_a_large_log_the_end_is_kept(state):
    for name, most, kept in ("a", "none", []), ("b", "200 MB", [2**20]), ("c", "1000 B", [1000]):
        with dask.config.set({"cml.history.logs": most}):
            logs = history.kept_logs(logged(name, 3 * 2**20)).paths()
        assert [path.stat().st_size for path in logs.values()] == kept
        assert {path.stat().st_mode & 0o777 for path in logs.values()} <= {0o600}
