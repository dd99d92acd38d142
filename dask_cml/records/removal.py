"""The removal of a cluster's folder.

All is done in the very folder that was looked at, by its descriptor. So of the processes that find the same
dead cluster, none takes away that of another one that has its name meanwhile, and there is no lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from dask_cml.private import NotPrivate, make_folder
from dask_cml.records import session_files
from dask_cml.records.record import RECORD_FILE

#: What the record is called of a cluster that is being removed.
_REMOVED_FILE = ".removed.json"
_TRIES = 5
_PAUSE = 0.01


def clear(folder: Path, is_meant: Callable[[int], bool]) -> dict[str, str] | None:
    """Remove a cluster's folder with all that is in it.

    Parameters
    ----------
    folder : Path
        The cluster's.
    is_meant : callable
        Gets the descriptor of the folder that is there, and returns whether to remove it.

    Returns
    -------
    dict of str to str, or None
        The sessions of which the record told last; None if nothing was there, or something else.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    aside = folder.parent / f".removed-{secrets.token_hex(8)}"
    try:
        if not is_meant(descriptor):
            return None
        # From now on nobody finds the cluster, and writers hear that it is gone. What they wrote before that
        # is read here. After a crash this file's name says that the removal goes on.
        with contextlib.suppress(FileNotFoundError):
            os.rename(RECORD_FILE, _REMOVED_FILE, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        # Another process may have been faster.
        sessions: dict[str, str] | None = {} if _entries(descriptor) else None
        with contextlib.suppress(OSError, NotPrivate):
            names = session_files.names_in(folder, descriptor)
            sessions = session_files.parse_all(names, folder.name).sessions
        make_folder(aside)
        for _ in range(_TRIES):  # a session may write its log meanwhile
            for entry in {*_entries(descriptor)} - {_REMOVED_FILE}:
                _move(entry, descriptor, aside)
            if {*_entries(descriptor)} <= {_REMOVED_FILE}:
                _move(_REMOVED_FILE, descriptor, aside)
                with contextlib.suppress(OSError):
                    os.rmdir(folder)  # only an empty one, so not that of another cluster
                if not _entries(descriptor):
                    break
            time.sleep(_PAUSE)
    finally:
        os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
    return sessions


def _move(entry: str, descriptor: int, aside: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process removes it, too
        os.rename(entry, aside / secrets.token_hex(8), src_dir_fd=descriptor)


def _entries(descriptor: int) -> list[str]:
    """List a folder; nothing, if it is gone."""
    try:
        return os.listdir(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return []


def is_half_done(descriptor: int) -> bool:
    """Return whether a process has begun to remove the folder, which may have died meanwhile."""
    names = _entries(descriptor)
    return _REMOVED_FILE in names and RECORD_FILE not in names
