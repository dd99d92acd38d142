"""The scheduler's plugin: who is there, and the end of clusters that nobody has any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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


class Clock:
    def __init__(self, scheduler):
        self.plugin = plugin_of(scheduler)
        self.now = time.monotonic()
        self.plugin.look(self.now)

    def after(self, seconds, step=0.5):
        """Let time pass, and return why the scheduler closes, and after how many seconds."""
        end = self.now + seconds
        start = self.now
        while self.now < end:
            self.now += step
            if reason := self.plugin.look(self.now):
                return reason, self.now - start
        return None


# -- orphans


async def test_scheduler_without_manager_and_client_closes_with_that_reason():
    async with scheduler(orphan_timeout=5) as running:
        assert Clock(running).after(60) == ("orphaned: no manager and no client for 5 s", 5.0)


async def test_scheduler_without_orphan_timeout_never_closes():
    async with scheduler(orphan_timeout=None) as running:
        assert Clock(running).after(1000) is None


async def test_count_begins_when_the_last_manager_has_left():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        one, other = Presence(running.address), Presence(running.address)
        await one.start()
        await other.start()
        assert clock.after(10) is None
        await one.close()
        assert clock.after(4) is None
        await other.close()
        assert clock.after(60)[1] == 5.5


async def test_manager_that_comes_back_in_time_keeps_the_scheduler():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        assert clock.after(4.5) is None
        presence = Presence(running.address)
        await presence.start()
        assert clock.after(4.5) is None
        await presence.close()
        assert clock.after(4.5) is None
        assert clock.after(1) is not None


async def test_manager_that_says_nothing_any_more_is_gone_in_bounded_time():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        presence._silence = 15
        await presence.start()
        # Its connection is open, as it is where the network is silent.
        assert 20 <= clock.after(60)[1] <= 21
        await presence.close()


async def test_manager_whose_connection_has_closed_is_gone_at_once(holds):
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        await presence.start()
        [comm] = presence._scheduler.comms
        comm.abort()
        await holds(lambda: plugin_of(running)._managers[presence.id].comm.closed())
        assert clock.after(60)[1] == 5.5
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
            assert 60 <= clock.after(200)[1] <= 70
        assert client.id not in running.clients


async def test_scheduler_closes_after_the_last_client_has_left():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        async with Client(running.address, asynchronous=True):
            assert clock.after(30) is None
        assert clock.after(60)[1] == 5.5


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


async def test_process_that_stood_still_hears_first_what_was_sent_meanwhile():
    async with scheduler(orphan_timeout=5) as running:
        clock = Clock(running)
        presence = Presence(running.address, interval=3600)
        await presence.start()
        assert clock.after(10) is None
        assert clock.after(1000, step=1000) is None
        assert clock.after(10) is None
        await presence.close()
        assert clock.after(4) is None
        assert clock.after(1000, step=1000) is None
        assert clock.after(60)[1] == 5


async def test_manager_that_only_watches_does_not_keep_an_orphan():
    async with scheduler(orphan_timeout=5) as running:
        watcher = Presence(running.address, info={WATCHES: True})
        await watcher.start()
        try:
            plugin = plugin_of(running)
            assert len(plugin.managers()["managers"]) == 1
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
        await asyncio.wait_for(running.finished(), 30)
        assert "orphaned: no manager and no client for 0.1 s" in str(running.get_logs())


# -- managers


async def test_second_registration_updates_and_does_not_double():
    async with scheduler() as running:
        first = plugin_of(running)
        async with rpc(running.address) as asked:
            one = Presence(running.address, orphan_timeout=300, info={"wants": 3})
            await one.start()
            other = Presence(running.address, orphan_timeout=10)
            await other.start()
            assert plugin_of(running) is first
            assert [*running.plugins].count(NAME) == 1
            assert running.handlers["cml_managers"] == first.managers
            assert first.orphan_timeout == 10
            listed = await asked.cml_managers()
            assert {*listed["managers"]} == {one.id, other.id} == {*other.managers}
            assert listed["managers"][one.id]["info"]["wants"] == 3
            assert listed["managers"][one.id]["info"]["pid"] == os.getpid()
            await one.close()
            assert {*(await asked.cml_managers())["managers"]} == {other.id}
            await other.close(orphan_timeout=None)
            assert await asked.cml_managers() == {"orphan_timeout": None, "managers": {}}


async def test_manager_that_says_nothing_of_the_timeout_leaves_it():
    async with scheduler(orphan_timeout=7) as running:
        presence = Presence(running.address)
        await presence.start()
        await presence.close()
        assert plugin_of(running).orphan_timeout == 7


async def test_many_managers_that_come_at_once_get_one_plugin():
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as running:
        managers = [Presence(running.address, orphan_timeout=300) for _ in range(10)]
        await asyncio.gather(*(each.start() for each in managers))
        assert running.handlers["cml_managers"] == plugin_of(running).managers
        assert len(plugin_of(running).managers()["managers"]) == 10
        await asyncio.gather(*(each.close() for each in managers))


async def test_heartbeats_tell_of_other_managers_and_of_what_they_say(holds):
    async with scheduler() as running:
        one = Presence(running.address, interval=0.02)
        other = Presence(running.address, interval=0.02)
        await one.start()
        await other.start()
        await holds(lambda: {*one.managers} == {one.id, other.id})
        other.info["wants"] = 5
        await holds(lambda: one.managers[other.id]["info"].get("wants") == 5)
        await other.close()
        await holds(lambda: {*one.managers} == {one.id})
        await one.close()


async def test_manager_registers_again_where_the_plugin_is_gone(holds):
    async with scheduler() as running:
        presence = Presence(running.address, orphan_timeout=300, interval=0.02)
        await presence.start()
        running.remove_plugin(NAME)
        del running.handlers["cml_manager_heartbeat"]
        await holds(lambda: NAME in running.plugins)
        assert plugin_of(running).orphan_timeout == 300
        await presence.close()


async def test_manager_survives_the_scheduler_and_leaves_quickly(holds):
    async with scheduler() as running:
        presence = Presence(running.address, interval=0.02)
        await presence.start()
    start = time.monotonic()
    await presence.close()
    await presence.close()
    assert time.monotonic() - start < 10
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
        with pytest.raises(CMLError, match=r"refuses the plugin: .*explicitly disallowed"):
            await presence.start()
        await presence.close()


async def test_manager_is_there_by_tls():
    pytest.importorskip("cryptography")
    security = Security.temporary()
    async with scheduler(security=security) as running:
        presence = Presence(running.address, security.get_connection_args("client"))
        await presence.start()
        assert running.address.startswith("tls://")
        assert {*plugin_of(running)._managers} == {presence.id}
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
        until(lambda: file.exists() and file.read_text().endswith("}"), 60)
        with run_dask("worker", tmp_path, "--no-dashboard", "--death-timeout", "60") as worker:
            yield scheduler, worker, json.loads(file.read_text())["address"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_processes_of_an_orphan_end_when_its_last_client_has_left(cluster, tmp_path, end):
    scheduler, worker, address = cluster

    async def look_on_alone(dask_scheduler):
        """Wait until there is no manager, and for longer than the timeout after that."""
        plugin = dask_scheduler.plugins["dask-cml"]
        while plugin.managers()["managers"]:
            await asyncio.sleep(0.05)
        end = plugin._looked + 2
        while plugin._looked < end:
            await asyncio.sleep(0.05)

    with process("-c", _MANAGER, address, stdout=subprocess.PIPE) as manager:
        assert manager.stdout.readline() == b"there\n"
        with Client(address) as client:
            client.wait_for_workers(1)
            manager.send_signal(end)
            client.run_on_scheduler(look_on_alone)
            assert client.submit(sum, [1, 2]).result(30) == 3
            assert scheduler.poll() is worker.poll() is None
        assert scheduler.wait(60) == 0
        assert worker.wait(60) == 0
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
        assert plugin_of(running).orphan_timeout == 5
        assert await asked.cml_managers() == {"orphan_timeout": 5, "managers": {}}


async def test_goodbye_that_no_manager_sends_does_not_switch_the_end_of_orphans_off():
    async with scheduler(orphan_timeout=5) as running, rpc(running.address) as asked:
        await asked.cml_manager_heartbeat(**HERE)
        with pytest.raises(ValueError, match="invalid orphan_timeout='never': expected seconds"):
            await asked.cml_manager_goodbye(manager="m1", orphan_timeout="never")
        assert plugin_of(running).orphan_timeout == 5
        assert [*(await asked.cml_managers())["managers"]] == ["m1"]


async def test_sync_that_no_manager_sends_leaves_the_managers_able_to_work():
    async with scheduler() as running, rpc(running.address) as asked:
        await asked.cml_manager_heartbeat(**HERE)
        before = await asked.cml_sync(manager="m1", wanted=2)
        for message in {"wanted": "many"}, {"launched": {"other": ["x"]}}, {"gone": 3}:
            with pytest.raises(ValueError, match=r"invalid .*: expected"):
                await asked.cml_sync(manager="m1", **message)
        assert await asked.cml_sync(manager="m1") == before
