"""The files of a cluster's sessions: each is empty, and its name says all that is known of a session.

``<id>,<key>,<owner>,<launched>``
    A session: its id, the name of its Dask worker or ``scheduler``, the session with which it ends if that is
    known, and when it was launched, in whole seconds since 1970. ``@`` stands for the cluster's name, which
    may be long, at the beginning of the key. What could be mistaken in a key is percent-encoded.
``<id>,waits``
    The session waits for room.

One file is made or removed at a time, and nobody changes another's. So all managers of a cluster write at
once without a lock, and a reader lists the folder once, whatever becomes of the writers.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from dask_cml.checks import is_session_id
from dask_cml.private import open_folder

#: In a cluster's folder.
SESSIONS_FOLDER = "sessions"

_NAME = re.compile(r"([^,]+),([^,]+),([^,]*),([1-9][0-9]{0,11})", re.ASCII)
_CLUSTER = "@"
_WAITS = "waits"


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
        When, in seconds since 1970.
    """

    id: str
    key: str
    owner: str | None
    launched: int


@dataclass(frozen=True)
class Changes:
    """What is to be written about a cluster's sessions.

    Parameters
    ----------
    launched : collection of Launch
        New sessions.
    ended : collection of str
        The ids of sessions that were stopped.
    waiting, waiting_no_more : collection of str
        The ids of sessions that wait for room, and of those that do not any more.
    """

    launched: Collection[Launch] = ()
    ended: Collection[str] = ()
    waiting: Collection[str] = ()
    waiting_no_more: Collection[str] = ()

    def __bool__(self) -> bool:
        return any((self.launched, self.ended, self.waiting, self.waiting_no_more))


@dataclass(frozen=True)
class Listing:
    """What the names of files say: by sessions' ids, as a record has it, and which say nothing."""

    sessions: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    launched: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def file_name(launch: Launch, cluster: str) -> str:
    """Return the name of a session's file.

    Parameters
    ----------
    launch : Launch
        The session.
    cluster : str
        The cluster's name.

    Examples
    --------
    >>> file_name(Launch("abcdefgh12345678", "mine-0", "ijklmnop12345678", 1790000000), "mine")
    'abcdefgh12345678,@-0,ijklmnop12345678,1790000000'
    """
    rest = launch.key.removeprefix(cluster)
    key = quote(rest, safe="") if rest == launch.key else _CLUSTER + quote(rest, safe="")
    return f"{launch.id},{key},{launch.owner or ''},{launch.launched}"


def parse(name: str, cluster: str) -> Launch:
    """Return the session that a file's name tells of; the opposite of :func:`file_name`.

    Raises
    ------
    ValueError
        If :func:`file_name` gives no such name.
    """
    if (match := _NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!a} is not the name of a session's file")
    session_id, key, owner, launched = match.groups()
    whose = cluster if key.startswith(_CLUSTER) else ""
    key = whose + unquote(key.removeprefix(_CLUSTER), errors="strict")
    launch = Launch(session_id, key, owner or None, int(launched))
    ids = {session_id, launch.owner or session_id}
    if not all(map(is_session_id, ids)) or not key.isprintable() or "/" in key:
        raise ValueError(f"{name!a} names what cannot be a session")
    if file_name(launch, cluster) != name:
        raise ValueError(f"{name!a} is not as dask-cml writes it")
    return launch


def parse_all(names: Iterable[str], cluster: str) -> Listing:
    """Return what the names of the files in a folder say, the oldest session first."""
    listing, launches, marked = Listing(), [], set()
    for name in names:
        session_id, _, mark = name.partition(",")
        if mark == _WAITS and is_session_id(session_id):
            marked.add(session_id)
        elif not name.startswith("."):  # NFS gives such a name to a file that is removed while it is open
            try:
                launches.append(parse(name, cluster))
            except ValueError:
                listing.strays.append(name)
    for launch in sorted(launches, key=lambda each: (each.launched, len(each.key), each.key, each.id)):
        if launch.id in listing.sessions:
            continue
        listing.sessions[launch.id] = launch.key
        listing.launched[launch.id] = launch.launched
        if launch.owner is not None:
            listing.owners[launch.id] = launch.owner
        if launch.id in marked:
            listing.waiting[launch.id] = launch.launched
    return listing


def names_in(folder: Path, descriptor: int) -> list[str]:
    """List the files of a cluster's sessions.

    Parameters
    ----------
    folder : Path
        The cluster's.
    descriptor : int
        What it is open at.

    Raises
    ------
    NotPrivate
        If others can write to it.
    """
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        return os.listdir(own)


def write(changes: Changes, cluster: str, folder: Path, descriptor: int) -> None:
    """Make and remove files of a cluster's sessions. What is there, or gone, already may stay so.

    Parameters
    ----------
    changes : Changes
        What is to be written.
    cluster : str
        The cluster's name.
    folder : Path
        The cluster's.
    descriptor : int
        What it is open at. If the folder is removed meanwhile, nothing comes back.

    Raises
    ------
    FileNotFoundError
        If the folder is removed.
    """
    made = [file_name(launch, cluster) for launch in changes.launched]
    made += [f"{each},{_WAITS}" for each in changes.waiting]
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        for name in made:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=own))
        removed = [f"{each},{_WAITS}" for each in changes.waiting_no_more]
        if changes.ended:  # others may have launched them, so the names are not known here
            removed += [name for name in os.listdir(own) if name.partition(",")[0] in changes.ended]
        for name in removed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=own)
