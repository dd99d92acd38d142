"""The records of clusters, by which other processes find a cluster and manage it.

Each cluster has a folder with its name in the state directory, see :mod:`dask_cml.layout`. No process changes
files of another process, there is no lock, and a reader sees either the old or the new state, even if a
writer dies. The state directory may be on NFS, which caches what it knows of files: functions list folders
anew.

A record contains its folder, which does not move if the configuration changes. All functions block while they
wait for the file system.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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
from dask_cml.records.entries import read_entries, read_started, write_entries
from dask_cml.records.record import Record, SchedulerState
from dask_cml.sessions.answers import NoAnswer
from dask_cml.sessions.calls import call_within
from dask_cml.sessions.entry import Launch
from dask_cml.timing import timing

#: Folders with such names, and of this age in seconds, were left behind by a crash.
_LEFTOVERS, _LEFTOVER_AGE = (".claim-", ".removed-"), 600.0
_TRIES = 5
_PAUSE = 0.01


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
    sweep(directory)


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
        As in :func:`dask_cml.records.entries.write_entries`.

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
        raise _missing(record.name, record.folder.parent)


def _missing(name: str, directory: Path) -> NoSuchCluster:
    return NoSuchCluster(name, tuple(other.name for other in records(directory)))


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


def read(name: str, directory: Path | None = None) -> Record:
    """Read the record of a cluster.

    Parameters
    ----------
    name : str
        The cluster's name.
    directory : Path, optional
        The state directory. Default: the configured one.

    Raises
    ------
    NoSuchCluster
        If it does not exist. The message lists the names of the existing clusters.
    RecordUnreadable
        If its record cannot be read.
    """
    directory = directory or state_directory()
    record = _patiently(_read, directory / name) if _is_name(name) else None
    if record is None:
        raise _missing(name, directory)
    return record


def find(name: str, directory: Path | None = None) -> Record | None:
    """Read the record of a cluster. Return None if it does not exist, or cannot be read."""
    return _load((directory or state_directory()) / name) if _is_name(name) else None


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
        raise _missing(record.name, record.folder.parent)
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


def records(directory: Path | None = None) -> list[Record]:
    """Read all records, sorted by name. Ignore records that are damaged or not private; warn once.

    Parameters
    ----------
    directory : Path, optional
        The state directory. Default: the configured one.
    """
    directory = directory or state_directory()
    try:
        check_folder(directory)
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except NotPrivate as error:
        report_ignored(directory, f"it {error.why}: run `{error.command}`")
        return []
    except (FileNotFoundError, NotADirectoryError):
        return []
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
    sweep(record.folder.parent)
    return sessions


def sweep(directory: Path | None = None) -> None:
    """Remove what crashed processes left behind, whose age the file system's clock tells."""
    directory = directory or state_directory()
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
