"""The processes of a session: finds and kills them."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

#: Seconds until killed processes must have ended.
_PATIENCE = 10.0


def find(session_id: str, group: int | None = None) -> set[psutil.Process]:
    """Return the processes of a session.

    Parameters
    ----------
    session_id : str
        The session's id. Its processes are those with this ``CDSW_ENGINE_ID``, and their descendants.
    group : int, optional
        A process group or POSIX session whose processes count, too. Pass it only while no other processes can
        have reused the number.
    """
    found: set[psutil.Process] = set()
    parents: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        pid = process.pid
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process] = process.ppid()
            in_group = group is not None and group in (os.getpgid(pid), os.getsid(pid))
            if in_group or process.environ().get("CDSW_ENGINE_ID") == session_id:
                found.add(process)
    while True:
        pids = {process.pid for process in found}
        descendants = {child for child, parent in parents.items() if parent in pids} - found
        if not descendants:
            return found
        found |= descendants


def kill(session_id: str, group: int | None = None) -> None:
    """Kill all processes of a session, including those that it starts meanwhile.

    Parameters
    ----------
    session_id : str
        The session's id, see :func:`find`.
    group : int, optional
        A process group of the session, see :func:`find`.

    Raises
    ------
    TimeoutError
        If some processes remain.
    """
    deadline = time.monotonic() + _PATIENCE
    while left := find(session_id, group):
        if time.monotonic() > deadline:
            pids = sorted(process.pid for process in left)
            raise TimeoutError(f"processes {pids} of session {session_id} still run after SIGKILL")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
