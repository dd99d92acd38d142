"""The records of clusters: what lets another process find a cluster, and rebuild it.

Each cluster has a folder of its name below the state directory, and in it ``record.json``. A record is
replaced as a whole, so whoever reads sees an old one or a new one, whatever becomes of the writer. The state
directory may be on NFS: nothing rests on flock, and folders are listed afresh.

All functions but `identities` and `is_alive` block for as long as the file system takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.core import rpc
from distributed.security import Security

from dask_cml.errors import ClusterExists, CMLError, NoSuchCluster
from dask_cml.options import state_directory
from dask_cml.tasks import cancel

logger = logging.getLogger(__name__)

RECORD_FILE = "record.json"
VERSION = 1

# A lock is held for a moment: one that does not change for so long was left by a process that was killed.
_LOCK_AGE = 5.0
_LOCK_TIMEOUT = 60.0
# What is as old as this, and has the name of something temporary, was left by a crash.
_LEFTOVER_AGE = 600.0
_TRIES = 5
_PAUSE = 0.01
#: psutil derives the time when a process was made from the clock, which may be set meanwhile.
_CLOCK_TOLERANCE = 10.0
_reported: set[tuple[str, str]] = set()
_reached: set[str] = set()


@dataclass(frozen=True)
class Maker:
    """The process that made a cluster.

    Parameters
    ----------
    host : str
        The host name of its session or machine.
    pid : int
        Its process id there.
    started : float
        When the process started, in seconds since 1970: process ids are used again.
    session : str or None
        The id of the CML session in which it runs (``CDSW_ENGINE_ID``).
    """

    host: str
    pid: int
    started: float
    session: str | None

    @classmethod
    def this_process(cls) -> Maker:
        """Return what describes the calling process."""
        process = psutil.Process()
        return cls(socket.gethostname(), process.pid, process.create_time(), _session())

    def lives(self) -> bool | None:
        """Return whether the process is there; None if that cannot be seen from here."""
        if (self.host, self.session) != (socket.gethostname(), _session()):
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_TOLERANCE
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return None


def _session() -> str | None:
    return os.environ.get("CDSW_ENGINE_ID") or None


@dataclass(frozen=True)
class Record:
    """What is needed to find a cluster and to rebuild its manager.

    It holds no secrets of the cluster itself, only where they are.

    Parameters
    ----------
    name : str
        The cluster's name.
    id : str
        Tells this cluster from others that had or will have the same name.
    maker : Maker
        The process that made it.
    created : str
        When, in ISO 8601.
    scheduler_session, scheduler_address, scheduler_id, app_url : str or None
        The scheduler's CML session, its address, its own id in Dask, and its session's URL, once known.
    options : mapping
        The cluster's options, as JSON can hold them.
    sessions : mapping of str to str
        The ids of all its sessions: the key of a worker, or ``"scheduler"``.
    security : mapping of str to str, or None
        The parameters of :class:`distributed.Security`: absolute paths of the keys' files.
    version : int
        Of the format.
    more : mapping
        What a newer release has written beyond this; it is kept.
    """

    name: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    maker: Maker = field(default_factory=Maker.this_process)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    scheduler_session: str | None = None
    scheduler_address: str | None = None
    scheduler_id: str | None = None
    app_url: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sessions: Mapping[str, str] = field(default_factory=dict)
    security: Mapping[str, str] | None = None
    version: int = VERSION
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as text.

        Raises
        ------
        TypeError
            If the options are not what JSON can hold.
        """
        # Not asdict(), which copies thousands of sessions one by one.
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        return json.dumps({**self.more, **own, "maker": asdict(self.maker)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read a record, and check it.

        Raises
        ------
        ValueError
            If it is no record, or of a format that is not known here.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("version"), int):
            raise ValueError("it is no record of a cluster")
        if content["version"] > VERSION:
            raise ValueError(f"it is of the newer format {content['version']}; a newer dask-cml wrote it")
        known = {each.name for each in fields(cls)} - {"more"}
        own = {key: content.pop(key) for key in known & set(content)}
        if missing := known - set(own):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        for key, value in own.items():
            if not _CHECKS.get(key, _is_text_or_none)(value):
                raise ValueError(f"its {key} cannot be {value!r}")
        maker = {each.name: own["maker"].get(each.name) for each in fields(Maker)}
        return cls(**{**own, "maker": Maker(**maker)}, more=content)

    def get_security(self) -> Security | None:
        """Return the cluster's security with the files of its keys; None if it has none of its own."""
        if self.security is None:
            return None
        return Security(require_encryption=True, **self.security)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_maker(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("started"), (int, float)):
        return False
    return isinstance(value.get("host"), str) and isinstance(value.get("pid"), int) and value["pid"] > 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "name": _is_text,
    "id": _is_text,
    "created": _is_text,
    "maker": _is_maker,
    "options": lambda value: isinstance(value, dict),
    "sessions": _is_texts,
    "security": lambda value: value is None or _is_texts(value),
    "version": lambda value: value > 0,
}


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
    """
    folder = _folder(record.name, directory)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # It gets its name as a whole: a crash leaves no folder of that name without a record.
    made = folder.parent / f".claim-{secrets.token_hex(8)}"
    made.mkdir(mode=0o700)
    try:
        write(record, directory, folder=made)
        if stale is not None:
            remove(record.name, directory, id=stale.id)
        os.rename(made, folder)  # takes the place of an empty folder, and of no other
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise ClusterExists(record.name) from None
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL):
            raise ValueError(f"name={record.name!r} cannot be a folder's name here: {error}") from None
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
    """
    folder = folder or _folder(record.name, directory)
    content = record.to_json().encode()
    temporary = folder / f".{RECORD_FILE}-{secrets.token_hex(8)}"
    try:
        with contextlib.ExitStack() as on_error:
            on_error.callback(_unlink, temporary)
            with open(temporary, "xb", opener=_owner_only) as file:
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
    """Read all records, sorted by name. What is damaged or foreign is reported once, and passed over."""
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


async def identities(
    records: Iterable[Record], security: Security | None = None, timeout: float = 2.5
) -> dict[str, dict[str, Any]]:
    """Ask the schedulers of clusters who they are, all at the same time.

    Parameters
    ----------
    records : iterable of Record
        The clusters'.
    security : Security, optional
        For those whose records name no keys. Default: as Dask's configuration says.
    timeout : float
        Seconds, for all of them together. One that needs longer, or half of it to accept a connection, counts
        as gone.

    Returns
    -------
    dict
        What each scheduler that answered said of itself (``Scheduler.identity()``), by the cluster's name.
    """
    tasks = {record.name: asyncio.create_task(_identity(record, security, timeout)) for record in records}
    if not tasks:
        return {}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout)
    finally:
        answered = {name: task for name, task in tasks.items() if task.done() and not task.cancelled()}
        await cancel(*tasks.values())
    answers = {name: task.result() for name, task in answered.items() if task.exception() is None}
    return {name: answer for name, answer in answers.items() if answer is not None}


async def is_alive(record: Record, security: Security | None = None, timeout: float = 5.0) -> bool:
    """Return whether a cluster's scheduler answers, and as the scheduler of this cluster.

    Parameters
    ----------
    record : Record
        The cluster's.
    security : Security, optional
        Default: as the record says, or else Dask's configuration.
    timeout : float
        Seconds. A scheduler that needs longer counts as gone.
    """
    return bool(await identities([record], security, timeout))


async def _identity(record: Record, security: Security | None, timeout: float) -> dict[str, Any] | None:
    address = record.scheduler_address
    if address is None:
        return None
    security = record.get_security() or security or Security()
    # It reads the files of the keys.
    arguments = await asyncio.to_thread(security.get_connection_args, "client")
    if address not in _reached:
        await asyncio.wait_for(_reach(address, arguments.get("ssl_context")), timeout / 2)
    try:
        async with rpc(address, connection_args=arguments) as scheduler:
            identity: dict[str, Any] = await scheduler.identity()
            if record.scheduler_id is None:
                info = await scheduler.get_metadata(keys=["cluster-manager-info"], default={})
                same = info.get("name") == record.name
            else:
                same = identity.get("id") == record.scheduler_id
    except BaseException:
        _reached.discard(address)
        raise
    _reached.add(address)
    return identity if same else None


async def _reach(address: str, ssl_context: Any) -> None:
    """Connect once, and raise OSError or wait if that is not possible.

    Dask's connections, when cancelled, keep their sockets until the system gives up on them, which takes
    minutes where nobody is at the address any more. These do not.
    """
    scheme, _ = parse_address(address)
    if scheme in ("tcp", "tls"):
        host, port = get_address_host_port(address)
        context = ssl_context if scheme == "tls" else None
        _, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _folder(name: str, directory: Path | None) -> Path:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"name={name!r} cannot be that of a cluster")
    return (directory or state_directory()) / name


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(record.name for record in records(directory))


def _folders(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
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
    except (OSError, ValueError, RecursionError) as error:
        _report(folder / RECORD_FILE, str(error))
        return None


def _read(folder: Path) -> bytes | None:
    for _ in range(_TRIES):
        try:
            # NFS may remember that a file is not there; listing the folder is what makes it look again.
            if RECORD_FILE not in os.listdir(folder):
                return None
            return (folder / RECORD_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                return None
        except OSError as error:
            if error.errno != errno.ESTALE:  # it was replaced while it was read
                raise
        time.sleep(_PAUSE)
    return None


def _report(path: Path, why: str) -> None:
    if (str(path), why) not in _reported:
        _reported.add((str(path), why))
        logger.warning("%s is passed over: %s", path, why)


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
            with open(path, "xb", opener=_owner_only) as file:
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
        return path.read_bytes()
    except OSError:
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
