"""The state that all processes of the local platform share: small files, each written as a whole.

Each session has a folder. Its ``session.json`` describes the launch, and what has become of it since. The
session's supervisor alone writes it. The file ``end.json`` requests that the session stops, or that it fails.
The folder ``tmp`` is the session's TMPDIR. The supervisor holds the file ``lock`` while it runs. If it dies,
the kernel releases the lock, and whoever reads the session next ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
import shutil
import string
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dask_cml.local import extensions
from dask_cml.private_files import make_folder, owner_only, report_ignored

#: A session as ``session.json`` has it.
Session = dict[str, Any]

DIRECTORY_VARIABLE = "DASK_CML_LOCAL_DIRECTORY"
ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
_ALPHABET = string.ascii_lowercase + string.digits
#: What the platform tells of a session as it is.
_TOLD = ("id", "status", "name", "app_url", "cpu", "memory", "nvidia_gpu", "kernel", "script")
#: Why a session failed, in the words of :func:`dask_cml.local.sessions`.
OUT_OF_MEMORY, SCRATCH_FULL, EVICTED = "out of memory", "scratch full", "evicted"
#: The version of ``session.json``.
_VERSION = 4


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


def folder_of(session_id: str) -> Path:
    """Return the folder of a session."""
    return directory() / "sessions" / session_id


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


def new_id() -> str:
    """Return 16 random letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(16))


def create_session(session: Session) -> int:
    """Create the folder of a new session.

    Returns
    -------
    int
        A file descriptor with the session's lock. The session fails when all copies of it are closed.
    """
    folder = folder_of(session["id"])
    folder.mkdir(mode=0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Nobody sees the session before it has this file.
    write_json(folder / "session.json", {**session, "version": _VERSION})
    return lock


def is_live(session: Session) -> bool:
    """Return whether a session has not ended."""
    return session["status"] not in ENDED


def read_session(session_id: str) -> Session | None:
    """Return the current state of a session. Return None if no session has this id.

    If the session has not ended but its supervisor has died, end it as failed.
    """
    return _current(folder_of(session_id)) if session_id.isalnum() else None


def read_sessions() -> list[Session]:
    """Return the current states of all sessions, the oldest first."""
    sessions = [session for session in map(_current, (directory() / "sessions").iterdir()) if session]
    return sorted(sessions, key=lambda session: session["created_at"])


def _current(folder: Path) -> Session | None:
    session = _read(folder)
    if session is None or not is_live(session):
        return session
    try:
        with lock_if_free(folder / "lock") as is_free:
            # The supervisor may have written the session's end before it released the lock.
            if is_free and (session := _read(folder)) and is_live(session):
                free(session)
                session |= {"status": "failed", "finished_at": time.time(), "reason": "supervisor lost"}
                write_json(folder / "session.json", session)
    except FileNotFoundError:  # the session was removed
        return None
    return session


def _read(folder: Path) -> Session | None:
    if not folder.name.isalnum():
        return None
    try:
        session: Session = json.loads((folder / "session.json").read_bytes())
        # Another release of dask-cml may have launched it.
        return session if session["version"] == _VERSION and session["status"] else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        report_ignored(f"session {folder.name}", repr(error))
        return None


def free(session: Session, group: int | None = None) -> None:
    """Kill every process of a session, and remove its scratch space.

    Parameters
    ----------
    session : dict
        The session.
    group : int, optional
        See :func:`processes.find`.
    """
    from dask_cml.local import processes  # imports psutil, which takes long

    processes.kill(session["id"], group)
    shutil.rmtree(folder_of(session["id"]) / "tmp", ignore_errors=True)
    for remove in extensions.hooks(session["extensions"], "remove"):
        remove(session)


def request_end(
    session_id: str, how: str = "stopped", reason: str | None = None, notice: bool = True
) -> Session | None:
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
    if session and is_live(session):
        with contextlib.suppress(FileNotFoundError):  # the session has ended, and was removed
            write_json(folder_of(session_id) / "end.json", {"how": how, "reason": reason, "notice": notice})
    return session


def stop_requested(session_id: str) -> bool:
    """Return whether a session was asked to stop."""
    return (read_json(folder_of(session_id) / "end.json") or {}).get("how") == "stopped"


def public(session: Session) -> dict[str, Any]:
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
