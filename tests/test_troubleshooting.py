"""The messages on the page about troubleshooting are those that users see: each is provoked here."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from clusters import log_of, sign_of, write_record
from distributed import Client, wait
from testbed import faults

from dask_cml import (
    ClusterExists,
    CMLCluster,
    CMLError,
    LaunchRefused,
    NoSuchCluster,
    NotOnCML,
    SchedulerTimeout,
    SessionFailed,
)
from dask_cml.keeper import failover
from dask_cml.local import processes
from dask_cml.options import state_directory
from dask_cml.private_files import NotPrivate
from dask_cml.records import operations, store
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")
PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
#: What differs from one time to the next.
_VARYING = [
    (r"\b[0-9a-f]{32}\b", "KEY"),
    (r"\b[a-z0-9]{16}\b", "SESSION"),
    (r"\b\d+(\.\d+)?\b", "N"),
    (r"/\S*/", "/"),
    (r"\s+", " "),
]


def comparable(text):
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def messages(title):
    """The messages that the page shows in a part, as they can be compared."""
    [part] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [comparable(text) for text in re.findall(r"^```text\n(.*?)^```", part, re.MULTILINE | re.DOTALL)]


@pytest.fixture
def seen():
    """What users have seen in a test, to be compared with the page."""
    return []


@pytest.fixture
def shown(seen):
    """Check that the page's messages in a part have been seen."""

    def shown(title):
        all_seen = "\n".join(map(comparable, seen))
        # An ellipsis stands for what is left out of a message.
        parts = [part.strip() for message in messages(title) for part in message.split("…")]
        missing = [part for part in parts if part not in all_seen]
        assert any(parts)
        assert missing == [], all_seen

    return shown


def make(**options):
    return CMLCluster(**{"name": "night", "platform": "local", "quiet": True, **options})


def connect(name):
    return make(name=name, create_mode="connect")


def fails(seen, error, function):
    with pytest.raises(error) as caught:
        function()
    seen.append(f"{type(caught.value).__name__}: {caught.value}")


@pytest.mark.slow
def test_the_page_lists_the_errors_of_a_start(platform, seen, shown, monkeypatch):
    scheduler = {"match": "The scheduler of"}
    fails(seen, NotOnCML, lambda: make(platform="auto"))
    fails(seen, ValueError, lambda: make(memory="lots"))
    with dask.config.set({"cml.cpus": 3}):
        fails(seen, ValueError, make)
    fails(seen, ValueError, lambda: make(launch_options={"gpu_label": 3}))
    platform.configure(quota={"sessions": 0})
    fails(seen, LaunchRefused, make)
    platform.configure(quota=None)
    for fault in ("fails", "succeeds"):
        platform.inject(fault, **scheduler)
        fails(seen, SessionFailed, make)
    fails(seen, SessionFailed, lambda: make(scheduler_args=["--preload", "my_setup"]))
    for fault, seconds in ("hangs", 3), ("stuck", 0.5):
        platform.inject(fault, **scheduler)
        fails(
            seen,
            SchedulerTimeout,
            lambda timeout=seconds: make(scheduler_timeout=timeout, pending_timeout=timeout),
        )
    with dask.config.set({"cml.api.retries": 0}):
        faults.inject("error", status=503)
        fails(seen, CMLError, make)
        faults.inject("answer", status=401)
        fails(seen, CMLError, make)
    faults.inject("error", status=403)
    fails(seen, CMLError, make)
    monkeypatch.delenv("CDSW_API_KEY", raising=False)
    faults.inject("key", seconds=600)
    fails(seen, CMLError, make)
    shown("Errors when a cluster starts")


def test_the_page_lists_the_errors_about_names(platform, seen, shown, caplog):
    fails(seen, NoSuchCluster, lambda: connect("night"))
    with make():
        fails(seen, ClusterExists, make)
        fails(seen, NoSuchCluster, lambda: connect("day"))
        record = store.read("night")
        gone = replace(record.scheduler, address="tls://127.0.0.1:1")  # where nothing listens
        folder = state_directory() / "dead"
        write_record(replace(record, name="dead", id="dead", folder=folder, scheduler=gone))
        with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
            fails(seen, CMLError, lambda: connect("dead"))
    state_directory().chmod(0o775)
    fails(seen, NotPrivate, make)
    assert store.records() == []
    seen[:] = [text.replace(str(state_directory()), "/home/cdsw/.dask-cml") for text in [*seen, caplog.text]]
    state_directory().chmod(0o700)
    shown("Errors about names")


def worker_sessions(cluster):
    return [session.id for session in cluster.sessions if session.role == "worker"]


@pytest.mark.slow
def test_the_page_lists_the_messages_about_workers_that_do_not_connect(platform, seen, shown, until):
    with dask.config.set({"cml.failure-limit": 2}), make(worker_timeout="2s") as cluster:
        for n, fault in enumerate(["fails", "succeeds", "hangs"], start=1):
            platform.inject(fault, times=2)
            cluster.scale(1)
            until(lambda n=n: log_of(cluster).count("launches no new workers") == n)
        platform.inject("stuck")
        before = {session["id"] for session in platform.sessions()}
        cluster.scale(1)
        until(lambda: {*worker_sessions(cluster)} - before)
        [session] = {*worker_sessions(cluster)} - before
        platform.evict(session)
        until(lambda: log_of(cluster).count("launching a replacement") == 4)
        platform.configure(quota={"sessions": 2})
        cluster.scale(3)
        until(lambda: "1 of 3 workers" in log_of(cluster))
        cluster.scale(0)
        until(lambda: not cluster.workers)
        platform.configure(quota={"sessions": 1}, over_quota="wait")
        cluster.scale(1)
        until(lambda: "waiting for room" in log_of(cluster))
        seen.append(log_of(cluster))
    shown("Workers that do not start")


@pytest.mark.slow
def test_the_page_lists_the_messages_about_lost_workers(platform, seen, shown, until):
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
        computed = client.submit(bytes, 10**6, workers=["night-1"], allow_other_workers=True)
        [scattered] = client.scatter([bytes(10**6)], workers=["night-1"])
        wait(computed)
        cluster.scale(1)
        until(lambda: "stays" in log_of(cluster))
        [session] = [session.id for session in cluster.sessions if session.name == "night-1"]
        platform.evict(session)
        assert len(computed.result()) == 10**6
        assert actor
        fails(seen, CancelledError, scattered.result)
        until(lambda: "Worker night-1 lost" in log_of(cluster))
        seen.append(log_of(cluster))
    shown("Workers that stop")


def test_the_page_lists_the_messages_about_waiting_tasks(platform, seen, shown, until):
    with make(worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster, Client(cluster) as client:
        waiting = client.map(abs, range(3), resources={"FPGA": 1})
        waiting += client.map(abs, range(3, 5), resources={"GPU": 1})
        waiting.append(client.submit(abs, 5, workers=["night-7"]))
        until(lambda: all(words in log_of(cluster) for words in ("FPGA", "GPU", "night-7")))
        seen.append(log_of(cluster))
    shown("Tasks that wait")


def test_the_page_lists_the_messages_of_an_outage(platform, seen, shown, until, caplog):
    with dask.config.set({"cml.api.retries": 0}):
        cluster = make()
    try:
        platform.inject("hangs")
        cluster.scale(1)
        until(lambda: worker_sessions(cluster))
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
    shown("When CML does not answer")


@pytest.mark.slow
def test_the_page_lists_the_messages_after_a_lost_scheduler(platform, seen, shown, until, monkeypatch):
    def ended(cluster):
        until(lambda: cluster.status.name == "closed")
        seen.append(log_of(cluster))

    monkeypatch.setattr(failover, "_PAUSES", (0.0,))
    with make(n_workers=1) as cluster, Client(cluster) as client:
        client.wait_for_workers(1)
        future = client.submit(sum, [1, 2])
        future.result()
        platform.evict(cluster.sessions[0].id)
        until(lambda: "connected to another scheduler" in log_of(cluster))
        fails(seen, CancelledError, future.result)
        platform.inject("fails", match="The scheduler of", times=10)
        platform.evict(cluster.sessions[0].id)
        ended(cluster)
        platform.clear_faults()
    with make() as cluster:
        asyncio.run(operations.end_all(store.records(), "ann"))
        ended(cluster)
    monkeypatch.setattr(timing, "silence", 5.0)
    monkeypatch.setattr(timing, "answer", 1.0)
    with make() as cluster:
        scheduler = processes.find(cluster.sessions[0].id)
        for process in scheduler:
            process.suspend()
        # As if only the network failed: the scheduler goes on to leave signs of life.
        until(lambda: os.utime(sign_of("night")) or cluster.status.name == "closed")
        ended(cluster)
        for process in scheduler:
            process.resume()
    assert store.records() == []
    shown("When the scheduler is lost")
