"""The platform's side of the requests: it launches, lists and stops sessions."""

from __future__ import annotations

import functools
import getpass
import hashlib
import importlib.util
import os
import random
import runpy
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dask_cml.local import quota, state
from dask_cml.local.state import Session, SessionInfo
from dask_cml.local.supervisor import Supervisor
from dask_cml.private_files import regular

# Below the ports that Linux and macOS give to outgoing connections.
_PORTS = range(20000, 32000)
#: The program that runs one session. Its arguments are the session's folder, and the folder of this package.
_SUPERVISE = (
    "import pathlib, sys; sys.path.insert(0, sys.argv[2]); from dask_cml.local import platform; "
    "platform.current().supervisor(pathlib.Path(sys.argv[1])).run()"
)
_PACKAGES = Path(__file__).parents[2]
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
_load = functools.lru_cache(runpy.run_path)


class Platform:
    """Answers requests. A subclass may add what a platform of tests needs, see :func:`current`."""

    #: What runs each session.
    supervisor = Supervisor
    #: Whether sessions share this machine's loopback and ports.
    shares_host_network = True

    def launch(self, request: Mapping[str, Any]) -> SessionInfo:
        """Launch one session, and return the answer.

        Parameters
        ----------
        request : mapping
            The parameters of :func:`dask_cml.local.launch_workers` for one session: ``cpu``, ``memory``,
            ``nvidia_gpu``, ``kernel``, ``script``, ``code``, ``env`` and ``name``.
        """
        with state.locked():
            sessions = state.read_sessions()
            state.forget(sessions)
            session = self.plan(request, quota.present(sessions))
            lock = state.create_session(session)
        try:
            _start_supervisor(session["id"], lock)
        finally:
            os.close(lock)
        return _refusal(session) if session["refused"] else state.public(session)

    def own_sessions(self) -> list[SessionInfo]:
        """Return the sessions that the calling session launched, the oldest first."""
        launcher = _calling_session()
        return [state.public(session) for session in state.read_sessions() if session["launcher"] == launcher]

    def stop(self, session_id: str) -> int:
        """Ask a session to stop, and return the HTTP status of the answer."""
        return 204 if state.request_stop(session_id) else 404

    def plan(self, request: Mapping[str, Any], live: Sequence[Session]) -> Session:
        """Return a new session, of a request and the sessions that are live."""
        session = {
            **request,
            **quota.admission(request, live),
            "id": secrets.token_hex(8),
            "status": "scheduling",
            "created_at": time.time(),
            "launcher": _calling_session(),
            "directory": os.getcwd(),
            **self.network(live),
        }
        session["app_url"] = f"http://{session['ip']}:{session['ports'][0]}/"
        session["env"] = _session_environment(session)
        session["command"] = [sys.executable, "-u", *_program(session)]
        return session

    def network(self, live: Sequence[Session]) -> dict[str, Any]:
        """Return a new session's address, that of its launcher, and two ports."""
        return {"ip": "127.0.0.1", "gateway": "127.0.0.1", "ports": _free_ports(live)}


def current() -> Platform:
    """Return the platform of the state directory.

    A file ``platform.py`` there may define another class ``Platform``, which then serves all processes that
    use the directory.
    """
    path = state.directory() / "platform.py"
    kind: type[Platform] = _load(str(path))["Platform"] if path.exists() else Platform
    return kind()


def _calling_session() -> str:
    """Return the id of the session of this process. Outside of sessions, it is a constant for each user."""
    return os.environ.get("CDSW_ENGINE_ID") or _digest("user", str(os.getuid()))


def _program(session: Session) -> list[str]:
    """Return the words after the interpreter's that run the script or code of a session."""
    if session["script"]:
        return [session["script"]]
    if not session["code"].lstrip().startswith("!"):
        return ["-c", session["code"]]
    if importlib.util.find_spec("IPython") is None:
        raise ImportError(
            "the local platform runs !commands with IPython, which is not installed: "
            "`pip install 'dask-cml[local]'`"
        )
    # The exit status of a !command is lost, as on CML.
    return [*_IPYTHON, f"--ipython-dir={state.folder_of(session['id'])}", "-c", session["code"]]


def _base_environment() -> dict[str, str]:
    """Return the variables that sessions and supervisors take from this process's environment."""
    kept = {name: value for name, value in os.environ.items() if name in _BASE or name.startswith("LC_")}
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("HOME", str(Path.home()))
    kept[state.DIRECTORY_VARIABLE] = str(state.directory())
    return kept


def _session_environment(session: Session) -> dict[str, str]:
    """Return the complete environment of a session.

    The variables of the launch override the platform's, but not those that mark the session's processes.
    """
    project = session["directory"]
    variables = {
        "TMPDIR": str(state.temporary_of(session["id"])),
        "CDSW_API_KEY": _digest("key", session["id"]),
        # CML assigns the sessions that a worker session launches to the worker session's own launcher.
        "CDSW_MASTER_ID": os.environ.get("CDSW_MASTER_ID") or session["launcher"],
        "CDSW_MASTER_IP": os.environ.get("CDSW_IP_ADDRESS", session["gateway"]),
        "CDSW_IP_ADDRESS": session["ip"],
        "CDSW_APP_PORT": str(session["ports"][0]),
        "CDSW_READONLY_PORT": str(session["ports"][0]),
        "CDSW_PUBLIC_PORT": str(session["ports"][1]),
        "CDSW_DOMAIN": "localhost",
        "CDSW_PROJECT": os.path.basename(project) or "project",
        "CDSW_PROJECT_ID": _digest("project", project),
        "CDSW_CREATOR": _user(),
        "CDSW_CPU_MILLICORES": str(round(1000 * session["cpu"])),
        "CDSW_MEMORY_MB": str(round(1024 * session["memory"])),
    }
    pinned = {"CDSW_ENGINE_ID": session["id"], state.DIRECTORY_VARIABLE: str(state.directory())}
    return {**_base_environment(), **variables, **session["env"], **pinned}


def _user() -> str:
    """Return the name of this process's user. In a container, the user's id may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _digest(*words: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:16]


def _refusal(session: Session) -> dict[str, Any]:
    reason = f'pods "{session["id"]}" is forbidden: exceeded quota: local, {session["refused"]}'
    return {
        "message": "Failed to launch the session: the quota is exceeded",
        "k8sMessage": reason,
        "engineId": session["id"],
    }


def _free_ports(live: Sequence[Session]) -> list[int]:
    taken = {port for session in live for port in session["ports"]}
    candidates = random.SystemRandom().sample(_PORTS, 1000)
    free = (port for port in candidates if port not in taken and _is_free(port))
    return [next(free), next(free)]


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
    with open(folder / "log", "ab", opener=regular) as log:
        # The shell exits at once, so the supervisor has no parent: it outlives this process, and this process
        # need not wait for it.
        subprocess.run(
            ["sh", "-c", '"$0" "$@" &', sys.executable, "-c", _SUPERVISE, folder, _PACKAGES],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd="/",
            pass_fds=[lock],
            start_new_session=True,
        )
