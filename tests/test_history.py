"""The history of clusters: its entry after each kind of end, and how long the history keeps it."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner
from clusters import LAUNCHED, Named, end, launch, sessions, sign_of, simulate, supplied, write_record
from distributed.core import Status
from simulated.shell import shell
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import SessionHours, Usage, cli
from dask_cml.layout import HISTORY_FOLDER, LOGS_FOLDER
from dask_cml.options import SessionSize, state_directory
from dask_cml.records import history, operations, store
from dask_cml.records.history import ended_clusters, usage_of
from dask_cml.records.store import Maker, Record, SchedulerState
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import this_user

HOUR = 3600
GONE = Maker("elsewhere", 1, 1.0, "session-of-ann", "ann")
ACTIVITY = {"tasks_done": 7, "most_workers": 2}


def the_only_one():
    [found] = ended_clusters()
    return found


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


@simulated
async def test_workers_that_a_subclass_names_count(it):
    async with supplied(Named, name="lab", n_workers=2) as cluster:
        assert [*await cluster.get_logs(cluster=False, workers=["a-w0"])] == ["Scheduler", "a-w0"]
        await eventually(lambda: store.read("lab").scheduler.workers.groups == {"default": 2})
    assert the_only_one().most_workers == 2
    assert the_only_one().usage["default"].sessions == 2


def dead_record(name="lab", ago=5 * HOUR, maker=GONE, **scheduler):
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
    assert (found.user, found.session) == ("ann", "session-of-ann")
    assert found.why == "its scheduler's session ended"
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
    assert the_only_one().why == "its scheduler's session ended"


def test_a_cluster_ends_even_if_the_history_cannot_be_written(platform, caplog):
    dead_record()
    (state_directory() / ".history").write_text("no folder")
    assert asyncio.run(operations.end_all(store.records())) == {"lab": None}
    assert store.records() == []
    assert "History of cluster lab not written" in caplog.text
    assert ended_clusters() == []


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


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.cml, ["history", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_lists_ended_clusters_with_their_hours(platform):
    now, month = time.time(), 30 * 24 * HOUR
    usage = {"groups": {"scheduler": HOURS, "default": {**HOURS, "sessions": 3, "lost": {"evicted": 1}}}}
    write(valid(created=now - 3 * HOUR, ended=now - HOUR, usage=usage))
    more = {"id": "fedcba9876543210", "name": "night", "user": "ben", "why": "idle for 60 s"}
    write(valid(created=now - month - HOUR, ended=now - month, usage=usage, **more), "fedcba9876543210.json")
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
    assert len(folders) == len([*(state_directory() / ".history").glob("*.json")]) == 2


def test_of_a_large_log_the_end_is_kept(state):
    for name, most, kept in ("a", "none", []), ("b", "200 MB", [2**20]), ("c", "1000 B", [1000]):
        with dask.config.set({"cml.history.logs": most}):
            logs = history.kept_logs(logged(name, 3 * 2**20)).paths()
        assert [path.stat().st_size for path in logs.values()] == kept
        assert {path.stat().st_mode & 0o777 for path in logs.values()} <= {0o600}


BEGIN = 1790000000


def ended(key, hours, size=None, **more):
    started = more.get("started", BEGIN)
    return Launch(f"over-{key}", key, None, BEGIN, size, started, ended=BEGIN + int(hours * HOUR))


def running(*launches):
    return Record("mine", launches={launch.id: launch for launch in launches})


def used(record, *over, now):
    return usage_of(replace(record, ended={launch.id: launch for launch in over}), now)


def session(key, size=None, **more):
    return Launch(key, key, None, BEGIN, size, **{"started": BEGIN, **more})


def test_hours_are_those_of_running_and_of_ended_sessions_by_group():
    record = running(
        session("scheduler", SessionSize(1, 2)),
        session("mine-0", SessionSize(4, 16)),
        session("mine-gpu-2", SessionSize(8, 64, 2)),
    )
    over = [ended("mine-1", 0.5, SessionSize(4, 16)), ended("mine-cpu-high-7", 2, SessionSize(0.5, 1))]
    assert used(record, *over, now=BEGIN + 3 * HOUR) == {
        "scheduler": SessionHours(1, 3, 3, 6, 0),
        "default": SessionHours(2, 3.5, 14, 56, 0),
        "cpu-high": SessionHours(1, 2, 1, 2, 0),
        "gpu": SessionHours(1, 3, 24, 192, 6),
    }


def test_the_total_is_the_sum_of_all_and_counts_lost_sessions_by_cause():
    first = SessionHours(1, 2, 3, 4, 5, lost={"evicted": 1})
    usage = Usage(a=first, b=SessionHours(10, 20, 30, 40, 50, lost={"evicted": 2, "killed": 1}))
    total = SessionHours(11, 22, 33, 44, 55, lost={"evicted": 3, "killed": 1})
    assert usage.total == total
    assert json.loads(json.dumps(usage.to_json()))["total"] == asdict(total) | {"cost": None}
    assert Usage().total == SessionHours()


def test_a_session_counts_once_from_its_start_to_its_end():
    record = running(session("mine-0", started=None), session("mine-1", started=BEGIN + HOUR))
    assert used(record, now=BEGIN + 3 * HOUR) == {"default": SessionHours(2, 2)}
    over = [ended("mine-0", 3, started=BEGIN + HOUR), ended("mine-1", 5, started=None)]
    assert used(running(), *over, now=BEGIN) == {"default": SessionHours(2, 2)}
    # It ends between two looks.
    over = ended("mine-0", 1)
    record = running(replace(over, ended=None))
    assert used(record, over, now=BEGIN + 9 * HOUR) == {"default": SessionHours(1, 1)}
    # Clocks differ.
    record = running(session("mine-0"))
    assert used(record, ended("mine-1", -1), now=BEGIN - HOUR) == {"default": SessionHours(2)}


def test_prices_count_each_part_of_a_session_and_are_above_0():
    usage = Usage(scheduler=SessionHours(1, 2.0, 2.0, 4.0), default=SessionHours(1, 1.0, 4.0, 16.0, 2.0))
    with dask.config.set({"cml.prices.cpu": 0.5, "cml.prices.memory": 0.01, "cml.prices.gpu": 2}):
        assert usage.total.cost == pytest.approx(3.0 + 0.2 + 4.0)
    for price in 0, -1, "cheap", True:
        with (
            dask.config.set({"cml.prices.gpu": price}),
            pytest.raises((TypeError, ValueError), match=r"cml\.prices\.gpu"),
        ):
            _ = usage.total.cost


@pytest.mark.slow
@simulated
async def test_a_keeper_remembers_little_of_sessions_that_are_over(it):
    """A cluster that adapts for weeks has many."""

    async def rounds(n):
        for _ in range(n):
            await cluster.scale(10)
            await eventually(lambda: len(cluster.workers) == 10)
            await cluster.scale(0)
            await eventually(lambda: not cluster.workers)

    def taken():
        gc.collect()
        # The world remembers the sessions' code, and their scheduler the events.
        folder = Path(dask_cml.__file__).parent
        parts = ("cluster.py", "core/*", "sharing/*", "records/*")
        ours = [tracemalloc.Filter(True, str(folder / part)) for part in parts]
        statistics = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        return sum(statistic.size for statistic in statistics)

    async with simulate(name="mine") as cluster:
        await rounds(2)
        tracemalloc.start()
        try:
            await rounds(1)
            before = taken()
            await rounds(10)
            assert taken() - before < 100 * 400
        finally:
            tracemalloc.stop()


FIRST = """
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from dask_cml.checks import validate

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(2) as pool:
    for _ in range(1000):
        outer = make_dataclass("Outer", [("inner", make_dataclass("Inner", [("n", int)]))])
        list(pool.map(lambda value: validate(value, outer, "test"), [{"inner": {"n": 1}}] * 2))
"""


def test_two_threads_may_be_the_first_to_read_a_type():
    assert subprocess.run([sys.executable, "-c", FIRST]).returncode == 0
