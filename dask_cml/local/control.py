"""Functions of the platform's own pages and nodes: list all sessions, read logs, lose a node, clean up."""

from __future__ import annotations

from typing import Any

from dask_cml.local import records, state


def sessions() -> list[dict[str, Any]]:
    """Return the sessions of all launchers, except those that were pruned.

    Returns
    -------
    list of dict
        As from :func:`list_workers`, the oldest first, with three more entries: ``launcher``, the id of the
        session that launched it, ``owner``, the id of the session with which it ends, and ``stop_requested``.

    Examples
    --------
    >>> from dask_cml import local
    >>> running = [each["id"] for each in local.sessions() if each["status"] == "running"]
    """
    return [
        {
            **records.public(record),
            "launcher": record.plan["launcher"],
            "owner": record.plan["owner"],
            "stop_requested": record.stop_requested,
        }
        for record in records.read_all()
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
    if records.read(session_id) is None:
        raise LookupError(f"no session {session_id!r}")
    path = state.directory() / "sessions" / session_id / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def evict(session_id: str, *, silently: bool = False) -> None:
    """Kill a session and all its processes at once, as the failure of its node does.

    Returns when the processes have ended. The session's status is ``failed`` then, unless it had ended
    before.

    Parameters
    ----------
    session_id : str
        The session's id.
    silently : bool
        Whether to take down the session's link first, so that its peers do not notice that its connections
        end. Requires ``configure(network="namespaces")`` and a running session.

    Raises
    ------
    LookupError
        If no session has this id.
    RuntimeError
        If `silently` is true, and the session has no link of its own.

    Examples
    --------
    >>> from dask_cml import local
    >>> code = "import time; time.sleep(600)"
    >>> [session] = local.launch_workers(1, cpu=1, memory=2, code=code)
    >>> local.evict(session["id"])
    """
    records.evict(session_id, silently)


def prune() -> list[str]:
    """Remove the records and logs of ended sessions.

    Returns
    -------
    list of str
        The ids of the removed sessions.

    Examples
    --------
    >>> from dask_cml import local
    >>> removed = local.prune()
    """
    ended = [record for record in records.read_all() if not record.live]
    for record in ended:
        records.remove(record)
    return [record.id for record in ended]
