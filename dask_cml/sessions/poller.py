"""The platform's list of sessions, from one poller that all coroutines share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.sessions import answers
from dask_cml.sessions.answers import SessionInfo, has_ended
from dask_cml.sessions.calls import Calls, start

logger = logging.getLogger(__name__)


class Poller:
    """Lists sessions by one call at a time, shared by all that wait. Without any, it makes no calls.

    Parameters
    ----------
    module : module
        The platform's module, with ``list_workers``.
    calls : Calls
        Makes the calls.
    interval : float
        Minimum time between two calls, in seconds.
    """

    def __init__(self, module: Any, calls: Calls, interval: float) -> None:
        self._module = module
        self._calls = calls
        self._interval = interval
        self._task: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next = 0.0

    def now(self) -> list[SessionInfo]:
        """Return the sessions by a blocking call of its own.

        Raises
        ------
        Exception
            An error from the platform, or WrongAnswer if the answer is not a list of sessions.
        """
        return answers.listed(self._module.list_workers())

    async def next(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, from the next call of ``list_workers``.

        Raises
        ------
        CMLError
            If all calls fail, or :meth:`cancel` is called meanwhile.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._list())
            # If all waiting tasks are cancelled, nobody retrieves its error.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._task
        await asyncio.wait([task])
        if task.cancelled():  # by cancel(); the waiting task is not cancelled
            raise CMLError("sessions not listed: the cluster has shut down")
        return task.result()

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next - time.monotonic())
        self._next = time.monotonic() + self._interval
        return {session["id"]: session for session in await self._calls.do("list sessions", self.now)}

    def cancel(self) -> None:
        """Cancel the current call for all that wait."""
        if self._task is not None:
            self._task.cancel()

    async def wait_until_ended(self, ids: Collection[str], timeout: float) -> bool:
        """Wait until the platform lists sessions as ended.

        Parameters
        ----------
        ids : collection of str
            The ids of the sessions.
        timeout : float
            Maximum time to wait, in seconds.

        Returns
        -------
        bool
            Whether all have ended. False if the platform fails.
        """
        deadline = time.monotonic() + timeout
        try:
            while (left := deadline - time.monotonic()) > 0:
                # Not next(), which fails after cancel().
                listed = await asyncio.wait_for(asyncio.wrap_future(start(self.now)), left)
                if all(has_ended(session) for session in listed if session["id"] in ids):
                    return True
                await asyncio.sleep(self._interval)
        except Exception as error:  # the platform may raise anything
            logger.info("Sessions not confirmed as ended: %s", answers.in_words(error))
        return False
