"""The sessions that have to be stopped: how they are counted, and stopped by plain calls, from any thread."""

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

#: A call that stops more sessions than this has as many times the time. The platform stops ten at once.
_IN_TIME = 1000
#: So many calls stop what is left when one call for all of them hangs.
_GROUPS = 64
#: What this process has stopped on each platform, of whichever cluster.
_stopped: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class LiveSessions:
    """The sessions that somebody launched or took over, and nobody has stopped yet.

    Parameters
    ----------
    module : module
        Has ``stop_workers``.
    calls : Calls
        Makes the calls of :meth:`stop_all`.

    Attributes
    ----------
    ids : set of str
        Those to be stopped. It changes in any thread.
    names : dict of str to str
        What each session was launched as, by its id, stopped ones too.
    sizes : dict of str to SessionSize
        The sizes of those that were launched here.
    """

    def __init__(self, module: Any, calls: Calls) -> None:
        self.ids: set[str] = set()
        self.names: dict[str, str] = {}
        self.sizes: dict[str, SessionSize] = {}
        self._module = module
        self._calls = calls
        self._half_made: set[str] = set()
        self._lock = threading.Lock()

    def add(
        self, session_id: str, name: str, size: SessionSize | None = None, half_made: bool = False
    ) -> None:
        """Count a session in.

        Parameters
        ----------
        session_id : str
            Its id.
        name : str
            What it was launched as.
        size : SessionSize, optional
            Its size, if it was launched here.
        half_made : bool
            Whether the platform has refused to launch it, and yet gave it an id.

        Raises
        ------
        ValueError
            If the id is none.
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
        """Count a session in unless it was ever counted before, and return whether it was not."""
        with self._lock:
            if session_id in self.names:
                return False
            self.ids.add(session_id)
            self.names[session_id] = name
            self.sizes[session_id] = size
            return True

    def named(self) -> dict[str, str]:
        """Return what each session that is to be stopped was launched as, by its id."""
        with self._lock:
            return {session_id: self.names[session_id] for session_id in self.ids}

    def forget(self, ids: Iterable[str]) -> None:
        """Leave sessions to others."""
        with self._lock:
            self.ids.difference_update(ids)

    def stopped_before(self) -> Collection[str]:
        """Return whole sessions that this process has stopped on this platform, of whichever cluster."""
        return _stopped.get(self._module, ())

    def stop(self, ids: Iterable[str]) -> None:
        """Stop sessions, all in one call. Without ids, nothing is called.

        Raises
        ------
        Exception
            Whatever the platform raises, or WrongAnswer if it does not stop them.
        """
        ids = [*ids]
        if not ids:  # would stop all sessions of the user's, those of other work too
            return
        answers.check_stopped(ids, self._module.stop_workers(*ids))
        with self._lock:
            _stopped.setdefault(self._module, set()).update(set(ids) - self._half_made)
            self.ids.difference_update(ids)

    def time_to_stop(self, ids: Collection[str]) -> float:
        """Return the seconds that one call for so many sessions has."""
        return self._calls.limit * (1 + len(ids) // _IN_TIME)

    def stop_all(self, hangs: bool, deadline: float) -> None:
        """Stop what is live: by one call, or if that hangs by many, so that one session delays no other.

        Parameters
        ----------
        hangs : bool
            Whether one call for all of them has hung already.
        deadline : float
            The monotonic time after which nothing that hangs is tried again.

        Raises
        ------
        CallFailed
            If sessions are left. It names them.
        """
        for pause in [*self._calls.pauses(), None]:
            ids = sorted(self.named())
            if not ids:
                return
            groups = [ids[i::_GROUPS] for i in range(min(_GROUPS, len(ids)))] if hangs else [ids]
            stops = [lambda group=group: self.stop(group) for group in groups]
            left = max(deadline - time.monotonic(), self._calls.limit / 4)
            errors = self._calls.run_all(stops, left if hangs else self.time_to_stop(ids) / 2)
            if not errors or not self.named():  # what hung may have been done meanwhile
                return
            late = hangs and time.monotonic() > deadline
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            if pause is None or late or not all(map(answers.may_pass, errors)):
                named, why = ", ".join(sorted(self.named())), answers.in_words(errors[-1])
                raise CallFailed(f"CML did not stop {named}, which may still run: {why}") from errors[-1]
            time.sleep(pause)


def check_id(session_id: object) -> None:
    """Refuse what is no session's id.

    Raises
    ------
    ValueError
        That says what was expected.
    """
    if not is_session_id(session_id):
        raise ValueError(message("session id", session_id, "letters and digits"))
