"""The records of clusters, by which other processes find a cluster and manage it.

Each cluster has a folder with its name in the state directory, see :mod:`dask_cml.layout`. No process changes
another one's files, there is no lock, and a reader sees either the old or the new state, even if a writer
dies. The state directory may be on NFS: functions list folders anew. They write by the descriptor of the
folder that they have checked, so that a removed cluster does not come back.

All functions block while they wait for the file system.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.layout import (
    RECORD_FILE,
    REMOVED_FILE,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    scheduler_file,
    scheduler_number,
    wanted_file,
)
from dask_cml.options import state_directory
from dask_cml.private_files import (
    MOST_BYTES,
    NotPrivate,
    check_folder,
    make_folder,
    open_folder,
    read_file,
    report_ignored,
    write_file,
)
from dask_cml.records.record import Record, SchedulerState
from dask_cml.sessions.entry import Launch, read_entries, write_entries

T = TypeVar("T")

# Files and folders with names of temporary ones, and of this age in seconds, were left behind by a crash.
_LEFTOVER_AGE = 600.0
_LEFTOVERS = (".claim-", ".removed-")
_TRIES = 5
_PAUSE = 0.01


def claim(record: Record, wanted: Mapping[str, Any]) -> Path:
    """Create the folder of a new cluster, with its record, and return it.

    If several processes claim a name at the same time, one succeeds.

    Parameters
    ----------
    record : Record
        The record of the new cluster.
    wanted : mapping
        What the cluster's first scheduler begins with, for JSON.

    Raises
    ------
    ClusterExists
        If a folder with this name exists.
    CMLError
        If the record exceeds a megabyte, so that no process would read it.
    ValueError
        If no cluster can have this name.
    NotPrivate
        If the state directory belongs to another user, or others can write to it.
    """
    folder = _folder(record.name)
    make_folder(folder.parent)
    # The complete folder gets its name in one step, so a crash leaves no folder with this name but no record.
    made = folder.parent / f".claim-{secrets.token_hex(8)}"
    make_folder(made)
    try:
        for each in (SESSIONS_FOLDER, STARTED_FOLDER):
            make_folder(made / each)
        with open_folder(made) as descriptor:
            write_file(RECORD_FILE, _encoded(record.to_json(), record.name), descriptor)
            write_file(wanted_file(0), _encoded(json.dumps(wanted), record.name), descriptor)
        os.rename(made, folder)  # replaces only an empty folder
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ClusterExists(record.name) from None
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    sweep()
    return folder


def _encoded(text: str, cluster: str) -> bytes:
    content = text.encode()
    if len(content) > MOST_BYTES:
        raise CMLError(
            f"the record of cluster {cluster!r} is too large: expected at most {MOST_BYTES} bytes, got "
            f"{len(content)}; use shorter options"
        )
    return content


def claim_scheduler(record: Record, number: int, wanted: Mapping[str, Any]) -> bool:
    """Claim to launch a cluster's next scheduler, and return whether no other manager was faster.

    Parameters
    ----------
    record : Record
        The cluster's record.
    number : int
        The scheduler's number.
    wanted : mapping
        What the scheduler begins with, for JSON.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name.
    """
    content, claimed = _encoded(json.dumps(wanted), record.name), False

    def claim(descriptor: int) -> None:
        nonlocal claimed
        # A second attempt finds the file of the first one.
        claimed = write_file(wanted_file(number), content, descriptor, new=True) or claimed

    _write_in(_folder(record.name), record.id, claim)
    return claimed


def write_sessions(launched: Collection[Launch], facts: Collection[str], name: str, *, id: str) -> None:
    """Write sessions into a cluster's record.

    A process that removes the cluster after this returns gets these sessions from :func:`remove`.

    Parameters
    ----------
    launched, facts
        As in :func:`dask_cml.sessions.entry.write_entries`.
    name : str
        The cluster's name.
    id : str
        The id of the record. Another cluster with this name is left alone.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name. The caller must stop the
        sessions that it launched.
    """
    folder = _folder(name)
    _write_in(folder, id, lambda descriptor: write_entries(launched, facts, folder, descriptor))


def _write_in(folder: Path, id: str, write: Callable[[int], None]) -> None:
    """Write into a cluster's folder, perhaps twice, if it is the same before and after."""

    def attempt() -> bool:
        check_folder(folder.parent)
        with open_folder(folder) as descriptor:
            try:
                record = Record.from_json(read_file(folder / RECORD_FILE, descriptor))
            except ValueError as error:
                raise CMLError(f"cannot read the record {folder / RECORD_FILE}: {error}") from None
            if record.id != id:
                return False
            write(descriptor)
            # Listing the folder makes NFS check whether it still has its name and its record.
            there = folder.name in os.listdir(folder.parent) and RECORD_FILE in os.listdir(descriptor)
            return there and os.path.samestat(os.stat(folder), os.fstat(descriptor))

    if not _until_settled(attempt, folder):
        raise NoSuchCluster(folder.name, tuple(each.name for each in records()))


def read(name: str, *, id: str | None = None) -> Record:
    """Read the record of a cluster.

    Parameters
    ----------
    name : str
        The cluster's name.

    Raises
    ------
    NoSuchCluster
        If it does not exist. The message lists the names of the existing clusters.
    """
    record = find(name, id=id)
    if record is None:
        raise NoSuchCluster(name, tuple(each.name for each in records()))
    return record


def find(name: str, *, id: str | None = None, even_removed: bool = False) -> Record | None:
    """Do the same as :func:`read`, but return None if the cluster does not exist.

    With `even_removed`, find also a cluster whose removal has begun.
    """
    with contextlib.suppress(ValueError):
        record = _load(_folder(name))
        if record is not None and id in (None, record.id) and (even_removed or not record.removed):
            return record
    return None


def records(*, removed: bool = False) -> list[Record]:
    """Read all records, sorted by name. Ignore damaged records and those that are not private; warn once.

    Parameters
    ----------
    removed : bool
        Whether to read the clusters instead whose removal has begun. Its process may have died meanwhile.
    """
    directory = state_directory()
    try:
        check_folder(directory)
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except NotPrivate as error:
        report_ignored(directory, error)
        return []
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_load(directory / name) for name in names)
    return [record for record in found if record is not None and record.removed == removed]


def remove(name: str, *, id: str | None = None) -> dict[str, str] | None:
    """Remove a cluster's folder and its contents: the record, keys and logs.

    All steps use the folder's descriptor. So if several processes remove the same dead cluster, none of them
    removes another cluster that takes its name meanwhile.

    Parameters
    ----------
    name : str
        The cluster's name.
    id : str, optional
        The id of the record. Another cluster with this name is left alone.

    Returns
    -------
    dict of str to str, or None
        The sessions in the last state of the record, as in :attr:`Record.sessions`. None if the cluster did
        not exist. The caller may not know those that were launched last.
    """
    folder = _folder(name)
    aside = folder.parent / f".removed-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if id not in (None, _id_in(folder, descriptor)):
            return None
        # From now on nobody finds the cluster, and its writers get an error. What they wrote before is read
        # below. After a crash, this file's name marks a removal to continue.
        with contextlib.suppress(FileNotFoundError):
            os.rename(RECORD_FILE, REMOVED_FILE, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        # Another process may have removed the files already.
        sessions: dict[str, str] | None = {} if _entries(descriptor) else None
        with contextlib.suppress(OSError, NotPrivate):
            found = read_entries(folder, descriptor)
            sessions = {session: each.key for session, each in found.items() if each.ended is None}
        make_folder(aside)
        for _ in range(_TRIES):  # a session may write its log meanwhile
            for entry in sorted(_entries(descriptor), key=REMOVED_FILE.__eq__):  # the mark at last
                with contextlib.suppress(FileNotFoundError):  # another process removes them, too
                    os.rename(entry, aside / secrets.token_hex(8), src_dir_fd=descriptor)
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # only an empty one, so not that of another cluster
            if not _entries(descriptor):
                break
            time.sleep(_PAUSE)
    finally:
        os.close(descriptor)
        shutil.rmtree(aside, ignore_errors=True)
    sweep()
    return sessions


def _id_in(folder: Path, descriptor: int) -> str | None:
    for file in (RECORD_FILE, REMOVED_FILE):
        with contextlib.suppress(OSError, ValueError, RecursionError, NotPrivate):
            return Record.from_json(read_file(folder / file, descriptor)).id
    return None


def _entries(descriptor: int) -> list[str]:
    """List a folder. Return nothing if it does not exist any more."""
    try:
        return os.listdir(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return []


def sweep() -> None:
    """Remove what crashed processes left behind, whose age the file system's clock tells."""
    folder = state_directory()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        os.utime(folder)
        oldest = folder.stat().st_mtime - _LEFTOVER_AGE
        for entry in entries:
            with contextlib.suppress(OSError):  # another process sweeps, too
                if entry.stat().st_mtime >= oldest:
                    continue
                if entry.name.startswith(_LEFTOVERS):
                    shutil.rmtree(entry, ignore_errors=True)
                elif not entry.name.startswith("."):
                    os.rmdir(entry)  # only an empty one, which is no cluster any more


def _folder(name: str) -> Path:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"invalid name={name!r}: expected the name of a cluster")
    return state_directory() / name


def _load(folder: Path) -> Record | None:
    """Read the record in a folder. Return None if the folder contains no valid record."""
    try:
        return _until_settled(lambda: _read(folder), folder)
    except (OSError, ValueError, RecursionError) as error:
        report_ignored(folder / RECORD_FILE, error)
    return None


def _read(folder: Path) -> Record | None:
    check_folder(folder.parent)
    if folder.is_symlink():
        raise ValueError("its folder is a symbolic link")
    with open_folder(folder) as descriptor:
        # NFS may cache that a file does not exist. Listing the folder refreshes the cache.
        names = os.listdir(descriptor)
        file = next((each for each in (RECORD_FILE, REMOVED_FILE) if each in names), None)
        if file is None:
            return None
        content = Record.from_json(read_file(folder / file, descriptor))
        record = replace(content, removed=file == REMOVED_FILE)
        if record.name != folder.name:
            raise ValueError(f"it is the record of another cluster, {record.name!r}")
        if SESSIONS_FOLDER not in names and record.removed:
            return record
        if SESSIONS_FOLDER not in names and os.path.samestat(os.stat(folder), os.fstat(descriptor)):
            raise ValueError(f"its folder lacks {SESSIONS_FOLDER}")
        found = read_entries(folder, descriptor)
        return replace(
            record,
            launches={session: each for session, each in found.items() if each.ended is None},
            ended={session: each for session, each in found.items() if each.ended is not None},
            scheduler=_read_scheduler(folder, names, descriptor) or record.scheduler,
        )


def _read_scheduler(folder: Path, names: list[str], descriptor: int) -> SchedulerState | None:
    """Read what the last scheduler has written, or what was written for it."""
    number = max((n for name in names if (n := scheduler_number(name, wanted=True)) is not None), default=0)
    for each in (scheduler_file(number), wanted_file(number)):
        try:
            return SchedulerState.from_json(number, read_file(folder / each, descriptor))
        except FileNotFoundError:
            continue
        except (NotPrivate, ValueError, RecursionError) as error:
            report_ignored(folder / each, error)
    return None


def _until_settled(attempt: Callable[[], T], folder: Path) -> T | None:
    """Retry an action that met files while they were replaced. Return None if the folder does not exist.

    Raises
    ------
    OSError
        If the file system fails.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            return attempt()
        except (FileNotFoundError, NotADirectoryError):
            if not tries_left or not folder.is_dir():
                return None
        except OSError as error:
            if not tries_left or error.errno != errno.ESTALE:  # the file was replaced while it was read
                raise
        time.sleep(_PAUSE)
    return None
