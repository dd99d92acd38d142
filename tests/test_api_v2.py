"""What CML's API v2 says of what the user's quota leaves, and how it may misbehave."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from clusters import arrived, lines_of, simulate
from simulated.testing import eventually, simulated
from workbench import (
    KEY,
    closes_the_connection,
    never_answers,
    quota,
    redirects,
    refuses,
    shows_a_page,
    workbench,
    writes,
)

from dask_cml.core import start
from dask_cml.options import SessionSize
from dask_cml.sessions import api_v2


async def quota_left():
    return await asyncio.to_thread(api_v2.quota_left)


async def test_the_quota_leaves_what_is_not_used_in_a_project_of_the_user(monkeypatch):
    async with workbench() as it:
        for entries, left in [
            ([quota()], {"cpu": 12, "memory": 240}),
            ([quota("bob"), quota("eve"), quota(used=("64.5", "0", "0"))], {"cpu": 0, "memory": 256}),
            ([quota(most=("8", "32", "2"), used=(1.5, 4, 1))], {"cpu": 6.5, "memory": 28, "nvidia_gpu": 1}),
            ([quota(most=("0", "-1", ""))], {}),
            ([quota(most=("8", "32Gi", "nan"))], {}),
            ([quota("bob")], {}),
            ([], {}),
        ]:
            it.quotas = entries
            assert await quota_left() == left
        it.asked.clear()
        it.quotas = [quota()]
        for missing in ("CDSW_APIV2_KEY", "CDSW_DOMAIN", "CDSW_PROJECT_URL"):
            with monkeypatch.context() as patch:
                patch.delenv(missing)
                assert await quota_left() == {}
        monkeypatch.setenv("CDSW_PROJECT_URL", f"http://{it}/api/v1/projects/team/demo")
        assert await quota_left() == {}
        assert not it.asked


def test_a_shortage_names_what_is_short_only():
    sessions = [(SessionSize(4, 16, 1), 10), (SessionSize(0.1, 2), 3)]
    left = {"cpu": 12.5, "memory": 166.0, "nvidia_gpu": 4.0}
    words = "its workers need 40.3 vCPU and 10 GPU, but your quota leaves 12.5 vCPU and 4 GPU"
    assert api_v2.shortage(sessions, left) == words
    assert api_v2.shortage(sessions, {"cpu": 40.3, "memory": 166.0}) is None
    assert api_v2.shortage([(SessionSize(0.1, 1), 3)], {"cpu": 0.3}) is None
    assert api_v2.shortage(sessions, {}) is None


@pytest.mark.slow
async def test_without_an_answer_in_its_form_nothing_is_known_and_the_key_is_in_no_log(monkeypatch, caplog):
    monkeypatch.setattr(api_v2, "PATIENCE", 0.5)
    caplog.set_level(logging.DEBUG)
    async with workbench() as it:
        for it.misbehaves in [
            never_answers,
            shows_a_page,
            closes_the_connection,
            *map(refuses, (401, 403, 404, 500)),
            *map(writes, ("", "[]", "null", "{}", '"text"', '{"user_quota": 5}', '{"user_quota": "no"}')),
            writes('{"user_quota": [null, [], {"user": []}]}'),
            writes('{"user_quota": [{"user": {"user_name": "ann"}, "quota_usage": null}]}'),
        ]:
            assert await quota_left() == {}
        monkeypatch.setenv("CDSW_APIV2_KEY", f"{KEY}\r\nX-Header: 1")
        it.asked.clear()
        assert await quota_left() == {}
        assert not it.asked
    assert KEY not in caplog.text


async def test_a_redirected_request_does_not_show_the_key():
    keys = []

    async def note(handler):
        keys.append(handler.request.headers.get("Authorization"))
        await redirects(handler)

    async with workbench() as it:
        it.misbehaves = note
        assert await quota_left() == {}
    assert keys[0] == f"Bearer {KEY}"
    assert {*keys[1:]} == {None}


@pytest.mark.parametrize("misbehaves", [None, refuses(401)])
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
async def test_a_start_does_not_believe_an_answer_that_comes_after_the_workers_launch(it, monkeypatch):
    """It may count them as used."""
    answer = Future()
    monkeypatch.setattr(start, "calls", SimpleNamespace(start=lambda function: answer))
    async with simulate(n_workers=2, cpu=1, memory=1) as cluster:
        answer.set_result({"cpu": 0.5})
        await eventually(lambda: arrived(cluster) == 2)
        assert not lines_of(cluster)
