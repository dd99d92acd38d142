"""Which managers and clients are connected, which manager leads, and when a cluster is an orphan.

Time passes by hand.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dask_cml.scheduler import presence as module
from dask_cml.scheduler.presence import Presence

STEP = 0.5


class Comm:
    """A manager's connection."""

    peer_address = "tcp://10.0.0.1:1"

    def __init__(self):
        self.is_closed = False

    def closed(self):
        return self.is_closed


class World:
    """A scheduler's managers and clients, and their clock."""

    def __init__(self, timeout=5.0):
        self.now = 1000.0
        self.clients = {}
        self.presence = Presence(self.clients, timeout)
        self.comms = {}
        self.silent = set()

    def monotonic(self):
        return self.now

    def hear(self, manager, observes=False, lease=15.0):
        """Let a manager send a message, and do so regularly from now on."""
        comm = self.comms.setdefault(manager, (Comm(), observes, lease))[0]
        return self.presence.hear(manager, observes, lease, comm)

    def leave(self, manager):
        self.comms.pop(manager)[0].is_closed = True

    def client(self, name="Client-1"):
        self.clients[name] = SimpleNamespace(last_seen=1.7e9)

    def after(self, seconds, step=STEP):
        """Let time pass. Return after how many seconds the cluster is an orphan, or None."""
        start, end = self.now, self.now + seconds
        while self.now < end:
            self.now += step
            for name in self.comms.keys() - self.silent:
                self.hear(name, *self.comms[name][1:])
            for name in self.clients.keys() - self.silent:
                self.clients[name].last_seen += step
            self.presence.look(self.now)
            if self.presence.is_orphan(self.now):
                return self.now - start
        return None


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(module, "time", world)
    world.presence.look(world.now)
    return world


# -- orphans


def test_a_scheduler_without_a_manager_and_a_client_is_an_orphan(world):
    assert world.after(60) == 5


def test_without_a_timeout_nothing_is_an_orphan(world):
    world.presence.timeout = None
    assert world.after(1000) is None


def test_the_time_begins_when_the_last_manager_has_left(world):
    world.hear("one")
    world.hear("other")
    assert world.after(10) is None
    world.leave("one")
    assert world.after(10) is None
    world.leave("other")
    assert world.after(60) == 5 + STEP


def test_a_manager_that_comes_in_time_keeps_the_scheduler(world):
    assert world.after(4.5) is None
    world.hear("one")
    assert world.after(10) is None
    world.leave("one")
    assert world.after(5) is None
    assert world.after(1) == STEP


def test_a_manager_whose_network_is_silent_is_disconnected_after_its_lease(world):
    world.hear("one", lease=15.0)
    world.silent.add("one")
    assert world.after(60) == 15 + STEP + 5
    assert not world.presence.has("one")


@pytest.mark.parametrize("observes", [True, False])
def test_only_a_manager_that_observes_keeps_no_orphan(world, observes):
    world.hear("one", observes)
    assert (world.after(60) is None) is not observes
    assert world.presence.has("one")


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


# -- managers


def test_a_manager_is_new_once(world, caplog):
    caplog.set_level("INFO", logger="distributed.scheduler.dask_cml")
    world.hear("one")
    world.hear("one")
    assert world.presence.managers == 1
    assert caplog.text.count("Manager one connected") == 1
    world.leave("one")
    assert world.presence.managers == 0
    world.after(STEP)
    world.hear("one")
    assert caplog.text.count("Manager one connected") == 2


def test_no_worker_outside_the_fleet_counts_as_connected(world):
    assert not world.presence.has("one")
    assert not world.presence.has(None)


# -- the leader


def test_the_first_manager_leads_and_goes_on_when_others_come(world):
    assert world.presence.next_leader(None) is None
    world.hear("one")
    assert world.presence.next_leader(None) == "one"
    world.hear("other")
    assert world.presence.next_leader("one") == "one"


def test_another_manager_leads_only_if_the_creator_does_not_connect_in_time(world):
    presence = Presence({}, None, creator="one")
    presence.hear("other", False, 15.0, Comm())
    assert presence.next_leader("one") == "one"
    world.now += 14.0
    assert presence.next_leader("one") == "one"
    world.now += 1.0
    assert presence.next_leader("one") == "other"


def test_another_manager_leads_at_once_after_the_creator_has_left(world):
    presence, comm = Presence({}, None, creator="one"), Comm()
    presence.hear("one", False, 15.0, comm)
    presence.hear("other", False, 15.0, Comm())
    comm.is_closed = True
    assert presence.next_leader("one") == "other"


def test_another_manager_leads_when_the_leader_has_left(world):
    world.hear("one")
    world.hear("other")
    world.leave("one")
    assert world.presence.next_leader("one") == "other"
    world.leave("other")
    assert world.presence.next_leader("other") == "other"  # nobody else can


def test_a_manager_that_only_observes_leads_if_no_other_can(world):
    world.hear("watcher", observes=True)
    assert world.presence.next_leader(None) == "watcher"
    world.hear("one")
    assert world.presence.next_leader("watcher") == "one"
