"""Where the local platform keeps what all of its processes must see: small files, written whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dask_cml.private import make_folder, owner_only

DIRECTORY_VARIABLE = "DASK_CML_LOCAL_DIRECTORY"


def directory() -> Path:
    """Return the state directory, and make it if need be.

    Returns
    -------
    pathlib.Path
        ``DASK_CML_LOCAL_DIRECTORY``, else a directory of the user's in the directory for temporary files.
        It should be on a local disk: locks on network file systems do not pass from process to process.

    Raises
    ------
    PermissionError
        If it belongs to somebody else, or others can write to it.
    """
    path = _path(os.environ)
    make_folder(path)
    make_folder(path / "sessions")
    return path


def is_of_a_process_with(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables has the same state directory."""
    return _path(environment) == _path(os.environ)


def _path(environment: Mapping[str, str]) -> Path:
    default = Path(tempfile.gettempdir(), f"dask-cml-local-{os.getuid()}")
    return Path(environment.get(DIRECTORY_VARIABLE) or default).absolute()


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None if there is no such file."""
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def read_json(path: Path) -> Any:
    """Return what :func:`write_json` wrote, or None if there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a file that others see whole or not at all, and that its owner alone can read."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(new, "w", opener=owner_only) as file:
        json.dump(content, file)
    os.replace(new, path)


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Keep every other process from changing settings, faults and the set of sessions meanwhile."""
    path = directory()
    with open(path / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path
