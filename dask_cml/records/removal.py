"""The removal of a cluster's folder.

All steps use the folder's descriptor. So if several processes remove the same dead cluster, none of them
removes another cluster that takes its name meanwhile. No lock is needed.
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

from dask_cml.layout import RECORD_FILE, REMOVED_FILE
from dask_cml.private_files import NotPrivate, make_folder
from dask_cml.records import session_files

_TRIES = 5
_PAUSE = 0.01


def clear(folder: Path, is_meant: Callable[[int], bool]) -> dict[str, str] | None:
    """Remove a cluster's folder and its contents.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    is_meant : callable
        Gets the descriptor of the existing folder, and returns whether to remove it.

    Returns
    -------
    dict of str to str, or None
        The sessions in the last state of the record. None if the folder did not exist, or was another one.
    """
    aside = folder.parent / f".removed-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not is_meant(descriptor):
            return None
        # From now on nobody finds the cluster, and its writers get an error. What they wrote before is read
        # below. After a crash, this file's name marks a removal to continue.
        with contextlib.suppress(FileNotFoundError):
            os.rename(RECORD_FILE, REMOVED_FILE, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        # Another process may have removed the files already.
        sessions: dict[str, str] | None = {} if _entries(descriptor) else None
        with contextlib.suppress(OSError, NotPrivate):
            found = session_files.read(folder, descriptor)
            sessions = {session: each.key for session, each in found.items() if each.ended is None}
        make_folder(aside)
        for _ in range(_TRIES):  # a session may write its log meanwhile
            for entry in sorted(_entries(descriptor), key=REMOVED_FILE.__eq__):  # the mark at last
                with contextlib.suppress(FileNotFoundError):  # another process removes them, too
                    os.rename(entry, aside / secrets.token_hex(8), src_dir_fd=descriptor)
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # only an empty one, so not that of another cluster
            if not _entries(descriptor):
                break
            time.sleep(_PAUSE)
    finally:
        os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
    return sessions


def _entries(descriptor: int) -> list[str]:
    """List a folder. Return nothing if it does not exist any more."""
    try:
        return os.listdir(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return []
