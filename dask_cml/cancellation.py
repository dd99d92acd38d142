"""Cancellation of asyncio tasks, and calls that may never return."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from dask_cml.errors import CMLError, NoAnswer
from dask_cml.timing import timing

T = TypeVar("T")

_PATIENCE = 1.0
#: How many calls of one function are left behind at most: a file system may hang for hours.
_MOST_HANGING = 64
#: The functions of the calls that were left behind and have not returned, one for every call.
_hanging: list[Callable[..., Any]] = []


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


async def to_the_end(call: Awaitable[T]) -> T:
    """Return the result of a call in a thread. A cancellation waits for its end."""
    running = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # cancel() repeats it
                await asyncio.wait([running])
        _drop_error(running)
        raise


async def files_in_time(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of files, which may hang, in a thread of its own, for ``timing.files`` at most.

    Raises
    ------
    NoAnswer
        If it takes longer. Its thread is left behind.
    """
    if _hanging.count(function) >= _MOST_HANGING:
        raise NoAnswer(f"the file system has not answered {_MOST_HANGING} earlier calls")
    future = start_call(functools.partial(function, *arguments))
    call = asyncio.wrap_future(future)
    call.add_done_callback(_drop_error)
    await asyncio.wait([call], timeout=timing.files)
    if call.done():
        return call.result()
    _hanging.append(function)
    future.add_done_callback(lambda _: _hanging.remove(function))
    raise NoAnswer(f"the file system did not answer within {timing.files:g} s")


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


def start_call(function: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, for which the interpreter does not wait when it exits.

    Raises
    ------
    CMLError
        If the interpreter is shutting down.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # of the function
            future.set_exception(error)

    try:
        # Threads of the platform's own pools inherit that they are daemons.
        threading.Thread(target=call, name="cml-api", daemon=True).start()
    except RuntimeError as error:
        raise CMLError(f"Workers API not called: {error}") from error
    return future


def block_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may hang, and block until it returns, for some seconds at most.

    Raises
    ------
    NoAnswer
        If it takes longer. Its thread is left behind.
    """
    future = start_call(functools.partial(function, *arguments))
    wait([future], timeout=seconds)
    if not future.done():
        raise no_answer(seconds)
    return future.result()


def no_answer(seconds: float) -> NoAnswer:
    """Return the error of a call that did not return in time."""
    return NoAnswer(f"no answer within {seconds:g} s")
