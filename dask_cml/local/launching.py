"""One launch: the quota, the session's record, and its supervisor."""

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

from dask_cml.local import configuration, environment, faults, network, quota, records, state

# Below the ports that Linux and macOS give to outgoing connections.
_PORTS = range(20000, 32000)
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for one session, see :func:`dask_cml.local.launch_workers`."""

    cpu: float
    memory: float
    nvidia_gpu: int
    kernel: str
    script: str
    code: str
    env: Mapping[str, str]
    name: str


def launch(request: Request) -> dict[str, Any]:
    """Launch one session, and return the platform's answer."""
    current = configuration.settings()
    injected = {fault["kind"]: fault for fault in faults.of_launch(request.name, request.code)}
    fate = next((kind for kind in injected if kind in faults.FATES), None)
    with state.locked():
        live = quota.live_sessions()
        words = quota.excess(dataclasses.asdict(request), live, current.quota or {})
        waits = current.over_quota == "wait" and (words is not None or any(each.waits for each in live))
        if waits:
            words = None
        if fate == "refused" and not words:
            words = "requested: pods=1, used: pods=1, limited: pods=1"
        if words:
            fate = "refused"
        plan = _plan(request, current, live)
        plan["fate"], plan["waits"] = fate, waits
        for kind, key in faults.HIDDEN.items():
            plan[key] = injected[kind]["seconds"] if kind in injected else 0.0
        lock = records.create(plan)
    try:
        if words:
            return _refusal(plan["id"], words)
        _start_supervisor(plan, lock)
    finally:
        os.close(lock)
    record = records.read(plan["id"])
    # The record may have been removed meanwhile.
    return records.public(record) if record else {"id": plan["id"], "status": "failed"}


def _plan(request: Request, current: configuration.Settings, live: list[records.Record]) -> dict[str, Any]:
    session_id = records.new_id()
    own: dict[str, str] | None = None
    if current.network == "namespaces":
        own = network.allocate()
        ip, gateway = own["ip"], own["gateway"]
        app_port, public_port = network.APP_PORT, network.PUBLIC_PORT
    else:
        ip = gateway = "127.0.0.1"
        app_port, public_port = _free_ports(2, live)
    return {
        **dataclasses.asdict(request),
        "id": session_id,
        "launcher": environment.calling_session(),
        "owner": environment.owner(),
        "created_at": time.time(),
        "ip": ip,
        "network": own,
        "ports": [app_port, public_port],
        "app_url": f"http://{ip}:{app_port}/",
        "env": environment.of_session(
            session_id,
            cpu=request.cpu,
            memory=request.memory,
            ip=ip,
            master_ip=os.environ.get("CDSW_IP_ADDRESS", gateway),
            app_port=app_port,
            public_port=public_port,
            variables=current.variables,
            env=request.env,
        ),
        "python": sys.executable,
        "directory": os.getcwd(),
        "start_delay": current.start_delay,
        "stop_grace": current.stop_grace,
        "lifetime": current.lifetime,
    }


def _refusal(session_id: str, words: str) -> dict[str, Any]:
    reason = f'pods "{session_id}" is forbidden: exceeded quota: local, {words}'
    return {
        "message": "Failed to launch the session: the quota is exceeded",
        "k8sMessage": reason,
        "engineId": session_id,
    }


def _free_ports(n: int, live: list[records.Record]) -> list[int]:
    taken = {port for record in live for port in record.plan["ports"]}
    free: list[int] = []
    start = random.SystemRandom().randrange(len(_PORTS))
    for i in range(len(_PORTS)):
        port = _PORTS[(start + i) % len(_PORTS)]
        if port not in taken and _is_free(port):
            free.append(port)
            if len(free) == n:
                return free
    raise OSError(f"no ports are free in {_PORTS}")


def _is_free(port: int) -> bool:
    for host in ("127.0.0.1", ""):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def _start_supervisor(plan: Mapping[str, Any], lock: int) -> None:
    folder = state.directory() / "sessions" / plan["id"]
    where = network.host() if plan["network"] else []
    env = environment.base()
    if "PYTHONPATH" in os.environ:  # psutil may be found by it
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with open(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
        # The shell exits at once, so the supervisor has no parent: it outlives this process, and this process
        # need not wait for it.
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *where, sys.executable, str(_SUPERVISOR), str(folder)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd="/",
            pass_fds=[lock],
            start_new_session=True,
        )
