"""Finding and killing every process of a session, wherever it hides."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from dask_cml.local import state


def pids(session_id: str, group: int | None = None) -> set[int]:
    """Return the ids of a session's processes.

    Parameters
    ----------
    session_id : str
        Belongs to the session what has this as ``CDSW_ENGINE_ID``, and what descends from it. It is the id of
        an engine, too, whose processes have the same state directory: elsewhere there may be another one.
    group : int, optional
        Belongs to it, too, what is in this process group or POSIX session. To be given only while that
        number cannot have passed to other processes.
    """
    import psutil

    found = set()
    for pid in psutil.pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            in_group = group is not None and group in (os.getpgid(pid), os.getsid(pid))
            environment = process.environ()
            named = environment.get("CDSW_ENGINE_ID") == session_id
            if in_group or (named and state.is_of_a_process_with(environment)):
                found.add(pid)
                found.update(child.pid for child in process.children(recursive=True))
    return found


def kill(session_id: str, group: int | None = None, patience: float = 10.0) -> None:
    """Kill all processes of a session, those too that it makes meanwhile.

    Parameters
    ----------
    session_id, group
        See :func:`pids`.
    patience : float
        Seconds to go on for.

    Raises
    ------
    TimeoutError
        If some are left.
    """
    deadline = time.monotonic() + patience
    while left := pids(session_id, group):
        if time.monotonic() > deadline:
            raise TimeoutError(f"session {session_id} has processes that do not die: {sorted(left)}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
