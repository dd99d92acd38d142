"""Cancellation of asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 1.0


async def cancel(*tasks: asyncio.Future | None) -> None:
    """Cancel tasks, and wait until they have finished. Drop their results and errors.

    One ``task.cancel()`` is not enough: ``asyncio.wait_for`` before Python 3.12 may lose it, and so may some
    code of Dask's comms.
    """
    given = [task for task in tasks if task is not None]
    for task in given:
        if task.done():
            _drop_error(task)
        else:  # even if this function is cancelled
            task.add_done_callback(_drop_error)
    pending = {task for task in given if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PATIENCE)


async def end_of(task: asyncio.Task[T]) -> T | None:
    """Return the result of a task, or raise its error. None if the task was cancelled.

    To cancel the caller does not cancel the task.
    """
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _drop_error(task: asyncio.Future) -> None:
    """Retrieve the error of a task. Otherwise, asyncio logs that nobody did."""
    if not task.cancelled():
        task.exception()


async def gather_or_cancel(*awaitables: Awaitable[Any]) -> list[Any]:
    """Do the same as ``asyncio.gather``, but if one fails, cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def first_of(*awaitables: Awaitable[Any]) -> Any:
    """Return the result of what ends first, or raise its error. Cancel the others, and wait for their end."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(*tasks)


async def wait_until_set(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event, for some seconds at most, and return whether it is set.

    Before Python 3.12, ``asyncio.wait_for`` loses a cancellation that comes just after the event.
    """
    await first_of(event.wait(), asyncio.sleep(timeout))
    return event.is_set()


async def to_the_end(function: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Do the same as ``asyncio.to_thread``, but let a cancellation wait for the thread."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **more))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancel() repeats it
                await asyncio.wait([running])
        _drop_error(running)
        raise


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Return the result of what ends within some seconds. Otherwise, cancel it and wait for its end.

    Before Python 3.12, ``asyncio.wait_for`` loses a cancellation that comes just after the result.

    Raises
    ------
    asyncio.TimeoutError
        If it takes longer.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
    finally:
        await cancel(task)
    raise asyncio.TimeoutError(f"no answer within {seconds:g} s")
