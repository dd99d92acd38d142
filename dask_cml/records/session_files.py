"""The files of a cluster's sessions: each is empty, and its name describes a session, or what became of it.

:mod:`dask_cml.sessions.entry` describes the names. Each operation creates one file, and none is ever changed,
moved or removed. So all managers of a cluster write at once without a lock, and a reader that lists the
folder once misses no session, even if a writer dies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dask_cml.layout import SESSIONS_FOLDER
from dask_cml.private_files import open_folder, report_ignored
from dask_cml.sessions.entry import Launch, file_name, parse, read_fact


def read(folder: Path, descriptor: int) -> dict[str, Launch]:
    """Return the sessions of a cluster, the oldest first. Ignore files that describe none; warn once.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    descriptor : int
        The descriptor of that folder.

    Raises
    ------
    NotPrivate
        If others can write to the folder.
    """
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        names = os.listdir(own)
    found = []
    facts: dict[str, dict[str, Any]] = {}
    # In this order, the end of a wait counts more than the wait, and the first of two times.
    for name in sorted(names, reverse=True):
        if (fact := read_fact(name)) is not None:
            session, known = fact
            facts.setdefault(session, {}).update(known)
        elif not name.startswith("."):  # NFS uses such a name for a file that was removed while it was open
            try:
                found.append(parse(name, folder.name))
            except ValueError:
                where = f"{name!a} in {folder / SESSIONS_FOLDER}"
                report_ignored(where, "it is not the name of a session's file")
    sessions: dict[str, Launch] = {}
    for each in sorted(found, key=lambda each: (each.launched, len(each.key), each.key, each.id)):
        sessions.setdefault(each.id, replace(each, **facts.get(each.id, {})))
    return sessions


def write(launched: Iterable[Launch], facts: Collection[str], folder: Path, descriptor: int) -> None:
    """Create files of a cluster's sessions, unless they exist.

    Parameters
    ----------
    launched : iterable of Launch
        New sessions.
    facts : collection of str
        The names of files from :func:`dask_cml.sessions.entry.fact`.
    folder : Path
        The cluster's folder.
    descriptor : int
        The descriptor of that folder. If the folder is removed meanwhile, it does not come back.

    Raises
    ------
    FileNotFoundError
        If the folder was removed.
    """
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        names = [file_name(each, folder.name) for each in launched]
        if facts:
            # Some were never in the record, such as the engines of refused launches.
            known = {name.partition(",")[0] for name in (*os.listdir(own), *names)}
            names += [name for name in facts if name.partition(",")[0] in known]
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=own))
