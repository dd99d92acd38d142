"""Engines: the user's own sessions, with which end the sessions that they have launched.

A file below ``engines`` in the state directory says that an engine has ended, unless a process holds the
file's lock. The kernel drops the lock with the process, however that dies. An engine without a file is one
that somebody has named in ``CDSW_ENGINE_ID``; only :func:`end_engine` ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dask_cml.local import processes, records, state
from dask_cml.private import make_folder


def has_ended(name: str) -> bool:
    """Return whether the sessions that an engine launched are to be collected."""
    # An owner may have a name that no engine can have.
    return name.isalnum() and state.is_locked(_path(name)) is False


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Make this process a session of the user's own, until the block ends or the process does.

    What is launched within the block is stopped then, as CML stops what an ended session has launched.

    Parameters
    ----------
    name : str
        The session's id, of letters and digits. An id is used once.

    Raises
    ------
    ValueError
        If `name` is no id, or was used.

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
        raise ValueError(f"invalid name={name!r}: expected an id that no engine has used") from None
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
    """End an engine that is named in ``CDSW_ENGINE_ID``: its processes at once, then what it launched.

    Parameters
    ----------
    name : str
        The engine's id, of letters and digits. An id is used once.

    Raises
    ------
    ValueError
        If `name` is no id, or that of an engine which a process is by :func:`engine`.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.end_engine("another")
    """
    path = _path(name)
    make_folder(path.parent)
    if path.exists() and not has_ended(name):
        raise ValueError(f"invalid name={name!r}: expected an engine that does not end with a process")
    path.touch(mode=0o600)
    processes.kill(name)
    _collect(name)


def _collect(name: str) -> None:
    """Stop what an engine has launched, sooner than the supervisors find that it has ended."""
    for record in records.read_all():
        if record.live and record.plan["owner"] == name:
            records.stop(record.id)


def _path(name: str) -> Path:
    if not name.isalnum():
        raise ValueError(f"invalid name={name!r}: expected letters and digits")
    return state.directory() / "engines" / name
