"""A cluster in an event loop, as the JupyterLab sidebar uses it."""

import asyncio
import contextlib
import logging
import sys
import threading
import time

import dask
import pytest
from clusters import (
    arrived,
    dashboard_listener,
    is_connected,
    rebuild,
    scheduler_number,
    scheduler_of,
    simulate,
)
from distributed import Worker
from distributed.core import Status
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError
from dask_cml.dashboard.proxy import DashboardForwarder
from dask_cml.options import state_directory
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


@simulated
async def test_a_cluster_that_is_closed_twice_at_once_does_not_start_again(it):
    cluster = await simulate(n_workers=1)
    await asyncio.gather(cluster.close(), cluster.close())
    await cluster.close()
    assert not it.platform.running
    with pytest.raises(CMLError, match="closed"):
        async with cluster:
            pass


@simulated
async def test_of_several_tasks_that_await_a_start_only_the_last_ends_it(it):
    it.platform.doom("silent")
    cluster = simulate()
    impatient = [asyncio.ensure_future(cluster) for _ in range(2)]
    patient = asyncio.ensure_future(cluster)
    await eventually(lambda: it.platform.live)
    for waiting in impatient:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert it.platform.live
    assert not patient.done()
    patient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patient
    assert not it.platform.running
    assert cluster.status == Status.closed


@simulated
async def test_close_during_the_start(it):
    it.platform.doom("silent", times=3)
    cluster = simulate(n_workers=2)
    start = asyncio.ensure_future(cluster)
    await eventually(lambda: len(it.platform.all) == 3)
    await cluster.close()
    with pytest.raises(CMLError, match="closed while it started"):
        await start
    assert not it.platform.running


@simulated
async def test_a_cluster_that_shut_itself_down_leaves_no_forwarder_and_no_silence(it, monkeypatch):
    async def close_slowly(self):
        await asyncio.sleep(5.0)
        await close(self)

    close = DashboardForwarder.close
    monkeypatch.setattr(DashboardForwarder, "close", close_slowly)
    handler = logging.StreamHandler()
    logging.getLogger("distributed").addHandler(handler)
    try:
        cluster = await simulate(idle_timeout="5s", forward_dashboard=True)
        listener = dashboard_listener(cluster)
        assert (handler.level, listener.fileno() == -1) == (logging.WARNING, False)
        await eventually(lambda: cluster.status == Status.closed)
        assert (handler.level, listener.fileno() == -1) == (logging.NOTSET, True)
    finally:
        logging.getLogger("distributed").removeHandler(handler)


@simulated
async def test_wait_for_workers_fails_when_the_cluster_has_ended(it):
    cluster = await simulate(idle_timeout="5s")
    with pytest.raises(CMLError, match=r"^1 workers not connected: cluster .* is clos"):
        await cluster.wait_for_workers(1)


@simulated
async def test_wait_for_workers_says_after_its_timeout_what_the_platform_refuses(it):
    async with simulate(name="lab") as creator, rebuild("lab") as other:
        it.platform.configure({"cpu": 3})
        creator.scale(4)
        await eventually(lambda: arrived(creator) == 2 and other.problem)
        for cluster in creator, other:
            words = r"^Only 2/4 workers .* 2 s: 2 of 4 workers launched: .*quota"
            with pytest.raises(TimeoutError, match=words):
                await cluster.wait_for_workers(4, timeout="2 s")
        scheduler_of(it, creator).handlers["identity"] = lambda: asyncio.sleep(3600)
        with pytest.raises(TimeoutError, match=r"^Only 0/1 workers arrived"):
            await creator.wait_for_workers(1, timeout="2 s")


@pytest.mark.images
@simulated
async def test_wait_for_workers_fails_as_soon_as_no_other_worker_is_to_connect(it):
    with dask.config.set({"cml.failure-limit": 2}):
        async with simulate(name="lab", n_workers=1, worker_groups={"gpu": {}}) as creator:
            await creator.wait_for_workers(1)
            async with rebuild("lab") as other:
                it.platform.doom("fails", times=2)
                creator.scale(1, worker_group="gpu")
                for cluster in creator, other:
                    with pytest.raises(CMLError) as failure:
                        await cluster.wait_for_workers(2)
                    words = "1 of 2 workers connected: no new workers after 2 failures in a row: "
                    assert str(failure.value).startswith(words)
                    advice = ". To try again, run `dask cml scale lab 1 --group gpu`"
                    assert str(failure.value).endswith(advice)
                creator.adapt(1, 2)  # these may come
                with pytest.raises(TimeoutError, match="Only 1/2 workers arrived after 5 s: gpu: no new"):
                    await creator.wait_for_workers(2, timeout="5 s")
                other.scale(1, worker_group="gpu")
                await other.wait_for_workers(2)


@simulated
async def test_wait_for_workers_does_not_ask_a_lost_scheduler(it):
    async with simulate(n_workers=1) as cluster:
        await cluster.wait_for_workers(1)
        it.platform.evict(it.platform.running[f"{cluster.name}-scheduler"])
        await eventually(lambda: not is_connected(cluster))
        begin = time.monotonic()
        await cluster.wait_for_workers(1)
        assert scheduler_number(cluster) == 1
        assert time.monotonic() - begin < 25  # Dask tries to connect for 30 s


@pytest.mark.images
@simulated
async def test_workers_with_odd_names_that_others_have_started_stay_and_spoil_nothing(it, caplog):
    async with (
        simulate(name="mine", n_workers=1, silence_logs=False) as cluster,
        rebuild("mine") as remote,
        contextlib.AsyncExitStack() as stack,
    ):
        names, others = ("x" * 10_000, ("a", 1), "mine-0-", "\x1b[31m", 0.5, 5, "mine"), []
        for name in names:
            other = Worker(cluster.scheduler_address, name=name, security=cluster.security)
            others.append(await stack.enter_async_context(other))
        await eventually(lambda: len(cluster.scheduler_info["workers"]) == 1 + len(names))
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == arrived(remote) == 2)
        assert cluster.problem is remote.problem is None
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)
        await asyncio.sleep(timing.strays + timing.stray)
        assert cluster.observed == {*names}
        assert {other.status for other in others} == {Status.running}
    assert "Cannot manage" not in caplog.text


def test_an_asynchronous_cluster_needs_an_event_loop(platform):
    with pytest.raises(RuntimeError, match="without a running loop"):
        CMLCluster(platform="local", asynchronous=True)


@pytest.mark.slow
async def test_the_loop_reads_and_writes_no_file_of_the_cluster(platform, light, holds):
    """The project's file system may hang."""
    main, in_loop, elsewhere, is_on = threading.current_thread(), [], [], True
    directory = str(state_directory())

    def note(event, arguments):
        if is_on and directory in str(arguments[:2]):
            used = in_loop if threading.current_thread() is main else elsewhere
            used.append((event, arguments))

    sys.addaudithook(note)  # which cannot be removed
    try:
        async with CMLCluster(name="mine", platform="local", asynchronous=True, quiet=True) as cluster:
            await cluster.scale(1)
            async with CMLCluster.from_name("mine", asynchronous=True, quiet=True) as remote:
                await holds(lambda: arrived(remote) == 1)
                await remote.scale(0)
                await holds(lambda: not cluster.workers)
                assert repr(remote)
            assert await cluster.get_logs()
    finally:
        is_on = False
    assert elsewhere
    assert not in_loop
