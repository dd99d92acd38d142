"""The scheduler's plugin: who is there, and the end of clusters that nobody has any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time

import dask
import pytest
from distributed import Client, Scheduler
from distributed.core import rpc
from distributed.security import Security

from dask_cml.errors import CMLError
from dask_cml.manager.presence import Presence
from dask_cml.scheduler.plugin import NAME, CMLSchedulerPlugin
from dask_cml.wire import WATCHES


@contextlib.asynccontextmanager
async def scheduler(orphan_timeout=None, security=None):
    """A scheduler with the plugin, in which time passes by hand."""
    running = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0", security=security)
    async with running:
        await running.register_scheduler_plugin(
            CMLSchedulerPlugin(orphan_timeout), name=NAME, idempotent=True
        )
        running.plugins[NAME]._looking.stop()
        yield running


def plugin_of(scheduler):
    return scheduler.plugins[NAME]


def watch_of(scheduler):
    return plugin_of(scheduler)._watch


class Clock:
    def __init__(self, scheduler):
        self.watch = watch_of(scheduler)
        self.now = time.monotonic()
        self.watch.look(self.now)

    def after(self, seconds, step=0.5):
        """Let time pass, and return after how many seconds the cluster is an orphan."""
        end = self.now + seconds
        start = self.now
        while self.now < end:
            self.now += step
            if self.watch.look(self.now):
                return self.now - start
        return None


async def leave(presence, scheduler, holds, **change):
    await presence.close(**change)
    await holds(lambda: not watch_of(scheduler).has(presence.id))


# -- orphans


async def test_scheduler_without_manager_and_client_closes():
    async with scheduler(orphan_timeout=5) as running:
        assert Clock(running).after(60) == 5.0


async def test_scheduler_without_orphan_timeout_never_closes():
    async with scheduler(orphan_timeout=None) as running:
        assert Clock(running).after(1000) is None


async def test_count_begins_when_the_last_manager_has_left(holds):
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        one, other = Presence(running.address), Presence(running.address)
        await one.start()
        await other.start()
        assert clock.after(10) is None
        await leave(one, running, holds)
        assert clock.after(4) is None
        await leave(other, running, holds)
        assert clock.after(60) == 5.5


async def test_manager_that_comes_back_in_time_keeps_the_scheduler(holds):
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        assert clock.after(4.5) is None
        presence = Presence(running.address)
        await presence.start()
        assert clock.after(4.5) is None
        await leave(presence, running, holds)
        assert clock.after(4.5) is None
        assert clock.after(1) is not None


async def test_manager_that_says_nothing_any_more_is_gone_in_bounded_time():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        presence._silence = 15
        await presence.start()
        # Its connection is open, as it is where the network is silent.
        assert 20 <= clock.after(60) <= 21
        await presence.close()


async def test_manager_whose_connection_has_closed_is_gone_at_once(holds):
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        await presence.start()
        [comm] = presence._scheduler.comms
        comm.abort()
        await holds(lambda: not watch_of(running).has(presence.id))
        assert clock.after(60) == 5.5
        await presence.close()


async def test_client_keeps_the_scheduler_as_long_as_it_is_heard():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        async with Client(running.address, asynchronous=True) as client:
            for _ in range(4):
                assert clock.after(40) is None
                heard = running.clients[client.id].last_seen
                client._heartbeat()
                while running.clients[client.id].last_seen == heard:
                    await asyncio.sleep(0.01)
            # Its connection is open, as it is where the network is silent.
            assert 60 <= clock.after(200) <= 70
        assert client.id not in running.clients


async def test_scheduler_closes_after_the_last_client_has_left():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        async with Client(running.address, asynchronous=True):
            assert clock.after(30) is None
        assert clock.after(60) == 5.5


@pytest.mark.parametrize("name", ["worker", None])
async def test_client_of_a_task_is_nobody_s(name):
    """A worker has one, and keeps it, once a task has asked for it."""
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        async with Client(running.address, asynchronous=True, name=name):
            assert (clock.after(30) is None) == (name is None)


async def test_clock_that_is_set_makes_no_client_silent():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        async with Client(running.address, asynchronous=True) as client:
            running.clients[client.id].last_seen -= 100_000
            assert clock.after(50) is None


async def test_process_that_stood_still_hears_first_what_was_sent_meanwhile(holds):
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        await presence.start()
        assert clock.after(10) is None
        assert clock.after(1000, step=1000) is None
        assert clock.after(10) is None
        await leave(presence, running, holds)
        assert clock.after(4) is None
        assert clock.after(1000, step=1000) is None
        assert clock.after(60) == 5


async def test_manager_that_only_watches_does_not_keep_an_orphan():
    async with scheduler(orphan_timeout=5) as running:
        watcher = Presence(running.address, info={WATCHES: True})
        await watcher.start()
        try:
            assert watch_of(running).has(watcher.id)
            clock = Clock(running)
            assert clock.after(4) is None
            await watcher._beat()
            assert clock.after(2) is not None
        finally:
            await watcher.close()


async def test_orphan_closes_by_itself():
    running = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    async with running:
        presence = Presence(running.address, orphan_timeout=0.1)
        await presence.start()
        await presence.close()
        await asyncio.wait_for(running.finished(), 120)
        assert "orphaned: no manager and no client for 0.1 s" in str(running.get_logs())


# -- managers


async def test_second_registration_updates_and_does_not_double(holds):
    async with scheduler() as running:
        first = plugin_of(running)
        one = Presence(running.address, orphan_timeout=300)
        await one.start()
        other = Presence(running.address, orphan_timeout=10)
        await other.start()
        assert plugin_of(running) is first
        assert [*running.plugins].count(NAME) == 1
        assert running.handlers["cml_manager_heartbeat"] == first.heartbeat
        watch = watch_of(running)
        assert watch.timeout == 10
        assert watch.has(one.id)
        assert watch.has(other.id)
        await leave(one, running, holds)
        assert watch.has(other.id)
        await leave(other, running, holds, orphan_timeout=None)
        assert watch.timeout is None


async def test_manager_that_says_nothing_of_the_timeout_leaves_it():
    async with scheduler(orphan_timeout=7) as running:
        presence = Presence(running.address)
        await presence.start()
        await presence.close()
        assert watch_of(running).timeout == 7


async def test_many_managers_that_come_at_once_get_one_plugin():
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as running:
        managers = [Presence(running.address, orphan_timeout=300) for _ in range(10)]
        await asyncio.gather(*(each.start() for each in managers))
        assert running.handlers["cml_manager_heartbeat"] == plugin_of(running).heartbeat
        assert all(watch_of(running).has(each.id) for each in managers)
        await asyncio.gather(*(each.close() for each in managers))


async def test_manager_registers_again_where_the_plugin_is_gone(holds):
    async with scheduler() as running:
        presence = Presence(running.address, orphan_timeout=300, interval=0.02)
        await presence.start()
        running.remove_plugin(NAME)
        del running.handlers["cml_manager_heartbeat"]
        await holds(lambda: NAME in running.plugins)
        assert watch_of(running).timeout == 300
        await presence.close()


async def test_manager_survives_the_scheduler_and_leaves_quickly(holds):
    async with scheduler() as running:
        presence = Presence(running.address, interval=0.02)
        await presence.start()
    start = time.monotonic()
    await presence.close()
    await presence.close()
    assert time.monotonic() - start < 25  # a connection is tried for 30 s
    with (
        pytest.raises(OSError, match="Timed out"),
        dask.config.set({"distributed.comm.timeouts.connect": 0.1}),
    ):
        await Presence(running.address).start()


async def test_plugin_that_is_refused_is_an_error_that_says_so():
    with dask.config.set({"distributed.scheduler.blocked-handlers": ["register_scheduler_plugin"]}):
        running = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    async with running:
        presence = Presence(running.address)
        with pytest.raises(CMLError, match=r"refused dask-cml's plugin: .*explicitly disallowed"):
            await presence.start()
        await presence.close()


async def test_manager_is_there_by_tls():
    pytest.importorskip("cryptography")
    security = Security.temporary()
    async with scheduler(security=security) as running:
        presence = Presence(running.address, security.get_connection_args("client"))
        await presence.start()
        assert running.address.startswith("tls://")
        assert watch_of(running).has(presence.id)
        await presence.close()


# -- real processes

_MANAGER = """
import asyncio, sys
from dask_cml.manager.presence import Presence
async def manage():
    presence = Presence(sys.argv[1], orphan_timeout=1)
    presence._silence = 2
    await presence.start()
    print("there", flush=True)
    await asyncio.sleep(3600)
asyncio.run(manage())
"""


@contextlib.contextmanager
def process(*command, **options):
    with subprocess.Popen([sys.executable, *map(str, command)], **options) as started:
        try:
            yield started
        finally:
            started.kill()


@contextlib.contextmanager
def run_dask(program, folder, *arguments):
    command = ("-m", "dask", program, "--scheduler-file", folder / "scheduler.json", *arguments)
    with (folder / f"{program}.log").open("wb") as log, process(*command, stdout=log, stderr=log) as started:
        yield started


@pytest.fixture
def cluster(tmp_path, until):
    """A scheduler's and a worker's process, and the scheduler's address."""
    file = tmp_path / "scheduler.json"
    arguments = ("--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0")
    with run_dask("scheduler", tmp_path, *arguments) as scheduler:
        until(lambda: file.exists() and file.read_text().endswith("}"))
        with run_dask("worker", tmp_path, "--no-dashboard", "--death-timeout", "120") as worker:
            yield scheduler, worker, json.loads(file.read_text())["address"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_processes_of_an_orphan_end_when_its_last_client_has_left(cluster, tmp_path, end):
    scheduler, worker, address = cluster

    async def look_on_alone(dask_scheduler):
        """Wait until there is no manager, and for longer than the timeout after that."""
        watch = dask_scheduler.plugins["dask-cml"]._watch
        while watch._managers:
            await asyncio.sleep(0.05)
        end = watch._looked + 2
        while watch._looked < end:
            await asyncio.sleep(0.05)

    with process("-c", _MANAGER, address, stdout=subprocess.PIPE) as manager:
        assert manager.stdout.readline() == b"there\n"
        with Client(address) as client:
            client.wait_for_workers(1)
            manager.send_signal(end)
            client.run_on_scheduler(look_on_alone)
            assert client.submit(sum, [1, 2]).result(120) == 3
            assert scheduler.poll() is worker.poll() is None
        assert scheduler.wait(120) == 0
        assert worker.wait(120) == 0
    assert "orphaned: no manager and no client for 1 s" in (tmp_path / "scheduler.log").read_text()


HERE = {"manager": "m1", "info": {"host": "here"}, "silence": 15.0}


@pytest.mark.parametrize(
    "message",
    [
        {"manager": "m1", "info": "many", "silence": 15.0},
        {"manager": "m1", "info": {str(i): i for i in range(1000)}, "silence": 15.0},
        {"manager": "m1", "info": {"host": ["here"]}, "silence": 15.0},
        {"manager": ["m1"], "info": {}, "silence": 15.0},
        {"manager": "m1", "info": {}, "silence": "long"},
        {"manager": "m1", "info": {}, "silence": float("inf")},
        {**HERE, "orphan_timeout": "never"},
        {**HERE, "orphan_timeout": 0},
        {**HERE, "orphan_timeout": float("nan")},
    ],
)
async def test_heartbeat_that_no_manager_sends_changes_nothing(message):
    async with scheduler(orphan_timeout=5) as running, rpc(running.address) as asked:
        with pytest.raises(ValueError, match=r"invalid .*: expected"):
            await asked.cml_manager_heartbeat(**message)
        assert watch_of(running).timeout == 5
        assert not watch_of(running)._managers


async def test_sync_that_no_manager_sends_leaves_the_managers_able_to_work():
    async with scheduler() as running, rpc(running.address) as asked:
        await asked.cml_manager_heartbeat(**HERE)
        before = await asked.cml_sync(manager="m1", wanted={"default": 2})
        for message in {"wanted": "many"}, {"launched": {"other": ["x"]}}, {"gone": 3}:
            with pytest.raises(ValueError, match=r"invalid .*: expected"):
                await asked.cml_sync(manager="m1", **message)
        assert await asked.cml_sync(manager="m1") == before
