"""What clusters have used: the arithmetic, and the files from which it comes, whoever ends a session."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner
from clusters import arrived, create_and_kill, make, rebuild, simulate
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import CMLCluster, SessionHours, Usage, cli
from dask_cml.errors import NoSuchCluster
from dask_cml.options import SessionSize
from dask_cml.records import store
from dask_cml.records.record import Record
from dask_cml.records.usage import usage_of
from dask_cml.sessions.entry import Launch

HOUR = 3600
BEGIN = 1790000000

# -- the arithmetic


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


def test_the_total_is_the_sum_of_all():
    usage = Usage(a=SessionHours(1, 2, 3, 4, 5), b=SessionHours(10, 20, 30, 40, 50))
    assert usage.total == SessionHours(11, 22, 33, 44, 55)
    assert Usage().total == SessionHours()


def test_lost_sessions_of_several_groups_are_summed_up_for_json():
    usage = Usage(a=SessionHours(lost={"evicted": 1}), b=SessionHours(lost={"evicted": 2, "killed": 1}))
    assert json.loads(json.dumps(usage.to_json()))["total"]["lost"] == {"evicted": 3, "killed": 1}


def test_a_session_counts_from_when_it_started():
    record = running(session("mine-0", started=None), session("mine-1", started=BEGIN + HOUR))
    assert used(record, now=BEGIN + 3 * HOUR) == {"default": SessionHours(2, 2)}
    over = [ended("mine-0", 3, started=BEGIN + HOUR), ended("mine-1", 5, started=None)]
    assert used(running(), *over, now=BEGIN) == {"default": SessionHours(2, 2)}


def test_a_session_that_ends_between_two_looks_counts_once():
    over = ended("mine-0", 1)
    record = running(replace(over, ended=None))
    assert used(record, over, now=BEGIN + 9 * HOUR) == {"default": SessionHours(1, 1)}


def test_clocks_that_differ_and_sizes_that_are_unknown_take_nothing_away():
    record = running(session("mine-0"))
    assert used(record, ended("mine-1", -1), now=BEGIN - HOUR) == {"default": SessionHours(2)}


def test_it_prints_as_a_table():
    usage = Usage({"default": SessionHours(1200, 1234.567, 2, 3, 0), "a-long-name": SessionHours()})
    assert repr(usage).splitlines() == [
        "group        sessions    hours  vCPU hours  GiB hours  GPU hours",
        "default          1200  1234.57        2.00       3.00       0.00",
        "a-long-name         0     0.00        0.00       0.00       0.00",
        "total            1200  1234.57        2.00       3.00       0.00",
    ]


# -- whole clusters


def mine(**options):
    return simulate(name="mine", **options)


def ended_keys():
    return sorted(launch.key for launch in store.read("mine").ended.values())


def waiting():
    """Return the sessions that have not started, as the record has them."""
    return {id: launch for id, launch in store.read("mine").launches.items() if launch.started is None}


def check(usage, cpu=1, memory=2):
    """Check that hours agree with each other for workers of this size and the smallest scheduler."""
    for group, used in usage.items():
        sizes = (1, 2) if group == "scheduler" else (cpu, memory)
        assert used.vcpu_hours == pytest.approx(sizes[0] * used.hours)
        assert used.gib_hours == pytest.approx(sizes[1] * used.hours)


@simulated
async def test_stopped_sessions_count_until_they_were_stopped(it):
    start = time.time()
    async with mine(n_workers=2, cpu=0.5, memory=1.5) as cluster:
        await eventually(lambda: len(store.read("mine").sessions) == 3)
        await eventually(lambda: arrived(cluster) == 2)
        usage = await cluster.usage()
        assert (usage["scheduler"].sessions, usage["default"].sessions) == (1, 2)
        cluster.scale(0)
        await eventually(lambda: ended_keys() == ["mine-0", "mine-1"])
        first = await cluster.usage()
        await asyncio.sleep(60.0)
        later = await cluster.usage()
        assert later["scheduler"].hours > first["scheduler"].hours
        assert later["default"] == first["default"]  # they count no more
        check(later, cpu=0.5, memory=1.5)
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)
        usage = await cluster.usage()
        assert (usage["default"].sessions, usage.total.sessions) == (3, 4)
    last = await cluster.usage()  # of its whole life
    assert last.total.sessions == 4
    assert last["scheduler"].hours >= first["scheduler"].hours > 0
    assert last.total.hours * HOUR <= 4 * (time.time() - start + 1)
    assert await cluster.usage() == last


@simulated
async def test_a_lost_session_counts_until_the_end_that_the_platform_names(it):
    async with mine(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        [lost] = [session.id for session in cluster.sessions if session.role == "worker"]
        it.platform.evict(lost)
        await eventually(lambda: lost in store.read("mine").ended)
        over = store.read("mine").ended[lost]
        assert over.ended == int(it.platform.all[lost].finished_at.timestamp())
        await eventually(lambda: arrived(cluster) == 1)
        assert (await cluster.usage())["default"].sessions == 2


@simulated
async def test_each_worker_group_has_hours_of_its_own_also_when_it_is_deleted(it):
    async with mine(n_workers=1) as cluster:
        await cluster.add_worker_group("gpu", 1, cpu=4, memory=16, nvidia_gpu=2)
        await eventually(lambda: arrived(cluster) == 2)
        await asyncio.sleep(60.0)
        await cluster.delete_worker_group("gpu")
        await eventually(lambda: ended_keys() == ["mine-gpu-0"])
        usage = await cluster.usage()
        assert [*usage] == ["scheduler", "default", "gpu"]
        gpu = usage.pop("gpu")
        assert gpu.hours > 0
        assert (gpu.sessions, gpu.vcpu_hours, gpu.gib_hours, gpu.gpu_hours) == pytest.approx(
            (1, 4 * gpu.hours, 16 * gpu.hours, 2 * gpu.hours)
        )
        check(usage)


@simulated
async def test_sessions_that_wait_for_room_cost_nothing(it):
    async with mine() as cluster:
        it.platform.configure({"cpu": 2}, waits_for_room=True)
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 1 and len(waiting()) == 1)
        assert (await cluster.usage())["default"].sessions == 2
        [(waits, launch)] = waiting().items()
        await asyncio.sleep(60.0)
        it.platform.configure()
        await eventually(lambda: not waiting())
        assert store.read("mine").launches[waits].started >= launch.launched + 60


async def test_it_is_awaited_in_an_event_loop(platform, light):
    cluster = make(name="mine")
    with pytest.raises(NoSuchCluster):
        await cluster.usage()
    async with cluster:
        assert (await cluster.usage())["scheduler"].sessions == 1
    assert (await cluster.usage()).total.sessions == 1


@simulated
async def test_the_sessions_of_a_keeper_that_crashed_are_finished_by_the_next_one(it):
    await create_and_kill(it, name="mine", n_workers=2, orphan_timeout="10 minutes")
    assert ended_keys() == []
    it.platform.evict(it.platform.running["mine-0"])  # which nobody sees
    async with rebuild("mine") as cluster:
        await eventually(lambda: "mine-0" in ended_keys())
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)
        used = (await cluster.usage())["default"].sessions
        assert len(ended_keys()) == len({*ended_keys()}) == used >= 2
        await cluster.shutdown()
    assert store.records() == []


def test_info_prints_it(platform, light, until, monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")

    def run(*arguments):
        result = CliRunner().invoke(cli.cml, [*arguments])
        assert result.exit_code == 0, result.output
        return result.output

    with CMLCluster(n_workers=1, name="mine", platform="local", quiet=True) as cluster:
        until(lambda: arrived(cluster) == 1)
        until(lambda: cluster.usage().total.sessions == 2)
        lines = [line for line in run("info", "mine").splitlines() if line.startswith("usage")]
        assert [line.split()[1:3] for line in lines] == [
            ["group", "sessions"],
            ["scheduler", "1"],
            ["default", "1"],
            ["total", "2"],
        ]
        assert re.fullmatch(r"usage +total( +\d+){1}( +\d+\.\d\d){4}", lines[-1])
        about = json.loads(run("info", "mine", "--json"))["usage"]
        assert {*about["groups"]} == {"scheduler", "default"}
        with dask.config.set({"cml.prices.cpu": 3600}):
            priced = json.loads(run("info", "mine", "--json"))
            assert priced["cost"] == pytest.approx(3600 * priced["usage"]["total"]["vcpu_hours"])
            assert "GPU hours  cost\n" in run("info", "mine")
            assert repr(cluster.usage()).splitlines()[0].endswith("cost")
        total = SessionHours(**about["total"])
        assert total.sessions == 2
        assert total.gib_hours == pytest.approx(2 * total.hours)


def test_where_prices_are_set_it_shows_costs(state):
    usage = Usage(scheduler=SessionHours(1, 2.0, 2.0, 4.0), default=SessionHours(1, 1.0, 4.0, 16.0))
    assert usage.total.cost is None
    assert "cost" not in repr(usage)
    with dask.config.set({"cml.prices.cpu": 0.5}):
        assert usage.total.cost == 3.0
        head, *lines = repr(usage).splitlines()
        assert head.endswith("  GPU hours  cost")
        assert [line.split()[-1] for line in lines] == ["1.00", "2.00", "3.00"]
    assert "cost" not in str(usage.to_json())  # what the history keeps


# -- what a keeper remembers


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
        # Who has read a record knows its sessions.
        ours.append(tracemalloc.Filter(False, str(folder / "records" / "entries.py")))
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


@simulated
async def test_all_sessions_are_recorded_with_their_sizes(it):
    """Many are launched at once, and one may be recorded while others are launched."""
    async with simulate(name="mine", cpu=2, memory=4) as cluster:
        await cluster.scale(30)
        await eventually(lambda: len(cluster.workers) == 30)
        record = store.read("mine")
        sizes = {launch.size for launch in record.launches.values() if launch.key != "scheduler"}
        assert sizes == {SessionSize(2, 4, 0)}
        assert len(record.launches) == 31
