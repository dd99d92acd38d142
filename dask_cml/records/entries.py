"""The files of a cluster's sessions. They are empty: a name describes a session, or what became of it.

For the name of a session's own file, see :mod:`dask_cml.sessions.entry`. What is known later are files of
their own: ``<id>,waits``, ``<id>,began,<time>`` and ``<id>,ended,<time>,<cause>``.

Each operation creates one file, and none is ever changed. So all processes of a cluster write at once
without a lock, and a reader that lists the folder once misses no session, even if a writer dies.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dask_cml.layout import SESSIONS_FOLDER
from dask_cml.private_files import check_folder, report_ignored
from dask_cml.sessions.entry import TIME, Launch, file_name, parse

_FACT = re.compile(rf"[^,]+,(?:waits|began,({TIME})|ended,({TIME}),([a-z-]*))", re.ASCII)


def fact(session_id: str, what: str, *details: object) -> str:
    """Return the name of a file that says what became of a session, see :func:`read_fact`.

    Examples
    --------
    >>> fact("abcdefgh12345678", "waits"), fact("abcdefgh12345678", "began", 1790000000)
    ('abcdefgh12345678,waits', 'abcdefgh12345678,began,1790000000')
    """
    return ",".join([session_id, what, *map(str, details)])


def read_fact(name: str) -> dict[str, Any] | None:
    """Return the fields of :class:`Launch` that a file adds. Return None for other files."""
    match = _FACT.fullmatch(name)
    if match is None:
        return None
    began, ended, cause = match.groups()
    if ended:
        return {"ended": int(ended), "cause": cause.replace("-", " ")}
    if began:
        return {"waits": False, "began": int(began)}
    return {"waits": True}


class Entries(NamedTuple):
    """The sessions of a cluster by their ids.

    Parameters
    ----------
    live : mapping of str to Launch
        The running and queued sessions, the oldest first.
    ended : mapping of str to Launch
        The sessions that have ended.
    """

    live: Mapping[str, Launch]
    ended: Mapping[str, Launch]


def read_entries(folder: Path, cluster: str) -> Entries:
    """Return the sessions of a cluster. Ignore files that describe none; warn once.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    cluster : str
        The cluster's name.

    Raises
    ------
    NotPrivate
        If others can write to the folder.
    ValueError
        If the folder is elsewhere.
    """
    sessions = folder / SESSIONS_FOLDER
    if sessions.is_symlink():
        raise ValueError(f"{SESSIONS_FOLDER} in its folder is a symbolic link")
    check_folder(sessions)
    by_session: dict[str, list[str]] = {}
    for name in os.listdir(sessions):
        if not name.startswith("."):  # NFS uses such a name for a file that was removed while it was open
            by_session.setdefault(_session_of(name), []).append(name)
    read = (_read_session(names, sessions, cluster) for names in by_session.values())
    launches = sorted((launch for launch in read if launch is not None), key=_order)
    return Entries(
        {launch.id: launch for launch in launches if launch.ended is None},
        {launch.id: launch for launch in launches if launch.ended is not None},
    )


def _session_of(name: str) -> str:
    return name.partition(",")[0]


def _order(launch: Launch) -> tuple[int, int, str, str]:
    """Return what sorts sessions by their age."""
    return launch.launched, len(launch.key), launch.key, launch.id


def _read_session(names: Iterable[str], folder: Path, cluster: str) -> Launch | None:
    """Return the session that the names of its files describe. Return None if they describe none."""
    launches = []
    facts: dict[str, Any] = {}
    # In this order, the end of a wait counts more than the wait, and the first of two times.
    for name in sorted(names, reverse=True):
        fields = read_fact(name)
        if fields is not None:
            facts |= fields
            continue
        try:
            launches.append(parse(name, cluster))
        except ValueError:
            report_ignored(f"{name!a} in {folder}", "it is not the name of a session's file")
    return replace(min(launches, key=_order), **facts) if launches else None


def write_entries(launched: Iterable[Launch], facts: Collection[str], folder: Path) -> None:
    """Create files of a cluster's sessions, unless they exist.

    Parameters
    ----------
    launched : iterable of Launch
        New sessions.
    facts : collection of str
        The names of files from :func:`fact`.
    folder : Path
        The cluster's folder, which has the cluster's name.

    Raises
    ------
    FileNotFoundError
        If the folder was removed. It does not come back.
    NotPrivate
        If others can write to the folder.
    """
    sessions = folder / SESSIONS_FOLDER
    check_folder(sessions)
    # Nobody reads a fact of a session that is not in the record, such as the engine of a refused launch.
    names = [*(file_name(launch, folder.name) for launch in launched), *facts]
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(sessions / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
