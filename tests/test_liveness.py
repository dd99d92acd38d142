"""Which clusters are alive: the answers of their schedulers, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time

import dask
import pytest
from clusters import write_record
from distributed import Scheduler
from distributed.security import Security

from dask_cml.layout import scheduler_file
from dask_cml.records import operations
from dask_cml.records.probe import State, identities, is_alive, judge
from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.records.store import records


@contextlib.asynccontextmanager
async def scheduler(security=None):
    async with Scheduler(port=0, dashboard=False, dashboard_address=":0", security=security) as running:
        yield running


def record_of(running, name="a", **more):
    """The record of a cluster with this scheduler."""
    return Record(name, scheduler=SchedulerState(address=running.address, id=running.id), **more)


def with_id(record, scheduler_id):
    return dataclasses.replace(record, scheduler=dataclasses.replace(record.scheduler, id=scheduler_id))


async def test_scheduler_is_known_by_its_id():
    async with scheduler() as running:
        own = record_of(running)
        assert await is_alive(own)
        # On CML an address is soon another scheduler's.
        assert not await is_alive(with_id(own, "Scheduler-other"))
    assert not await is_alive(own, timeout=0.5)


async def test_record_without_an_address_is_not_alive():
    assert not await is_alive(Record("a"))
    assert await identities([]) == {}


async def test_keys_of_a_scheduler_are_found_by_the_record(tmp_path):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    files = {}
    for key in ("tls_ca_file", "tls_client_cert", "tls_client_key"):
        (tmp_path / key).write_text(getattr(security, key))
        files[key] = str(tmp_path / key)
    async with scheduler(security) as running:
        record = record_of(running)
        assert await is_alive(dataclasses.replace(record, security=files))
        assert await is_alive(record, security)
        assert not await is_alive(record, Security.temporary(), timeout=1)
        assert not await is_alive(record, timeout=1)
        (tmp_path / "tls_client_key").unlink()
        assert not await is_alive(dataclasses.replace(record, security=files))


GONE = Maker("elsewhere", 1, 1.0, "gone")


class Listing:
    """A platform that lists one session."""

    def __init__(self, status):
        self.status = status

    async def sessions(self):
        if self.status is None:
            raise OSError("the platform does not answer")
        return {"s": {"id": "s", "status": self.status}}


@pytest.fixture
def cluster(tmp_path):
    """A record, and the age of the last sign of life in its folder."""

    def cluster(address, silence=None, maker=GONE, id="Scheduler-1", **more):
        if silence is not None:
            (tmp_path / "a").mkdir(exist_ok=True)
            sign = tmp_path / "a" / scheduler_file(0)
            sign.unlink(missing_ok=True)
            sign.touch()
            now = sign.stat().st_mtime
            os.utime(sign, (now, now - silence))
        scheduler = SchedulerState(address=address, id=id)
        return Record("a", maker=maker, scheduler=scheduler, sessions={"s": "scheduler"}, **more)

    with dask.config.set({"cml.state-directory": str(tmp_path)}):
        yield cluster


async def state(record, listed="running", timeout=60):
    return (await judge([record], timeout=timeout, api=Listing(listed)))["a"].state


@pytest.fixture
def listener():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener


def address(listener):
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_scheduler_that_nobody_can_reach_is_dead_if_its_session_has_ended(cluster, listener):
    for status in ("failed", "stopped", "succeeded", "timedout"):
        assert await state(cluster(address(listener)), status) is State.DEAD
    for status in ("running", "scheduling", "STOPPING", "UNKNOWN", None):
        assert await state(cluster(address(listener)), status) is State.UNKNOWN


@pytest.mark.parametrize("listed", ["running", None])
async def test_a_scheduler_that_nobody_can_reach_is_dead_after_two_minutes_of_silence(
    cluster, listener, listed
):
    assert await state(cluster(address(listener), silence=60), listed) is State.UNKNOWN
    assert await state(cluster(address(listener), silence=130), listed) is State.DEAD


async def test_a_program_that_accepts_connections_may_be_the_scheduler(cluster, listener):
    listener.listen()
    for silent in address(listener), address(listener).replace("tcp", "tls"):
        record = cluster(silent, silence=3600)
        assert await state(record, "failed", timeout=1) is State.UNKNOWN


async def test_a_cluster_is_dead_if_another_scheduler_has_its_address(cluster):
    async with scheduler() as running:
        assert await state(cluster(running.address, id="Scheduler-other")) is State.DEAD
        assert await state(cluster(running.address, id=running.id)) is State.ALIVE


async def test_a_cluster_whose_maker_runs_is_not_dead(cluster, listener):
    maker = Maker.this_process()
    assert await state(cluster(address(listener), maker=maker), "failed") is State.UNKNOWN
    assert await state(cluster(None, maker=maker)) is State.UNKNOWN
    assert await state(cluster(None)) is State.UNKNOWN
    ended = dataclasses.replace(maker, started=1.0)
    assert await state(cluster(None, maker=ended)) is State.DEAD


async def test_a_live_scheduler_gets_more_time_to_answer_than_one_without_a_sign_of_life(platform, cluster):
    async with scheduler() as running:
        asked, identity = [], running.handlers["identity"]

        async def late(*arguments, **more):
            asked.append(1)
            # The quick look is over by then.
            await asyncio.sleep(1)
            return identity(*arguments, **more)

        running.handlers["identity"] = late
        for silence, lives in (None, False), (3600, False), (60, True):
            record = cluster(running.address, silence, id=running.id, options={"platform": "local"})
            [row] = await operations.describe([record], timeout=0.5, patience=120)
            assert (row["status"] == "running") is lives
        assert asked


@pytest.mark.slow
async def test_among_two_hundred_records_those_that_are_alive_are_found(tmp_path):
    """Half of them stale: refused, or silent as where a pod was."""
    with contextlib.ExitStack() as stack:
        # A full backlog answers nobody, as does an address that nobody has any more.
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        refusing = stack.enter_context(socket.socket())
        refusing.bind(("127.0.0.1", 0))
        stale = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (silent, refusing)]
        async with scheduler() as running:
            for i in range(100):
                write_record(record_of(running, f"live-{i}"), tmp_path)
                silent_one = SchedulerState(address=stale[i % 2])
                write_record(Record(f"stale-{i}", scheduler=silent_one), tmp_path)
            before = descriptors()
            found = await identities(records(tmp_path), timeout=10)
            end = time.monotonic()
            assert set(found) == {f"live-{i}" for i in range(100)}
            assert {each["id"] for each in found.values()} == {running.id}
            while descriptors() > before:  # the silent ones' are not kept until the system gives up
                assert time.monotonic() < end + 60
                await asyncio.sleep(0.01)


def descriptors():
    return len(os.listdir("/proc/self/fd"))
