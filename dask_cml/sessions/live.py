"""The sessions that must be stopped: their account, and blocking calls that stop them, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

from dask_cml.checks import is_session_id, message
from dask_cml.options import SessionSize
from dask_cml.sessions import answers
from dask_cml.sessions.answers import CallFailed, NoAnswer
from dask_cml.sessions.calls import Calls

#: Number of sessions that one call stops within its time limit. The platform stops ten at once.
_IN_TIME = 1000
#: Number of calls that stop the remaining sessions after one call for all of them hung.
_GROUPS = 64
#: The sessions that this process has stopped on each platform, of all clusters, and that may not have ended.
_stopped: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class LiveSessions:
    """The sessions that were launched or adopted, and not stopped: the base of the Workers API.

    Parameters
    ----------
    module : module
        The platform's module, with ``stop_workers``.
    calls : Calls
        Makes the calls.
    """

    def __init__(self, module: Any, calls: Calls) -> None:
        self.module = module
        self.live: set[str] = set()
        self.names: dict[str, str] = {}
        self.sizes: dict[str, SessionSize] = {}
        self.stopped: set[str] = set()
        self._calls = calls
        self._stopping = _stopped.setdefault(module, set())
        #: Guards what threads share.
        self._lock = threading.Lock()

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

    def stop_all(self, hangs: bool, deadline: float) -> None:
        """Stop all sessions: by one call or, if that hangs, by many, so that one session delays no other.

        Parameters
        ----------
        hangs : bool
            Whether one call for all of them has hung already.
        deadline : float
            The monotonic time after which calls that hang are not repeated.

        Raises
        ------
        CallFailed
            If sessions remain. The message names them.
        """
        for pause in [*self._calls.pauses(), None]:
            ids = sorted(self.named_sessions())
            if not ids:
                return
            groups = [ids[i::_GROUPS] for i in range(min(_GROUPS, len(ids)))] if hangs else [ids]
            stops = [lambda group=group: self.stop_now(group) for group in groups]
            left = max(deadline - time.monotonic(), self._calls.limit / 4)
            errors = self._calls.run_all(stops, left if hangs else self.time_to_stop(ids) / 2)
            if not errors or not self.named_sessions():  # a call that hung may have succeeded meanwhile
                return
            late = hangs and time.monotonic() > deadline
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            if pause is None or late or not all(map(answers.may_pass, errors)):
                named, why = ", ".join(sorted(self.named_sessions())), answers.in_words(errors[-1])
                raise CallFailed(f"CML did not stop {named}, which may still run: {why}") from errors[-1]
            time.sleep(pause)


def check_id(session_id: object) -> None:
    """Check a session id.

    Raises
    ------
    ValueError
        If the id is invalid.
    """
    if not is_session_id(session_id):
        raise ValueError(message("session id", session_id, "letters and digits"))
