"""What the platform's own pages and nodes do: look at all sessions, read logs, lose one, clear away."""

from __future__ import annotations

from typing import Any

from dask_cml.local import records, state


def sessions() -> list[dict[str, Any]]:
    """Return the sessions of all launchers, as far as they are not pruned.

    Returns
    -------
    list of dict
        As of :func:`list_workers`, oldest first, with three entries more: ``launcher``, the id of the session
        that launched it, ``owner``, the id of the one with which it ends, and ``stop_requested``.

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
    """Return what a session has written so far, to its standard output and error.

    Parameters
    ----------
    session_id : str
        The session's id.

    Raises
    ------
    LookupError
        If there is no such session.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.log("nosuchsession")
    Traceback (most recent call last):
        ...
    LookupError: there is no session 'nosuchsession'
    """
    if records.read(session_id) is None:
        raise LookupError(f"there is no session {session_id!r}")
    path = state.directory() / "sessions" / session_id / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def evict(session_id: str, *, silently: bool = False) -> None:
    """Kill a session with everything in it at once, as the loss of its node does.

    It returns when the processes are gone; the session's status is ``failed`` then, unless it had ended.

    Parameters
    ----------
    session_id : str
        The session's id.
    silently : bool
        Its link goes down first, so that nobody hears of the end of its connections. This needs
        ``configure(network="namespaces")``, and a session that runs.

    Raises
    ------
    LookupError
        If there is no such session.
    RuntimeError
        If it has no link of its own to take down.

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
        Their ids.

    Examples
    --------
    >>> from dask_cml import local
    >>> removed = local.prune()
    """
    ended = [record for record in records.read_all() if not record.live]
    for record in ended:
        records.remove(record)
    return [record.id for record in ended]
