"""What clusters have used: the arithmetic, and the files from which it comes, whoever ends a session."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import dask
import pytest
from clusters import simulate
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import SessionHours, Usage
from dask_cml.options import SessionSize
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


def test_the_total_is_the_sum_of_all_and_counts_lost_sessions_by_cause():
    first = SessionHours(1, 2, 3, 4, 5, lost={"evicted": 1})
    usage = Usage(a=first, b=SessionHours(10, 20, 30, 40, 50, lost={"evicted": 2, "killed": 1}))
    total = SessionHours(11, 22, 33, 44, 55, lost={"evicted": 3, "killed": 1})
    assert usage.total == total
    assert json.loads(json.dumps(usage.to_json()))["total"] == asdict(total)
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


# -- whole clusters


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
