"""Files and folders that only this user can read and change.

The state directory has mode 0700, so what it contains is this user's. A user who can write a record chooses
which scheduler its readers connect to and which sessions they stop.
All functions block while they wait for the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import BinaryIO

from dask_cml.errors import CMLError, reason_of
from dask_cml.output import get_logger, warn_once

logger = get_logger(__name__)


class NotPrivate(CMLError, PermissionError):
    """A folder belongs to another user, or others can write to it.

    Parameters
    ----------
    path : Path
        The folder.
    why : str
        The problem, such as ``has mode 0775, so others can write to it``.
    command : str
        The shell command that solves it.
    """

    def __init__(self, path: Path, why: str, command: str) -> None:
        super().__init__(f"{path} {why}: run `{command}`")
        self.path, self.why, self.command = path, why, command


def make_folder(path: Path, option: str | None = None) -> None:
    """Create a folder with mode 0700, and its parents. Check an existing folder.

    Parameters
    ----------
    path : Path
        The folder.
    option : str, optional
        The option that says where it is, for the error.

    Raises
    ------
    NotPrivate
        If the folder exists and is not private.
    ValueError, OSError
        If it cannot be made. With an `option`, it is a ValueError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if option is None:
            raise
        raise ValueError(f"invalid {option}: {reason_of(error)}") from None
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a folder that belongs to another user, or to which others can write.

    Raises
    ------
    NotPrivate
        If the folder is not private.
    """
    about = path.stat()
    if about.st_uid != os.geteuid():
        why = f"belongs to the user with the id {about.st_uid}, your id is {os.geteuid()}"
        raise NotPrivate(path, why, move_aside(path))
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"has mode {stat.S_IMODE(about.st_mode):04o}, so others can write to it"
        raise NotPrivate(path, why, shlex.join(["chmod", "700", str(path)]))


def is_gone(path: Path) -> bool:
    """Return whether a folder is known not to exist: a list of its parent, or of one above, lacks it.

    A file in the place of one is proof, too. Other errors prove nothing: the file system may not answer for a
    while, or refuse to.
    """
    try:
        return path.name not in os.listdir(path.parent)
    except NotADirectoryError:
        return True
    except FileNotFoundError:
        return is_gone(path.parent)
    except OSError:
        return False


def regular(path: str, flags: int) -> int:
    """Open a regular file for :func:`open`. Neither follow a link nor wait for a pipe's writer.

    If this creates it, only its owner can read it.

    Raises
    ------
    ValueError
        If it is not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise ValueError("it is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it, see :func:`regular`."""
    return open(path, "rb", opener=regular)


def append(path: Path, content: bytes) -> None:
    """Append to a regular file, or create it, see :func:`regular`."""
    with open(path, "ab", opener=regular) as file:
        file.write(content)


def read_file(path: Path) -> bytes:
    """Read a regular file, see :func:`regular`."""
    with open_regular(path) as file:
        return file.read()


def write_file(path: Path, content: bytes, *, new: bool = False) -> bool:
    """Write a file atomically, and wait until the content is on the disk. Return whether it was written.

    Parameters
    ----------
    path : Path
        The path of the file. Its temporary name is ``.<name>-…``.
    content : bytes
        The content of the file.
    new : bool
        Whether to leave an existing file alone. If several processes write it at the same time, one succeeds.
    """
    # By hand: libraries for atomic writes cannot leave an existing file alone.
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=regular) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # The complete file gets its name in one step.
        name_it = os.link if new else os.replace
        name_it(temporary, path)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost. Then the file has its second name already.
        return os.stat(temporary).st_nlink > 1
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return True


def move_aside(path: Path) -> str:
    """Return the shell command that renames a folder or file to a name that no cluster can have."""
    aside = path.with_name(f".{path.name.lstrip('.')}-{secrets.token_hex(2)}")
    return shlex.join(["mv", str(path), str(aside)])


def report_ignored(path: Path | str, why: Exception | str) -> None:
    """Log that a file is ignored, once.

    Parameters
    ----------
    path : Path or str
        The file.
    why : Exception or str
        Why, as a clause.
    """
    warn_once(logger, str(path), f"{path} ignored: {why}")
