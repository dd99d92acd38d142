"""The scheduler's plugin: what it answers managers, over the network, and when it ends its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status, rpc
from distributed.security import Security
from schedulers import RECORD, prepare, scheduler_in

from dask_cml import protocol
from dask_cml.layout import FOLDER, NUMBER, scheduler_file, wanted_file
from dask_cml.scheduler import state_file
from dask_cml.scheduler.plugin import CMLSchedulerPlugin
from dask_cml.scheduler.state_file import StateFile
from dask_cml.sessions.plan import PRELOAD

WATCH = {"observes": False, "lease": 15.0, "since": 0, "wait": 0.1}
SCALE = {"op": "scale", "group": "default", "n": 2}


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path / "mine", leader="m1")


@pytest.fixture
async def scheduler(folder):
    async with scheduler_in(folder) as running:
        yield running


@pytest.fixture
async def comm(scheduler):
    async with rpc(scheduler.address) as connected:
        yield connected


def file_of(folder, number=0):
    return json.loads((folder / scheduler_file(number)).read_text())


# -- start


async def test_a_scheduler_waits_for_a_file_system_whose_handles_are_stale(folder, monkeypatch):
    calls = []
    for name in ("begin", "write"):
        action = getattr(StateFile, name)

        def stale_at_first(self, *arguments, name=name, action=action):
            calls.append(name)
            if calls.count(name) == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            return action(self, *arguments)

        monkeypatch.setattr(StateFile, name, stale_at_first)
    async with scheduler_in(folder) as running:
        assert file_of(folder)["address"] == running.address


@pytest.mark.parametrize("exists", [False, True], ids=["of a deleted cluster", "with an invalid file"])
async def test_a_scheduler_without_the_plugin_closes(tmp_path, monkeypatch, caplog, exists):
    """Nobody else would end it without managers."""
    folder = tmp_path / "mine"
    if exists:
        (prepare(folder) / wanted_file(0)).write_text("{")
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(NUMBER, "0")
    scheduler = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0", preload=[PRELOAD])
    await scheduler
    await asyncio.wait_for(scheduler.finished(), 120)
    assert ("its cluster was deleted" in caplog.text) != exists
    assert ("Traceback" in caplog.text) == exists


# -- managers


async def test_a_scheduler_says_which_cluster_it_belongs_to(tmp_path):
    folder = prepare(tmp_path / "mine", number=3)
    async with scheduler_in(folder, number=3) as running, rpc(running.address) as comm:
        assert await comm.cml_hello() == {
            "protocol": protocol.PROTOCOL,
            "cluster": "mine",
            "record": RECORD,
            "number": 3,
        }


async def test_the_file_of_a_scheduler_contains_its_address_and_the_targets(
    scheduler, folder, comm, holds, monkeypatch
):
    monkeypatch.setattr(state_file, "_REST", 0.01)
    about = file_of(folder)
    assert (about["address"], about["id"]) == (scheduler.address, scheduler.id)
    assert (about["protocol"], about["app_url"]) == (protocol.PROTOCOL, None)
    await comm.cml_watch(manager="m1", **WATCH)
    await comm.cml_apply(manager="m1", operations=[SCALE], since=0)
    await holds(lambda: file_of(folder)["groups"]["default"]["target"] == 2)
    await comm.cml_set(app_url="https://abc.example.com/")
    await holds(lambda: file_of(folder)["app_url"] == "https://abc.example.com/")


async def test_the_next_scheduler_begins_with_the_file_of_this_one(tmp_path):
    groups = {"default": {"target": 2, "number": 7}, "gpu": {"options": {"cpu": 2}, "target": 1}}
    folder = prepare(tmp_path / "mine", number=1, **groups)
    async with scheduler_in(folder, number=1) as running, rpc(running.address) as comm:
        answer = await comm.cml_watch(manager="m1", **WATCH)
        assert {*answer["sessions"]} == {"mine-7", "mine-8", "mine-gpu-0"}
        assert answer["groups"]["gpu"]["options"] == {"cpu": 2}


async def test_operations_of_all_managers_are_carried_out_and_each_gets_its_results(comm):
    for manager in "m1", "m2":
        await comm.cml_watch(manager=manager, **WATCH)
    unknown = {"op": "scale", "group": "no", "n": 1}
    answer = await comm.cml_apply(manager="m2", operations=[SCALE, unknown], since=0)
    first, second = answer["results"]
    assert first is None
    assert second["error"].startswith("invalid worker_group='no'")
    assert {*answer["sessions"]} == {"mine-0", "mine-1"}
    assert answer["leader"] == "m1"
    # The leader decides, and the other one does not.
    replace = {"op": "replace", "names": ["mine-0"], "causes": {}}
    for manager, gone in ("m2", []), ("m1", ["mine-0"]):
        answer = await comm.cml_apply(manager=manager, operations=[replace], since=0)
        [result] = answer["results"]
        assert [*result] == gone


async def test_a_change_ends_the_wait_of_managers(scheduler, comm):
    answer = await comm.cml_watch(manager="m1", **WATCH)
    async with rpc(scheduler.address) as other:
        long = {**WATCH, "since": answer["revision"], "lease": 1e6, "wait": 1e5}
        waiting = asyncio.ensure_future(other.cml_watch(manager="m2", **long))
        # It is connected, so what it is told first is the revision after its own coming.
        await comm.cml_watch(manager="m1", **WATCH)
        await comm.cml_apply(manager="m1", operations=[SCALE], since=0)
        answer = await asyncio.wait_for(waiting, 60)
        assert {*answer["sessions"]} == {"mine-0", "mine-1"}


async def test_managers_get_dask_workers_that_connect_and_leave(scheduler, comm):
    await comm.cml_watch(manager="m1", **WATCH)
    await comm.cml_apply(manager="m1", operations=[{**SCALE, "n": 1}], since=0)
    async with Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False) as worker:
        answer = await comm.cml_watch(manager="m1", **WATCH)
        assert answer["workers"][worker.address]["name"] == "mine-0"
        assert [*answer["sessions"]["mine-0"]["seen"]] == ["mine-0"]
        held = await comm.cml_held(names=["mine-0", "mine-1"])
        assert {name: {*about} for name, about in held.items()} == {"mine-0": {"last_seen", "nbytes"}}
        since = answer["revision"]
    answer = await comm.cml_watch(manager="m1", **{**WATCH, "since": since})
    assert answer["workers"] == {worker.address: None}
    assert answer["groups"] is None


async def test_managers_are_told_when_a_worker_becomes_full_after_it_has_paused(scheduler, comm, holds):
    async with Worker(scheduler.address, name="mine-0", memory_limit=0, dashboard=False) as worker:
        worker.periodic_callbacks["heartbeat"].stop()
        state = scheduler.workers[worker.address]
        state.extra["cml"] = {"max_spill": 100}
        state.metrics["spilled_bytes"] = {"memory": 0, "disk": 0}
        worker.status = Status.paused
        plugin = scheduler.plugins["dask-cml"]
        await holds(lambda: plugin._paused)
        since = (await comm.cml_watch(manager="m1", **WATCH))["revision"]
        state.metrics["spilled_bytes"] = {"memory": 90, "disk": 90}
        answer = await comm.cml_watch(manager="m1", **{**WATCH, "since": since, "wait": 60, "lease": 1000})
        assert answer["workers"][worker.address]["metrics"]["spilled_bytes"]["disk"] == 90


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ("cml_watch", {"manager": "m2", **WATCH, "lease": "long"}),
        ("cml_watch", {"manager": ["m2"], **WATCH}),
        ("cml_watch", {"manager": "m2", **WATCH, "observes": 3}),
        ("cml_apply", {"manager": "m1", "operations": "all", "since": 0}),
        ("cml_apply", {"manager": "m2", "operations": [SCALE], "since": 0}),  # which is not connected
        ("cml_apply", {"manager": 3, "operations": [SCALE], "since": 0}),
        ("cml_set", {"orphan_timeout": 0}),
        ("cml_set", {"orphan_timeout": 1, "app_url": "javascript:alert(1)"}),
        ("cml_set", {"leader": "m2"}),
        ("cml_held", {"names": "mine-0"}),
    ],
)
async def test_an_invalid_message_of_a_manager_changes_nothing(comm, handler, message):
    await comm.cml_watch(manager="m1", **WATCH)
    before = await comm.cml_watch(manager="m1", **WATCH)
    with pytest.raises(ValueError, match=r"invalid (message of a )?manager"):
        await getattr(comm, handler)(**message)
    assert await comm.cml_watch(manager="m1", **WATCH) == before


async def test_an_invalid_operation_does_not_block_the_others(comm):
    await comm.cml_watch(manager="m1", **WATCH)
    operations = [{"op": "scale", "group": "no"}, SCALE, {"op": "lead"}, 3]
    answer = await comm.cml_apply(manager="m1", operations=operations, since=0)
    assert answer["groups"]["default"]["target"] == SCALE["n"]
    assert answer["leader"] == "m1"
    [first, second, *others] = answer["results"]
    assert second is None
    assert all(each["error"].startswith("invalid operation: ") for each in (first, *others))


async def test_managers_need_the_keys_of_the_cluster(folder):
    security = Security.temporary()
    async with scheduler_in(folder, security=security) as running:
        assert running.address.startswith("tls://")
        async with rpc(running.address, connection_args=security.get_connection_args("client")) as comm:
            assert (await comm.cml_hello())["record"] == RECORD
        others = Security.temporary().get_connection_args("client")
        async with rpc(running.address, connection_args=others) as comm:
            with pytest.raises(OSError, match=r"\w"):
                await asyncio.wait_for(comm.cml_hello(), 60)


# -- the leader


async def leader(comm, manager="m2", **more):
    return (await comm.cml_watch(manager=manager, **{**WATCH, **more}))["leader"]


async def test_the_creator_leads_before_it_is_connected_but_not_for_ever(folder, monkeypatch):
    async with scheduler_in(folder) as running, rpc(running.address) as comm:
        assert await leader(comm) == "m1"
    monkeypatch.setattr(protocol, "LEASE", 0.1)
    async with scheduler_in(folder) as running, rpc(running.address) as comm:
        while await leader(comm) != "m2":
            await asyncio.sleep(0.01)


async def test_another_manager_leads_when_the_leaders_connection_closes(scheduler, comm, monkeypatch):
    async with rpc(scheduler.address) as first:
        await first.cml_watch(manager="m1", **WATCH)
        assert await leader(comm) == "m1"
    while await leader(comm) != "m2":
        await asyncio.sleep(0.01)
    async with rpc(scheduler.address) as first:  # which comes back
        assert await leader(first, "m1") == "m2"


async def test_a_manager_that_only_observes_leads_only_alone(tmp_path):
    folder = prepare(tmp_path / "mine")
    async with scheduler_in(folder) as running, rpc(running.address) as watcher, rpc(running.address) as comm:
        assert await leader(watcher, "watcher", observes=True) == "watcher"
        assert await leader(comm) == "m2"


# -- the end


async def test_an_orphan_ends_itself(folder, holds):
    async with scheduler_in(folder) as running:
        async with rpc(running.address) as comm:
            await comm.cml_watch(manager="m1", **WATCH)
            await comm.cml_set(orphan_timeout=0.1)
        await asyncio.wait_for(running.finished(), 120)
        assert "orphaned: no manager and no client for 0.1 s" in str(running.get_logs())
    # Nothing ends the process of a scheduler that could close.
    await holds(lambda: not any(isinstance(each, threading.Timer) for each in threading.enumerate()))


@pytest.mark.parametrize("orphan_timeout", [0.5, None], ids=["orphans", "never"])
@pytest.mark.parametrize("number", [0, 1])
async def test_the_orphan_timeout_counts_when_a_manager_has_come(tmp_path, orphan_timeout, number):
    """If observers counted at first, the cluster of a late creator could end, or that of a dead one stay.

    Later schedulers may have no other manager.
    """
    folder = prepare(tmp_path / "mine", number=number, orphan_timeout=orphan_timeout, patience=300)
    async with scheduler_in(folder, number=number) as running, rpc(running.address) as comm:
        presence = running.plugins["dask-cml"]._presence
        assert presence.timeout == 300
        await comm.cml_watch(manager="page", **{**WATCH, "observes": True})
        assert presence.timeout == (orphan_timeout if number else 300)
        await comm.cml_watch(manager="m1", **WATCH)
        assert presence.timeout == orphan_timeout
        assert file_of(folder, number)["orphan_timeout"] == orphan_timeout


async def test_a_cluster_whose_folder_was_removed_ends(folder, monkeypatch):
    for name, seconds in ("_REST", 0.01), ("SIGN_OF_LIFE", 0.02), ("_GONE_FOR", 0.05):
        monkeypatch.setattr(state_file, name, seconds)
    async with scheduler_in(folder) as running:
        folder.rename(folder.with_name(".removed"))
        await asyncio.wait_for(running.finished(), 120)
        assert "its folder was removed" in str(running.get_logs())
    assert not folder.exists()


async def test_a_scheduler_without_its_file_does_not_start(tmp_path):
    """Rather than begin with nothing, which would stop all workers."""
    running = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    async with running:
        with pytest.raises(FileNotFoundError):
            await running.register_scheduler_plugin(CMLSchedulerPlugin(tmp_path), idempotent=True)


# -- real processes

MANAGER = """
import asyncio, sys
from distributed.core import rpc
async def manage():
    comm = rpc(sys.argv[1])
    await comm.cml_watch(manager="m1", observes=False, lease=2.0, since=0, wait=0.1)
    await comm.cml_set(orphan_timeout=1)
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
    command = ("-m", "dask", program, *arguments)
    with (folder / f"{program}.log").open("wb") as log, process(*command, stdout=log, stderr=log) as started:
        yield started


@pytest.fixture
def cluster(folder, until, monkeypatch):
    """A scheduler's and a worker's process, and the scheduler's address."""
    for name, value in (FOLDER, folder), (NUMBER, 0):
        monkeypatch.setenv(name, str(value))
    arguments = ("--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0")
    with run_dask("scheduler", folder, *arguments, "--preload", PRELOAD) as scheduler:
        file = folder / scheduler_file(0)
        until(file.exists)
        more = ("--scheduler-file", file, "--no-dashboard", "--death-timeout", "120")
        with run_dask("worker", folder, *more) as worker:
            yield scheduler, worker, file_of(folder)["address"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_the_processes_of_an_orphan_end_after_its_last_client_has_left(cluster, folder, end):
    scheduler, worker, address = cluster

    async def wait_alone(dask_scheduler):
        """Wait until there is no manager, and for longer than the timeout after that."""
        presence = dask_scheduler.plugins["dask-cml"]._presence
        while presence.managers:
            await asyncio.sleep(0.05)
        later = time.monotonic() + 2
        while time.monotonic() < later:
            await asyncio.sleep(0.05)

    with process("-c", MANAGER, address, stdout=subprocess.PIPE) as manager:
        assert manager.stdout.readline() == b"there\n"
        with Client(address) as client:
            client.wait_for_workers(1)
            manager.send_signal(end)
            client.run_on_scheduler(wait_alone)
            assert client.submit(sum, [1, 2]).result(120) == 3
            assert scheduler.poll() is worker.poll() is None
        assert scheduler.wait(120) == 0
        assert worker.wait(120) == 0
    assert "orphaned: no manager and no client for 1 s" in (folder / "scheduler.log").read_text()


# -- what happened to sessions, and why the cluster ended


async def test_clients_get_the_events_of_sessions(scheduler, comm):
    name = "mine-0"
    async with Client(scheduler.address, asynchronous=True) as client:
        watching = await comm.cml_watch(manager="m1", **WATCH)
        for operation in (
            SCALE,
            {"op": "launched", "names": [name, "mine-1"]},
            {"op": "found", "states": {name: "waiting", "mine-1": "running", "mine-9": "running"}},
        ):
            await comm.cml_apply(manager="m1", operations=[operation], since=watching["revision"])
        async with Worker(scheduler.address, name=name):
            await client.wait_for_workers(1)
            lost = {"op": "replace", "names": ["mine-1"], "causes": {"mine-1": "out of memory"}}
            stopped = {"op": "stopped", "names": ["mine-1"]}
            await comm.cml_apply(manager="m1", operations=[lost, stopped], since=0)
            events = [event for _, event in await client.get_events("cml")]
    told = [(each["session"], each["action"], each.get("cause")) for each in events]
    assert told == [
        (name, "launched", None),
        ("mine-1", "launched", None),
        (name, "waiting", None),
        ("mine-1", "running", None),
        (name, "connected", None),
        ("mine-1", "lost", "out of memory"),
        ("mine-1", "stopped", None),
    ]


async def test_the_file_says_that_a_client_shut_the_cluster_down(folder):
    async with scheduler_in(folder) as scheduler, rpc(scheduler.address) as comm:
        with contextlib.suppress(OSError):  # the answer is the end of the connection
            await comm.terminate()
        await scheduler.finished()
    assert file_of(folder)["closed"] == "shut down by a client"


async def test_the_file_says_that_the_cluster_was_idle(folder):
    async with scheduler_in(folder) as scheduler:
        scheduler.idle_timeout = 0.01
        await scheduler.finished()
    assert file_of(folder)["closed"] == "idle for 0.01 s"


async def test_the_file_of_a_scheduler_that_the_platform_stops_names_no_reason(folder):
    async with scheduler_in(folder) as scheduler:
        await scheduler.close(reason="signal-15")
    assert file_of(folder)["closed"] is None


async def test_a_scheduler_closes_when_another_one_replaces_it(folder):
    async with scheduler_in(folder) as scheduler:
        prepare(folder, number=1)
        await scheduler.finished()
    assert "another scheduler" in file_of(folder)["closed"]


async def test_restarts_in_a_row_count_until_a_task_is_computed(folder):
    prepare(folder, number=2, restarts=2)
    async with scheduler_in(folder, number=2) as scheduler:
        assert file_of(folder, 2)["restarts"] == 2
        async with Worker(scheduler.address), Client(scheduler.address, asynchronous=True) as client:
            await client.submit(sum, [1, 2])
    assert file_of(folder, 2)["restarts"] == 0
    assert file_of(folder, 2)["activity"]["tasks_done"] == 1
