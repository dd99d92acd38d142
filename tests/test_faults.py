"""The fault matrix: what goes wrong, and that the cluster has what it was asked for in the end.

Of the scheduler's faults, those at the start are in test_start.py, and its loss is in test_failover.py. A
refusal is no fault of a session that was launched, so nothing is killed after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re

import dask
import pytest
from clusters import live, log_of, make, name_of, target
from distributed import Client
from extensions import faults

from dask_cml import CMLError, SessionFailed
from dask_cml.sessions import calls

ENDED = ("succeeded", "failed", "stopped", "timedout")
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
def impatience(monkeypatch):
    """A tenth of the pauses between tries: what a platform does wrong for 12 s, it does here for one."""
    monkeypatch.setattr(calls, "_FIRST_PAUSE", calls._FIRST_PAUSE / 10)
    monkeypatch.setattr(calls, "_LONGEST_PAUSE", calls._LONGEST_PAUSE / 10)
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


@modes
@pytest.mark.parametrize("fault", ["fails", "succeeds", "hangs"])
async def test_a_worker_that_does_not_come_is_replaced(platform, holds, mode, fault):
    words = {
        "fails": "lost: it never connected; the platform says failed",
        "succeeds": "lost: it never connected; the platform says succeeded",
        "hangs": "lost: it did not connect within 1 s",
    }[fault]
    async with make(**MODES[mode]) as cluster:
        platform.inject(fault)
        ask(cluster, mode, 1)
        if fault == "hangs":  # the one that comes in its place has its time, on a busy machine too
            await holds(lambda: cluster.workers)
            [hung] = cluster.workers.values()
            hung.options = dataclasses.replace(hung.options, worker_timeout=1.0)
        await holds(lambda: words in log_of(cluster))
        await holds(lambda: complete(cluster, 1))
        # What was given up is stopped.
        await holds(lambda: len(live(platform)) == 2)


@modes
async def test_a_refused_worker_is_told_and_comes_when_there_is_room(platform, holds, mode):
    async with make(**MODES[mode]) as cluster:
        platform.configure(quota={"sessions": 2})
        ask(cluster, mode, 2)
        await holds(lambda: "exceeded quota" in log_of(cluster))
        await holds(lambda: complete(cluster, 1))
        assert "exceeded quota" in repr(cluster)
        assert "exceeded quota" in cluster._repr_html_()
        platform.configure(quota={"sessions": 3})
        if mode != "adapt":
            cluster.scale(2)
        await holds(lambda: complete(cluster, 2))
        assert log_of(cluster).count("exceeded quota") == 1


@modes
async def test_a_worker_killed_before_it_connects_is_replaced(platform, holds, mode):
    async with make(**MODES[mode]) as cluster:
        platform.inject("hangs")
        ask(cluster, mode, 1)
        await holds(lambda: len(live(platform)) == 2)
        [session] = [each.id for each in cluster.sessions if each.role == "worker"]
        platform.evict(session)
        await holds(lambda: complete(cluster, 1))
        assert "lost: it never connected; the platform says failed" in log_of(cluster)


@modes
async def test_a_killed_worker_is_replaced_and_its_results_are_computed_again(platform, holds, mode):
    async with make(n_workers=1, **MODES[mode]) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: complete(cluster, 1))
        ask(cluster, mode, 1)
        future = client.submit(sum, [1, 2])
        await future
        [session] = [each.id for each in cluster.sessions if each.role == "worker"]
        platform.evict(session)
        await holds(lambda: complete(cluster, 1) and session not in {each.id for each in cluster.sessions})
        assert await client.gather(future) == 3
        assert "lost: evicted or killed by the platform, which says failed" in log_of(cluster)


async def test_a_scheduler_killed_before_it_answers_fails_the_start(platform, holds):
    platform.inject("hangs", match="The scheduler of")
    start = asyncio.ensure_future(make(n_workers=1))
    await holds(lambda: [each for each in platform.sessions() if each["status"] == "running"])
    [session] = [each["id"] for each in platform.sessions() if name_of(each).endswith("-scheduler")]
    platform.evict(session)
    with pytest.raises(SessionFailed, match=session):
        await start


API_FAULTS = {
    "503": ("error", {"status": 503, "times": 3}),
    "broken connections": ("error", {"status": None, "times": 3}),
    "slow calls": ("slow", {"seconds": 1, "times": 2}),
    "listed late": ("invisible", {"seconds": 1, "times": 2}),
    "address late": ("unknown_ip", {"seconds": 1, "times": 2}),
}


@pytest.mark.parametrize("fault", API_FAULTS)
async def test_faults_of_the_api_are_borne(platform, holds, fault):
    def inject():
        kind, arguments = API_FAULTS[fault]
        faults.inject(kind, **arguments)

    inject()
    async with make(n_workers=1) as cluster:
        await holds(lambda: complete(cluster, 1))
        inject()
        cluster.scale(2)
        await holds(lambda: complete(cluster, 2))
        inject()
        cluster.scale(1)
        await holds(lambda: complete(cluster, 1))
        inject()


#: What the platform answers that is no answer.
WRONG = {
    "unauthorized": ("answer", {"status": 401}),
    "server error": ("answer", {"status": 500}),
    "gateway's page": ("page", {}),
    "no answer": ("hang", {}),
    "answer lost": ("unanswered", {}),
}


@pytest.fixture
def quick_limit(platform):
    with dask.config.set({"cml.api.timeout": "2s"}):
        yield
    # What hangs must not launch or stop anything when the platform's directory is gone.
    faults.clear()


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, marks=[pytest.mark.slow] if "answer" in wrong else []) for wrong in WRONG],
)
async def test_start_life_and_close_bear_one_wrong_answer_of_each_function(
    platform, holds, quick_limit, wrong, caplog
):
    kind, arguments = WRONG[wrong]

    def inject():
        for function in ("launch_workers", "list_workers", "stop_workers"):
            faults.inject(kind, function=function, **arguments)

    inject()
    async with make(n_workers=1) as cluster:
        await holds(lambda: complete(cluster, 1))
        inject()
        cluster.scale(2)
        await holds(lambda: complete(cluster, 2))
        inject()
        cluster.scale(1)
        await holds(lambda: complete(cluster, 1))
        assert cluster.manager.state.problem is None
        inject()
    await holds(lambda: not wanted(platform))
    assert "Traceback" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "seconds"), [*((wrong, 1.2) for wrong in WRONG), ("gateway's page", 12)])
async def test_start_life_and_close_bear_wrong_answers_for_a_while(
    platform, holds, quick_limit, wrong, seconds, caplog, monkeypatch
):
    kind, arguments = WRONG[wrong]
    if seconds == 12:  # with the pauses that users have
        monkeypatch.setattr(calls, "_FIRST_PAUSE", calls._FIRST_PAUSE * 10)
        monkeypatch.setattr(calls, "_LONGEST_PAUSE", calls._LONGEST_PAUSE * 10)
    if kind in ("hang", "unanswered"):
        seconds *= 4  # several tries, each of which takes its limit

    def inject():
        faults.inject(kind, seconds=seconds, **arguments)

    inject()
    async with make(n_workers=1) as cluster:
        await holds(lambda: complete(cluster, 1))
        [lost] = [each.id for each in cluster.sessions if each.role == "worker"]
        inject()
        platform.evict(lost)
        cluster.scale(2)
        await holds(lambda: complete(cluster, 2) and lost not in {each.id for each in cluster.sessions})
        if kind in ("hang", "unanswered"):
            seconds = 600  # until the faults are cleared
        inject()
        if kind in ("hang", "unanswered"):
            # close() takes no longer than the limit of one call, and names what it could not stop.
            ids = [each.id for each in cluster.sessions]
            with pytest.raises(CMLError) as caught:
                await cluster.close()
            assert kind == "unanswered" or all(session_id in str(caught.value) for session_id in ids)
            faults.clear()
            await cluster.close()
    await holds(lambda: not wanted(platform))
    assert "Traceback" not in caplog.text


def wanted(platform):
    return [
        each for each in platform.sessions() if each["status"] not in ENDED and not each["stop_requested"]
    ]


async def test_an_outage_is_told_when_it_begins_and_when_it_ends(platform, holds, caplog, monkeypatch):
    list_workers, listings = platform.list_workers, []

    def counted():
        listings.append(list_workers())
        return listings[-1]

    def lines():
        return [
            each.getMessage()
            for each in caplog.records
            if re.match("(Cannot manage|Managing) cluster", each.getMessage())
        ]

    monkeypatch.setattr(platform, "list_workers", counted)

    with dask.config.set({"cml.api.retries": 0}):
        cluster = make(n_workers=1)
    async with cluster:
        await holds(lambda: complete(cluster, 1))
        cluster.adapt(minimum=2, maximum=2, interval="100 ms")
        faults.inject("answer", status=401, seconds=600)
        [lost] = [each.id for each in cluster.sessions if each.role == "worker"]
        platform.evict(lost)
        await holds(lambda: "Unauthorized" in repr(cluster))
        await holds(lambda: listings.count({"message": "Unauthorized"}) > 3)
        assert len(lines()) == 1
        assert lines()[0].endswith("Unauthorized")
        faults.clear()
        await holds(lambda: complete(cluster, 2) and lost not in {each.id for each in cluster.sessions})
        await holds(lambda: len(lines()) == 2)
        assert lines()[1].endswith("again")
        assert not cluster.manager.state.gave_up("default")
    assert "Traceback" not in caplog.text


async def test_a_missing_key_is_told_at_once(platform, holds, monkeypatch, caplog):
    faults.inject("key", seconds=600)
    monkeypatch.delenv("CDSW_API_KEY", raising=False)
    with pytest.raises(CMLError, match=r"^CML did not launch .*: CDSW_API_KEY is not set: restart"):
        await make(n_workers=1)
    assert platform.sessions() == []
    monkeypatch.setenv("CDSW_API_KEY", "key")
    async with make() as cluster:
        monkeypatch.delenv("CDSW_API_KEY")
        cluster.scale(1)
        await holds(lambda: "CDSW_API_KEY is not set" in repr(cluster))
        monkeypatch.setenv("CDSW_API_KEY", "key")
        await holds(lambda: complete(cluster, 1))
    assert caplog.text.count("CDSW_API_KEY is not set") == 1


async def test_too_many_failures_in_a_row_end_the_trying_until_scale(platform, holds):
    with dask.config.set({"cml.failure-limit": 2}):
        cluster = make()
    async with cluster:
        platform.inject("fails", times=2)
        cluster.scale(1)
        await holds(lambda: cluster.manager.state.gave_up("default"))
        assert "no new workers after 2 failures in a row" in log_of(cluster)
        assert "no new workers after 2 failures" in repr(cluster)
        cluster.scale(1)
        await holds(lambda: complete(cluster, 1))
        assert "problem" not in repr(cluster)


async def test_a_quota_met_by_a_hundred_launches_is_not_asked_for_each(platform, holds, monkeypatch):
    launches = []
    launch_workers = platform.launch_workers

    @functools.wraps(launch_workers)
    def counted(*args, **kwargs):
        launches.append(kwargs["name"])
        return launch_workers(*args, **kwargs)

    monkeypatch.setattr(platform, "launch_workers", counted)
    async with make() as cluster:
        platform.configure(quota={"sessions": 3})
        cluster.scale(100)
        await holds(lambda: complete(cluster, 2))
        assert target(cluster) == 2
        assert len(launches) <= 3 + dask.config.get("cml.api.threads")
        assert log_of(cluster).count("launched 2 of 100 workers") == 1
