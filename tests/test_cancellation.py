"""Waiting for events and tasks that are cancelled."""

import asyncio
import gc
import threading

import pytest

from dask_cml.cancellation import cancel, to_the_end, wait_until_set


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


async def test_an_error_in_a_thread_after_a_cancellation_is_nobody_elses():
    """asyncio would log "Task exception was never retrieved"."""
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    may_end = threading.Event()

    def fail():
        may_end.wait(60)
        raise OSError("stale")

    writing = asyncio.create_task(to_the_end(fail))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    del writing
    gc.collect()
    await asyncio.sleep(0)
    assert unretrieved == []


async def test_an_error_is_nobody_elses_if_the_wait_for_a_cancelled_task_is_cancelled():
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    may_end = asyncio.Event()

    async def fail():
        while True:
            try:
                await may_end.wait()
                break
            except asyncio.CancelledError:
                pass
        raise OSError("stale")

    failing = asyncio.create_task(fail())
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(cancel(failing))
    await asyncio.sleep(0)
    cancelling.cancel()
    await asyncio.wait([cancelling])
    may_end.set()
    await asyncio.wait([failing])
    del failing, cancelling
    gc.collect()
    await asyncio.sleep(0)
    assert unretrieved == []


async def test_a_wait_ends_with_its_event_or_its_time():
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_until_set(event, 60))
    await asyncio.sleep(0)
    event.set()
    assert await waiting is True
    assert await wait_until_set(event, 0) is True
    assert await wait_until_set(asyncio.Event(), 0.01) is False
    assert asyncio.all_tasks() == {asyncio.current_task()}
