"""What CML's API v2 says of what the user's quota leaves, and how it may misbehave."""

from __future__ import annotations

import asyncio
import logging

import pytest
from clusters import arrived, lines_of, simulate
from simulated.testing import eventually, simulated
from workbench import (
    KEY,
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

from dask_cml.options import SessionSize
from dask_cml.sessions import api_v2

BAD_NEWS = [
    never_answers,
    answers_slowly,
    shows_a_page,
    redirects,
    closes_the_connection,
    never_ends,
    *map(refuses, (401, 403, 404, 500)),
    *map(writes, ("", "[]", "null", "{}", '"text"', '{"user_quota": 5}')),
    writes('{"user_quota": "no", "next_page_token": {"b": [2]}}'),
    writes('{"user_quota": [null, [], {"user": []}]}'),
    writes('{"user_quota": [{"user": {"user_name": "ann"}, "quota_usage": null}]}'),
]


# -- what the quota leaves


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ([quota()], {"cpu": 12, "memory": 240}),
        ([quota("bob"), quota("eve"), quota(used=("64.5", "0", "0"))], {"cpu": 0, "memory": 256}),
        ([quota(most=("8", "32", "2"), used=(1.5, 4, 1))], {"cpu": 6.5, "memory": 28, "nvidia_gpu": 1}),
        ([quota(most=("0", "-1", ""))], {}),
        ([quota(most=("8", "32Gi", "nan"))], {}),
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
        assert await api_v2.quota_left() == {}
        assert not it.asked
    assert KEY not in caplog.text


@pytest.mark.parametrize("missing", ["CDSW_APIV2_KEY", "CDSW_DOMAIN"])
async def test_nothing_is_asked_without_a_key_and_an_address(monkeypatch, missing):
    async with workbench() as it:
        it.quotas = [quota()]
        monkeypatch.delenv(missing)
        assert await api_v2.quota_left() == {}
        assert not it.asked


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
        handler.write(platform.answer(0))
        answered.set()

    answered = asyncio.Event()
    async with workbench() as platform:
        platform.quotas = [quota(most=("8", "64", "0"), used=("7.5", "8", "0"))]
        platform.misbehaves = answers_late
        async with simulate(name="mine", n_workers=2, cpu=1, memory=1) as cluster:
            await answered.wait()
            await eventually(lambda: arrived(cluster) == 2)
            assert not lines_of(cluster)
