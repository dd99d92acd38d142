"""The fault matrix: what goes wrong, and that the cluster has what it was asked for in the end.

Of the scheduler's faults, those at the start are in promises/test_start.py, and its loss is in
test_failover.py.
"""

from __future__ import annotations

import asyncio
import re

import dask
import pytest
from clusters import arrived, log_of, make, simulate, target
from distributed import Client
from simulated.faults import HTTPError, JSONDecodeError, Mishap
from simulated.testing import eventually, simulated

pytestmark = pytest.mark.usefixtures("light")
MODES = {
    "fixed": {},
    "adapt": {},
    "groups": {"processes": 2, "cpu": 2, "worker_args": []},
}
modes = pytest.mark.parametrize(
    "mode", ["fixed", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("adapt", "groups"))]
)


@pytest.fixture(autouse=True)
def impatience():
    settings = {
        "distributed.deploy.lost-worker-timeout": "2s",
        "cml.quota-retry": "500ms",
        "cml.api.poll-interval": "200ms",
    }
    with dask.config.set(settings):
        yield


def ask(cluster, mode, n):
    if mode == "adapt":
        cluster.adapt(minimum=n, maximum=n, interval="100 ms")
    else:
        cluster.scale(n)


def complete(cluster, n):
    """Whether there are so many sessions, with all their Dask workers."""
    return (
        len(cluster.workers) == len(cluster.worker_spec) == n
        and len(cluster.scheduler_info["workers"]) == n * cluster.options.processes
    )


#: What may become of a session, and what is said of it.
FAULTS = {
    "fails": "lost: it never connected; the platform says failed",
    "succeeds": "lost: it never connected; the platform says succeeded",
    "silent": "lost: it did not connect within 20 s",
    "silent, and evicted": "lost: it never connected; the platform says failed",
}


@modes
@simulated
async def test_a_worker_that_does_not_connect_is_replaced(it, mode):
    async with simulate(**MODES[mode], worker_timeout=20.0) as cluster:
        for n, (fault, words) in enumerate(FAULTS.items(), start=1):
            before = log_of(cluster).count(words)
            it.platform.doom(fault.partition(",")[0])
            ask(cluster, mode, n)
            if "evicted" in fault:
                await eventually(lambda n=n: len(it.platform.running) == n + 1)
                it.platform.evict([*it.platform.running.values()][-1])
            await eventually(lambda words=words, before=before: log_of(cluster).count(words) > before)
            await eventually(lambda n=n: complete(cluster, n))
            # What was given up is stopped.
            await eventually(lambda n=n: len(it.platform.running) == n + 1)


@modes
async def test_a_killed_worker_is_replaced_and_its_results_are_computed_again(platform, holds, mode):
    async with make(n_workers=1, **MODES[mode]) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: complete(cluster, 1))
        ask(cluster, mode, 1)
        future = client.submit(sum, [1, 2])
        await future
        [lost] = [session.id for session in cluster.sessions if session.role == "worker"]
        platform.evict(lost)
        await holds(lambda: complete(cluster, 1) and lost not in {session.id for session in cluster.sessions})
        assert await client.gather(future) == 3
        # Its nanny may log the end of the worker before it is killed itself, as if memory had been short.
        causes = "evicted or killed by the platform, which says failed|out of memory, "
        assert re.search(f"lost: ({causes})", log_of(cluster))


#: What goes wrong with a launch or a list, and the status that answers a stop, or None: the same goes wrong.
WRONG = {
    "unauthorized": (Mishap(answer={"message": "Unauthorized"}, carried_out=False), 401),
    "server error": (Mishap(answer={"message": "Internal Server Error"}, carried_out=False), 500),
    "gateway's page": (Mishap(error=JSONDecodeError("Expecting value"), carried_out=False), 502),
    "unavailable": (Mishap(error=HTTPError(503), carried_out=False), None),
    "broken connection": (Mishap(error=ConnectionError("lost"), carried_out=False), None),
    "slow": (Mishap(before=1.0), None),
    # CML's gateway ends them before the tries of a launch, which waits for two calls that hang.
    "no answer": (Mishap(before=20.0, error=ConnectionError("lost"), carried_out=False), None),
    "answer lost": (Mishap(after=20.0), None),
}
DEFAULT = ("unauthorized", "gateway's page", "no answer")


def spoil_one(it, wrong):
    """Let one call of each function go wrong."""
    mishap, code = WRONG[wrong]
    it.platform.plan("launch_workers", mishap)
    it.platform.plan("list_workers", mishap)
    it.platform.plan("stop_workers", *([] if code else [mishap]))
    it.platform.answer_stop(*([code] if code else []))


def traceback_in(caplog):
    """Whether dask-cml has logged a traceback, or asyncio one that nobody caught."""
    return any(record.exc_info for record in caplog.records if re.search("cml|asyncio", record.name))


@pytest.mark.parametrize(
    "wrong",
    [wrong if wrong in DEFAULT else pytest.param(wrong, marks=pytest.mark.slow) for wrong in WRONG],
)
@simulated
async def test_a_cluster_works_despite_one_wrong_answer_of_each_function(it, wrong, caplog):
    spoil_one(it, wrong)
    with dask.config.set({"cml.api.timeout": "2s"}):
        async with simulate(n_workers=1) as cluster:
            await eventually(lambda: complete(cluster, 1))
            spoil_one(it, wrong)
            cluster.scale(2)
            await eventually(lambda: complete(cluster, 2))
            spoil_one(it, wrong)
            cluster.scale(1)
            await eventually(lambda: complete(cluster, 1))
            assert cluster.problem is None
            spoil_one(it, wrong)
    await eventually(lambda: not it.platform.running)
    assert not traceback_in(caplog)


@pytest.mark.slow
@simulated
async def test_sessions_that_are_listed_late_or_without_an_address_are_waited_for(it):
    for fate in "hidden", "unknown":
        launched = len(it.platform.all)
        it.platform.doom(fate, times=3)
        async with simulate(n_workers=1) as cluster:
            await eventually(lambda: complete(cluster, 1))
            cluster.scale(2)
            await eventually(lambda: complete(cluster, 2))
            assert len(it.platform.all) - launched == 3


@simulated
async def test_a_key_that_is_accepted_again_ends_the_problem(it):
    async with simulate(n_workers=1) as cluster:
        await eventually(lambda: complete(cluster, 1))
        it.platform.plan("list_workers", *[WRONG["unauthorized"][0]] * 10_000)
        await eventually(lambda: "CDSW_API_KEY" in repr(cluster))
        it.platform.heal()
        await eventually(lambda: "CDSW_API_KEY" not in repr(cluster))
        cluster.scale(2)
        await eventually(lambda: complete(cluster, 2))


@pytest.mark.slow
@simulated
async def test_what_the_platform_forbids_is_tried_again_with_pauses(it):
    async def scale(n, function):
        asked = it.platform.count(function)
        it.platform.fail(function, *[HTTPError(403)] * 10_000)
        cluster.scale(n)
        await eventually(lambda: it.platform.count(function) > asked)
        await asyncio.sleep(30.0)
        assert it.platform.count(function) - asked <= 15
        it.platform.heal()
        await eventually(lambda: complete(cluster, n))

    async with simulate(n_workers=2) as cluster:
        await eventually(lambda: complete(cluster, 2))
        await scale(3, "launch_workers")
        await scale(1, "stop_workers")


@simulated
async def test_an_exhausted_quota_refuses_few_of_a_hundred_launches(it):
    with dask.config.set({"cml.quota-retry": "1h"}):
        async with simulate() as cluster:
            it.platform.configure({"sessions": 3})
            cluster.scale(100)
            await eventually(lambda: arrived(cluster) == 2)
            assert target(cluster) == 100
            assert it.platform.count("launch_workers") <= 3 + dask.config.get("cml.api.threads")
            assert log_of(cluster).count("launched 2 of 100 workers") == 1
