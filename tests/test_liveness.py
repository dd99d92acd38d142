"""Which clusters are alive: by the answers of their schedulers or by their files, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket

import dask
import pytest
from clusters import new_record, sessions
from distributed.security import Security
from schedulers import RECORD, prepare, scheduler_in

from dask_cml.layout import scheduler_file
from dask_cml.protocol import HELLO
from dask_cml.records import liveness, operations
from dask_cml.records.liveness import State, judge, silence
from dask_cml.records.record import Maker, Present, SchedulerState

GONE = Maker("elsewhere", 1, 1.0, "gone")


@pytest.fixture(scope="module")
def security():
    pytest.importorskip("cryptography")
    return Security.temporary()


@pytest.fixture
def keys(security, tmp_path):
    """The paths of the keys for a record."""
    paths = {}
    for key in ("tls_ca_file", "tls_client_cert", "tls_client_key"):
        (tmp_path / key).write_text(getattr(security, key))
        paths[key] = str(tmp_path / key)
    return paths


@pytest.fixture
def scheduler(security, tmp_path):
    """Run a cluster's scheduler."""
    (tmp_path / "running").mkdir()
    return lambda: scheduler_in(prepare(tmp_path / "running" / "a"), security=security)


@pytest.fixture
def cluster(state, keys):
    """Return a record whose scheduler has left its last sign of life some seconds ago."""

    def cluster(address, silence=None, name="a", id=RECORD, maker=GONE, security=keys, **more):
        if silence is not None:
            (state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            state.chmod(0o700)
            sign = state / name / scheduler_file(0)
            sign.unlink(missing_ok=True)
            sign.touch()
            now = sign.stat().st_mtime
            os.utime(sign, (now, now - silence))
        scheduler = SchedulerState(address=address, session="s", **more)
        options = {"platform": "local"}
        return new_record(name, id=id, maker=maker, scheduler=scheduler, security=security, options=options)

    return cluster


class Listing:
    """A platform that lists one session."""

    def __init__(self, status):
        self.status = status
        self.calls = 0

    async def sessions(self):
        self.calls += 1
        if self.status is None:
            raise OSError("the platform does not answer")
        return {"s": {"id": "s", "status": self.status}}


async def is_alive(record, timeout=5):
    return (await judge([record], timeout))["a"].state is State.ALIVE


async def found(record, listed="running", timeout=60):
    return (await judge([record], timeout=timeout, api=Listing(listed)))["a"]


async def state_of(record, listed="running"):
    """Judge a cluster whose scheduler does not answer."""
    return (await found(record, listed, timeout=0.5)).state


@pytest.fixture
def unreachable():
    """An address at which nothing accepts connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tls://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.asynccontextmanager
async def impostor():
    """A program at a scheduler's address, and what it receives."""
    received = []

    async def serve(reader, writer):
        received.append(b"")
        while chunk := await reader.read(2**16):
            received.append(chunk)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", received


# -- by the scheduler's answer


async def test_a_scheduler_is_known_by_the_record_that_it_names(cluster, scheduler):
    async with scheduler() as running:
        own = cluster(running.address)
        assert await is_alive(own)
        # On CML an address is soon another scheduler's.
        other = await found(cluster(running.address, silence=60, id="fedcba9876543210"))
        assert (other.state, other.why) == (State.DEAD, f"another scheduler answers at {running.address}")
    assert not await is_alive(own, timeout=0.5)
    assert not await is_alive(cluster(None))
    assert await judge([], timeout=1) == {}


async def test_the_keys_of_a_scheduler_are_found_by_the_record(cluster, scheduler, keys, tmp_path):
    async with scheduler() as running:
        record = cluster(running.address)
        with dask.config.set({"distributed.comm.tls.ciphers": "ECDHE+AESGCM"}):
            assert await is_alive(record)
        (tmp_path / "tls_client_key").unlink()
        assert not await is_alive(record)
        os.mkfifo(tmp_path / "tls_client_key")  # opening it would wait for ever
        assert not await is_alive(record, timeout=60)


async def test_a_program_that_accepts_connections_and_does_not_answer_may_be_the_busy_scheduler(cluster):
    """A platform that does not answer either is asked once."""
    platform = Listing(None)
    async with impostor() as (address, received):
        finding = (await judge([cluster(f"tls://{address}", silence=1)], timeout=1, api=platform))["a"]
    assert finding.state is State.UNKNOWN
    assert platform.calls == 1
    assert finding.why == f"its scheduler at tls://{address} does not answer; it may be busy"
    assert any(received)


async def test_a_wrong_answer_is_a_problem_of_its_own_cluster_only(cluster, scheduler):
    async with scheduler() as good, scheduler() as bad:
        for answer in {}, {"record": 3}, {"record": [RECORD]}, None, [1]:
            bad.handlers[HELLO] = lambda answer=answer: answer
            findings = await judge([cluster(bad.address), cluster(good.address, name="b")], timeout=60)
            assert (findings["a"].state, findings["b"].state) == (State.DEAD, State.ALIVE)


async def test_an_invalid_address_is_a_problem_of_its_own_cluster_only(cluster, scheduler):
    invalid = "tls://127.0.0.1:99999999", "tls://a\0b:1", "tls://", "", "x", "tls://[::1", "ucx://a:1"
    async with scheduler() as good:
        records = [cluster(address, name=address) for address in invalid]
        findings = await judge([*records, cluster(good.address, name="b")], timeout=1)
    assert findings.pop("b").state is State.ALIVE
    assert {finding.state for finding in findings.values()} == {State.UNKNOWN}


# -- for those who only show clusters: by the files and the platform's list


async def test_who_only_shows_a_cluster_reads_its_file_and_sends_its_scheduler_nothing(platform, cluster):
    problem = "worker a-0 has spilled"
    present = Present(workers=3, groups={"default": 3}, threads=6, memory=2**30, problem=problem)
    shown = ("status", "workers", "groups", "threads", "memory", "problem")
    async with impostor() as (address, received):
        address = f"tls://{address}"
        [row] = await operations.describe([cluster(address, 60, workers=present)])
        assert [row[name] for name in shown] == ["running", 3, {"default": 3}, 6, 2**30, problem]
        [row] = await operations.describe([cluster(address, 180, workers=present)])
        silent = f"its scheduler at {address} has left no sign of life for 3 min"
        assert [row[name] for name in shown] == ["not answering", None, None, None, None, silent]
        [row] = await operations.describe([cluster(address, 60, closed="orphaned")])
        assert (row["status"], row["problem"]) == ("stale", "its scheduler has closed: orphaned")
    assert received == []


# -- by the platform, the files and the creator


@pytest.mark.slow
async def test_an_unreachable_scheduler_is_dead_if_its_session_has_ended(cluster, unreachable):
    for status in ("failed", "timedout"):
        assert await state_of(cluster(unreachable), status) is State.DEAD
    for status in ("running", "STOPPING", None):
        assert await state_of(cluster(unreachable), status) is State.UNKNOWN


@pytest.mark.parametrize(("listed", "has_keys"), [("running", True), (None, True), (None, False)])
async def test_no_silence_proves_that_a_scheduler_has_ended(cluster, unreachable, keys, listed, has_keys):
    """It may be frozen, or its disk may be full."""
    record = cluster(unreachable, silence=30 * 86400, security=keys if has_keys else None)
    finding = await found(record, listed, timeout=0.5)
    assert finding.why == f"its scheduler at {unreachable} has left no sign of life for 30 d"


@pytest.mark.parametrize(
    ("creator", "listed", "expected", "words"),
    [
        ("ended", None, State.DEAD, "the program of its scheduler's session s has ended"),
        ("elsewhere", None, State.UNKNOWN, "a process of another session may replace its scheduler"),
        ("runs", None, State.UNKNOWN, "its creator still runs"),
        ("elsewhere", "failed", State.DEAD, "its scheduler's session s has ended"),
    ],
)
async def test_the_word_of_a_schedulers_session_proves_its_end(
    cluster, unreachable, creator, listed, expected, words
):
    this = Maker.this_process()
    maker = {"ended": dataclasses.replace(this, started=1.0), "elsewhere": GONE, "runs": this}[creator]
    record = cluster(unreachable, silence=1, maker=maker)
    ended = dataclasses.replace(record, ended=sessions(s="scheduler"))
    finding = await found(ended, listed, timeout=0.5)
    assert finding.state is expected
    assert words in finding.why


async def test_a_session_that_is_listed_as_running_outweighs_the_word_of_its_program(cluster, unreachable):
    """Its workers may be stopped with it: the platform says so a moment later."""
    maker = dataclasses.replace(Maker.this_process(), started=1.0)
    ended = dataclasses.replace(cluster(unreachable, silence=1, maker=maker), ended=sessions(s="scheduler"))
    assert liveness.why_ended(ended) is not None
    assert liveness.why_ended(ended, {"s": {"id": "s", "status": "running"}}) is None


async def test_a_scheduler_that_has_closed_is_not_connected_to_and_the_platform_is_not_asked(cluster):
    platform = Listing("running")
    async with impostor() as (address, received):
        record = cluster(f"tls://{address}", silence=1, closed="orphaned")
        findings = await judge([record], timeout=60, api=platform)
        assert not await is_alive(record)
    assert (findings["a"].state, findings["a"].why) == (State.DEAD, "its scheduler has closed: orphaned")
    assert (received, platform.calls) == ([], 0)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("scheduling", State.UNKNOWN), (None, State.UNKNOWN), ("failed", State.DEAD)],
)
async def test_a_launched_scheduler_may_start_after_its_creator_has_ended(cluster, listed, expected):
    ended = dataclasses.replace(Maker.this_process(), started=1.0)
    record = dataclasses.replace(cluster(None, maker=ended), launches=sessions(s="scheduler"))
    assert await state_of(record, listed) is expected


async def test_a_cluster_whose_next_scheduler_lost_its_launcher_is_dead_only_after_two_minutes(cluster):
    """Another process may launch it instead."""
    ended = dataclasses.replace(Maker.this_process(), started=1.0)
    assert await state_of(cluster(None, maker=ended)) is State.DEAD
    assert await state_of(cluster(None, silence=60, maker=ended)) is State.UNKNOWN
    assert await state_of(cluster(None, silence=130, maker=ended)) is State.DEAD


async def test_a_cluster_whose_creator_runs_is_not_dead(cluster, unreachable):
    maker = Maker.this_process()
    running = await found(cluster(unreachable, maker=maker), "failed", timeout=0.5)
    assert running.state is State.UNKNOWN
    assert f"its creator still runs, process {maker.pid}" in running.why
    assert await state_of(cluster(None, maker=maker)) is State.UNKNOWN
    assert await state_of(cluster(None)) is State.UNKNOWN


def test_a_pipe_in_place_of_a_sign_of_life_blocks_no_process(state):
    (state / "mine").mkdir(parents=True)
    os.mkfifo(state / "mine" / scheduler_file(0))
    assert silence(new_record("mine")) is None


# -- clusters without keys: another program may answer at the address


@pytest.mark.parametrize(
    ("silent", "closed", "expected", "words"),
    [
        (1, None, State.ALIVE, ""),
        (1, "orphaned", State.DEAD, "its scheduler has closed: orphaned"),
        (None, None, State.UNKNOWN, "has left no sign of life lately"),
        (3600, None, State.UNKNOWN, "has left no sign of life for 60 min"),
    ],
)
async def test_a_cluster_without_keys_is_judged_by_its_files_and_sent_nothing(
    cluster, silent, closed, expected, words
):
    async with impostor() as (address, received):
        finding = await found(cluster(f"tcp://{address}", silent, security=None, closed=closed), listed=None)
        assert finding.state is expected
        assert words in finding.why
    assert received == []
