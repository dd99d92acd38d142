"""The session of this process, and the owner: the session with which this process's launches end."""

from __future__ import annotations

import getpass
import os


def this_session() -> str | None:
    """Return the id of the session in which this process runs. Return None outside of sessions."""
    return os.environ.get("CDSW_ENGINE_ID") or None


def this_user() -> str | None:
    """Return the name of this process's user. Return None if the user has no name."""
    try:
        return os.environ.get("CDSW_CREATOR") or getpass.getuser()
    except (KeyError, OSError):  # the user id has no name
        return None


def this_owner() -> str | None:
    """Return the id of the owner of the sessions that this process launches. Return None outside of sessions.

    The platform assigns the sessions that a worker session launches to the session that launched the worker
    session.
    """
    return os.environ.get("CDSW_MASTER_ID") or this_session()


def lifetime(name: str) -> str:
    """Return a sentence on how long a cluster can run that this process creates.

    Parameters
    ----------
    name : str
        The cluster's name.
    """
    owner = this_owner()
    end = f"session {owner} ends" if owner else "this machine restarts"
    return f"Cluster {name} can run until {end}"
