"""The end of asyncio tasks."""

from __future__ import annotations

import asyncio

_PATIENCE = 1.0


async def cancel(*tasks: asyncio.Future | None) -> None:
    """Cancel tasks and wait until they are over; their results and errors are dropped.

    One ``task.cancel()`` is not enough: ``asyncio.wait_for`` before Python 3.12 may lose it, and so does some
    code in Dask's comms.
    """
    pending = {task for task in tasks if task is not None and not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PATIENCE)
    for over in filter(None, tasks):
        if not over.cancelled():
            over.exception()  # or asyncio complains that nobody asked for it
