"""Which clusters are alive: the answers of their schedulers, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import time

import dask
import pytest
from clusters import write_record
from distributed import Scheduler, Worker
from distributed.protocol.serialize import ToPickle
from distributed.security import Security
from schedulers import prepare, scheduler_in
from wire_samples import framed

from dask_cml.identity import Identity
from dask_cml.layout import scheduler_file
from dask_cml.records import operations
from dask_cml.records.liveness import State, is_alive, judge, look, silence
from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.records.store import records
from dask_cml.scheduler import state_file


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
    assert await look([]) == {}


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
        with dask.config.set({"distributed.comm.tls.ciphers": "ECDHE+AESGCM"}):
            assert await is_alive(dataclasses.replace(record, security=files))
        assert not await is_alive(record, timeout=1)
        (tmp_path / "tls_client_key").unlink()
        assert not await is_alive(dataclasses.replace(record, security=files))
        os.mkfifo(tmp_path / "tls_client_key")  # opening it would wait for ever
        assert not await is_alive(dataclasses.replace(record, security=files), timeout=60)


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
        scheduler = SchedulerState(address=address, id=id, session="s")
        return Record("a", maker=maker, scheduler=scheduler, **more)

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


async def test_an_unreachable_scheduler_is_dead_if_its_session_has_ended(cluster, listener):
    for status in ("failed", "stopped", "succeeded", "timedout"):
        assert await state(cluster(address(listener)), status) is State.DEAD
    for status in ("running", "scheduling", "STOPPING", "UNKNOWN", None):
        assert await state(cluster(address(listener)), status) is State.UNKNOWN


@pytest.mark.parametrize("listed", ["running", None])
async def test_an_unreachable_scheduler_is_dead_after_two_minutes_of_silence(cluster, listener, listed):
    assert await state(cluster(address(listener), silence=60), listed) is State.UNKNOWN
    assert await state(cluster(address(listener), silence=130), listed) is State.DEAD


async def test_an_unreachable_scheduler_is_dead_at_once_if_it_has_closed(cluster, listener):
    record = cluster(address(listener), silence=1)
    closed = dataclasses.replace(record.scheduler, closed="orphaned")
    assert await state(record, None) is State.UNKNOWN
    assert await state(dataclasses.replace(record, scheduler=closed), None) is State.DEAD


async def test_a_cluster_whose_next_scheduler_lost_its_launcher_is_dead_only_after_two_minutes(cluster):
    """Another manager may launch it instead."""
    ended = dataclasses.replace(Maker.this_process(), started=1.0)
    assert await state(cluster(None, maker=ended)) is State.DEAD
    assert await state(cluster(None, silence=60, maker=ended)) is State.UNKNOWN
    assert await state(cluster(None, silence=130, maker=ended)) is State.DEAD


async def test_a_program_that_accepts_connections_may_be_the_scheduler(cluster, listener):
    listener.listen()
    for silent in address(listener), address(listener).replace("tcp", "tls"):
        record = cluster(silent, silence=3600)
        assert await state(record, "failed", timeout=1) is State.UNKNOWN


async def test_a_cluster_is_dead_if_another_scheduler_has_its_address(cluster):
    async with scheduler() as running:
        assert await state(cluster(running.address, silence=60, id="Scheduler-other")) is State.DEAD
        assert await state(cluster(running.address, silence=60, id=running.id)) is State.ALIVE


async def test_a_cluster_whose_creator_runs_is_not_dead(cluster, listener):
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
async def test_among_two_hundred_records_those_that_are_alive_are_found(state):
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
                write_record(record_of(running, f"live-{i}"))
                silent_one = SchedulerState(address=stale[i % 2])
                write_record(Record(f"stale-{i}", scheduler=silent_one))
            before = descriptors()
            findings = await look(records(), timeout=10)
            end = time.monotonic()
            found = {name: each.identity for name, each in findings.items() if each.identity}
            assert set(found) == {f"live-{i}" for i in range(100)}
            assert {each.id for each in found.values()} == {running.id}
            while descriptors() > before:  # the silent ones' are not kept until the system gives up
                assert time.monotonic() < end + 60
                await asyncio.sleep(0.01)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


# -- programs that answer as a scheduler


@contextlib.asynccontextmanager
async def impostor(sent=None):
    """A program at a scheduler's address: it keeps what it receives, and sends what it is given."""
    received = []

    async def serve(reader, writer):
        if sent is not None:
            writer.write(sent)
        received.append(b"")
        while chunk := await reader.read(2**16):
            received.append(chunk)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", received


@pytest.mark.parametrize("silence", [None, 3600])
async def test_without_keys_and_without_a_sign_of_life_a_program_at_the_address_is_sent_nothing(
    cluster, silence
):
    async with impostor() as (address, received):
        found = (await judge([cluster(address, silence)], timeout=5, api=Listing("running")))["a"]
        assert found.state is State.UNKNOWN
        assert "it has no keys" in found.why
        assert "run `dask cml delete a`" in found.why
        assert received == [b""] * len(received)


async def test_a_program_at_a_scheduler_s_address_runs_no_code_in_the_probing_process(cluster, hostile):
    async with impostor(framed(ToPickle(hostile)) * 3) as (address, received):
        [row] = await operations.describe([cluster(address, silence=1)], timeout=5)
        assert row["status"] == "not answering"
        assert row["problem"] == "the scheduler's answer is invalid: identity=None"
        assert any(received)
    assert not hostile.ran


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nthreads": "many"}, "nthreads='many'"),
        ({"nthreads": -1}, "nthreads=-1"),
        ({"nthreads": float("nan")}, "nthreads=nan"),
        ({"memory_limit": float("inf")}, "memory_limit=inf"),
        ({"memory_limit": 2.0**70}, "memory_limit=1.18"),
        ({"name": None}, "name=None"),
        ({"name": "x" * 2000}, "name='xxx"),
        ({"name": {"a": 1}}, "name={'a': 1}"),
    ],
)
async def test_an_invalid_answer_is_a_problem_of_its_own_cluster_only(cluster, change, words):
    async with scheduler() as good, scheduler() as bad:
        worker = {"name": "a-0", "nthreads": 1, "memory_limit": 1, **change}
        bad.handlers["identity"] = lambda: {"id": bad.id, "services": {}, "workers": {"tcp://w": worker}}
        records = [
            cluster(bad.address, silence=1, id=bad.id),
            record_of(good, "b"),
        ]
        first, second = await operations.describe(records, timeout=60)
        assert (first["status"], second["status"]) == ("not answering", "running")
        assert words in first["problem"]
        assert len(first["problem"]) < 200
        json.dumps([first, second], allow_nan=False)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:99999999",
        "tcp://a\0b:1",
        "tcp://",
        "",
        "x",
        "tcp://[::1",
        "ucx://a:1",
        "tcp://a..b:1",
    ],
)
async def test_an_invalid_address_is_a_problem_of_its_own_cluster_only(cluster, address):
    async with scheduler() as good:
        records = [
            cluster(address, silence=1),
            record_of(good, "b"),
        ]
        rows = await operations.describe(records, timeout=60)
    assert [row["status"] for row in rows] == ["not answering", "running"]


def test_a_pipe_in_place_of_a_sign_of_life_blocks_no_process(state):
    (state / "mine").mkdir(parents=True)
    os.mkfifo(state / "mine" / scheduler_file(0))
    assert silence(Record("mine")) is None


@pytest.mark.parametrize("answer", [None, [], {"workers": {}}, {"id": "a", "workers": [1]}, {"id": 1.5}])
async def test_an_answer_without_an_identity_is_invalid(answer):
    with pytest.raises(ValueError, match="the scheduler's answer is invalid"):
        Identity.read(answer)


async def test_a_worker_s_name_may_be_a_number(cluster):
    async with scheduler() as running, Worker(running.address, name=7):
        [row] = await operations.describe([cluster(running.address, 1, id=running.id)], timeout=60)
        assert (row["status"], row["workers"], row["groups"]) == ("running", 1, {"default": 1})


async def test_a_scheduler_leaves_signs_of_life_in_its_clusters_folder(state, monkeypatch, holds):
    state.mkdir(mode=0o700)
    assert silence(Record("mine")) is None
    for name in "SIGN_OF_LIFE", "_REST":
        monkeypatch.setattr(state_file, name, 0.05)
    folder = prepare(state / "mine")
    async with scheduler_in(folder):
        sign = folder / scheduler_file(0)
        await holds(sign.exists)
        os.utime(sign, (0, 0))
        await holds(lambda: silence(Record("mine")) < 3600)
