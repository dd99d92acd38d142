"""The files of a cluster's sessions, which say which exist: launched, started and ended.

In ``sessions`` they are empty: for the name of a session's own file, see :mod:`dask_cml.sessions.entry`, and
its end is a file of its own, ``<id>,ended,<time>,<cause>``. In ``started``, each session creates a file with
the name that it takes, which contains its id.

Each operation creates one file, and none is ever changed. So all processes of a cluster write at once
without a lock, and a reader that lists the folder once misses no session, even if a writer dies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dask_cml.checks import is_session_id
from dask_cml.layout import SESSIONS_FOLDER, STARTED_FOLDER
from dask_cml.private_files import read_file, report_ignored
from dask_cml.sessions.entry import TIME, Launch, file_name, parse

_END = re.compile(rf"[^,]+,ended,({TIME}),([a-z-]*)", re.ASCII)


def end_file(session_id: str, at: int, cause: str = "") -> str:
    """Return the name of a file that says when a session ended, and why if nobody asked for it.

    Examples
    --------
    >>> end_file("abcdefgh12345678", 1790000000, "out of memory")
    'abcdefgh12345678,ended,1790000000,out-of-memory'
    """
    return f"{session_id},ended,{at},{cause.replace(' ', '-')}"


def read_started(folder: Path, record_id: str) -> dict[str, float]:
    """Return when the programs of a cluster's sessions have started, by the ids of the sessions.

    The file system's clock dates that. Ignore files that cannot be read.
    """
    started = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder / STARTED_FOLDER):
            with contextlib.suppress(OSError, ValueError):
                session, at = _read_taken(folder / STARTED_FOLDER / name, record_id)
                started[session] = at
    return started


@functools.lru_cache(maxsize=10_000)
def _read_taken(file: Path, record_id: str) -> tuple[str, float]:
    """Return which session has taken a name, and when. In one cluster, this never changes."""
    session = read_file(file).decode()
    if not is_session_id(session):  # it is written just now
        raise ValueError("it contains no session's id")
    return session, file.stat().st_mtime


def read_entries(folder: Path, cluster: str, started: Mapping[str, float]) -> list[Launch]:
    """Return the sessions of a cluster, the oldest first. Ignore files that describe none; warn once.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    cluster : str
        The cluster's name.
    started : mapping of str to float
        When their programs have started, see :func:`read_started`.
    """
    sessions = folder / SESSIONS_FOLDER
    # NFS uses a name with a dot for a file that was removed while it was open.
    names = sorted((name for name in os.listdir(sessions) if not name.startswith(".")), reverse=True)
    read = [_read_session(own, sessions, cluster) for _, own in itertools.groupby(names, _session_of)]
    launches = [replace(launch, started=started.get(launch.id)) for launch in read if launch is not None]
    return sorted(launches, key=_order)


def _session_of(name: str) -> str:
    return name.partition(",")[0]


def _order(launch: Launch) -> tuple[int, int, str, str]:
    """Return what sorts sessions by their age."""
    return launch.launched, len(launch.key), launch.key, launch.id


def _read_session(names: Iterable[str], folder: Path, cluster: str) -> Launch | None:
    """Return the session that the names of its files describe, the last name first. None: they do not."""
    launches = []
    end: dict[str, Any] = {}
    for name in names:  # of two ends, the first counts
        match = _END.fullmatch(name)
        if match is not None:
            # The session itself knows no cause.
            end = {"ended": int(match[1]), "cause": match[2].replace("-", " ") or end.get("cause", "")}
            continue
        try:
            launches.append(parse(name, cluster))
        except ValueError:
            report_ignored(f"{name!a} in {folder}", "it is not the name of a session's file")
    return replace(min(launches, key=_order), **end) if launches else None


def write_entries(launched: Iterable[Launch], ends: Iterable[str], folder: Path) -> None:
    """Create files of a cluster's sessions, unless they exist.

    Parameters
    ----------
    launched : iterable of Launch
        New sessions.
    ends : iterable of str
        The names of files from :func:`end_file`.
    folder : Path
        The cluster's folder, which has the cluster's name.

    Raises
    ------
    FileNotFoundError
        If the folder was removed. It does not come back.
    """
    sessions = folder / SESSIONS_FOLDER
    # Nobody reads the end of a session that is not in the record, such as the engine of a refused launch.
    for name in (*(file_name(launch, folder.name) for launch in launched), *ends):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(sessions / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
