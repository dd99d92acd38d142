"""Waiting for events and tasks that are cancelled."""

import asyncio
import contextlib
import gc
import threading

import pytest

from dask_cml.cancellation import cancel, files_in_time, to_the_end, wait_until_set


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


@pytest.mark.parametrize("wait", [to_the_end, cancel])
async def test_an_error_is_nobody_elses_if_the_wait_for_a_cancelled_task_is_cancelled(wait):
    """asyncio would log "Task exception was never retrieved"."""
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    may_end = asyncio.Event()

    async def fail():
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()
        raise OSError("stale")

    failing = asyncio.create_task(fail())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(wait(failing))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([failing, waiting])
    del failing, waiting
    gc.collect()
    await asyncio.sleep(0)
    assert unretrieved == []


async def test_calls_that_hang_end_in_time_and_are_few(monkeypatch):
    monkeypatch.setattr("dask_cml.timing.timing.files", 0.01)
    may_end = threading.Event()
    for words in [*["file system did not answer within"] * 64, "64 earlier calls"]:
        with pytest.raises(TimeoutError, match=words):
            await files_in_time(may_end.wait)
    may_end.set()
