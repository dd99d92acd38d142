"""The caller of the platform, and the environment of a session."""

from __future__ import annotations

import getpass
import hashlib
import os
import pwd
from collections.abc import Mapping
from typing import Any

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
    return os.environ.get("CDSW_ENGINE_ID") or _digest("user", str(os.getuid()))


def owner() -> str:
    """Return the id of the owner: the session at whose end the platform stops what this process launches.

    CML assigns the sessions that a worker session launches to the owner of the worker session.
    """
    return os.environ.get("CDSW_MASTER_ID") or calling_session()


def base() -> dict[str, str]:
    """Return the variables that sessions and supervisors take from this process's environment."""
    kept = {name: value for name, value in os.environ.items() if name in _BASE or name.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    kept[state.DIRECTORY_VARIABLE] = str(state.directory())
    return kept


def of_session(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the complete environment of a session.

    The project's variables override the platform's, and those of the launch override both. Neither can change
    the variables by which the platform finds the session's processes.

    Parameters
    ----------
    plan : mapping
        The session's plan.
    """
    project = os.getcwd()
    platform = {
        "TMPDIR": str(state.directory() / "sessions" / plan["id"] / "tmp"),
        "CDSW_API_KEY": _digest("key", plan["id"]),
        "CDSW_MASTER_ID": plan["owner"],
        "CDSW_MASTER_IP": os.environ.get("CDSW_IP_ADDRESS", plan["gateway"]),
        "CDSW_IP_ADDRESS": plan["ip"],
        "CDSW_APP_PORT": str(plan["ports"][0]),
        "CDSW_READONLY_PORT": str(plan["ports"][0]),
        "CDSW_PUBLIC_PORT": str(plan["ports"][1]),
        "CDSW_DOMAIN": "localhost",
        "CDSW_PROJECT": os.path.basename(project) or "project",
        "CDSW_PROJECT_ID": _digest("project", project),
        "CDSW_CREATOR": getpass.getuser(),
        "CDSW_CPU_MILLICORES": str(round(1000 * plan["cpu"])),
        "CDSW_MEMORY_MB": str(round(1024 * plan["memory"])),
    }
    pinned = {"CDSW_ENGINE_ID": plan["id"], state.DIRECTORY_VARIABLE: str(state.directory())}
    return {**base(), **platform, **plan["variables"], **plan["env"], **pinned}


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
