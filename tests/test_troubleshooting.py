"""The messages on the page Messages are those that users see: each is provoked here, and compared.

A test names the headings whose messages it provokes. A message on the page is a line of a block ``text``.
"""

import ast
import asyncio
import contextlib
import functools
import re
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import dask
import pytest
from clusters import cut_off, log_of, new_record, simulate, supplied, write_record
from distributed import Client, wait
from distributed.comm import core, tcp
from distributed.core import Status
from shells import run
from simulated.testing import eventually, simulated
from testbed import faults

import dask_cml
from dask_cml import (
    CMLCluster,
    CMLError,
    LaunchRefused,
    NoSuchCluster,
    NotOnCML,
    SchedulerTimeout,
    SessionFailed,
    output,
)
from dask_cml.core.look import Look
from dask_cml.core.workers import Workers
from dask_cml.local import processes
from dask_cml.options import SessionSize, state_directory
from dask_cml.records import operations, store
from dask_cml.scheduler.health import Health
from dask_cml.sessions import api_v2, here
from dask_cml.sessions.causes import find_cause
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")
PAGE = Path(__file__).parents[1] / "docs" / "messages.md"
GIB = 2**30
#: What differs from one time to the next. Simulated clusters have no keys.
_VARYING = [
    (r"\btcp://", "tls://"),
    (r"\b[0-9a-f]{32}\b", "KEY"),
    (r"\b[a-z0-9]{16}\b", "SESSION"),
    (r"\b\d+(\.\d+)?\b", "N"),
    (r"/\S*/", "/"),
    (r"\s+", " "),
]
#: The headings whose messages a test provokes.
PROVOKED: list[str] = []


def comparable(text):
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def messages():
    """The messages on the page by heading, as the parts that an ellipsis separates."""
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading = part.splitlines()[0]
        blocks = re.findall(r"^```text\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        if lines:
            found[heading] = [part.strip() for line in lines for part in comparable(line).split("…")]
    return found


def provokes(*headings):
    """Let a test fail if the page has a message below a heading that the test has not ``seen``."""
    PROVOKED.extend(headings)

    def decorate(test):
        @functools.wraps(test)
        def run(seen, **fixtures):
            test(seen=seen, **fixtures)
            all_seen = "\n".join(map(comparable, seen))
            for heading in headings:
                missing = [part for part in messages()[heading] if part not in all_seen]
                assert missing == [], f"{heading}: {all_seen}"

        return run

    return decorate


@pytest.fixture
def seen():
    """What users have seen in a test."""
    return []


def test_each_message_on_the_page_is_provoked_once_and_the_headings_are_in_alphabetical_order():
    assert sorted(PROVOKED) == sorted(messages())
    *headings, last = re.findall(r"^## (.+)", PAGE.read_text(), re.MULTILINE)
    assert headings == sorted(headings, key=str.lower)
    assert last == "Rare messages"


def test_the_rare_messages_are_in_the_code():
    files = [*Path(dask_cml.__file__).parent.rglob("*.py"), Path(core.__file__), Path(tcp.__file__)]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    rows = re.findall(r"^\| (`.+?`) \|", PAGE.read_text(), re.MULTILINE)
    parts = [part for message in re.findall("`(.+?)`", " ".join(rows)) for part in re.split("…|: ", message)]
    assert parts
    assert [part for part in parts if not any(part.strip(" :;,") in text for text in texts)] == []


def make(**options):
    return CMLCluster(**{"name": "night", "platform": "local", "quiet": True, **options})


def connect(name, **options):
    return make(name=name, create_mode="connect", **options)


def fails(seen, error, function):
    with pytest.raises(error) as caught:
        function()
    seen.append(f"{type(caught.value).__name__}: {caught.value}")


@provokes("NotOnCML", "invalid", "LaunchRefused", "CallFailed: CML did not launch", "its workers need")
def test_the_page_lists_the_reasons_why_nothing_is_launched(platform, seen, monkeypatch):
    fails(seen, NotOnCML, lambda: make(platform="auto"))
    fails(seen, ValueError, lambda: make(memory="lots"))
    with dask.config.set({"cml.cpus": 3}):
        fails(seen, ValueError, make)
    fails(seen, ValueError, lambda: make(launch_options={"gpu_label": 3}))
    with dask.config.set({"cml.limits.sessions": 3}):
        fails(seen, ValueError, lambda: make(n_workers=4))
    seen.append(run("create", "--n-workers=-3", code=2))
    platform.configure(quota={"sessions": 0})
    fails(seen, LaunchRefused, make)
    platform.configure(quota=None)
    with dask.config.set({"cml.api.retries": 1}):
        faults.inject("error", status=503, times=2)
        fails(seen, CMLError, make)
        faults.inject("answer", status=401, times=2)
        fails(seen, CMLError, make)
    faults.inject("error", status=403)
    fails(seen, CMLError, make)
    monkeypatch.delenv("CDSW_API_KEY", raising=False)
    faults.inject("key", seconds=600)
    fails(seen, CMLError, make)
    seen.append(f"Cluster night: {api_v2.shortage([(SessionSize(4, 16), 10)], {'cpu': 12.0})}")


@provokes("CML ends session")
def test_the_page_lists_the_limits_of_the_session(seen, monkeypatch):
    monkeypatch.setattr(here, "_age", lambda: 86400.0)
    monkeypatch.setenv("CDSW_ENGINE_ID", "kbmjhsx8uobd5ks9")
    monkeypatch.setenv("IDLE_MAXIMUM_MINUTES", "60")
    monkeypatch.setenv("SESSION_MAXIMUM_MINUTES", "10080")
    seen.append(here.session_limits())


@pytest.mark.slow
@provokes("SchedulerTimeout", "SessionFailed")
def test_the_page_lists_the_failures_of_a_start(platform, seen):
    scheduler = {"match": "The scheduler of"}
    for fault in ("fails", "succeeds"):
        platform.inject(fault, **scheduler)
        fails(seen, SessionFailed, make)
    fails(seen, SessionFailed, lambda: make(scheduler_args=["--preload", "my_setup"]))
    for fault, until_it_runs in ("hangs", 120), ("stuck", 0.5):
        platform.inject(fault, **scheduler)
        limits = {"scheduler_timeout": 0.5, "pending_timeout": until_it_runs}
        fails(seen, SchedulerTimeout, lambda limits=limits: make(**limits))


@pytest.mark.slow
@provokes(
    "Cluster is starting",
    "NoSuchCluster",
    "the scheduler of cluster does not answer",
    "Timed out trying to connect",
)
def test_the_page_lists_the_errors_about_names(platform, seen, caplog, capsys):
    fails(seen, NoSuchCluster, lambda: connect("night"))
    write_record(new_record("night", options={"pending_timeout": 0.1, "scheduler_timeout": 0.1}))
    fails(seen, CMLError, lambda: connect("night", quiet=False))
    fails(seen, OSError, lambda: Client("cml://night", timeout="0.5 s"))
    store.remove(store.read("night"))
    with make():
        fails(seen, NoSuchCluster, lambda: connect("day"))
        record = store.read("night")
        gone = replace(record.scheduler, address="tls://127.0.0.1:1")  # where nothing listens
        folder = state_directory() / "dead"
        write_record(replace(record, name="dead", id="dead", folder=folder, scheduler=gone))
        with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
            fails(seen, CMLError, lambda: connect("dead"))
    output.flush(60)
    seen += [caplog.text, capsys.readouterr().out]
    seen[:] = [text.replace(str(state_directory()), "/home/cdsw/.dask-cml") for text in seen]
    seen[:] = [text.replace("dead", "night") for text in seen]


@provokes("Cluster adapts to")
@simulated
async def test_the_page_lists_the_messages_about_bounds(it, seen, caplog):
    async with simulate(name="night") as cluster:
        cluster.adapt()
        output.flush(60)
        with dask.config.set({"cml.limits.sessions": 3}):
            cluster.adapt(0, 10)
            async with Client(cluster, asynchronous=True) as client:
                futures = client.map(abs, range(1000))
                await eventually(lambda: "workers, because" in log_of(cluster))
                del futures
        seen += [log_of(cluster), caplog.text]


@pytest.mark.slow
@provokes("Cluster shut down", "Cluster shuts down in")
@simulated
async def test_the_page_lists_the_ends_of_clusters(it, seen, monkeypatch):
    async def ended(cluster):
        await eventually(lambda: cluster.status == Status.closed, 3600)
        seen.append(log_of(cluster))

    await ended(await simulate(name="night", idle_timeout="1 minute"))
    monkeypatch.setattr(timing, "notice", 60)
    with dask.config.set({"cml.limits.hours": 0.03}):
        await ended(await simulate(name="night"))
    cluster = await simulate(name="night")
    with contextlib.suppress(OSError):  # it closes before it has answered
        await store.read("night").ask_scheduler("terminate", 5.0, reason=operations.deleted_by("ann"))
    await ended(cluster)
    cluster = await simulate(name="night")
    it.platform.stop_workers()
    await ended(cluster)
    cluster = await simulate(name="night")
    it.platform.doom("fails", times=10, key="scheduler")
    it.platform.evict(cluster.scheduler.session_id)
    await ended(cluster)
    it.platform.heal()
    cluster = await simulate(name="night")
    it.platform.stop_workers()
    await ended(cluster)


@pytest.mark.slow
@provokes(
    "Cluster not connected",
    "FutureCancelledError",
    "Scheduler of cluster lost",
    "Worker lost: evicted or killed",
)
@simulated
async def test_the_page_lists_the_messages_about_lost_sessions(it, seen):
    async def cancelled(future):
        with pytest.raises(CancelledError) as caught:
            await future.result()
        seen.append(f"{type(caught.value).__name__}: {caught.value}")

    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        [scattered] = await client.scatter([bytes(1000)])
        it.platform.evict(cluster.sessions[1].id)
        await cancelled(scattered)
        await eventually(lambda: "lost" in log_of(cluster))
        future = client.submit(sum, [1, 2])
        await future.result()
        it.platform.evict(cluster.sessions[0].id)
        await eventually(lambda: "connected to another scheduler" in log_of(cluster))
        await cancelled(future)
        seen.append(log_of(cluster))
    cluster = await simulate(name="night")
    cut_off(cluster)
    await eventually(lambda: "not connected" in log_of(cluster))
    seen.append(log_of(cluster))
    await cluster.close()


@provokes(
    "Worker found … of … GPUs",
    "Worker has spilled or is paused",
    "Worker lost: bus error",
    "Worker lost: its program failed",
    "Worker lost: out of memory",
    "Worker lost: scratch full",
    "Worker was restarted",
)
def test_the_page_lists_the_causes_of_lost_and_paused_workers(seen):
    last = {"memory": GIB // 8, "limit": GIB, "spilled": 0, "max_spill": None, "tasks": ["train-1"]}
    core = Mock(options=SimpleNamespace(name="night"), _tell=seen.append, workers={})
    core.groups.group_of.return_value = "default"
    core.processes = Workers(core)
    look = Look(core)
    for log in (
        [f"[memory: {GIB} of {GIB} bytes]"],
        ["[scratch: 9500000000 of 10000000000 bytes]"],
        ["no such model", "[dask worker exited with status 3]"],
        ["[dask worker exited with status -7]"],
    ):
        loss = find_cause(last, log, said="failed")
        asyncio.run(look.replace({"night-1": loss}))
    health = Health(None)
    full = {**last, "memory": GIB, "expected": False, "noticed": False}
    address = "tls://100.66.0.18:1234"
    health.note_event("worker-restart-memory", {"worker": address, "rss": GIB})
    health.note_left("night-1", address, full)
    health.note_connected("night-1", 0.0)
    seen += [f"Cluster night: {restart}" for restart in health.restarts.values()]
    for spilled in 0, 8 * 10**9:
        worker = SimpleNamespace(
            name="night-1",
            address="tls://100.66.0.18:1234",
            status=Status.paused,
            memory=SimpleNamespace(process=7 * GIB, spilled=spilled),
            memory_limit=8 * GIB,
            extra={"cml": {"max_spill": 8 * 10**9}},
            metrics={"spilled_bytes": {"memory": spilled, "disk": spilled}},
        )
        health.look([worker], 0.0)
        health.look([worker], timing.pause)
        seen.append(f"Cluster night: {health.news['memory']}")
    found = {"cml": {"found_gpus": "0 of 1"}}
    health.look([SimpleNamespace(name="night-gpu-0", status=Status.running, extra=found)], 0.0)
    seen.append(f"Cluster night: {health.news['gpus']}")


@pytest.mark.slow
@provokes(
    "Cluster launched … of … workers",
    "Cluster launches no new workers",
    "Cluster has sessions queued",
    "Worker lost: it did not connect",
    "Worker lost: it never connected",
)
def test_the_page_lists_the_messages_about_workers_that_do_not_connect(platform, seen, until):
    with dask.config.set({"cml.failure-limit": 2}), make(worker_timeout="2s") as cluster:
        for n, fault in enumerate(["fails", "succeeds", "hangs"], start=1):
            platform.inject(fault, times=2)
            cluster.scale(1)
            until(lambda n=n: log_of(cluster).count("launches no new workers") == n)
        platform.configure(quota={"sessions": 2})
        cluster.scale(3)
        until(lambda: "1 of 3 workers" in log_of(cluster))
        cluster.scale(0)
        until(lambda: not cluster.workers)
        platform.configure(quota={"sessions": 1}, over_quota="wait")
        cluster.scale(1)
        until(lambda: "queued" in log_of(cluster))
        seen.append(log_of(cluster))


@pytest.mark.slow
@provokes("Worker abandoned", "Worker stays")
def test_the_page_lists_the_messages_about_workers_that_are_to_stop(platform, seen, until):
    with dask.config.set({"cml.retire-timeout": "2s"}):
        cluster = make(n_workers=3)
    with cluster, Client(cluster) as client:
        client.wait_for_workers(3)
        held = client.submit(bytes, 10**6, workers=["night-2"], allow_other_workers=True)
        wait(held)
        for process in processes.find(cluster.workers["night-2"].session_id):
            process.suspend()
        cluster.sync(cluster.scale_down, ["night-2"])
        until(lambda: "abandoned" in log_of(cluster))
        assert len(held.result()) == 10**6
        held.cancel()
        # The scheduler can best do without the worker that holds least.
        actor = client.submit(Counter, actor=True, workers=["night-0"]).result()
        held = client.submit(bytes, 10**6, workers=["night-1"])
        wait(held)
        cluster.scale(1)
        until(lambda: "stays" in log_of(cluster))
        assert actor
        seen.append(log_of(cluster))


@provokes("Cluster cannot run all tasks")
@simulated
async def test_the_page_lists_the_messages_about_waiting_tasks(it, seen):
    groups = {"gpu": {"nvidia_gpu": 1}}
    async with (
        simulate(name="night", worker_groups=groups) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        waiting = client.map(abs, range(3), resources={"FPGA": 1})
        waiting += client.map(abs, range(3, 5), resources={"GPU": 1})
        waiting.append(client.submit(abs, 5, workers=["night-7"]))
        await eventually(lambda: all(words in log_of(cluster) for words in ("FPGA", "GPU", "night-7")))
        seen.append(log_of(cluster))
        del waiting


@pytest.mark.slow
@provokes("CallFailed: CML did not stop", "Cannot manage cluster")
def test_the_page_lists_the_messages_of_an_outage(platform, seen, until, caplog):
    with dask.config.set({"cml.api.retries": 1}):
        cluster = make()
    try:
        platform.inject("hangs")
        cluster.scale(1)
        until(lambda: len(cluster.sessions) == 2)
        faults.inject("error", status=503, seconds=600)
        until(lambda: "Cannot manage cluster night" in caplog.text)
        faults.clear()
        until(lambda: "Managing cluster night again" in caplog.text)
        seen.append(caplog.text)
        faults.inject("error", status=401, seconds=600)
        until(lambda: "CDSW_API_KEY" in log_of(cluster))
        seen.append(log_of(cluster))
        faults.clear()
        until(lambda: cluster.problem is None)
        faults.inject("error", status=503, seconds=600)
        fails(seen, CMLError, cluster.close)
    finally:
        faults.clear()
        cluster.close()
