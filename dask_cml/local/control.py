"""Functions of the platform's own pages and nodes: list all sessions, read logs, lose a node, clean up."""

from __future__ import annotations

import shutil
import time
from typing import Any

from dask_cml.local import state


def sessions() -> list[dict[str, Any]]:
    """Return the sessions of all launchers, except those that were pruned.

    Returns
    -------
    list of dict
        As from :func:`list_workers`, the oldest first, with four more entries: ``launcher``, the id of the
        session that launched it, ``owner``, the id of the session with which it ends, ``stop_requested``,
        and ``reason``, why the platform let it fail: ``"out of memory"``, ``"scratch full"``, ``"evicted"``,
        ``"supervisor lost"``, or None. CML is not known to say this.

    Examples
    --------
    >>> from dask_cml import local
    >>> running = [each["id"] for each in local.sessions() if each["status"] == "running"]
    """
    return [
        {
            **state.public(session),
            "launcher": session["launcher"],
            "owner": session["owner"],
            "stop_requested": state.stop_requested(session["id"]),
            "reason": session.get("reason"),
        }
        for session in state.read_sessions()
    ]


def log(session_id: str) -> str:
    """Return the output of a session so far, of both standard output and standard error.

    Parameters
    ----------
    session_id : str
        The session's id.

    Raises
    ------
    LookupError
        If no session has this id.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.log("nosuchsession")
    Traceback (most recent call last):
        ...
    LookupError: no session 'nosuchsession'
    """
    if state.read_session(session_id) is None:
        raise LookupError(f"no session {session_id!r}")
    path = state.folder_of(session_id) / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def evict(session_id: str, *, notice: bool = False) -> None:
    """Let a session fail, and return when all its processes have ended.

    By default, they are killed at once, as by the failure of their node. The session's status is ``failed``
    then, unless it had ended before.

    Parameters
    ----------
    session_id : str
        The session's id.
    notice : bool
        Whether the session's main process gets SIGTERM first, and ``stop_grace`` seconds, as when a node is
        drained.

    Raises
    ------
    LookupError
        If no session has this id.

    Examples
    --------
    >>> from dask_cml import local
    >>> code = "import time; time.sleep(600)"
    >>> [session] = local.launch_workers(1, cpu=1, memory=2, code=code)
    >>> local.evict(session["id"], notice=True)
    """
    session = state.request_end(session_id, "failed", state.EVICTED, notice)
    while session and state.is_live(session):
        time.sleep(0.01)
        session = state.read_session(session_id)
    if session is None:
        raise LookupError(f"no session {session_id!r}")


def prune() -> list[str]:
    """Remove ended sessions and their logs.

    Returns
    -------
    list of str
        The ids of the removed sessions.

    Examples
    --------
    >>> from dask_cml import local
    >>> removed = local.prune()
    """
    ended = [session["id"] for session in state.read_sessions() if not state.is_live(session)]
    for session_id in ended:
        shutil.rmtree(state.folder_of(session_id), ignore_errors=True)
    return ended
