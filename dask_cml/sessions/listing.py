"""The platform's list of sessions: one poller for all who wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.sessions import answers
from dask_cml.sessions.answers import SessionInfo, has_ended
from dask_cml.sessions.calls import Calls

logger = logging.getLogger(__name__)


class Listing:
    """Lists sessions for all who ask, by no more than one call at a time, and by none when nobody asks.

    Parameters
    ----------
    module : module
        Has ``list_workers``.
    calls : Calls
        Makes the calls.
    interval : float
        Seconds from one call to the next.
    """

    def __init__(self, module: Any, calls: Calls, interval: float) -> None:
        self._module = module
        self._calls = calls
        self._interval = interval
        self._task: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next = 0.0

    def now(self) -> list[SessionInfo]:
        """Return the sessions by a plain call, whoever else waits for one.

        Raises
        ------
        Exception
            Whatever the platform raises, or WrongAnswer if it does not list sessions.
        """
        return answers.listed(self._module.list_workers())

    async def next(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, as the platform lists them next.

        Raises
        ------
        CMLError
            If the platform fails at every try, or :meth:`cancel` is called meanwhile.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._list())
            # All who wait may be cancelled, and then nobody asks for its error.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._task
        await asyncio.wait([task])
        if task.cancelled():  # by cancel(), while the task that waits is not cancelled
            raise CMLError("the sessions are not listed any more: the cluster has ended")
        return task.result()

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next - time.monotonic())
        self._next = time.monotonic() + self._interval
        return {session["id"]: session for session in await self._calls.do("list sessions", self.now)}

    def cancel(self) -> None:
        """List nothing for those who wait."""
        if self._task is not None:
            self._task.cancel()

    async def wait_until_ended(self, ids: Collection[str], timeout: float) -> bool:
        """Wait until the platform lists sessions as ended.

        Parameters
        ----------
        ids : collection of str
            The sessions.
        timeout : float
            Seconds to wait at most.

        Returns
        -------
        bool
            Whether there were such sessions, and all have ended. False, too, if the platform fails.
        """
        deadline = time.monotonic() + timeout
        waited = False
        try:
            while (left := deadline - time.monotonic()) > 0:
                # Not next(), which lists no more after cancel().
                listed = await asyncio.wait_for(asyncio.wrap_future(self._calls.start(self.now)), left)
                if all(has_ended(session) for session in listed if session["id"] in ids):
                    return waited
                waited = True
                await asyncio.sleep(self._interval)
        except Exception as error:  # whatever the platform raises
            logger.info("Sessions that end were not waited for: %s", answers.in_words(error))
        return False
