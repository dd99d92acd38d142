"""The state that all processes of the local platform share: small files, each written as a whole.

Each session has a folder. Its ``session.json`` describes the launch, and what has become of it since. The
session's supervisor alone writes it. The file ``stop`` asks the session to stop. The file ``log`` is its
output, and the folder ``tmp`` its TMPDIR, to which a short link leads. The supervisor holds the file ``lock``
while it runs. If it dies, the kernel releases the lock, and whoever reads the session next ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dask_cml.private_files import make_folder, write_file

#: A session as ``session.json`` has it.
Session = dict[str, Any]
#: What the platform tells of a session.
SessionInfo = dict[str, Any]

DIRECTORY_VARIABLE = "DASK_CML_LOCAL_DIRECTORY"
ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
#: The folder of the sessions. It changes with the content of ``session.json``.
_SESSIONS = "sessions-5"
#: What the platform tells of a session as it is.
_TOLD = ("id", "status", "name", "app_url", "cpu", "memory", "nvidia_gpu", "kernel", "script")
#: Seconds for which an ended session and its log are kept.
_KEPT = 24 * 3600.0


def directory() -> Path:
    """Return the state directory. Create it if necessary.

    Returns
    -------
    pathlib.Path
        ``DASK_CML_LOCAL_DIRECTORY``, or else ``dask-cml`` in the user's cache directory. There, unlike in
        ``/tmp``, other users cannot take the name first.

    Raises
    ------
    PermissionError
        If the directory belongs to another user, or others can write to it.
    """
    path = Path(os.environ.get(DIRECTORY_VARIABLE) or _default_directory()).absolute()
    make_folder(path)
    make_folder(path / _SESSIONS)
    return path


def _default_directory() -> Path:
    if os.environ.get("CDSW_ENGINE_ID"):  # its home is a network file system, and all of /tmp is its user's
        return Path(tempfile.gettempdir(), f"dask-cml-local-{os.getuid()}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return Path(cache if cache.is_absolute() else Path.home() / ".cache", "dask-cml")


def folder_of(session_id: str) -> Path:
    """Return the folder of a session."""
    return directory() / _SESSIONS / session_id


def temporary_of(session_id: str) -> Path:
    """Return the TMPDIR of a session: a link to its folder ``tmp``.

    It is short, because programs have sockets below it, and the path of a socket has at most 107 bytes.
    """
    return Path("/tmp", f"cml-{session_id}")


def read_json(path: Path) -> Any:
    """Return the content that :func:`write_json` wrote. Return None if the file does not exist."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a file atomically, so that only its owner can read it."""
    write_file(path, json.dumps(content).encode())


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Prevent other processes from changing the quota and the set of sessions in the block."""
    path = directory()
    with open(path / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def create_session(session: Session) -> int:
    """Create the folder of a new session.

    Returns
    -------
    int
        A file descriptor with the session's lock. The session fails when all copies of it are closed.

    Raises
    ------
    OSError
        If the state directory is on a network file system, where processes cannot pass on locks.
    """
    folder = folder_of(session["id"])
    folder.mkdir(mode=0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not _is_locked(folder / "lock"):  # locks there belong to a process
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(
            f"{directory()} is on a network file system: set {DIRECTORY_VARIABLE} to a folder on a local disk"
        )
    write_json(folder / "session.json", session)  # nobody sees the session before it has this file
    return lock


def _is_locked(path: Path) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_live(session: Session) -> bool:
    """Return whether a session has not ended."""
    return session["status"] not in ENDED


def read_session(session_id: str) -> Session | None:
    """Return the current state of a session. Return None if no session has this id.

    If the session has not ended but its supervisor has died, end it as failed.
    """
    folder = folder_of(session_id)
    session = read_json(folder / "session.json") if session_id.isalnum() else None
    if session is None or not is_live(session):
        return session
    with contextlib.suppress(FileNotFoundError), open(folder / "lock", "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the supervisor has it
            return session
        # The supervisor may have written the session's end before it released the lock.
        session = read_json(folder / "session.json")
        if session and is_live(session):
            free(session)
            session |= {"status": "failed", "finished_at": time.time()}
            write_json(folder / "session.json", session)
    return session


def read_sessions() -> list[Session]:
    """Return the current states of all sessions, the oldest first."""
    sessions = [read_session(folder.name) for folder in (directory() / _SESSIONS).iterdir()]
    return sorted(filter(None, sessions), key=lambda session: session["created_at"])


def forget(sessions: list[Session]) -> None:
    """Remove the sessions that ended long ago."""
    for session in sessions:
        if not is_live(session) and session["finished_at"] < time.time() - _KEPT:
            shutil.rmtree(folder_of(session["id"]), ignore_errors=True)


def free(session: Session, group: int | None = None) -> None:
    """Kill every process of a session, and remove its TMPDIR.

    Parameters
    ----------
    session : dict
        The session.
    group : int, optional
        See :func:`processes.find`.
    """
    from dask_cml.local import processes  # imports psutil, which a session need not wait for at its start

    processes.kill(session["id"], group)
    with contextlib.suppress(OSError):  # it never started
        temporary_of(session["id"]).unlink()
    shutil.rmtree(folder_of(session["id"]) / "tmp", ignore_errors=True)


def request_stop(session_id: str) -> bool:
    """Ask a session to stop, without waiting for it. Return whether it exists."""
    session = read_session(session_id)
    if session and is_live(session):
        with contextlib.suppress(FileNotFoundError):  # the session was removed
            (folder_of(session_id) / "stop").touch()
    return session is not None


def public(session: Session) -> SessionInfo:
    """Return a session as the platform describes it."""
    created, running, finished = (session.get(f"{event}_at") for event in ("created", "running", "finished"))
    description = {
        **{name: session[name] for name in _TOLD},
        "created_at": _timestamp(created),
        "running_at": _timestamp(running),
        "finished_at": _timestamp(finished),
        "duration": round(max(0.0, finished - (running or created)), 3) if finished else None,
    }
    if session["status"] != "scheduling":
        description["ip_address"] = session["ip"] if running else "unknown"
    return description


def _timestamp(moment: float | None) -> str | None:
    if moment is None:
        return None
    date = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")
