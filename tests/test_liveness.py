"""Which clusters are alive, by their files and the list of sessions, and which are orphans, by watchers."""

import asyncio
import contextlib
import dataclasses
import os
import socket
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from clusters import new_record, sessions
from distributed import Client, Scheduler
from schedulers import RECORD

from dask_cml.layout import scheduler_file
from dask_cml.protocol import USERS, Rank
from dask_cml.records import operations, store
from dask_cml.records.store import Maker, Present, SchedulerState, State, judge, silence
from dask_cml.scheduler import plugin
from dask_cml.timing import timing

GONE = Maker("elsewhere", 1, 1.0, "gone")
KEYS = {"tls_ca_file": "/no/such/file"}
UNREACHABLE = "tls://127.0.0.1:1"


@pytest.fixture
def cluster(state):
    """Return a record whose scheduler has left its last sign of life some seconds ago."""

    def cluster(address, silence=None, name="a", id=RECORD, maker=GONE, security=KEYS, **more):
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


async def found(record, listed="running"):
    """Judge it by a platform that lists one session, or does not answer."""
    api = AsyncMock()
    api.sessions.return_value = {"s": {"id": "s", "status": listed}}
    if listed is None:
        api.sessions.side_effect = OSError("the platform does not answer")
    return (await judge([record], api=api))["a"]


async def state_of(record, listed="running"):
    return (await found(record, listed)).state


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


@pytest.mark.slow
async def test_an_unreachable_or_launched_scheduler_is_dead_if_its_session_has_ended(cluster):
    # One that is launched may start after its creator has ended.
    ended = dataclasses.replace(Maker.this_process(), started=1.0)
    launched = dataclasses.replace(cluster(None, maker=ended), launches=sessions(s="scheduler"))
    for record in cluster(UNREACHABLE), launched:
        for status in ("failed", "timedout"):
            assert await state_of(record, status) is State.DEAD
        for status in ("running", "scheduling", "STOPPING", None):
            assert await state_of(record, status) is State.UNKNOWN


@pytest.mark.parametrize(("listed", "has_keys"), [("running", True), (None, True), (None, False)])
async def test_no_silence_proves_that_a_scheduler_has_ended(cluster, listed, has_keys):
    """It may be frozen, or its disk may be full."""
    record = cluster(UNREACHABLE, silence=30 * 86400, security=KEYS if has_keys else None)
    finding = await found(record, listed)
    assert finding.why == f"its scheduler at {UNREACHABLE} has left no sign of life for 30 d"


@pytest.mark.parametrize(
    ("creator", "listed", "expected", "words"),
    [
        ("ended", None, State.DEAD, "the program of its scheduler's session s has ended"),
        ("elsewhere", None, State.UNKNOWN, "a process of another session may replace its scheduler"),
        ("runs", None, State.UNKNOWN, "its manager or creator still runs"),
        ("elsewhere", "failed", State.DEAD, "its scheduler's session s has ended"),
    ],
)
async def test_the_word_of_a_schedulers_session_proves_its_end(cluster, creator, listed, expected, words):
    this = Maker.this_process()
    maker = {"ended": dataclasses.replace(this, started=1.0), "elsewhere": GONE, "runs": this}[creator]
    record = cluster(UNREACHABLE, silence=1, maker=maker)
    ended = dataclasses.replace(record, ended=sessions(s="scheduler"))
    finding = await found(ended, listed)
    assert finding.state is expected
    assert words in finding.why
    if creator == "ended":  # its workers may be stopped with it: the platform says so a moment later
        assert store.why_ended(ended) is not None
        assert store.why_ended(ended, {"s": {"id": "s", "status": "running"}}) is None


async def test_a_cluster_whose_creator_runs_is_not_dead_nor_one_without_a_launcher_for_two_minutes(cluster):
    maker = Maker.this_process()
    running = await found(cluster(UNREACHABLE, maker=maker), "failed")
    assert running.state is State.UNKNOWN
    assert f"its manager or creator still runs, process {maker.pid}" in running.why
    assert await state_of(cluster(None, maker=maker)) is State.UNKNOWN
    assert await state_of(cluster(None)) is State.UNKNOWN
    ended = dataclasses.replace(maker, started=1.0)  # another process may launch the next scheduler instead
    assert await state_of(cluster(None, maker=ended)) is State.DEAD
    assert await state_of(cluster(None, silence=60, maker=ended)) is State.UNKNOWN
    assert await state_of(cluster(None, silence=130, maker=ended)) is State.DEAD


def test_a_pipe_in_place_of_a_sign_of_life_blocks_no_process_and_a_full_disk_proves_no_silence(
    state, monkeypatch
):
    (state / "mine").mkdir(parents=True)
    os.mkfifo(state / "mine" / scheduler_file(0))
    assert silence(new_record("mine")) is None
    (state / "full").mkdir()
    (state / "full" / scheduler_file(0)).touch()
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError("no space")))
    assert silence(new_record("full")) == 0.0


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize(
    ("silent", "closed", "expected", "words"),
    [
        (1, None, State.ALIVE, ""),
        (1, "orphaned", State.DEAD, "its scheduler has closed: orphaned"),
        (None, None, State.UNKNOWN, "has left no sign of life lately"),
        (3600, None, State.UNKNOWN, "has left no sign of life for 60 min"),
    ],
)
async def test_a_cluster_is_judged_by_its_files_and_sent_nothing(
    cluster, has_keys, silent, closed, expected, words
):
    """Another program may answer at its address."""
    async with impostor() as (address, received):
        record = cluster(f"tls://{address}", silent, security=KEYS if has_keys else None, closed=closed)
        finding = await found(record, listed=None)
        assert finding.state is expected
        assert words in finding.why
    assert received == []


STEP = 0.5


class Comm:
    """A watcher's connection."""

    peer_address = "tcp://10.0.0.1:1"

    def __init__(self):
        self.is_closed = False

    def closed(self):
        return self.is_closed


class World:
    """A scheduler's watchers and clients, and their clock."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(plugin, "time", self)
        self.clients = {}
        inside = SimpleNamespace(extra={"cml": {"name": "mine-0"}})
        self.scheduler = SimpleNamespace(
            address="tcp://10.0.0.7:1",
            client_comms=self.clients,
            host_info={host: {"addresses": {"tcp://10.0.0.9:1"}} for host in ("10.0.0.7", "10.0.0.9")},
            workers={"tcp://10.0.0.9:1": inside},
        )
        self.watchers = self.watch()
        self.comms = {}
        self.silent = set()

    def watch(self, **options):
        return plugin.Watchers(self.scheduler, inside="cml-0123", timeout=5.0, **options)

    def monotonic(self):
        return self.now

    def hear(self, watcher, rank=Rank.USER):
        """Let a watcher send a message, and do so regularly from now on."""
        comm, _ = self.comms.setdefault(watcher, (Comm(), rank))
        self.watchers.hear(watcher, rank, "its user", comm)

    def leave(self, watcher):
        comm, _ = self.comms.pop(watcher)
        comm.is_closed = True

    def client(self, name="Client-1", host="10.0.0.1"):
        comm = Comm()
        comm.peer_address = f"tcp://{host}:1"
        self.clients[name] = SimpleNamespace(comm=comm)

    def after(self, seconds, step=STEP):
        start, end = self.now, self.now + seconds
        while self.now < end:
            self.now += step
            for name in self.comms.keys() - self.silent:
                self.hear(name, self.comms[name][1])
            self.watchers.update()
            if self.watchers.is_orphan:
                return self.now - start
        return None


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_a_silent_watcher_keeps_no_cluster_after_a_lease_and_no_orphan_while_it_is_connected(world):
    """Its event loop or its interpreter may be held."""
    world.hear("one")
    assert world.watchers.answers("one")
    world.silent.add("one")
    assert world.after(timing.lease) is None
    assert world.watchers.answers("one")
    assert world.after(STEP) is None
    assert not world.watchers.answers("one")
    assert world.watchers.has_user
    assert world.after(1000) is None
    world.leave("one")
    assert world.after(60) == 5


@pytest.mark.parametrize("rank", Rank)
def test_only_processes_of_users_keep_an_orphan_whoever_answers(world, rank):
    world.hear("one", rank)
    assert (world.after(60) is None) is world.watchers.has_user is (rank in USERS)
    assert world.watchers.answers("one")
    assert not world.watchers.answers("other")


@pytest.mark.parametrize(
    ("name", "is_user"),
    [
        ("Client-worker-1234", False),
        ("Client-cml-0123-1234", False),
        ("MyClient-cml-0123-1234", False),
        ("Client-cml-01234-1234", True),
        ("Client-cml-9999-1234", True),
        ("Client-mine-1234", True),
    ],
)
def test_a_client_of_dask_itself_or_in_the_clusters_own_session_does_not_keep_an_orphan(world, name, is_user):
    world.client(name)
    assert (world.after(60) is None) == is_user


def test_a_client_in_a_workers_session_does_not_keep_an_orphan_but_one_beside_the_scheduler_does(world):
    world.client(host="10.0.0.9")
    assert world.after(60) == 5
    world.client(host="10.0.0.7")  # all programs share the host of a laptop
    assert world.after(60) is None


def test_the_first_watcher_may_take_longer_to_come_but_only_the_first(world):
    world.watchers = world.watch(patience=20.0)
    world.hear("page", Rank.OBSERVER)
    assert world.after(60) == 20
    world.hear("one")
    world.leave("one")
    assert world.after(60) == 5
    world.watchers = world.watch(patience=1.0)
    assert world.after(60) == 5


def test_a_keeper_that_is_silent_does_not_keep_the_cluster_by_pauses_of_the_scheduler(world):
    world.hear("one")
    world.silent.add("one")
    for _ in range(7):
        world.after(10, step=10)
        assert world.watchers.answers("one")  # its messages of that time may arrive only now
    world.after(10, step=10)
    assert not world.watchers.answers("one")


async def test_the_kernel_closes_connections_to_machines_that_are_gone(security):
    """Dask sets that. Otherwise, such a connection would keep a cluster for hours."""
    async with (
        Scheduler(port=0, dashboard_address=":0", security=security) as scheduler,
        Client(scheduler.address, asynchronous=True, security=security) as client,
    ):
        connection = scheduler.client_comms[client.id].comm.stream.socket
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + count * interval == 30
