"""Where this process runs: its platform, its session, its user, and the owner of what it launches.

The owner is the session with which this process's launches end.
"""

from __future__ import annotations

import getpass
import importlib
import os
from typing import Any

from dask_cml.errors import NotOnCML
from dask_cml.words import format_duration

#: The variables with the ports of this session that CML serves, and the beginnings of their hosts.
SERVED_PORTS = {"CDSW_APP_PORT": "", "CDSW_READONLY_PORT": "read-only-"}


def served_hosts() -> dict[str, str]:
    """Return the hosts at which CML serves the ports of this session, by the variables with the ports."""
    session, domain = this_session(), os.environ.get("CDSW_DOMAIN")
    if session is None or not domain:
        return {}
    return {variable: f"{prefix}{session}.{domain}".lower() for variable, prefix in SERVED_PORTS.items()}


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


def lifetime(name: str, idle_timeout: float | None) -> str:
    """Return a sentence on how long a cluster can run that this process creates.

    Parameters
    ----------
    name : str
        The cluster's name.
    idle_timeout : float or None
        Idle time after which it shuts down, in seconds. None: never.
    """
    owner = this_owner()
    end = f"session {owner} ends" if owner else "this machine restarts"
    idle = f", or it is idle for {format_duration(idle_timeout)}" if idle_timeout else ""
    return f"Cluster {name} can run until {end}{idle}"


def load_platform(platform: str = "auto") -> Any:
    """Import the platform's module, with ``launch_workers``, ``list_workers`` and ``stop_workers``.

    Parameters
    ----------
    platform : {"auto", "local"}
        ``"auto"`` is CML: ``cml.workers_v1`` or, if that is missing, ``cdsw``.

    Raises
    ------
    NotOnCML
        If neither module can be imported.
    """
    if platform == "local":
        return importlib.import_module("dask_cml.local")
    for name in ("cml.workers_v1", "cdsw"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "launch_workers"):
            return module
    raise NotOnCML(
        "not in a CML session: cannot import cml.workers_v1 or cdsw. To run on this machine, use "
        'platform="local" or set the environment variable DASK_CML__PLATFORM=local'
    )
