"""Engines: the user's own sessions. When an engine ends, so do the sessions that it launched.

An engine has ended if it has a file below ``engines`` in the state directory, and no process holds the file's
lock. The kernel releases the lock when the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dask_cml.local import state
from dask_cml.private_files import make_folder


def has_ended(name: str) -> bool:
    """Return whether an engine has ended, so that the sessions that it launched must end."""
    try:
        with state.lock_if_free(_path(name)) as is_free:
            return is_free
    except (FileNotFoundError, ValueError):  # the owner is no engine
        return False


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Turn this process into a session of the user, until the block or the process ends.

    Sessions that are launched in the block end with it, as on CML.

    Parameters
    ----------
    name : str
        The session's id, of letters and digits. Each id can be used once.

    Raises
    ------
    ValueError
        If `name` is not an id, or was used before.

    Examples
    --------
    >>> from dask_cml import local
    >>> with local.engine("laptop"):
    ...     [session] = local.launch_workers(1, cpu=1, memory=2, code="import time; time.sleep(600)")
    """
    before = {variable: os.environ.get(variable) for variable in ("CDSW_ENGINE_ID", "CDSW_MASTER_ID")}
    lock = become(name)
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        os.close(lock)
        # Before their supervisors notice that the engine has ended.
        for session in state.read_sessions():
            if session["owner"] == name:
                state.request_end(session["id"])


def become(name: str) -> int:
    """Turn this process into an engine, as in :func:`engine`.

    Returns
    -------
    int
        A file descriptor. The engine ends when all copies of it are closed.
    """
    path = _path(name)
    make_folder(path.parent)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"invalid name={name!r}: expected an id that was not used before") from None
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.environ.pop("CDSW_MASTER_ID", None)
    os.environ["CDSW_ENGINE_ID"] = name
    return lock


def _path(name: str) -> Path:
    if not name.isalnum():
        raise ValueError(f"invalid name={name!r}: expected letters and digits")
    return state.directory() / "engines" / name
