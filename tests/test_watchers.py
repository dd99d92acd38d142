"""Who watches the board, and when a cluster is an orphan. Time passes by hand."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from distributed import Client, Scheduler
from distributed.security import Security

from dask_cml.protocol import USERS, Rank
from dask_cml.scheduler import watchers as module
from dask_cml.scheduler.watchers import Watchers
from dask_cml.timing import timing

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
        monkeypatch.setattr(module, "time", self)
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
        return Watchers(self.scheduler, inside="cml-0123", timeout=5.0, **options)

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
        """Let time pass. Return after how many seconds the cluster is an orphan, or None."""
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


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["tcp", "tls"])
async def test_the_kernel_closes_connections_to_machines_that_are_gone(is_encrypted):
    """Dask sets that. Otherwise, such a connection would keep a cluster for hours."""
    if is_encrypted:
        pytest.importorskip("cryptography")
    security = Security.temporary() if is_encrypted else None
    async with (
        Scheduler(port=0, dashboard=False, security=security) as scheduler,
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
