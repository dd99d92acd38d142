"""What CML's API v2 adds to messages: why a session ended, and what the quota leaves."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from clusters import arrived, lines_of, log_of, simulate
from distributed import Client
from simulated.testing import eventually, simulated
from workbench import (
    KEY,
    USER,
    answers_slowly,
    closes_the_connection,
    never_answers,
    never_ends,
    quota,
    redirects,
    refuses,
    shows_a_page,
    workbench,
    writes,
)

from dask_cml import SessionFailed
from dask_cml.options import SessionSize
from dask_cml.sessions import api_v2

SESSION = "k2j4h5g6f7d8s9a0"
OOM = {
    "oom_killed": True,
    "k8s_info": {"k8s_exit_code": 137, "k8s_signal": "0", "k8s_reason": "OOMKilled", "k8s_message": ""},
}
OOM_WORDS = "OOMKilled (exit code 137)"
EVICTED = {
    "k8s_info": {"k8s_reason": "Evicted", "k8s_message": "The node was low on resource: memory. "},
}
BAD_NEWS = [
    never_answers,
    answers_slowly,
    shows_a_page,
    redirects,
    closes_the_connection,
    never_ends,
    *map(refuses, (401, 403, 404, 500)),
    *map(writes, ("", "[]", "null", "{}", '"text"', '{"usage_response": 5, "user_quota": 5}')),
    writes('{"usage_response": {"a": 1}, "user_quota": "no", "next_page_token": {"b": [2]}}'),
    writes('{"usage_response": [null, [], {"id": {}}], "user_quota": [null, [], {"user": []}]}'),
    writes('{"user_quota": [{"user": {"user_name": "ann"}, "quota_usage": null}]}'),
]


def entry(n=0, session=None, **values):
    """An entry of a workload, as CML's documentation describes it."""
    return {
        "id": str(n),
        "name": f"workload {n}",
        "creator": USER,
        "workload_type": "session",
        "status": "failed",
        "duration": "3600",
        "workload_url": f"https://cml.example.com/{USER}/demo/engines/{session or n}",
        "message": "",
        "oom_killed": False,
        "k8s_info": {"k8s_exit_code": 0, "k8s_signal": "", "k8s_reason": "", "k8s_message": ""},
        **values,
    }


# -- why a session ended


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (OOM, OOM_WORDS),
        ({"oom_killed": True, "k8s_info": {"k8s_reason": "Error"}}, "OOMKilled: Error"),
        ({"oom_killed": True, "k8s_info": None}, "OOMKilled"),
        (EVICTED, "Evicted: The node was low on resource: memory"),
        ({"k8s_info": {"k8s_exit_code": 143, "k8s_reason": "Error"}}, "Error (exit code 143)"),
        ({"k8s_info": {"k8s_exit_code": 1}}, "exit code 1"),
        ({"message": "Engine exited with status 34."}, "Engine exited with status 34"),
        ({"message": "two\nlines\x1b[2J"}, r"two lines\x1b[2J"),
        ({"message": "long" * 100}, "long" * 49 + "lon…"),
        ({"k8s_info": {"k8s_reason": "Completed", "k8s_exit_code": 0}}, None),
        ({"k8s_info": "odd", "message": ["odd"], "oom_killed": "odd"}, None),
        ({}, None),
    ],
)
async def test_the_reason_is_what_the_platform_says_in_one_line(values, reason):
    async with workbench() as it:
        it.usage = lambda: [None, entry(1), entry(session=SESSION, **values)]
        assert await api_v2.reasons([SESSION]) == ({} if reason is None else {SESSION: reason})


@pytest.mark.parametrize(
    "identity",
    [
        {"id": SESSION, "workload_url": None},
        {"workload_url": f"https://cml.example.com/{USER}/demo/engines/{SESSION}"},
        {"workload_url": f"https://cml.example.com/{USER}/demo/dashboards/{SESSION}?tab=logs"},
    ],
)
async def test_a_session_is_found_among_the_newest_first_on_any_page(identity):
    async with workbench() as it:
        it.page = 2
        it.usage = lambda: [*map(entry, range(5)), entry(5, **identity, **OOM), entry(6), entry(7)]
        assert await api_v2.reasons([SESSION]) == {SESSION: OOM_WORDS}
        assert len(it.asked) == 3
        assert all("sort=-created_at" in url for url in it.asked)


async def test_of_several_sessions_those_that_are_known_have_a_reason():
    async with workbench() as it:
        it.usage = lambda: [entry(session="a" * 16, **OOM), entry(session="b" * 16)]
        assert await api_v2.reasons(["a" * 16, "b" * 16, "c" * 16]) == {"a" * 16: OOM_WORDS}
        assert len(it.asked) == 1


# -- what the quota leaves


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ([quota()], {"cpu": 12, "memory": 240}),
        ([quota("bob"), quota("eve"), quota(used=("64.5", "0", "0"))], {"cpu": 0, "memory": 256}),
        ([quota(most=("8", "32", "2"), used=(1.5, 4, 1))], {"cpu": 6.5, "memory": 28, "nvidia_gpu": 1}),
        ([quota(most=("0", "-1", ""))], {}),
        ([quota(most=("8", "32Gi", "nan"))], {"cpu": -44}),
        ([quota(most=("inf", "nan", "0"))], {}),
        ([quota("bob")], {}),
        ([], {}),
    ],
)
async def test_the_quota_leaves_what_is_not_used(entries, left):
    async with workbench() as it:
        it.page, it.quotas = 1, entries
        assert await api_v2.quota_left() == {name: max(0, amount) for name, amount in left.items()}


async def test_the_users_quota_says_nothing_of_a_teams_project(monkeypatch):
    async with workbench() as it:
        it.quotas = [quota()]
        monkeypatch.setenv("CDSW_PROJECT_URL", f"http://{it}/api/v1/projects/team/demo")
        assert await api_v2.quota_left() == {}
        assert not it.asked


def test_a_shortage_names_what_is_short_only():
    sessions = [(SessionSize(4, 16, 1), 10), (SessionSize(0.1, 2), 3)]
    left = {"cpu": 12.5, "memory": 166.0, "nvidia_gpu": 4.0}
    words = "its workers need 40.3 vCPU and 10 GPU, but your quota leaves 12.5 vCPU and 4 GPU"
    assert api_v2.shortage(sessions, left) == words
    assert api_v2.shortage(sessions, {"cpu": 40.3, "memory": 166.0}) is None
    assert api_v2.shortage([(SessionSize(0.1, 1), 3)], {"cpu": 0.3}) is None
    assert api_v2.shortage(sessions, {}) is None


# -- if it does not answer


@pytest.mark.parametrize("misbehaves", BAD_NEWS)
async def test_it_is_silent_and_takes_no_longer_than_its_time(monkeypatch, caplog, misbehaves):
    monkeypatch.setattr(api_v2, "PATIENCE", 0.5)
    caplog.set_level(logging.DEBUG)
    async with workbench() as it:
        it.misbehaves = misbehaves
        assert await api_v2.reasons([SESSION]) == {}
        assert await api_v2.quota_left() == {}
        assert "/api/v2/login" not in it.asked
        await asyncio.sleep(0.6)  # what was given up ends by itself
    assert KEY not in caplog.text
    assert not [
        record for record in caplog.records if record.levelno > logging.INFO and "tornado" in record.name
    ]


async def test_the_key_is_in_no_log_if_it_cannot_be_sent(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    async with workbench() as it:
        monkeypatch.setenv("CDSW_APIV2_KEY", f"{KEY}\r\nX-Header: 1")
        assert await api_v2.reasons([SESSION]) == {}
        assert not it.asked
    assert KEY not in caplog.text


@pytest.mark.parametrize("missing", ["CDSW_APIV2_KEY", "CDSW_DOMAIN"])
async def test_nothing_is_asked_without_a_key_and_an_address(monkeypatch, missing):
    async with workbench() as it:
        it.usage, it.quotas = lambda: [entry(session=SESSION, **OOM)], [quota()]
        monkeypatch.delenv(missing)
        assert await api_v2.reasons([SESSION]) == {}
        assert await api_v2.quota_left() == {}
        assert not it.asked


# -- lost sessions


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (OOM, f"lost: out of memory, the platform says {OOM_WORDS}"),
        (
            EVICTED,
            "lost: evicted or killed by the platform, which says "
            "Evicted: The node was low on resource: memory",
        ),
        ({}, "lost: evicted or killed by the platform, which says failed"),
    ],
)
@simulated
async def test_the_cause_of_a_loss_is_the_platforms_reason(it, values, words):
    async with workbench() as platform, simulate(name="mine", n_workers=1) as cluster:
        platform.usage = lambda: [entry(session=session, **values) for session in it.platform.all]
        await eventually(lambda: arrived(cluster) == 1)
        it.platform.evict(cluster.workers["mine-0"].session_id)
        await eventually(lambda: "mine-1" in cluster.workers and arrived(cluster) == 1)
        assert log_of(cluster) == f"Worker mine-0 {words}; launching a replacement"


@simulated
async def test_a_session_that_was_closed_needs_no_reason(it):
    async with (
        workbench() as platform,
        simulate(name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        platform.asked.clear()
        await client.retire_workers(names=["mine-0"])
        await eventually(lambda: "mine-1" in cluster.workers and arrived(cluster) == 1)
        assert not platform.asked


@simulated
async def test_a_lost_session_is_replaced_soon_although_the_platform_does_not_say_why(it):
    async with workbench() as platform, simulate(name="mine", n_workers=1) as cluster:
        platform.misbehaves = never_answers
        await eventually(lambda: arrived(cluster) == 1)
        it.platform.evict(cluster.workers["mine-0"].session_id)
        began = time.monotonic()
        await eventually(lambda: "mine-1" in cluster.workers)
        assert api_v2.PATIENCE <= time.monotonic() - began < 15
        assert log_of(cluster).startswith("Worker mine-0 lost: evicted or killed by the platform")


@simulated
async def test_a_lost_scheduler_is_lost_for_the_platforms_reason(it):
    async with workbench() as platform, simulate(name="mine") as cluster:
        platform.usage = lambda: [entry(session=session, **OOM) for session in it.platform.all]
        it.platform.evict(it.platform.running["mine-scheduler"])
        await eventually(lambda: "connected to another scheduler" in log_of(cluster))
        assert f"lost, with tasks and results: out of memory, the platform says {OOM_WORDS}" in log_of(
            cluster
        )


@simulated
async def test_a_start_that_fails_says_the_platforms_reason(it):
    it.platform.doom("fails", key="scheduler")
    async with workbench() as platform:
        platform.usage = lambda: [entry(session=session, **OOM) for session in it.platform.all]
        with pytest.raises(SessionFailed) as caught:
            await simulate()
    assert f"its status is failed ({OOM_WORDS})" in str(caught.value)


# -- a start


@pytest.mark.parametrize("misbehaves", [None, never_answers, refuses(401)])
@simulated
async def test_a_start_says_nothing_of_a_quota_that_suffices_or_is_unknown(it, misbehaves):
    it.platform.latency = 1.0
    async with workbench() as platform:
        platform.quotas = [quota(most=("8", "64", "0"), used=("4", "8", "0"))]
        platform.misbehaves = misbehaves
        async with simulate(n_workers=2, cpu=1, memory=1) as cluster:
            assert not lines_of(cluster)
        assert len(platform.asked) == 1


@simulated
async def test_a_start_does_not_believe_a_quota_of_which_it_has_used_a_part_meanwhile(it):
    """The workers are launched before the answer comes, which may count them as used."""

    async def answers_late(handler):
        await eventually(lambda: "mine-1" in it.platform.running)
        handler.write(platform.answer("usersquota", 0))
        answered.set()

    answered = asyncio.Event()
    async with workbench() as platform:
        platform.quotas = [quota(most=("8", "64", "0"), used=("7.5", "8", "0"))]
        platform.misbehaves = answers_late
        async with simulate(name="mine", n_workers=2, cpu=1, memory=1) as cluster:
            await answered.wait()
            await eventually(lambda: arrived(cluster) == 2)
            assert not lines_of(cluster)
