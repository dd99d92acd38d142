"""The files of a cluster's sessions: each is empty, and its name describes a session.

In the folder ``sessions``:

``<id>,<key>,<owner>,<launched>,<size>``
    A session: its id, the name of its Dask worker or ``scheduler``, the session with which it ends if that is
    known, the time of its launch, in whole seconds since 1970, and its vCPUs, GiB and GPUs as ``4x16x1`` if
    they are known. At the beginning of the key, ``@`` stands for the cluster's name, which may be long.
    Ambiguous characters in a key are percent-encoded.
``<id>,waits``
    The session waits for room.
``<id>,began,<when>``
    The session waited for room until that time.

In the folder ``ended``:

``<id>,<key>,<owner>,<launched>,<size>,<began>,<ended>,<cause>``
    A session that has ended: its previous name, and the times when it started to use room and when it ended.
    The cause, such as ``out-of-memory``, if nobody asked for its end.

Each operation creates, moves or removes one file, and managers never change each other's files. So all
managers of a cluster write at once without a lock, and a reader lists a folder once, even if a writer dies.
A session moves to ``ended`` in one step. So a process that lists ``sessions`` first, and ``ended`` after it,
misses none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dask_cml.checks import is_session_id
from dask_cml.layout import ENDED_FOLDER, SESSIONS_FOLDER
from dask_cml.options import SessionSize
from dask_cml.private_files import open_folder
from dask_cml.sessions.entry import TIME, Launch, file_name, parse

_ENDED = re.compile(rf"(.*),({TIME}),({TIME})(?:,([a-z-]+))?", re.ASCII)
_WAITS = "waits"
_BEGAN = re.compile(rf"began,({TIME})", re.ASCII)


@dataclass(frozen=True)
class Ended:
    """A session that has ended.

    Parameters
    ----------
    launch : Launch
        The session.
    began : int
        The time when it started to use room, in seconds since 1970.
    ended : int
        The time when it ended, in seconds since 1970.
    cause : str or None
        Why it ended, if nobody asked for it, such as ``out of memory``.
    """

    launch: Launch
    began: int
    ended: int
    cause: str | None = None


@dataclass(frozen=True)
class Changes:
    """Changes of a cluster's sessions, to be written.

    Parameters
    ----------
    launched : collection of Launch
        New sessions.
    ended : mapping of str to int
        For the id of each session that has ended, the time of its end, in seconds since 1970.
    waiting : collection of str
        The ids of sessions that wait for room.
    began : mapping of str to int
        For the id of each session that does not wait any more, the end of its wait.
    causes : mapping of str to str
        For the ids of sessions in `ended` that nobody asked to end, the cause.
    """

    launched: Collection[Launch] = ()
    ended: Mapping[str, int] = field(default_factory=dict)
    waiting: Collection[str] = ()
    began: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.launched, self.ended, self.waiting, self.began))


@dataclass(frozen=True, kw_only=True)
class RecordedSessions:
    """The sessions of a record: mappings by their ids."""

    sessions: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    began: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, SessionSize] = field(default_factory=dict)


def parse_all(names: Iterable[str], cluster: str) -> tuple[RecordedSessions, list[str]]:
    """Return the sessions that the names of files describe, the oldest first, and the other names."""
    found: dict[str, Launch] = {}
    strays = []
    marks, names = _marks(names)
    for name in names:
        if not name.startswith("."):  # NFS uses such a name for a file that was removed while it was open
            try:
                launch = parse(name, cluster)
            except ValueError:
                strays.append(name)
            else:
                found[launch.id] = min(launch, found.get(launch.id, launch), key=_age)
    launches = sorted(found.values(), key=_age)
    ends = {each.id: marks.get(each.id, each.launched) for each in launches}
    sessions = RecordedSessions(
        sessions={each.id: each.key for each in launches},
        owners={each.id: each.owner for each in launches if each.owner is not None},
        launched={each.id: each.launched for each in launches},
        waiting={each.id: each.launched for each in launches if ends[each.id] is None},
        began={session: end for session, end in ends.items() if session in marks and end is not None},
        sizes={each.id: each.size for each in launches if each.size is not None},
    )
    return sessions, strays


def _age(launch: Launch) -> tuple[int, int, str, str]:
    return launch.launched, len(launch.key), launch.key, launch.id


def parse_ended(names: Iterable[str], cluster: str) -> list[Ended]:
    """Return the ended sessions that the names of files describe. Ignore other names."""
    found: dict[str, Ended] = {}
    for name in names:
        match = _ENDED.fullmatch(name)
        with contextlib.suppress(ValueError):
            ended = None
            if match is not None:
                cause = match[4] and match[4].replace("-", " ")
                ended = Ended(parse(match[1], cluster), int(match[2]), int(match[3]), cause)
            if ended is not None and ended.ended <= found.get(ended.launch.id, ended).ended:
                found[ended.launch.id] = ended
    return [*found.values()]


def _marks(names: Iterable[str]) -> tuple[dict[str, int | None], list[str]]:
    """Return for each session that waited for room the end of its wait, or None, and the other names."""
    marks: dict[str, int | None] = {}
    others = []
    for name in names:
        session_id, _, mark = name.partition(",")
        if not is_session_id(session_id):
            others.append(name)
        elif match := _BEGAN.fullmatch(mark):
            marks[session_id] = min(int(match[1]), marks.get(session_id) or int(match[1]))
        elif mark == _WAITS:
            marks.setdefault(session_id)
        else:
            others.append(name)
    return marks, others


def names_in(folder: Path, descriptor: int, of: str = SESSIONS_FOLDER) -> list[str]:
    """List the files of a cluster's sessions.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    descriptor : int
        The descriptor of that folder.
    of : str
        The name of the folder in it: of running or of ended sessions.

    Raises
    ------
    NotPrivate
        If others can write to the folder.
    """
    with open_folder(folder / of, descriptor) as own:
        return os.listdir(own)


def write(changes: Changes, cluster: str, folder: Path, descriptor: int) -> None:
    """Create, move and remove files of a cluster's sessions. Ignore files that exist, or are gone, already.

    Parameters
    ----------
    changes : Changes
        The changes.
    cluster : str
        The cluster's name.
    folder : Path
        The cluster's folder.
    descriptor : int
        The descriptor of that folder. If the folder is removed meanwhile, it does not come back.

    Raises
    ------
    FileNotFoundError
        If the folder was removed.
    """
    made = [file_name(launch, cluster) for launch in changes.launched]
    made += [f"{each},{_WAITS}" for each in changes.waiting]
    made += [f"{each},began,{when}" for each, when in changes.began.items()]
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        for name in made:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=own))
        _unlink([f"{each},{_WAITS}" for each in changes.began], own)
        if changes.ended:
            with open_folder(folder / ENDED_FOLDER, descriptor) as ended:
                _end(changes, cluster, own, ended)


def _end(changes: Changes, cluster: str, own: int, ended: int) -> None:
    """Move the files of sessions to the folder of ended sessions, and remove their other files."""
    ends = changes.ended
    # Other managers may have launched them, so list the names.
    names = [name for name in os.listdir(own) if name.partition(",")[0] in ends]
    marks, others = _marks(names)
    for name in others:
        with contextlib.suppress(ValueError, FileNotFoundError):  # another manager moves them, too
            launch = parse(name, cluster)
            end = ends[launch.id]
            began = marks.get(launch.id, launch.launched) or end
            cause = changes.causes.get(launch.id)
            moved = f"{name},{min(began, end)},{end}" + (f",{cause.replace(' ', '-')}" if cause else "")
            os.rename(name, moved, src_dir_fd=own, dst_dir_fd=ended)
    _unlink(names, own)


def _unlink(names: Iterable[str], folder: int) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
