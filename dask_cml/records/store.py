"""The records of clusters: what lets another process find a cluster, and rebuild it.

Each cluster has a folder of its name below the state directory, and in it ``record.json``. A record is
replaced as a whole, so whoever reads sees an old one or a new one, whatever becomes of the writer. The state
directory may be on NFS: nothing rests on flock, and folders are listed afresh.

All functions block for as long as the file system takes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.options import state_directory
from dask_cml.private import MOST_BYTES, NotPrivate, check_folder, make_folder, owner_only, read_file
from dask_cml.records.record import Maker, Record

logger = logging.getLogger(__name__)

RECORD_FILE = "record.json"

# A lock is held for a moment: one that does not change for so long was left by a process that was killed.
_LOCK_AGE = 5.0
_LOCK_TIMEOUT = 60.0
# What is as old as this, and has the name of something temporary, was left by a crash.
_LEFTOVER_AGE = 600.0
_TRIES = 5
_PAUSE = 0.01
_reported: set[tuple[str, str]] = set()


def claim(record: Record, directory: Path | None = None, *, stale: Record | None = None) -> Path:
    """Make the folder of a new cluster, with its record in it, and return it.

    Of all who claim a name at the same time, one gets it.

    Parameters
    ----------
    record : Record
        The new cluster's.
    directory : Path, optional
        The state directory.
    stale : Record, optional
        The record of a cluster that is gone, as the caller has found, and whose place is taken.

    Raises
    ------
    ClusterExists
        If there is a folder of this name, and it is not that of `stale`.
    ValueError
        If the name cannot be that of a folder.
    NotPrivate
        If the state directory belongs to another user, or others can write to it.
    """
    folder = _folder(record.name, directory)
    make_folder(folder.parent)
    # It gets its name as a whole: a crash leaves no folder of that name without a record.
    made = folder.parent / f".claim-{secrets.token_hex(8)}"
    make_folder(made)
    try:
        write(record, directory, folder=made)
        if stale is not None:
            remove(record.name, directory, id=stale.id)
        os.rename(made, folder)  # takes the place of an empty folder, and of no other
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ClusterExists(record.name) from None
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL):
            raise ValueError(f"invalid name={record.name!r}: expected a name for a folder: {error}") from None
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _sweep(folder.parent, (".claim-", ".lock-"), folder)
    return folder


def write(record: Record, directory: Path | None = None, *, folder: Path | None = None) -> None:
    """Replace a cluster's record as a whole. Of two writers the last one wins; see `update`.

    Raises
    ------
    NoSuchCluster
        If the cluster's folder is gone.
    CMLError
        If the record has more than a megabyte, so that nobody would read it.
    """
    folder = folder or _folder(record.name, directory)
    content = record.to_json().encode()
    if len(content) > MOST_BYTES:
        raise CMLError(
            f"the record of the cluster {record.name!r} has {len(content)} bytes: "
            f"expected at most {MOST_BYTES}; use shorter options or fewer sessions"
        )
    temporary = folder / f".{RECORD_FILE}-{secrets.token_hex(8)}"
    try:
        with contextlib.ExitStack() as on_error:
            on_error.callback(_unlink, temporary)
            with open(temporary, "xb", opener=owner_only) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / RECORD_FILE)
            on_error.pop_all()
    except (FileNotFoundError, NotADirectoryError):
        raise NoSuchCluster(record.name, _names(folder.parent)) from None
    _sweep(folder, (f".{RECORD_FILE}-",), folder / RECORD_FILE)


def update(
    name: str, change: Callable[[Record], Record], directory: Path | None = None, *, id: str | None = None
) -> Record:
    """Change a cluster's record so that nothing that others change meanwhile is lost.

    Parameters
    ----------
    name : str
        The cluster's name.
    change : callable
        Gets the record as it is and returns it as it is to be, at once.
    directory : Path, optional
        The state directory.
    id : str, optional
        The record's; another cluster of this name is left alone.

    Raises
    ------
    NoSuchCluster
        If the cluster is gone.
    """
    read(name, directory)
    with _locked(_folder(name, directory)):
        record = read(name, directory)
        if id is not None and record.id != id:
            raise NoSuchCluster(name)
        record = change(record)
        write(record, directory)
        return record


def read(name: str, directory: Path | None = None) -> Record:
    """Read the record of a cluster.

    Raises
    ------
    NoSuchCluster
        If there is none; it lists the names of those that are there.
    """
    with contextlib.suppress(ValueError):
        record = _load(_folder(name, directory))
        if record is not None:
            return record
    raise NoSuchCluster(name, _names(directory or state_directory()))


def records(directory: Path | None = None) -> list[Record]:
    """Read all records, sorted by name. What is damaged or not private is reported once, and passed over."""
    directory = directory or state_directory()
    found = (_load(directory / name) for name in sorted(_folders(directory)))
    return [record for record in found if record is not None]


def remove(name: str, directory: Path | None = None, *, id: str | None = None) -> bool:
    """Remove a cluster's folder with all that is in it: the record, keys and logs.

    Parameters
    ----------
    name : str
        The cluster's name.
    directory : Path, optional
        The state directory.
    id : str, optional
        The record's; another cluster of this name is left alone.

    Returns
    -------
    bool
        Whether it was there.
    """
    folder = _folder(name, directory)
    # A crash leaves it whole, or gone under its name, but never in part.
    aside = folder.parent / f".removed-{secrets.token_hex(8)}"
    if not folder.parent.is_dir():
        return False
    with _locked(folder):
        record = _load(folder) if id is not None else None
        removed = id is None or (record is not None and record.id == id)
        if removed:
            try:
                os.rename(folder, aside)
            except FileNotFoundError:
                removed = False
    for leftover in folder.parent.glob(".removed-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return removed


def _folder(name: str, directory: Path | None) -> Path:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"invalid name={name!r}: expected the name of a cluster")
    return (directory or state_directory()) / name


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(record.name for record in records(directory))


def _folders(directory: Path) -> list[str]:
    try:
        check_folder(directory)
        return [name for name in os.listdir(directory) if not name.startswith(".")]
    except NotPrivate as error:
        _report_open(error)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return []


def _load(folder: Path) -> Record | None:
    """Read the record in a folder; None if there is none that can be read."""
    try:
        content = _read(folder)
        if content is None:
            return None
        record = Record.from_json(content)
        if record.name != folder.name:
            raise ValueError(f"it is that of the cluster {record.name!r}")
        return record
    except NotPrivate as error:
        _report_open(error)
        return None
    except (OSError, ValueError, RecursionError) as error:
        _report(folder / RECORD_FILE, str(error))
        return None


def _read(folder: Path) -> bytes | None:
    for _ in range(_TRIES):
        try:
            check_folder(folder.parent)
            # NFS may remember that a file is not there; listing the folder is what makes it look again.
            if RECORD_FILE not in os.listdir(folder):
                return None
            check_folder(folder)
            if folder.is_symlink():
                raise ValueError("its folder is a symbolic link")
            return read_file(folder / RECORD_FILE)
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                return None
        except OSError as error:
            if error.errno != errno.ESTALE:  # it was replaced while it was read
                raise
        time.sleep(_PAUSE)
    return None


def _report_open(error: NotPrivate) -> None:
    _report(error.path, f"it {error.why}", f": run `{error.command}`")


def _report(path: Path, why: str, remedy: str = "") -> None:
    if (str(path), why) not in _reported:
        _reported.add((str(path), why))
        logger.warning("%s is passed over: %s%s", path, why, remedy)


def _sweep(folder: Path, prefixes: tuple[str, ...], newest: Path) -> None:
    """Remove what crashes left. Its age is told by the file system's clock, not by this machine's."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        oldest = newest.stat().st_mtime - _LEFTOVER_AGE
        for entry in entries:
            with contextlib.suppress(OSError):  # another process sweeps, too
                if entry.name.startswith(prefixes) and entry.stat().st_mtime < oldest:
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry, ignore_errors=True)
                    else:
                        os.unlink(entry)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cluster's name."""
    digest = hashlib.sha256(folder.name.encode()).hexdigest()[:32]
    path = folder.parent / f".lock-{digest}"
    own = json.dumps({**asdict(Maker.this_process()), "token": secrets.token_hex(8)}).encode()
    deadline = time.monotonic() + _LOCK_TIMEOUT
    seen: bytes | None = None
    since = 0.0
    while True:
        try:
            with open(path, "xb", opener=owner_only) as file:
                file.write(own)
            break
        except FileExistsError:
            pass
        held = _content(path)
        if held != seen:
            seen, since = held, time.monotonic()
        elif held is not None and (time.monotonic() > since + _LOCK_AGE or _holder_is_gone(held)):
            _break(path, held)
        if time.monotonic() > deadline:
            raise CMLError(f"the record of the cluster {folder.name!r} is locked: {path}")
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        if _content(path) == own:
            _unlink(path)


def _content(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except (OSError, ValueError):
        return None


def _holder_is_gone(lock: bytes) -> bool:
    try:
        content = json.loads(lock)
        return Maker(**{each.name: content[each.name] for each in fields(Maker)}).lives() is False
    except (ValueError, LookupError, TypeError):
        return False


def _break(path: Path, held: bytes) -> None:
    aside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        if _content(aside) != held:
            os.link(aside, path)  # another process broke it first, and this lock is its own
    _unlink(aside)
