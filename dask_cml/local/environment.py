"""The caller of the platform, and the environment of a session."""

from __future__ import annotations

import getpass
import hashlib
import os
import pwd
from collections.abc import Mapping

from dask_cml.local import state

# A CML session does not inherit the environment of its launcher. These variables describe the machine.
_BASE = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TMPDIR",
    "TZ",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONUSERBASE",
    "PYTHONNOUSERSITE",
    "__CF_USER_TEXT_ENCODING",
    "__PYVENV_LAUNCHER__",
)


def calling_session() -> str:
    """Return the id of the session of this process. Outside of sessions, it is a constant for each user."""
    return os.environ.get("CDSW_ENGINE_ID") or _users_own()


def owner() -> str:
    """Return the id of the owner: the session at whose end the platform stops what this process launches.

    CML assigns the sessions that a worker session launches to the owner of the worker session.
    """
    return os.environ.get("CDSW_MASTER_ID") or calling_session()


def ends(owner: str) -> bool:
    """Return whether an owner may end. The owner of sessions launched outside of sessions never ends."""
    return owner != _users_own()


def _users_own() -> str:
    return _digest("user", str(os.getuid()))


def base() -> dict[str, str]:
    """Return the variables that sessions and supervisors take from this process's environment."""
    kept = {name: value for name, value in os.environ.items() if name in _BASE or name.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    kept[state.DIRECTORY_VARIABLE] = str(state.directory())
    return kept


def of_session(
    session_id: str,
    *,
    cpu: float,
    memory: float,
    ip: str,
    master_ip: str,
    app_port: int,
    public_port: int,
    variables: Mapping[str, str],
    env: Mapping[str, str],
) -> dict[str, str]:
    """Return the complete environment of a session.

    The project's variables override the platform's, and `env` overrides both. Neither can change the
    variables by which the platform finds the session's processes.
    """
    project = os.getcwd()
    platform = {
        "CDSW_API_KEY": _digest("key", session_id),
        "CDSW_MASTER_ID": owner(),
        "CDSW_MASTER_IP": master_ip,
        "CDSW_IP_ADDRESS": ip,
        "CDSW_APP_PORT": str(app_port),
        "CDSW_READONLY_PORT": str(app_port),
        "CDSW_PUBLIC_PORT": str(public_port),
        "CDSW_DOMAIN": "localhost",
        "CDSW_PROJECT": os.path.basename(project) or "project",
        "CDSW_PROJECT_ID": _digest("project", project),
        "CDSW_CREATOR": getpass.getuser(),
        "CDSW_CPU_MILLICORES": str(round(1000 * cpu)),
        "CDSW_MEMORY_MB": str(round(1024 * memory)),
    }
    pinned = {"CDSW_ENGINE_ID": session_id, state.DIRECTORY_VARIABLE: str(state.directory())}
    return {**base(), **platform, **variables, **env, **pinned}


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
