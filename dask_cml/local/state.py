"""The state that all processes of the local platform share: small files, each written as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dask_cml.private_files import make_folder, owner_only

DIRECTORY_VARIABLE = "DASK_CML_LOCAL_DIRECTORY"


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
            free = True
        except BlockingIOError:
            free = False
        yield free


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
