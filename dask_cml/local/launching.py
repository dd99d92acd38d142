"""One launch: the quota, the order of sessions that wait for it, the session's plan, and its supervisor."""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import importlib.util
import os
import pwd
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dask_cml import checks
from dask_cml.local import configuration, extensions, faults, state
from dask_cml.local.configuration import Settings
from dask_cml.local.state import Session
from dask_cml.private_files import owner_only

# Below the ports that Linux and macOS give to outgoing connections.
_PORTS = range(20000, 32000)
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_IPYTHON = ("-m", "IPython", "--quick", "--no-banner", "--colors=nocolor", "--HistoryManager.enabled=False")
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


def launch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Launch one session, and return the platform's answer.

    Parameters
    ----------
    request : mapping
        The parameters of :func:`dask_cml.local.launch_workers` for one session: ``cpu``, ``memory``,
        ``nvidia_gpu``, ``kernel``, ``script``, ``code``, ``env`` and ``name``.
    """
    current = configuration.settings()
    with state.locked():
        fate = faults.take(request["name"], request["code"])
        live = _live_sessions()
        excess = _excess(request, live, current.quota or {})
        waits = current.over_quota == "wait" and (excess is not None or any(each["waits"] for each in live))
        if excess and not waits:
            fate = "refused"
        session = {**_plan(request, current, live), "status": "scheduling", "fate": fate, "waits": waits}
        lock = state.create_session(session)
    try:
        _start_supervisor(session["id"], lock)
    finally:
        os.close(lock)
    if fate == "refused":
        return _refusal(session["id"], excess or "requested: pods=1, used: pods=1, limited: pods=1")
    return state.public(session)


def has_room(session_id: str) -> bool:
    """Return whether a waiting session has room now. The oldest waiting session comes first.

    Call this while the state is locked, and keep it locked until the session is admitted.
    """
    live = _live_sessions()
    waiting = [session for session in live if session["waits"]]
    if not waiting or waiting[0]["id"] != session_id:
        return False
    return _excess(waiting[0], live, configuration.settings().quota or {}) is None


def _live_sessions() -> list[Session]:
    """Return the sessions that have not ended, the oldest first, without those of refused launches."""
    return [each for each in state.read_sessions() if state.is_live(each) and each["fate"] != "refused"]


def _excess(request: Mapping[str, Any], live: Iterable[Session], quota: Mapping[str, float]) -> str | None:
    """Return the message if one more session would exceed the quota, else None. Waiting ones use nothing."""
    present = [session for session in live if not session["waits"]]
    for resource, limit in quota.items():
        wanted, used = request[resource], sum(session[resource] for session in present)
        if wanted and used + wanted > limit:
            unit = "Gi" if resource == "memory" else ""
            return ", ".join(
                f"{verb}: {resource}={amount:g}{unit}"
                for verb, amount in (("requested", wanted), ("used", used), ("limited", limit))
            )
    return None


def _plan(request: Mapping[str, Any], current: Settings, live: list[Session]) -> dict[str, Any]:
    plan = {
        **dataclasses.asdict(current),
        **request,
        "id": state.new_id(),
        "launcher": calling_session(),
        # The session at whose end the platform stops this one. CML assigns the sessions that a worker session
        # launches to the owner of the worker session.
        "owner": os.environ.get("CDSW_MASTER_ID") or calling_session(),
        "created_at": time.time(),
        "ip": "127.0.0.1",
        "gateway": "127.0.0.1",
        "ports": _free_ports(2, live),
        "directory": os.getcwd(),
        "scratch": None if current.scratch is None else checks.gibibytes("scratch", current.scratch),
    }
    for hook in extensions.hooks(current.extensions, "network"):
        plan |= hook(plan)
    plan["app_url"] = f"http://{plan['ip']}:{plan['ports'][0]}/"
    plan["env"] = _session_environment(plan)
    plan["command"] = [sys.executable, "-u", *_program(plan)]
    return plan


def _program(plan: Mapping[str, Any]) -> list[str]:
    """Return the words after the interpreter's that run the script or code of a session."""
    if plan["script"]:
        return [plan["script"]]
    if not plan["code"].lstrip().startswith("!"):
        return ["-c", plan["code"]]
    if importlib.util.find_spec("IPython") is None:
        raise ImportError(
            "the local platform runs !commands with IPython, which is not installed: "
            "`pip install 'dask-cml[local]'`"
        )
    # The exit status of a !command is lost, as on CML.
    return [*_IPYTHON, f"--ipython-dir={state.folder_of(plan['id'])}", "-c", plan["code"]]


def _base_environment() -> dict[str, str]:
    """Return the variables that sessions and supervisors take from this process's environment."""
    kept = {name: value for name, value in os.environ.items() if name in _BASE or name.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    kept[state.DIRECTORY_VARIABLE] = str(state.directory())
    return kept


def _session_environment(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the complete environment of a session.

    The project's variables override the platform's, and those of the launch override both. Neither can change
    the variables by which the platform finds the session's processes.
    """
    project = os.getcwd()
    platform = {
        "TMPDIR": str(state.folder_of(plan["id"]) / "tmp"),
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
    return {**_base_environment(), **platform, **plan["variables"], **plan["env"], **pinned}


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _refusal(session_id: str, words: str) -> dict[str, Any]:
    reason = f'pods "{session_id}" is forbidden: exceeded quota: local, {words}'
    return {
        "message": "Failed to launch the session: the quota is exceeded",
        "k8sMessage": reason,
        "engineId": session_id,
    }


def _free_ports(n: int, live: list[Session]) -> list[int]:
    taken = {port for session in live for port in session["ports"]}
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    free = (port for port in candidates if port not in taken and _is_free(port))
    return [next(free) for _ in range(n)]


def _is_free(port: int) -> bool:
    try:
        for host in ("127.0.0.1", ""):
            socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _start_supervisor(session_id: str, lock: int) -> None:
    folder = state.folder_of(session_id)
    env = _base_environment()
    if "PYTHONPATH" in os.environ:  # psutil may be found by it
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with open(folder / "log", "ab", opener=owner_only) as log:
        # The shell exits at once, so the supervisor has no parent: it outlives this process, and this process
        # need not wait for it.
        subprocess.run(
            ["sh", "-c", '"$0" "$@" &', sys.executable, str(_SUPERVISOR), str(folder)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd="/",
            pass_fds=[lock],
            start_new_session=True,
        )
