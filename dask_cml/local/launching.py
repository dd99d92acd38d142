"""One launch: the quota, the session's state, and its supervisor."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_cml import checks
from dask_cml.local import configuration, environment, extensions, faults, quota, session_state, state
from dask_cml.local.configuration import Settings
from dask_cml.local.session_state import SessionState
from dask_cml.private_files import owner_only

# Below the ports that Linux and macOS give to outgoing connections.
_PORTS = range(20000, 32000)
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


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
        live = quota.live_sessions()
        excess = quota.excess(request, live, current.quota or {})
        waits = current.over_quota == "wait" and (excess is not None or any(each.waits for each in live))
        if excess and not waits:
            fate = "refused"
        plan = {**_plan(request, current, live), "fate": fate, "waits": waits}
        lock = session_state.create(plan)
    try:
        if fate == "refused":
            return _refusal(plan["id"], excess or "requested: pods=1, used: pods=1, limited: pods=1")
        _start_supervisor(plan["id"], lock)
    finally:
        os.close(lock)
    session = session_state.read(plan["id"])
    # The session may have been removed meanwhile.
    return session_state.public(session) if session else {"id": plan["id"], "status": "failed"}


def _plan(request: Mapping[str, Any], current: Settings, live: list[SessionState]) -> dict[str, Any]:
    plan = {
        **dataclasses.asdict(current),
        **request,
        "id": session_state.new_id(),
        "launcher": environment.calling_session(),
        "owner": environment.owner(),
        "created_at": time.time(),
        "ip": "127.0.0.1",
        "gateway": "127.0.0.1",
        "ports": _free_ports(2, live),
        "python": sys.executable,
        "directory": os.getcwd(),
        "scratch": None if current.scratch is None else checks.gibibytes("scratch", current.scratch),
    }
    for hook in extensions.hooks(current.extensions, "network"):
        plan |= hook(plan)
    plan["app_url"] = f"http://{plan['ip']}:{plan['ports'][0]}/"
    plan["env"] = environment.of_session(plan)
    return plan


def _refusal(session_id: str, words: str) -> dict[str, Any]:
    reason = f'pods "{session_id}" is forbidden: exceeded quota: local, {words}'
    return {
        "message": "Failed to launch the session: the quota is exceeded",
        "k8sMessage": reason,
        "engineId": session_id,
    }


def _free_ports(n: int, live: list[SessionState]) -> list[int]:
    taken = {port for session in live for port in session.plan["ports"]}
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    free = (port for port in candidates if port not in taken and _is_free(port))
    return [next(free) for _ in range(n)]


def _is_free(port: int) -> bool:
    for host in ("127.0.0.1", ""):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def _start_supervisor(session_id: str, lock: int) -> None:
    folder = state.directory() / "sessions" / session_id
    env = environment.base()
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
