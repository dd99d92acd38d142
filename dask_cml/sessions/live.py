"""The sessions that must be stopped: their account, and blocking calls that stop them, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
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
    """The sessions that were launched or adopted, and not stopped.

    Parameters
    ----------
    module : module
        The platform's module, with ``stop_workers``.
    calls : Calls
        Makes the calls of :meth:`stop_all`.

    Attributes
    ----------
    ids : set of str
        The ids of the sessions to stop. Any thread may change it.
    names : dict of str to str
        The name of each session by its id, also of stopped ones.
    sizes : dict of str to SessionSize
        The size of each session launched here, by its id.
    stopped : set of str
        The ids of the sessions that were stopped here, and whose end is not in the record yet.
    """

    def __init__(self, module: Any, calls: Calls) -> None:
        self.ids: set[str] = set()
        self.names: dict[str, str] = {}
        self.sizes: dict[str, SessionSize] = {}
        self.stopped: set[str] = set()
        self._module = module
        self._calls = calls
        self._half_made: set[str] = set()
        self._lock = threading.Lock()

    def add(
        self, session_id: str, name: str, size: SessionSize | None = None, half_made: bool = False
    ) -> None:
        """Add a session.

        Parameters
        ----------
        session_id : str
            Its id.
        name : str
            Its name.
        size : SessionSize, optional
            Its size, if it was launched here.
        half_made : bool
            Whether the platform refused the launch, but returned an id.

        Raises
        ------
        ValueError
            If the id is invalid.
        """
        check_id(session_id)
        with self._lock:
            self.ids.add(session_id)
            self.names[session_id] = name
            if size is not None:
                self.sizes[session_id] = size
            if half_made:
                self._half_made.add(session_id)

    def add_new(self, session_id: str, name: str, size: SessionSize) -> bool:
        """Add a session unless it was ever added before. Return whether it is new."""
        with self._lock:
            if session_id in self.names:
                return False
            self.ids.add(session_id)
            self.names[session_id] = name
            self.sizes[session_id] = size
            return True

    def named(self) -> dict[str, str]:
        """Return the names of the sessions to stop, by id."""
        with self._lock:
            return {session_id: self.names[session_id] for session_id in self.ids}

    def forget(self, ids: Iterable[str]) -> None:
        """Leave sessions to others."""
        with self._lock:
            self.ids.difference_update(ids)

    def stopped_before(self) -> set[str]:
        """Return the sessions that this process has stopped, of all clusters, and that may not have ended."""
        return _stopped.get(self._module, set())

    def ended(self, ids: Collection[str]) -> None:
        """Forget stopped sessions, because the platform lists them as ended."""
        self.stopped_before().difference_update(ids)

    def stop(self, ids: Iterable[str]) -> None:
        """Stop sessions in one call. Without ids, call nothing.

        Raises
        ------
        Exception
            An error from the platform, or WrongAnswer if it does not stop the sessions.
        """
        ids = [*ids]
        if not ids:  # the platform would stop all sessions of the user, including other work
            return
        answers.check_stopped(ids, self._module.stop_workers(*ids))
        with self._lock:
            _stopped.setdefault(self._module, set()).update(set(ids) - self._half_made)
            self.ids.difference_update(ids)
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
            ids = sorted(self.named())
            if not ids:
                return
            groups = [ids[i::_GROUPS] for i in range(min(_GROUPS, len(ids)))] if hangs else [ids]
            stops = [lambda group=group: self.stop(group) for group in groups]
            left = max(deadline - time.monotonic(), self._calls.limit / 4)
            errors = self._calls.run_all(stops, left if hangs else self.time_to_stop(ids) / 2)
            if not errors or not self.named():  # a call that hung may have succeeded meanwhile
                return
            late = hangs and time.monotonic() > deadline
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            if pause is None or late or not all(map(answers.may_pass, errors)):
                named, why = ", ".join(sorted(self.named())), answers.in_words(errors[-1])
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
