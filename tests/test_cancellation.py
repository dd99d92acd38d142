"""Waiting for events and tasks that are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from dask_cml.cancellation import wait_until_set


@pytest.mark.parametrize("steps", range(5))
async def test_a_cancellation_counts_even_if_the_event_is_set_just_before(steps):
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_until_set(event, 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    was_cancelled = waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() == was_cancelled


async def test_an_event_that_is_set_in_time_ends_the_wait():
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_until_set(event, 60))
    await asyncio.sleep(0)
    event.set()
    assert await waiting is True
    assert await wait_until_set(event, 0) is True


async def test_the_wait_for_an_event_has_an_end():
    assert await wait_until_set(asyncio.Event(), 0.01) is False
    assert asyncio.all_tasks() == {asyncio.current_task()}
