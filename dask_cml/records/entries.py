"""The files of a cluster's sessions. They are empty: a name describes a session, or what became of it.

For the name of a session's own file, see :mod:`dask_cml.sessions.entry`. What is known later are files of
their own: ``<id>,waits``, ``<id>,began,<time>`` and ``<id>,ended,<time>,<cause>``.

Each operation creates one file, and none is ever changed. So all processes of a cluster write at once
without a lock, and a reader that lists the folder once misses no session, even if a writer dies. A process
that reads again parses only new names, because a cluster may have tens of thousands.

The keeper packs the files of ended sessions: it writes their names into one new file in another folder, and
then removes them. A reader lists the files first, and then the packs, so it finds every name at least once,
and a name counts once. So several processes may pack at once, may die between, and a late writer may create
a packed file again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dask_cml.layout import ENDED_FOLDER, SESSIONS_FOLDER
from dask_cml.private_files import check_folder, read_file, report_ignored, write_file
from dask_cml.sessions.entry import TIME, Launch, file_name, parse

_FACT = re.compile(rf"[^,]+,(?:waits|began,({TIME})|ended,({TIME}),([a-z-]*))", re.ASCII)
#: Seconds of real time after which a folder that changes has another time, whatever its file system.
_RESOLUTION = 2.0
#: Names in a pack at least, so that packs are few, and at most. The keeper waits for a pack.
_LEAST, _MOST = 1000, 2000


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
    """The sessions of a cluster by their ids. Nobody changes the mappings: all readers share them.

    Parameters
    ----------
    live : mapping of str to Launch
        The running and queued sessions, the oldest first.
    ended : mapping of str to Launch
        The sessions that have ended.
    """

    live: Mapping[str, Launch]
    ended: Mapping[str, Launch]


@dataclass(frozen=True)
class _Listing:
    """The files of a cluster's sessions as they were read last.

    Parameters
    ----------
    stamp : tuple
        The identity and time of their folder.
    since, at : float
        The real times when this stamp was seen first, and when the folder was listed last.
    names : set of str
        The names of the files in the folder.
    packs : set of str
        The names of the packs.
    packed : set of str
        The names in the packs.
    by_session : mapping of str to tuple of str
        The names of its files by their sessions.
    entries : Entries
        The sessions that they describe.
    """

    stamp: tuple[int, ...] = ()
    since: float = 0.0
    at: float = 0.0
    names: Set[str] = frozenset()
    packs: Set[str] = frozenset()
    packed: Set[str] = frozenset()
    by_session: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    entries: Entries = field(default_factory=lambda: Entries({}, {}))


#: What this process has read, by folder and cluster. A listing never changes, so threads need no lock.
_listings: dict[tuple[Path, str], _Listing] = {}


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
    return _look(folder, cluster).entries


def _look(folder: Path, cluster: str) -> _Listing:
    """Return the files of a cluster's sessions as they are now."""
    sessions_folder, packs_folder = folder / SESSIONS_FOLDER, folder / ENDED_FOLDER
    _check(sessions_folder)
    key = folder, cluster
    known = _listings.get(key)
    if known is None:
        known = _Listing()
        for other in [*_listings]:
            if not other[0].exists():  # its cluster has ended
                _listings.pop(other, None)
    stamp, now = _stamp(sessions_folder), time.perf_counter()
    is_unchanged = stamp == known.stamp
    # Two changes may have one time. So it must have been listed when a change would have had another time.
    if is_unchanged and known.at - known.since >= _RESOLUTION:
        return known
    # NFS uses a name with a dot for a file that was removed while it was open.
    names = {name for name in os.listdir(sessions_folder) if not name.startswith(".")}
    # Only now: a file is removed after its name is in a pack. A new pack without a new file changes nothing.
    packs = _list_packs(folder)
    in_new = {name for pack in packs - known.packs for name in _read_pack(packs_folder / pack)}
    packed = known.packed | in_new if in_new else known.packed
    if not (known.packs <= packs and known.names - names <= packed):  # another cluster had this path
        _listings.pop(key, None)
        return _look(folder, cluster)
    since = known.since if is_unchanged else now
    new = (names | in_new) - known.names - known.packed
    looked = replace(known, stamp=stamp, since=since, at=now, names=names, packs=packs, packed=packed)
    _listings[key] = looked = _with_new(looked, new, sessions_folder, cluster) if new else looked
    return looked


def _check(folder: Path) -> None:
    if folder.is_symlink():
        raise ValueError(f"{folder.name} in its folder is a symbolic link")
    check_folder(folder)


def _list_packs(folder: Path) -> set[str]:
    """Return the names of the packs in a cluster's folder. Clusters of earlier releases have none."""
    try:
        _check(folder / ENDED_FOLDER)
        return {name for name in os.listdir(folder / ENDED_FOLDER) if not name.startswith(".")}
    except FileNotFoundError:
        if ENDED_FOLDER in os.listdir(folder):
            raise
        return set()


def _read_pack(pack: Path) -> list[str]:
    return read_file(pack).decode("ascii").splitlines()


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return a folder's identity and time. NFS asks its server for them when the folder is opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        about = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return about.st_dev, about.st_ino, about.st_mtime_ns


def _with_new(known: _Listing, new: Set[str], folder: Path, cluster: str) -> _Listing:
    """Return a listing with the sessions that new names describe."""
    by_session = {**known.by_session}
    for name in new:
        session = _session_of(name)
        by_session[session] = (*by_session.get(session, ()), name)
    read = (_read_session(by_session[session], folder, cluster) for session in {*map(_session_of, new)})
    changed = sorted((launch for launch in read if launch is not None), key=_order)
    live = {**known.entries.live, **{launch.id: launch for launch in changed}}
    ended = {launch.id: launch for launch in changed if launch.ended is not None}
    entries = Entries(
        {launch.id: launch for launch in sorted(live.values(), key=_order) if launch.ended is None},
        {**known.entries.ended, **ended} if ended else known.entries.ended,
    )
    return replace(known, by_session=by_session, entries=entries)


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
    names = [file_name(launch, folder.name) for launch in launched]
    if facts:
        entries, new = read_entries(folder, folder.name), {*map(_session_of, names)}
        for name in facts:
            session = _session_of(name)
            # Some sessions were never in the record, such as the engines of refused launches.
            if session in new or session in entries.live or session in entries.ended:
                names.append(name)
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(sessions / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def pack_entries(folder: Path) -> None:
    """Move the files of ended sessions into a pack, if they are many.

    Parameters
    ----------
    folder : Path
        The cluster's folder, which has the cluster's name.

    Raises
    ------
    FileNotFoundError
        If the folder was removed.
    """
    listing = _look(folder, folder.name)
    ended = [
        name
        for name in listing.names
        # Other names of files are left where they are.
        if _session_of(name) in listing.entries.ended and name.isascii() and name.isprintable()
    ]
    if len(ended) < _LEAST:
        return
    ended = sorted(ended)[:_MOST]
    # A process that died may have removed only some files of its pack.
    if new := [name for name in ended if name not in listing.packed]:
        write_file(folder / ENDED_FOLDER / secrets.token_hex(8), "\n".join(new).encode("ascii"))
    for name in ended:
        with contextlib.suppress(FileNotFoundError):  # another process packs, too
            os.unlink(folder / SESSIONS_FOLDER / name)
