"""The session of this process, and the one with which ends what this process launches."""

from __future__ import annotations

import getpass
import os


def this_session() -> str | None:
    """Return the id of the session in which this process runs; None outside of all."""
    return os.environ.get("CDSW_ENGINE_ID") or None


def this_user() -> str | None:
    """Return the name of the user who runs this process; None if it has none."""
    try:
        return os.environ.get("CDSW_CREATOR") or getpass.getuser()
    except (KeyError, OSError):  # as where the uid has no name
        return None


def this_owner() -> str | None:
    """Return the id of the session with which ends what this process launches; None outside of all.

    The platform files what a worker session launches under the session at the root.
    """
    return os.environ.get("CDSW_MASTER_ID") or this_session()


def lifetime(name: str) -> str:
    """Say until when a cluster can run that this process makes.

    Parameters
    ----------
    name : str
        The cluster's.
    """
    owner = this_owner()
    end = f"the session {owner} ends" if owner else "this machine restarts"
    return f"The cluster {name} can run until {end}"
