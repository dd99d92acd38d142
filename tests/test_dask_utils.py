"""The prototype's functions on real sessions: their contract, and what they leave when they fail."""

import asyncio
import os
import signal
import sys
import threading
import urllib.error
import urllib.request

import dask
import pytest
from distributed import Client
from ports import free_port

from dask_cml import LaunchRefused, NotOnCML, SchedulerTimeout, SessionFailed
from dask_cml.dask_utils import (
    get_dashboard_url,
    get_scheduler_url,
    run_dask_cluster,
    run_dask_workers,
    run_scheduler,
)
from dask_cml.options import Options, state_directory

LIVE = ("scheduling", "starting", "running")
pytestmark = pytest.mark.usefixtures("no_nannies")


@pytest.fixture
def workers_v1(platform, monkeypatch):
    """The platform, where code that is written for CML finds it."""
    monkeypatch.delenv("CDSW_READONLY_PORT", raising=False)
    for name in ("cml", "cml.workers_v1", "cdsw"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is forgotten after the test
    platform.install()
    return platform


@pytest.fixture
def scheduler(workers_v1):
    scheduler = run_scheduler(dashboard_port=free_port())
    yield scheduler
    stop(workers_v1, *scheduler)


@pytest.fixture
def other(workers_v1):
    """A session of other work, which must survive whatever happens to ours."""
    [session] = workers_v1.launch_workers(1, cpu=1, memory=1, code="import time; time.sleep(600)")
    yield session
    assert session["id"] in [live["id"] for live in workers_v1.list_workers() if live["status"] in LIVE]
    stop(workers_v1, session)


def stop(workers_v1, *sessions):
    workers_v1.stop_workers(*[session["id"] for session in sessions])


def left(platform, *others):
    kept = {other["id"] for other in others}
    return [
        session["id"]
        for session in platform.sessions()
        if session["status"] in LIVE and not session["stop_requested"] and session["id"] not in kept
    ]


def page(url):
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.status


@pytest.mark.images
def test_the_prototypes_notebook_with_its_import_changed(workers_v1, other):
    NUM_WORKERS = 2
    CPU_PER_WORKER = 1
    MEM_PER_WORKER = 2
    DASHBOARD_PORT = free_port()

    dask_cluster = run_dask_cluster(
        num_workers=NUM_WORKERS, cpu=CPU_PER_WORKER, memory=MEM_PER_WORKER, dashboard_port=DASHBOARD_PORT
    )
    client = Client(dask_cluster["scheduler_address"])
    workers = client.scheduler_info()["workers"].values()
    assert len(workers) == NUM_WORKERS
    assert {worker["nthreads"] for worker in workers} == {CPU_PER_WORKER}
    memory = Options.read(memory=MEM_PER_WORKER).worker_memory
    assert {worker["memory_limit"] for worker in workers} == {int(memory * 2**30)}
    assert client.gather(client.map(lambda x: x**2, range(10))) == [x**2 for x in range(10)]
    assert page(f"http://127.0.0.1:{DASHBOARD_PORT}/status") == 200
    client.close()

    assert {*dask_cluster} == {"scheduler", "workers", "scheduler_address", "dashboard_address"}
    [scheduler] = dask_cluster["scheduler"]
    sizes = {session["id"]: (session["cpu"], session["memory"]) for session in workers_v1.list_workers()}
    del sizes[other["id"]]
    workers = {worker["id"]: (1, 2) for worker in dask_cluster["workers"]}
    assert sizes == {scheduler["id"]: (1, 2), **workers}
    assert all(worker["app_url"] for worker in dask_cluster["workers"])
    assert dask_cluster["scheduler_address"] == get_scheduler_url(dask_cluster["scheduler"])
    assert dask_cluster["dashboard_address"] == get_dashboard_url(dask_cluster["scheduler"])

    workers_v1.stop_workers(*[w["id"] for w in dask_cluster["scheduler"] + dask_cluster["workers"]])
    assert left(workers_v1, other) == []


@pytest.mark.slow
def test_the_dashboards_port_may_be_that_of_the_schedulers_session(workers_v1):
    """Outside of sessions no variable names a port."""
    scheduler = run_scheduler(None)
    try:
        assert page(get_dashboard_url(scheduler)) == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):  # it would fill the workers' disks
            page(get_dashboard_url(scheduler).replace("status", "hardware"))
    finally:
        stop(workers_v1, *scheduler)


@pytest.mark.slow
def test_where_each_session_has_an_address_the_schedulers_port_is_dasks(workers_v1, namespaces):
    with dask.config.set({"cml.processes": 2, "cml.worker-args": []}):
        cluster = run_dask_cluster(1, 2, 2)
    try:
        [scheduler] = [s for s in workers_v1.list_workers() if s["id"] == cluster["scheduler"][0]["id"]]
        assert cluster["scheduler_address"] == f"tcp://{scheduler['ip_address']}:8786"
        with Client(cluster["scheduler_address"]) as client:
            assert [*client.nthreads().values()] == [1, 1]  # all processes were waited for
    finally:
        stop(workers_v1, *cluster["scheduler"], *cluster["workers"])


@pytest.mark.slow
def test_the_platform_may_be_configured_instead_also_where_an_event_loop_runs(platform):
    async def notebook():
        with pytest.raises(NotOnCML, match="DASK_CML__PLATFORM=local"):
            run_dask_cluster(1, 1, 1)
        with dask.config.set({"cml.platform": "local"}):
            cluster = run_dask_cluster(1, 1, 1)
        async with Client(cluster["scheduler_address"], asynchronous=True) as client:
            assert await client.submit(sum, [1, 2]) == 3
        stop(platform, *cluster["scheduler"], *cluster["workers"])

    asyncio.run(notebook())


@pytest.mark.slow
def test_a_scheduler_that_ends_or_does_not_answer_raises_an_error(workers_v1, other):
    for fault, status in {"succeeds": "succeeded", "fails": "failed"}.items():
        workers_v1.inject(fault, match="The scheduler of")
        with pytest.raises(SessionFailed, match=f"its status is {status}"):
            run_dask_cluster(2, 1, 1)
    workers_v1.inject("hangs", match="The scheduler of")
    late = pytest.raises(SchedulerTimeout, match="did not answer within 1 s")
    with dask.config.set({"cml.scheduler-timeout": "1s"}), late:
        run_scheduler(dashboard_port=8090)
    assert left(workers_v1, other) == []
    assert not any(state_directory().iterdir())


@pytest.mark.slow
def test_a_quota_that_grants_fewer_sessions_raises_an_error(workers_v1, other):
    """It refuses the scheduler, or the second of two workers."""
    for granted in 1, 3:
        workers_v1.configure(quota={"sessions": granted})
        with pytest.raises(LaunchRefused, match="exceeded quota"):
            run_dask_cluster(2, 1, 1)
        assert left(workers_v1, other) == []


@pytest.mark.slow
def test_a_worker_that_ends_or_does_not_connect_raises_an_error(workers_v1, scheduler, other):
    url = get_scheduler_url(scheduler)
    for fault in "succeeds", "fails":
        workers_v1.inject(fault, skip=1)
        with pytest.raises(SessionFailed, match=r"the worker's session .* ended"):
            run_dask_workers(url, 2, 1, 1)
        assert left(workers_v1, other) == [scheduler[0]["id"]]
    workers_v1.inject("error", function="list_workers", status=403, times=3)  # which proves nothing
    workers_v1.inject("hangs", skip=1)
    late = pytest.raises(RuntimeError, match="did not connect within 10 s, its status is running")
    with dask.config.set({"cml.worker-timeout": "10s"}), late:
        run_dask_workers(url, 2, 1, 1)
    assert left(workers_v1, other) == [scheduler[0]["id"]]


def test_ctrl_c_leaves_no_session(workers_v1, other, until):
    def interrupt():
        until(lambda: len(workers_v1.sessions()) > 1)
        os.kill(os.getpid(), signal.SIGINT)

    workers_v1.inject("hangs", match="The scheduler of")
    # What a shell starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_dask_cluster(1, 1, 1)
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert left(workers_v1, other) == []


def test_arguments_are_checked_before_anything_is_launched(workers_v1):
    for argument, value in [
        ("num_workers", -1),
        ("num_workers", "2"),
        ("cpu", 0),
        ("memory", 0),
        ("nvidia_gpu", -1),
        ("dashboard_port", "http"),
        ("dashboard_port", 0),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"{argument}={value!r}"):
            run_dask_cluster(**{"num_workers": 1, "cpu": 1, "memory": 1, argument: value})
    assert workers_v1.sessions() == []
