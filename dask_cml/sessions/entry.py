"""The files of a cluster's sessions. They are empty: a name describes a session, or what became of it.

The keeper writes a file for every session that it launches, and a session writes its own when it starts.
Its name is ``<id>,<key>,<owner>,<launched>,<size>,``. See :class:`Launch`. What is unknown is empty. At the
beginning of the key, ``@`` stands for the cluster's name, which may be long. Ambiguous characters in a key
are percent-encoded.

What is known later are files of their own: ``<id>,waits``, ``<id>,began,<time>`` and
``<id>,ended,<time>,<cause>``.

Each operation creates one file, and none is ever changed, moved or removed. So all processes of a cluster
write at once without a lock, and a reader that lists the folder once misses no session, even if a writer
dies.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dask_cml.checks import is_session_id
from dask_cml.layout import SESSIONS_FOLDER
from dask_cml.options import SessionSize, exact
from dask_cml.private_files import check_folder, report_ignored

_TIME = "[1-9][0-9]{0,11}"
_NUMBER = "[0-9.e+-]+"
_SIZE = rf"({_NUMBER})x({_NUMBER})x([0-9]+)"
_NAME = re.compile(rf"([^,]+),([^,]+),([^,]*),({_TIME}),(?:{_SIZE})?,", re.ASCII)
_FACT = re.compile(rf"([^,]+),(?:waits|began,({_TIME})|ended,({_TIME}),([a-z-]*))", re.ASCII)
_CLUSTER = "@"


@dataclass(frozen=True)
class Launch:
    """A session that was launched for a cluster.

    Parameters
    ----------
    id : str
        The platform's id.
    key : str
        The name of its Dask worker, or ``"scheduler"``.
    owner : str or None
        The id of the session with which it ends, if that is known.
    launched : int
        The time of its launch, in seconds since 1970.
    size : SessionSize, optional
        Its size, if that is known.
    waits : bool
        Whether it is queued, or ended in the queue.
    began : int, optional
        If it was queued, the time at which it left the queue.
    ended : int, optional
        The time of its end.
    cause : str
        Why it ended, if nobody asked for it, such as ``out of memory``.
    """

    id: str
    key: str
    owner: str | None
    launched: int
    size: SessionSize | None = None
    waits: bool = False
    began: int | None = None
    ended: int | None = None
    cause: str = ""

    def seconds(self, now: float) -> float:
        """Return for how long it has used room, in seconds."""
        return 0.0 if self.waits else (self.ended or now) - (self.began or self.launched)


def file_name(launch: Launch, cluster: str) -> str:
    """Return the name of a new session's file.

    Parameters
    ----------
    launch : Launch
        The session.
    cluster : str
        The cluster's name.

    Examples
    --------
    >>> launch = Launch("abcdefgh12345678", "mine-0", "ijklmnop12345678", 1790000000, SessionSize(4, 16, 1))
    >>> file_name(launch, "mine")
    'abcdefgh12345678,@-0,ijklmnop12345678,1790000000,4x16x1,'
    """
    name = form(launch.key, cluster, launch.size)
    return name.format(id=launch.id, owner=launch.owner or "", launched=launch.launched)


def form(key: str, cluster: str, size: SessionSize | None) -> str:
    """Return the name of a new session's file, without ``{id}``, ``{owner}`` and ``{launched}``."""
    text = f"{exact(size.cpu)}x{exact(size.memory)}x{size.nvidia_gpu}" if size else ""
    rest = key.removeprefix(cluster)
    quoted = quote(rest, safe="") if rest == key else _CLUSTER + quote(rest, safe="")
    return f"{{id}},{quoted},{{owner}},{{launched}},{text},"


# Files of ended sessions stay, and processes read all of them again and again.
@lru_cache(maxsize=2**16)
def parse(name: str, cluster: str) -> Launch:
    """Return the session that a file's name describes. The inverse of :func:`file_name`.

    Raises
    ------
    ValueError
        If :func:`file_name` returns no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!a} is not the name of a session's file")
    session_id, key, owner, launched, cpu, memory, gpus = match.groups()
    prefix = cluster if key.startswith(_CLUSTER) else ""
    key = prefix + unquote(key.removeprefix(_CLUSTER), errors="strict")
    size = SessionSize(float(cpu), float(memory), int(gpus)) if cpu else None
    launch = Launch(session_id, key, owner or None, int(launched), size)
    ids = {session_id, launch.owner or session_id}
    if not all(map(is_session_id, ids)) or not key.isprintable() or "/" in key:
        raise ValueError(f"{name!a} does not describe a session")
    if file_name(launch, cluster) != name:
        raise ValueError(f"{name!a} is not in dask-cml's form")
    return launch


def fact(session_id: str, what: str, *details: object) -> str:
    """Return the name of a file that says what became of a session, see :func:`read_fact`.

    Examples
    --------
    >>> fact("abcdefgh12345678", "waits"), fact("abcdefgh12345678", "began", 1790000000)
    ('abcdefgh12345678,waits', 'abcdefgh12345678,began,1790000000')
    """
    return ",".join([session_id, what, *map(str, details)])


def read_fact(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return a session's id, and the fields of :class:`Launch` that a file adds. None for other files."""
    match = _FACT.fullmatch(name)
    if match is None:
        return None
    session_id, began, ended, cause = match.groups()
    if ended:
        return session_id, {"ended": int(ended), "cause": cause.replace("-", " ")}
    if began:
        return session_id, {"waits": False, "began": int(began)}
    return session_id, {"waits": True}


def read_entries(folder: Path, cluster: str) -> dict[str, Launch]:
    """Return the sessions of a cluster, the oldest first. Ignore files that describe none; warn once.

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
    sessions_folder = folder / SESSIONS_FOLDER
    if sessions_folder.is_symlink():
        raise ValueError(f"{SESSIONS_FOLDER} in its folder is a symbolic link")
    check_folder(sessions_folder)
    names = os.listdir(sessions_folder)
    launches = []
    facts: dict[str, dict[str, Any]] = {}
    # In this order, the end of a wait counts more than the wait, and the first of two times.
    for name in sorted(names, reverse=True):
        fact = read_fact(name)
        if fact is not None:
            session, fields = fact
            facts.setdefault(session, {}).update(fields)
        elif not name.startswith("."):  # NFS uses such a name for a file that was removed while it was open
            try:
                launches.append(parse(name, cluster))
            except ValueError:
                where = f"{name!a} in {folder / SESSIONS_FOLDER}"
                report_ignored(where, "it is not the name of a session's file")
    launches.sort(key=lambda launch: (launch.launched, len(launch.key), launch.key, launch.id))
    sessions: dict[str, Launch] = {}
    for launch in launches:
        sessions.setdefault(launch.id, replace(launch, **facts.get(launch.id, {})))
    return sessions


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
    names = [file_name(launch, folder.name) for launch in launched]
    if facts:
        # Some sessions were never in the record, such as the engines of refused launches.
        known = {name.partition(",")[0] for name in (*os.listdir(sessions), *names)}
        names += [name for name in facts if name.partition(",")[0] in known]
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(sessions / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
