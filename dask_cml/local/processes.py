"""Functions that find and kill all processes of a session."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from dask_cml.local import state

#: Seconds until killed processes must have ended.
_PATIENCE = 10.0


def pids(session_id: str, group: int | None = None) -> set[int]:
    """Return the ids of a session's processes.

    Parameters
    ----------
    session_id : str
        The session's id. Its processes are those with this ``CDSW_ENGINE_ID``, and their descendants. An
        engine's processes must also use this state directory, because elsewhere its id may be in use, too.
    group : int, optional
        A process group or POSIX session whose processes count, too. Pass it only while no other processes can
        have reused the number.
    """
    import psutil

    found: set[int] = set()
    parents: dict[int, int] = {}
    for pid in psutil.pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                parents[pid] = process.ppid()
            if group is not None and group in (os.getpgid(pid), os.getsid(pid)):
                found.add(pid)
                continue
            environment = process.environ()
            if environment.get("CDSW_ENGINE_ID") == session_id and state.is_of_a_process_with(environment):
                found.add(pid)
    while descendants := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= descendants
    return found


def kill(session_id: str, group: int | None = None) -> None:
    """Kill all processes of a session, including those that it starts meanwhile.

    Parameters
    ----------
    session_id : str
        The session's id, see :func:`pids`.
    group : int, optional
        A process group of the session, see :func:`pids`.

    Raises
    ------
    TimeoutError
        If some processes remain.
    """
    deadline = time.monotonic() + _PATIENCE
    while left := pids(session_id, group):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} of session {session_id} still run after SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
