"""Engines: the user's own sessions. When an engine ends, so do the sessions that it launched.

An engine has ended if it has a file below ``engines`` in the state directory, and no process holds the file's
lock. The kernel releases the lock when the process dies. An engine without a file is one from
``CDSW_ENGINE_ID``; only :func:`end_engine` ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dask_cml.local import processes, session_state, state
from dask_cml.private_files import make_folder


def has_ended(name: str) -> bool:
    """Return whether an engine has ended, so that the sessions that it launched must end."""
    # The owner of a session may have a name that no engine can have.
    return name.isalnum() and state.is_locked(_path(name)) is False


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
    path = _path(name)
    make_folder(path.parent)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"invalid name={name!r}: expected an id that was not used before") from None
    before = {variable: os.environ.get(variable) for variable in ("CDSW_ENGINE_ID", "CDSW_MASTER_ID")}
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.environ.pop("CDSW_MASTER_ID", None)
        os.environ["CDSW_ENGINE_ID"] = name
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        os.close(lock)
        _collect(name)


def end_engine(name: str) -> None:
    """End an engine from ``CDSW_ENGINE_ID``: kill its processes, then stop the sessions that it launched.

    Parameters
    ----------
    name : str
        The engine's id, of letters and digits. Each id can be used once.

    Raises
    ------
    ValueError
        If `name` is not an id, or is that of an :func:`engine` block.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.end_engine("another")
    """
    path = _path(name)
    make_folder(path.parent)
    if path.exists() and not has_ended(name):
        raise ValueError(f"invalid name={name!r}: expected an engine other than an engine() block")
    path.touch(mode=0o600)
    processes.kill(name)
    _collect(name)


def _collect(name: str) -> None:
    """Stop the sessions that an engine launched, before their supervisors notice that it has ended."""
    for session in session_state.read_all():
        if session.live and session.plan["owner"] == name:
            session_state.stop(session.id)


def _path(name: str) -> Path:
    if not name.isalnum():
        raise ValueError(f"invalid name={name!r}: expected letters and digits")
    return state.directory() / "engines" / name
