"""The records of clusters, by which other processes find a cluster and manage it.

Each cluster has a folder with its name in the state directory, see :mod:`dask_cml.layout`. No process changes
files of another process, there is no lock, and a reader sees either the old or the new state, even if a
writer dies. The state directory may be on NFS, which caches what it knows of files: functions list folders
anew.

The files of a cluster's sessions say which exist: launched, started and ended. In ``sessions`` they are
empty: for the name of a session's own file, see :mod:`dask_cml.sessions.entry`, and its end is a file of its
own, ``<id>,ended,<time>,<cause>``. In ``started``, each session creates a file with the name that it takes,
which contains its id. Each operation creates one file, and none is ever changed. So all processes of a
cluster write at once, and a reader that lists the folder once misses no session.

A record contains its folder, which does not move if the configuration changes. All functions block while they
wait for the file system.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dask_cml.checks import is_session_id, message
from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.layout import (
    LOGS_FOLDER,
    RECORD_FILE,
    SCHEDULER,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    board_file,
    scheduler_file,
    scheduler_number,
)
from dask_cml.options import state_directory
from dask_cml.private_files import (
    NotPrivate,
    check_folder,
    is_gone,
    make_folder,
    read_file,
    report_ignored,
    write_file,
)
from dask_cml.records.record import Record, SchedulerState
from dask_cml.sessions.calls import NoAnswer, call_within
from dask_cml.sessions.entry import TIME, Launch, file_name, parse
from dask_cml.timing import timing

_END = re.compile(rf"[^,]+,ended,({TIME}),([a-z-]*)", re.ASCII)


#: Folders with such names, and of this age in seconds, were left behind by a crash.
_LEFTOVERS, _LEFTOVER_AGE = (".claim-", ".removed-"), 600.0
_TRIES = 5
_PAUSE = 0.01


def end_file(session_id: str, at: int, cause: str = "") -> str:
    """Return the name of a file that says when a session ended, and why if nobody asked for it.

    Examples
    --------
    >>> end_file("abcdefgh12345678", 1790000000, "out of memory")
    'abcdefgh12345678,ended,1790000000,out-of-memory'
    """
    return f"{session_id},ended,{at},{cause.replace(' ', '-')}"


def read_started(folder: Path, record_id: str) -> dict[str, float]:
    """Return when the programs of a cluster's sessions have started, by their ids, or else by their keys.

    The file system's clock dates that. Ignore files that cannot be read.
    """
    started = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder / STARTED_FOLDER):
            file = folder / STARTED_FOLDER / name
            with contextlib.suppress(OSError):
                try:
                    session, at = _read_taken(file, record_id)
                except ValueError:  # it is written just now, or the disk was full
                    session, at = unquote(name), file.stat().st_mtime
                started[session] = at
    return started


@functools.lru_cache(maxsize=10_000)
def _read_taken(file: Path, record_id: str) -> tuple[str, float]:
    """Return which session has taken a name, and when. In one cluster, this never changes."""
    session = read_file(file).decode()
    if not is_session_id(session):
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
    launches = sorted((launch for launch in read if launch is not None), key=_order)
    return [replace(launch, started=started.get(launch.id, started.get(launch.key))) for launch in launches]


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


class RecordUnreadable(CMLError, OSError):
    """The record of a cluster cannot be read now. That is no proof that the cluster has ended.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    reason : Exception
        Why it cannot be read.
    """

    def __init__(self, folder: Path, reason: Exception) -> None:
        super().__init__(f"cannot read the record in {folder}: {reason}")
        self.reason = reason


def claim(record: Record, board: Mapping[str, Any]) -> None:
    """Create the folder of a new cluster, with its record.

    If several processes claim a name at once, one succeeds.

    Parameters
    ----------
    record : Record
        The record of the new cluster.
    board : mapping
        What the cluster's first scheduler begins with, for JSON.

    Raises
    ------
    ClusterExists
        If a folder with this name exists.
    ValueError
        If the state directory cannot be made.
    NotPrivate
        If the state directory belongs to another user, or others can write to it.
    """
    directory = record.folder.parent
    make_folder(directory, "cml.state-directory")
    # The complete folder gets its name in one step, so a crash leaves no folder with this name but no record.
    temporary = directory / f".claim-{secrets.token_hex(8)}"
    make_folder(temporary)
    try:
        for name in (SESSIONS_FOLDER, STARTED_FOLDER, LOGS_FOLDER):
            make_folder(temporary / name)
        write_file(temporary / RECORD_FILE, record.to_json().encode())
        write_file(temporary / board_file(0), json.dumps(board).encode())
        os.rename(temporary, record.folder)  # replaces only an empty folder
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ClusterExists(record.name) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sweep()


def claim_scheduler(record: Record, number: int, board: Mapping[str, Any]) -> bool:
    """Claim to launch a cluster's next scheduler, and return whether no other process was faster.

    Parameters
    ----------
    record : Record
        The cluster's record.
    number : int
        The scheduler's number.
    board : mapping
        What the scheduler begins with, for JSON.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name.
    """
    _check_exists(record)
    return write_file(record.folder / board_file(number), json.dumps(board).encode(), new=True)


def write_sessions(record: Record, launched: Iterable[Launch], ends: Iterable[str] = ()) -> None:
    """Write sessions into a cluster's record.

    A process that removes the cluster after this returns gets these sessions from :func:`remove`.

    Parameters
    ----------
    record : Record
        The cluster's record.
    launched, ends
        As in :func:`dask_cml.records.store.write_entries`.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name. The caller must stop the
        sessions that it launched.
    """
    _check_exists(record)
    with contextlib.suppress(FileNotFoundError):
        write_entries(launched, ends, record.folder)
    _check_exists(record)  # a process that removes it meanwhile may have read its sessions before


def _check_exists(record: Record) -> None:
    if not _has(record.folder, record):
        raise _missing(record.name)


def _missing(name: str) -> NoSuchCluster:
    return NoSuchCluster(name, tuple(other.name for other in records()))


def _has(folder: Path, record: Record) -> bool:
    """Return whether a folder belongs to a record's cluster."""
    found = _patiently(_read_own, folder)
    return found is not None and found.id == record.id


def given_names(record: Record) -> set[str]:
    """Return all names that a cluster has ever given to worker sessions.

    The record lacks a session whose launch was not answered. The folder of the taken names lacks a session
    that has not started yet.

    Parameters
    ----------
    record : Record
        The cluster's record, with its ended sessions.

    Raises
    ------
    OSError
        If the cluster's folder cannot be read.
    """
    names = {launch.key for launch in (*record.launches.values(), *record.ended.values())}
    with contextlib.suppress(FileNotFoundError):
        names.update(map(unquote, os.listdir(record.folder / STARTED_FOLDER)))
    return names


def read(name: str) -> Record:
    """Read the record of a cluster.

    Raises
    ------
    NoSuchCluster
        If it does not exist. The message lists the names of the existing clusters.
    RecordUnreadable
        If its record cannot be read.
    """
    record = _patiently(_read, state_directory() / name) if _is_name(name) else None
    if record is None:
        raise _missing(name)
    return record


def find(name: str) -> Record | None:
    """Read the record of a cluster. Return None if it does not exist, or cannot be read."""
    return _load(state_directory() / name) if _is_name(name) else None


def read_again(record: Record) -> Record:
    """Read the record of a known cluster as it is now.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name.
    RecordUnreadable
        If its record cannot be read.
    """
    latest = _patiently(_read, record.folder)
    if latest is None or latest.id != record.id:
        raise _missing(record.name)
    return latest


def refreshed(record: Record) -> Record:
    """Return the record of a known cluster as it is now, or else as it was if nobody can read it any more."""
    latest = _load(record.folder)
    return latest if latest is not None and latest.id == record.id else record


def has_ended(record: Record) -> bool:
    """Return whether a known cluster does not exist any more. An unreadable record is no proof of that."""
    try:
        return not _has(record.folder, record)
    except RecordUnreadable:
        return False


def records() -> list[Record]:
    """Read all records, sorted by name. Ignore records that are damaged or not private; warn once.

    Raises
    ------
    ValueError
        If the state directory is not a folder.
    """
    directory = state_directory()
    try:
        check_folder(directory)
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except NotPrivate as error:
        report_ignored(directory, f"it {error.why}: run `{error.command}`")
        return []
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ValueError(message("cml.state-directory", str(directory), "the path of a folder")) from None
    loaded = (_load(directory / name) for name in names)
    return [record for record in loaded if record is not None]


def remove(record: Record) -> dict[str, str] | None:
    """Remove a cluster's folder and its contents: the record, keys and logs.

    Returns
    -------
    dict of str to str, or None
        The sessions in the last state of the record, as in :attr:`Record.sessions`. None if the cluster did
        not exist. The caller may not know the sessions that were launched last.
    """
    if not _has(record.folder, record):
        return None
    aside = record.folder.with_name(f".removed-{secrets.token_hex(8)}")
    try:
        os.rename(record.folder, aside)  # from now on nobody finds it, and its writers get an error
    except FileNotFoundError:  # another process removes it, too
        return None
    if not _has(aside, record):  # since the check above, another cluster has taken the name
        with contextlib.suppress(OSError):  # a third one has it already: the second one finds its record gone
            os.rename(aside, record.folder)
        return None
    sessions: dict[str, str] = {}
    with contextlib.suppress(OSError):
        last = read_entries(aside, record.name, {})
        sessions = {launch.id: launch.key for launch in last if launch.ended is None}
    # A session may write its log meanwhile. The files of many sessions take long, and nobody needs to wait.
    delete = functools.partial(shutil.rmtree, aside, ignore_errors=True)
    with contextlib.suppress(NoAnswer):
        call_within(timing.files / 2, delete)
    sweep()
    return sessions


def sweep() -> None:
    """Remove what crashed processes left behind, whose age the file system's clock tells."""
    directory = state_directory()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        os.utime(directory)
        oldest = directory.stat().st_mtime - _LEFTOVER_AGE
        for entry in entries:
            with contextlib.suppress(OSError):  # another process sweeps, too
                if entry.name.startswith(_LEFTOVERS) and entry.stat().st_mtime < oldest:
                    shutil.rmtree(entry, ignore_errors=True)


def _is_name(name: str) -> bool:
    """Return whether a cluster can have a name, and its folder is in the state directory."""
    # Surrogates, which stand for bytes of file names that are no text, are not printable.
    return name.isprintable() and name != "" and not name.startswith(".") and "/" not in name


def _load(folder: Path) -> Record | None:
    """Read the record in a folder. Return None if the folder contains no valid record; warn once."""
    try:
        return _patiently(_read, folder)
    except RecordUnreadable as error:
        report_ignored(folder / RECORD_FILE, error.reason)
        return None


def _patiently(read: Callable[[Path], Record | None], folder: Path) -> Record | None:
    """Read the record in a folder. Return None if no cluster is there.

    Raises
    ------
    RecordUnreadable
        If a record is there, or may be there, and cannot be read.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            return read(folder)
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)) and is_gone(folder):
                return None
            is_stale = isinstance(error, FileNotFoundError) or getattr(error, "errno", 0) == errno.ESTALE
            if not is_stale or not tries_left:
                raise RecordUnreadable(folder, error) from None
        time.sleep(_PAUSE)  # NFS: a file was replaced while it was read
    return None


def _read_own(folder: Path) -> Record | None:
    """Read what a cluster's creator has written."""
    check_folder(folder.parent)
    if RECORD_FILE not in os.listdir(folder):
        return None
    return Record.from_json(read_file(folder / RECORD_FILE))


def _read(folder: Path) -> Record | None:
    record = _read_own(folder)
    if record is None:
        return None
    if record.name != folder.name or not _is_name(record.name):
        raise ValueError(f"it is the record of another cluster, {record.name!r}")
    sessions = read_entries(folder, record.name, read_started(folder, record.id))
    scheduler = _read_scheduler(folder) or record.scheduler
    if scheduler.session is not None and all(launch.id != scheduler.session for launch in sessions):
        # Neither its keeper nor the session itself could enter it, as on a full disk.
        launched = int(record.created.timestamp())
        sessions.append(Launch(scheduler.session, SCHEDULER, None, launched, started=launched))
    launches = {launch.id: launch for launch in sessions if launch.ended is None}
    ended = {launch.id: launch for launch in sessions if launch.ended is not None}
    return replace(record, folder=folder, launches=launches, ended=ended, scheduler=scheduler)


def _read_scheduler(folder: Path) -> SchedulerState | None:
    """Read what the last scheduler has written, or what was written for it."""
    numbers = [scheduler_number(name, begins=True) for name in os.listdir(folder)]
    number = max((number for number in numbers if number is not None), default=0)
    for file in (scheduler_file(number), board_file(number)):
        try:
            return SchedulerState.from_json(number, read_file(folder / file))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            report_ignored(folder / file, error)
    return None
