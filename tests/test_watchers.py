"""Who watches the board, and when a cluster is an orphan. Time passes by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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

    def __init__(self):
        self.now = 1000.0
        self.clients = {}
        self.watchers = Watchers(self.clients, timeout=5.0, inside="cml-0123")
        self.comms = {}
        self.silent = set()

    def monotonic(self):
        return self.now

    def hear(self, watcher, counts=True):
        """Let a watcher send a message, and do so regularly from now on."""
        comm, _ = self.comms.setdefault(watcher, (Comm(), counts))
        self.watchers.hear(watcher, counts, comm)

    def leave(self, watcher):
        comm, _ = self.comms.pop(watcher)
        comm.is_closed = True

    def client(self, name="Client-1"):
        self.clients[name] = SimpleNamespace(last_seen=1.7e9)

    def after(self, seconds, step=STEP):
        """Let time pass. Return after how many seconds the cluster is an orphan, or None."""
        start, end = self.now, self.now + seconds
        while self.now < end:
            self.now += step
            for name in self.comms.keys() - self.silent:
                self.hear(name, self.comms[name][1])
            for name in self.clients.keys() - self.silent:
                self.clients[name].last_seen += step
            self.watchers.update(self.now)
            if self.watchers.is_orphan(self.now):
                return self.now - start
        return None


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(module, "time", world)
    world.watchers.update(world.now)
    return world


def test_a_scheduler_without_a_watcher_and_a_client_is_an_orphan(world):
    assert world.after(60) == 5


def test_without_a_timeout_nothing_is_an_orphan(world):
    world.watchers.timeout = None
    assert world.after(1000) is None


def test_the_time_begins_when_the_last_watcher_has_left(world):
    world.hear("one")
    world.hear("other")
    assert world.after(10) is None
    world.leave("one")
    assert world.after(10) is None
    world.leave("other")
    assert world.after(60) == 5 + STEP


def test_a_watcher_that_comes_in_time_keeps_the_scheduler(world):
    assert world.after(4.5) is None
    world.hear("one")
    assert world.after(10) is None
    world.leave("one")
    assert world.after(5) is None
    assert world.after(1) == STEP


def test_a_watcher_whose_network_is_silent_has_left_after_a_lease(world):
    world.hear("one")
    world.silent.add("one")
    assert world.after(60) == timing.lease + STEP + 5
    assert not world.watchers.has("one")


@pytest.mark.parametrize("counts", [True, False])
def test_one_that_only_looks_is_here_and_keeps_no_orphan(world, counts):
    world.hear("one", counts)
    assert (world.after(60) is None) is counts
    assert world.watchers.has("one")
    assert not world.watchers.has("other")


def test_a_watcher_is_logged_when_it_comes_and_when_it_has_left(world, caplog):
    caplog.set_level("INFO", logger="distributed.scheduler.dask_cml")
    for times in (1, 2):
        world.hear("one")
        world.hear("one")
        assert caplog.text.count("Process one watches from tcp://10.0.0.1:1") == times
        world.leave("one")
        world.after(STEP)
        assert caplog.text.count("Process one watches no more") == times


def test_a_client_keeps_the_scheduler_until_it_leaves(world):
    world.client()
    assert world.after(1000) is None
    world.clients.clear()
    assert world.after(60) == 5 + STEP


def test_a_client_whose_network_is_silent_is_disconnected_after_a_minute(world):
    world.client()
    world.silent.add("Client-1")
    assert 60 < world.after(200) <= 70


@pytest.mark.parametrize("name", ["fire-and-forget", "Client-worker-1234"])
def test_a_client_of_dask_itself_does_not_keep_an_orphan(world, name):
    world.client(name)
    assert world.after(60) == 5


@pytest.mark.parametrize("name", ["Client-cml-0123-1234", "MyClient-cml-0123-1234"])
def test_a_client_in_the_clusters_own_session_does_not_keep_an_orphan(world, name):
    world.client(name)
    assert world.after(60) == 5


@pytest.mark.parametrize("name", ["Client-cml-01234-1234", "Client-cml-9999-1234", "Client-mine-1234"])
def test_a_client_elsewhere_keeps_an_orphan(world, name):
    world.client(name)
    assert world.after(60) is None


def test_a_client_stays_connected_if_the_clock_is_set(world):
    world.client()
    assert world.after(30) is None
    world.clients["Client-1"].last_seen -= 100_000
    assert world.after(55) is None


def test_a_scheduler_that_was_stopped_first_reads_the_messages_of_that_time(world):
    world.hear("one")
    world.client()
    world.silent = {"one", "Client-1"}
    assert world.after(10) is None
    assert world.after(1000, step=1000) is None
    assert world.after(10) is None
    assert world.after(60) is not None
