"""The files of a cluster's sessions: each is empty, and its name describes a session.

The folder ``sessions`` contains a file for each session that runs or waits for room, and ``ended`` one for
each session that has ended. :mod:`dask_cml.sessions.entry` describes the names.

A session that waits for room, or has waited, has another file for that, beside its first one.

Each operation creates, moves or removes one file, and no name in ``sessions`` ever changes. So all managers
of a cluster write at once without a lock, and a reader that lists a folder once misses no session, even if a
writer dies. A session moves to ``ended`` in one step. So a process that lists ``sessions`` first, and
``ended`` after it, misses none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dask_cml.layout import ENDED_FOLDER, SESSIONS_FOLDER
from dask_cml.private_files import open_folder
from dask_cml.sessions.entry import Launch, file_name, parse


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

    def of(self, launch: Launch) -> Launch:
        """Return a session after its changes. What another manager has written before remains."""
        if launch.began is None:
            began = self.began.get(launch.id)
            waits = began is None and (launch.waits or launch.id in self.waiting)
            launch = replace(launch, waits=waits, began=began)
        if launch.id in self.ended:
            launch = replace(launch, ended=self.ended[launch.id], cause=self.causes.get(launch.id, ""))
        return launch


def parse_all(names: Iterable[str], cluster: str) -> tuple[dict[str, Launch], list[str]]:
    """Return the sessions that the names of files describe, the oldest first, and the other names."""
    found, strays = [], []
    for name in names:
        if not name.startswith("."):  # NFS uses such a name for a file that was removed while it was open
            try:
                found.append(parse(name, cluster))
            except ValueError:
                strays.append(name)
    sessions: dict[str, Launch] = {}
    for each in sorted(found, key=_age):
        first = sessions.get(each.id)
        if first is None and (each.ended or each == _first(each)):
            sessions[each.id] = each
        elif first is not None and first.began is None and not first.ended:
            sessions[each.id] = replace(first, waits=each.waits, began=each.began)
    return sessions, strays


def _first(launch: Launch) -> Launch:
    """Return a session as its first file describes it."""
    return replace(launch, waits=False, began=None)


def _age(launch: Launch) -> tuple[int, bool, int, int, int, str, str]:
    age = (launch.began or 0, launch.waits, launch.launched, launch.ended or 0)
    return *age, len(launch.key), launch.key, launch.id


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
    with open_folder(folder / SESSIONS_FOLDER, descriptor) as own:
        for launch in changes.launched:
            _create(file_name(launch, cluster), own)
        # Other managers may have launched the others, so list the names.
        changed = {*changes.waiting, *changes.began, *changes.ended}
        names = [name for name in os.listdir(own) if name.partition(",")[0] in changed] if changed else []
        with open_folder(folder / ENDED_FOLDER, descriptor) as ended:
            for launch in parse_all(names, cluster)[0].values():
                now = changes.of(launch)
                if now.ended is None:
                    _create(file_name(now, cluster), own)
                    continue
                old, new = file_name(_first(launch), cluster), file_name(now, cluster)
                with contextlib.suppress(FileNotFoundError):  # another manager moves it, too
                    os.rename(old, new, src_dir_fd=own, dst_dir_fd=ended)
        for name in names:
            if name.partition(",")[0] in changes.ended:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=own)


def _create(name: str, folder: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
