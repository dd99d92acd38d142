"""The limits of a site: more is refused before a launch, adapting keeps within, and hours end a cluster."""

from __future__ import annotations

import asyncio

import dask
import pytest
from clusters import create_and_kill, log_of, make, simulate
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml.options import SessionSize
from dask_cml.options.limits import check_room, limits, room
from dask_cml.records import store


def limited(**values):
    return dask.config.set({f"cml.limits.{name.replace('_', '-')}": value for name, value in values.items()})


# -- what fits


def test_the_tightest_limit_decides_how_many_sessions_fit_next_to_others():
    others = [(SessionSize(1, 2), 1), (SessionSize(1, 5, 2), 2)]
    for limit, fit in [
        ({}, (float("inf"), "")),
        ({"sessions": 10}, (7, "sessions")),
        ({"cpu": 16}, (3, "cpu")),
        ({"memory": "64 GiB"}, (6, "memory")),
        ({"gpu": 5}, (1, "gpu")),
        ({"gpu": 0}, (0, "gpu")),
        ({"sessions": 6, "cpu": 16, "memory": 64}, (3, "cpu")),
        ({"sessions": 2}, (0, "sessions")),
        ({"hours": 1}, (float("inf"), "")),
    ]:
        with limited(**limit):
            assert room(SessionSize(4, 8, 1), others) == fit
    with limited(gpu=0):
        check_room("n", 1000, SessionSize(1, 1), [])
    with limited(cpu=0.4):  # amounts with fractions fit exactly
        assert room(SessionSize(0.1, 1), [(SessionSize(0.1, 1), 1)])[0] == 3


def test_an_invalid_limit_raises_an_error_with_its_key():
    invalid = {"sessions": 1.5, "cpu": 0, "memory": "lots", "gpu": -1, "hours": "2 days"}
    for name, value in invalid.items():
        words = f"^invalid cml.limits.{name}={value!r}: expected .*, in "
        with limited(**{name: value}), pytest.raises((TypeError, ValueError), match=words):
            limits()


# -- a new cluster


def test_a_new_cluster_with_more_is_refused_with_the_limit(state):
    big = {"n_workers": 1, "worker_groups": {"big": {"n_workers": 2, "memory": 8}}}
    for options, limit, words in [
        ({"n_workers": 4}, {"sessions": 4}, "n_workers=4: expected at most 3, because cml.limits"),
        (big, {"memory": 16}, "worker_groups['big'].n_workers=2: expected at most 1, because cml"),
        ({"scheduler_cpu": 8}, {"cpu": 4}, "scheduler_cpu=8.0: expected less, because cml.limits.cpu is 4"),
    ]:
        with limited(**limit), pytest.raises(ValueError, match="invalid ") as caught:
            make(**options)
        assert str(caught.value).startswith(f"invalid {words}")
    assert not state.exists()


# -- adapting


@pytest.mark.slow
@simulated
async def test_groups_that_adapt_at_once_share_the_limit(it):
    with limited(sessions=5):
        async with simulate(worker_groups={"gpu": {"nvidia_gpu": 1}}) as mine:
            mine.adapt(0, 10)
            mine.adapt(0, 10, worker_group="gpu")
            async with Client(mine, asynchronous=True) as client:
                plain = client.map(lambda i: i, range(1000), pure=False)
                gpu = client.map(lambda i: i, range(1000), pure=False, resources={"GPU": 1})
                await eventually(lambda: len(it.platform.live) == 5)
                await asyncio.sleep(30)
                assert len(mine.workers) <= 4
                del plain, gpu
            assert "workers, because cml.limits.sessions is 5" in log_of(mine)


# -- hours


@pytest.mark.slow
@simulated
async def test_without_a_keeper_too_a_cluster_ends_at_its_limit(it):
    with limited(hours=0.2):
        await create_and_kill(it, name="lab", orphan_timeout="1 hour")
    await eventually(lambda: store.read("lab").scheduler.closed == "reached its limit of 0.2 h", 1800)
    assert store.read("lab").scheduler.hours == 0.2
    await eventually(lambda: not it.platform.running)
