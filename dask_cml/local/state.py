"""The state that all processes of the local platform share: small files, each written as a whole.

Each session has a folder, which every function reads anew. ``plan.json`` describes the launch and never
changes. The session's supervisor writes its status to ``status.json``. The file ``end.json`` requests that
the session stops, or that it fails. The folder ``tmp`` is the session's TMPDIR. The supervisor holds the file
``lock`` while it runs. If it dies, the kernel releases the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import string
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dask_cml.local import extensions
from dask_cml.private_files import make_folder, owner_only

DIRECTORY_VARIABLE = "DASK_CML_LOCAL_DIRECTORY"
ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
#: Logs once what several calls find.
_warn = functools.lru_cache(maxsize=1000)(logging.getLogger(__name__).warning)
_ALPHABET = string.ascii_lowercase + string.digits
#: What the platform tells of a session's plan.
_TOLD = ("name", "app_url", "cpu", "memory", "nvidia_gpu", "kernel", "script")
#: Why a session failed, in the words of :func:`dask_cml.local.sessions`.
OUT_OF_MEMORY, SCRATCH_FULL, EVICTED = "out of memory", "scratch full", "evicted"
#: The version of the plans.
_VERSION = 3


def directory() -> Path:
    """Return the state directory. Create it if necessary.

    Returns
    -------
    pathlib.Path
        ``DASK_CML_LOCAL_DIRECTORY``, or else a directory of the user in the directory for temporary files. It
        should be on a local disk: on network file systems, processes cannot pass on locks.

    Raises
    ------
    PermissionError
        If the directory belongs to another user, or others can write to it.
    """
    default = Path(tempfile.gettempdir(), f"dask-cml-local-{os.getuid()}")
    path = Path(os.environ.get(DIRECTORY_VARIABLE) or default).absolute()
    make_folder(path)
    make_folder(path / "sessions")
    return path


@contextlib.contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Lock a file for the block. Yield False if another process holds the lock.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    """
    with open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        yield is_free


def read_json(path: Path) -> Any:
    """Return the content that :func:`write_json` wrote. Return None if the file does not exist."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically, so that only its owner can read it."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(new, "w", opener=owner_only) as file:
        json.dump(content, file)
    os.replace(new, path)


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Prevent other processes from changing settings, faults and the set of sessions in the block."""
    path = directory()
    with open(path / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


@dataclasses.dataclass(frozen=True)
class SessionState:
    """A session at one moment."""

    folder: Path
    plan: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The session's id."""
        return self.folder.name

    @property
    def live(self) -> bool:
        """Whether the session has not ended."""
        return self.status["status"] not in ENDED

    @property
    def half_made(self) -> bool:
        """Whether the session is an engine that a refused launch left behind."""
        return self.plan["fate"] == "refused"

    @property
    def waits(self) -> bool:
        """Whether the session waits for room, because the quota is exhausted."""
        return self.plan["waits"] and not self.status.get("admitted")

    @property
    def stop_requested(self) -> bool:
        """Whether the session was asked to stop."""
        return (read_json(self.folder / "end.json") or {}).get("how") == "stopped"


def new_id() -> str:
    """Return 16 random letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(16))


def create_session(plan: Mapping[str, Any]) -> int:
    """Create the folder of a new session.

    Returns
    -------
    int
        A file descriptor with the session's lock. The session fails when all copies of it are closed.
    """
    sessions = directory() / "sessions"
    hidden = sessions / f".{plan['id']}"
    hidden.mkdir(mode=0o700)
    lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_json(hidden / "plan.json", {**plan, "version": _VERSION})
    write_json(hidden / "status.json", {"status": "scheduling"})
    hidden.rename(sessions / plan["id"])
    return lock


def read_session(session_id: str) -> SessionState | None:
    """Return the current state of a session. Return None if no session has this id.

    If the session has not ended but its supervisor has died, mark it as failed.
    """
    return _read_and_check(directory() / "sessions" / session_id)


def read_sessions() -> list[SessionState]:
    """Return the current states of all sessions, the oldest first."""
    with os.scandir(directory() / "sessions") as entries:
        folders = [Path(entry.path) for entry in entries]
    sessions = [session for session in map(_read_and_check, folders) if session]
    return sorted(sessions, key=lambda session: session.plan["created_at"])


def _read_and_check(folder: Path) -> SessionState | None:
    if not folder.name.isalnum():
        return None
    session = _read(folder)
    if session and session.live and not session.half_made:
        return _end(session, "failed", "supervisor lost")
    return session


def _read(folder: Path) -> SessionState | None:
    try:
        status = json.loads((folder / "status.json").read_bytes())
        session = SessionState(folder, _plan(folder), {**status, "status": status["status"]})
        # Another release of dask-cml may have launched it.
        return session if session.plan.get("version") == _VERSION else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        _warn("session %s skipped: %s", folder.name, repr(error))
        return None


@functools.lru_cache(maxsize=1000)
def _plan(folder: Path) -> Mapping[str, Any]:
    """Return the plan, which never changes."""
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_bytes())
    return plan


def _end(session: SessionState, how: str, reason: str | None = None) -> SessionState | None:
    """End a session that has no supervisor. Return its current state."""
    try:
        with lock_if_free(session.folder / "lock") as is_free:
            if not is_free:
                return session
            # The supervisor may have written the session's end before it released the lock.
            now = _read(session.folder)
            if now and now.live:
                free(now)
                ended = {**now.status, "status": how, "finished_at": time.time(), "reason": reason}
                write_json(now.folder / "status.json", ended)
    except FileNotFoundError:  # the session was removed
        return None
    return _read(session.folder)


def free(session: SessionState, group: int | None = None) -> None:
    """Kill every process of a session, and remove its scratch space.

    Parameters
    ----------
    session : SessionState
        The session.
    group : int, optional
        See :func:`processes.find`.
    """
    from dask_cml.local import processes  # imports psutil, which takes long

    processes.kill(session.id, group)
    shutil.rmtree(session.folder / "tmp", ignore_errors=True)
    for remove in extensions.hooks(session.plan["extensions"], "remove"):
        remove(session.plan)


def request_end(
    session_id: str, how: str = "stopped", reason: str | None = None, notice: bool = True
) -> SessionState | None:
    """Ask a session to end, without waiting for it. Return its last state, or None if it does not exist.

    Parameters
    ----------
    session_id : str
        The session's id.
    how : str
        Its last status.
    reason : str, optional
        Why it fails.
    notice : bool
        Whether its main process gets SIGTERM first.
    """
    session = read_session(session_id)
    if session and session.live:
        with contextlib.suppress(FileNotFoundError):  # the session has ended, and was removed
            write_json(session.folder / "end.json", {"how": how, "reason": reason, "notice": notice})
        if session.half_made:
            _end(session, how, reason)
        elif "supervisor" in session.status:  # otherwise, it looks for the file when it is ready
            with contextlib.suppress(ProcessLookupError):
                os.kill(session.status["supervisor"], signal.SIGUSR1)
    return session


def public(session: SessionState) -> dict[str, Any]:
    """Return a session as the platform describes it."""
    plan, status = session.plan, session.status
    description = {
        **{name: plan[name] for name in _TOLD},
        "id": session.id,
        "status": status["status"],
        "created_at": _timestamp(plan["created_at"]),
        "running_at": _timestamp(status.get("running_at")),
        "finished_at": _timestamp(status.get("finished_at")),
        "duration": None,
    }
    if "finished_at" in status:
        begin = status.get("running_at", plan["created_at"])
        description["duration"] = round(max(0.0, status["finished_at"] - begin), 3)
    if status["status"] != "scheduling":
        description["ip_address"] = plan["ip"] if "running_at" in status else "unknown"
    return description


def _timestamp(moment: float | None) -> str | None:
    if moment is None:
        return None
    date = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")
