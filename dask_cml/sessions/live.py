"""The sessions of the platform: their list, and an account of those that must be stopped, from any thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from dask_cml.checks import is_session_id, message
from dask_cml.errors import CMLError
from dask_cml.options import setting
from dask_cml.sessions import answers
from dask_cml.sessions.answers import SessionInfo, has_ended
from dask_cml.sessions.calls import Calls, start

logger = logging.getLogger(__name__)

#: Seconds within which stopped sessions usually end.
_STOPPED_WITHIN = 30.0
#: Number of sessions that one call stops within its time limit. The platform stops ten at once.
_IN_TIME = 1000
#: The sessions that this process has stopped on each platform, of all clusters, and that may not have ended.
_stopped: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class LiveSessions:
    """The platform's list of sessions, and those that were launched or adopted, and not stopped.

    The base of the Workers API.

    Parameters
    ----------
    module : module
        The platform's module.
    """

    def __init__(self, module: Any) -> None:
        functions = ("launch_workers", "list_workers", "stop_workers")
        modules = {getattr(getattr(module, name, None), "__module__", "") for name in functions}
        self.module = module
        self.threads: int = setting("api.threads")
        self.live: set[str] = set()
        self.names: dict[str, str] = {}
        self.stopped: set[str] = set()
        self._calls = Calls(self.threads, setting("api.timeout"), setting("api.retries"), modules)
        self._interval = setting("api.poll-interval")
        self._listing: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next_listing = 0.0
        self._stopping = _stopped.setdefault(module, set())
        #: Guards what threads share.
        self._lock = threading.Lock()

    async def sessions(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, from the next call of ``list_workers``.

        All coroutines that wait share one call. Without any, the platform is not called.

        Raises
        ------
        CMLError
            If all calls fail, or :meth:`close` is called meanwhile.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
            # If all waiting tasks are cancelled, nobody retrieves its error.
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._listing
        await asyncio.wait([task])
        if task.cancelled():  # by close(); the waiting task is not cancelled
            raise CMLError("sessions not listed: the cluster has shut down")
        return task.result()

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next_listing - time.monotonic())
        self._next_listing = time.monotonic() + self._interval
        return {session["id"]: session for session in await self._calls.do("list sessions", self.list_now)}

    def list_now(self) -> list[SessionInfo]:
        """Return the sessions by a blocking call.

        Raises
        ------
        Exception
            An error from the platform, or WrongAnswer if the answer is not a list of sessions.
        """
        return answers.listed(self.module.list_workers())

    async def wait_until_ended(self, ids: Collection[str]) -> bool:
        """Wait until the platform lists stopped sessions as ended. Until then they count against the quota.

        Parameters
        ----------
        ids : collection of str
            The ids of the sessions.

        Returns
        -------
        bool
            Whether all have ended. False if the platform fails, or after 30 s.
        """
        deadline = time.monotonic() + _STOPPED_WITHIN
        try:
            while (left := deadline - time.monotonic()) > 0:
                # Not sessions(), which fails after close(), and whose call would go on after the time-out.
                listed = await asyncio.wait_for(asyncio.wrap_future(start(self.list_now)), left)
                if all(has_ended(session) for session in listed if session["id"] in ids):
                    return True
                await asyncio.sleep(self._interval)
        except Exception as error:  # the platform may raise anything
            logger.info("Sessions not confirmed as ended: %s", answers.in_words(error))
        return False

    def adopt(self, session_id: str, name: str) -> None:
        """Take over a session that another process launched.

        Raises
        ------
        ValueError
            If the id is invalid.
        """
        check_id(session_id)
        with self._lock:
            self.live.add(session_id)
            self.names[session_id] = name

    def named_sessions(self) -> dict[str, str]:
        """Return the names of the live sessions, by id."""
        with self._lock:
            return {session_id: self.names[session_id] for session_id in self.live}

    def forget(self, *ids: str) -> None:
        """Leave sessions to others."""
        with self._lock:
            self.live.difference_update(ids)

    def stop_now(self, ids: Collection[str]) -> None:
        """Stop sessions by one blocking call. Without ids, call nothing.

        Raises
        ------
        Exception
            An error from the platform, or WrongAnswer if it does not stop the sessions.
        """
        if not ids:  # the platform would stop all sessions of the user, including other work
            return
        answers.check_stopped(ids, self.module.stop_workers(*ids))
        with self._lock:
            self._stopping.update(ids)
            self.live.difference_update(ids)
            self.stopped.update(ids)

    def time_to_stop(self, ids: Collection[str]) -> float:
        """Return the time limit of one call that stops these sessions, in seconds."""
        return self._calls.limit * (1 + len(ids) // _IN_TIME)


def check_id(session_id: object) -> None:
    """Check a session id.

    Raises
    ------
    ValueError
        If the id is invalid.
    """
    if not is_session_id(session_id):
        raise ValueError(message("session id", session_id, "letters and digits"))
