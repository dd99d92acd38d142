"""Starts that fail: the error says why, and no session is left."""

import asyncio
import errno
import os
import re
import time
import traceback

import pytest
from clusters import arrived, simulate
from simulated.testing import eventually, simulated
from testbed import faults

from dask_cml import CMLCluster, CMLError, LaunchRefused, NotPrivate, SchedulerTimeout, protocol
from dask_cml.options import state_directory
from dask_cml.sessions import here
from dask_cml.sessions.process import CMLScheduler

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
def start(platform):
    """Start a cluster with a worker, which fails; return the error."""

    def start(error, **options):
        with pytest.raises(error) as caught:
            CMLCluster(n_workers=1, platform="local", quiet=True, **options)
        assert isinstance(caught.value, RuntimeError)
        return caught.value

    return start


def shown(error):
    """The lines of a traceback, and what IPython shows in its place."""
    return "".join(traceback.format_exception(error)).splitlines(), error._render_traceback_()


def test_a_refusal_is_shown_with_the_callers_frames_only_and_leaves_no_session(platform, start):
    platform.inject("refused", match="The scheduler of")
    error = start(LaunchRefused)
    assert platform.sessions()  # half created
    lines, in_notebook = shown(error)
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert {*modules[1:]} == {"dask_cml.errors"}
    assert "\n".join(lines).endswith(str(error))
    assert sum(line.startswith("Traceback") for line in lines) == 1  # of no error behind it
    assert in_notebook[0] == f"LaunchRefused: {error}"
    assert any("CMLCluster(n_workers=1" in line for line in in_notebook[1:])
    assert not any("dask_cml/" in line for line in in_notebook[1:])


async def test_a_refusal_is_shown_with_the_callers_frames_only_where_it_is_awaited(platform):
    faults.inject("error", function="launch_workers", status=403)
    with pytest.raises(CMLError) as caught:
        await CMLCluster(platform="local", quiet=True, asynchronous=True)
    lines, in_notebook = shown(caught.value)
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert {*modules[1:]} == {"distributed.deploy.spec", "dask_cml.cluster"}
    assert not any("HTTPError" in line for line in lines[:-1])
    assert re.search(r"did not launch .*: HTTPError: 403 Forbidden", lines[-1])
    assert in_notebook[0] == f"CallFailed: {caught.value}"


def test_an_error_of_a_running_cluster_is_shown_without_the_event_loop(platform):
    with CMLCluster(platform="local", quiet=True) as cluster:
        cluster.shutdown()
        with pytest.raises(CMLError, match="is closed") as caught:
            cluster.add_worker_group("new")
    modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert {*modules[1:]} == {"dask_cml.errors"}


@simulated
async def test_a_start_in_a_mesh_fails_in_time_and_names_the_cure(it, sidecar):
    it.sessions.are_in_mesh = True
    began = time.monotonic()
    with pytest.raises(SchedulerTimeout, match="did not answer within 30 s, its status is running") as caught:
        await simulate(n_workers=1, scheduler_timeout=30)
    assert time.monotonic() - began < 60
    assert str(caught.value).endswith(
        f"{here.MESH_EFFECT} An administrator can change the mode:\n{here.PERMIT_MESH}"
    )
    assert not it.platform.running
    it.platform.configure({"sessions": 0}, waits_for_room=True)  # a session that does not run is no proof
    with pytest.raises(SchedulerTimeout) as caught:
        await simulate(n_workers=1, pending_timeout=30)
    assert "Istio" not in str(caught.value)


@pytest.mark.parametrize("hangs", [(CMLScheduler, "_read_address"), (protocol, "connection_args")])
@simulated
async def test_a_start_fails_in_time_although_the_file_of_its_scheduler_or_its_keys_hang(
    it, hangs, monkeypatch
):
    def hang(*_):
        while not ended.is_set():
            time.sleep(1.0)

    ended = asyncio.Event()
    monkeypatch.setattr(CMLScheduler, "_guess", lambda _: "tls://127.0.0.1:9")
    monkeypatch.setattr(*hangs, hang)
    it.platform.doom("silent", key="scheduler")
    with pytest.raises(SchedulerTimeout, match="did not answer within 30 s, its status is running"):
        await asyncio.wait_for(simulate(scheduler_timeout=30), 90)
    ended.set()


@simulated
async def test_a_cluster_may_have_the_name_scheduler(it):
    async with simulate(name="scheduler", n_workers=1):
        await eventually(lambda: {*it.platform.running} == {"scheduler-scheduler", "scheduler-0"})


@pytest.mark.parametrize("quota", [None, {"sessions": 2}])
@simulated
async def test_a_cluster_starts_with_fewer_workers_if_it_is_scaled_down_while_they_are_launched(it, quota):
    it.platform.configure(quota)
    cluster = simulate(name="lab", n_workers=3)
    with it.platform.held("launch_workers") as go_on:
        starting = asyncio.ensure_future(cluster)
        await eventually(lambda: it.platform.under_way == 1)
        cluster.scale(1)
        go_on()
        await starting
    async with cluster:
        await eventually(lambda: arrived(cluster) == len(cluster.workers) == 1)
        assert it.platform.count("launch_workers") == 2


@simulated
async def test_a_start_in_a_folder_of_others_says_so_once(it, caplog):
    state_directory().chmod(0o775)
    with pytest.raises(NotPrivate, match=r"has mode 0775, .*: run `chmod 700 "):
        await simulate()
    assert not caplog.messages


@simulated
async def test_a_start_on_a_full_disk_names_the_folder(it, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        await simulate(name="lab")
    assert caught.value.filename == str(state_directory() / "lab")
