"""Reads and writes the records of clusters, and judges by them and the platform which clusters run.

Each cluster has a folder with its name in the state directory, see :mod:`dask_cml.layout`. No process changes
files of another process, there is no lock, and a reader sees either the old or the new state, even if a
writer dies. The state directory may be on NFS, which caches what it knows of files: functions list folders
anew.

The files of a cluster's sessions say which exist: launched, started and ended. In ``sessions`` they are
empty: for the name of a session's own file, see :mod:`dask_cml.sessions.entry`, and its end is a file of its
own, ``<id>,ended,<time>,<cause>``. In ``started``, each session creates a file with the name that it takes,
which contains its id. Each operation creates one file, and none is ever changed. So all processes of a
cluster write at once, and a reader that lists the folder once misses no session.

A record contains its folder, which does not move if the configuration changes. Functions that are no
coroutines block while they wait for the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict
from urllib.parse import quote, unquote

import psutil
from distributed.security import Security
from msgspec import Meta

from dask_cml.cancellation import block_within
from dask_cml.checks import is_session_id, seconds, validate
from dask_cml.errors import ClusterExists, CMLError, NoAnswer, NoSuchCluster
from dask_cml.layout import (
    LOGS_FOLDER,
    RECORD_FILE,
    SCHEDULER,
    SESSIONS_FOLDER,
    STARTED_FOLDER,
    board_file,
    log_folder,
    scheduler_file,
    scheduler_number,
)
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import state_directory
from dask_cml.output import get_logger
from dask_cml.private_files import (
    NotPrivate,
    check_folder,
    is_gone,
    make_folder,
    open_regular,
    read_file,
    report_ignored,
    write_file,
)
from dask_cml.protocol import Letter, Rank, WantedGroup, after_mail, ask_with_keys
from dask_cml.sessions.entry import TIME, Launch, file_name, parse
from dask_cml.sessions.here import dashboard_link, this_session, this_user
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.sessions.workers_api import SessionInfo, WorkersAPI, has_ended, load_platform
from dask_cml.timing import timing
from dask_cml.words import command, format_duration

logger = get_logger(__name__)

VERSION = 4
#: The scheme of the addresses by which Dask's clients find clusters; see :mod:`dask_cml.address`.
SCHEME = "cml"

#: Seconds. psutil derives the start time of a process from the clock, which may be set meanwhile.
_CLOCK_TOLERANCE = 10.0
#: The year 36812.
_MOST_SECONDS = 2**40

_Text = Annotated[str, Meta(min_length=1)]
_Time = Annotated[datetime, Meta(tz=True)]
_Count = Annotated[int, Meta(ge=0, lt=_MOST_SECONDS)]
_Duration = Annotated[float, Meta(gt=0, lt=_MOST_SECONDS)]
#: The fields of a record that the creator writes.
_OWN = ("name", "id", "maker", "created", "options", "security", "version")
_END = re.compile(rf"[^,]+,ended,({TIME}),([a-z-]*)", re.ASCII)
#: Folders with such names, and of this age in seconds, were left behind by a crash.
_LEFTOVERS, _LEFTOVER_AGE = (".claim-", ".removed-"), 600.0
_TRIES = 5
_PAUSE = 0.01
#: Seconds between two looks at whether a cluster has started.
_POLL_INTERVAL = 0.5


class _ReadOptions(TypedDict, total=False):
    """The options of a record that all processes read, whoever uses the cluster."""

    platform: str | None
    log_directory: str | None


def _this_second() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def cluster_address(name: str) -> str:
    """Return the address by which clients in the project find the cluster with this name."""
    return f"{SCHEME}://{quote(name, safe='')}"


@dataclass(frozen=True)
class Maker:
    """The process that created a cluster.

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
    user : str or None
        The user's name.
    serves : bool or None
        Whether it is the web UI of ``dask cml serve``. A later one keeps the clusters of one that was killed.
    """

    host: str
    pid: Annotated[int, Meta(gt=0, lt=2**31)]
    started: Annotated[float, Meta(ge=0, lt=_MOST_SECONDS)]
    session: str | None = None
    user: str | None = None
    serves: bool | None = False

    @classmethod
    def this_process(cls, user: str | None = None, serves: bool = False) -> Maker:
        """Return the description of the calling process.

        Parameters
        ----------
        user : str, optional
            For whom it acts. Default: whoever runs it.
        serves : bool
            Whether it is the web UI of ``dask cml serve``.
        """
        process = psutil.Process()
        started, session = process.create_time(), this_session()
        return cls(socket.gethostname(), process.pid, started, session, user or this_user(), serves)

    @property
    def words(self) -> str:
        """Who runs the process, and where."""
        where = f"on {self.host}" if self.session is None else f"in session {self.session}"
        return f"{self.user or 'an unknown user'} {where} (process {self.pid})"

    def lives(self) -> bool | None:
        """Return whether the process runs. Return None if this process cannot see that."""
        if (self.host, self.session) != (socket.gethostname(), this_session()):
            return None
        try:
            process = psutil.Process(self.pid)
            is_maker = abs(process.create_time() - self.started) < _CLOCK_TOLERANCE
            return is_maker and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return None


@dataclass(frozen=True)
class Present:
    """The Dask workers that are connected to a scheduler.

    Parameters
    ----------
    workers : int
        Number of Dask workers.
    groups : mapping of str to int
        Number of Dask workers by worker group.
    sessions : sequence of str
        The names of all worker sessions with a connected Dask worker.
    threads : int
        Number of their threads.
    memory : int
        Sum of their memory limits, in bytes.
    problem : str or None
        What the keeper reports, or else what is wrong with the Dask workers, as a clause.
    idle_since : float or None
        Since when no task has waited or run, in seconds since 1970. None: some do.
    """

    workers: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)
    sessions: Sequence[str] = field(default_factory=list)
    threads: int = 0
    memory: int = 0
    problem: str | None = None
    idle_since: float | None = None

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do."""
        return None if self.idle_since is None else max(0.0, time.time() - self.idle_since)


@dataclass(frozen=True)
class SchedulerState:
    """What the last scheduler of a cluster has written, or what was written for it before it began.

    Parameters
    ----------
    number : int
        Its number in the cluster.
    groups : mapping of str to WantedGroup
        The worker groups by its report and its mail, whatever its file says.
    address : str or None
        Its address. None before it listens.
    session : str or None
        The id of its session.
    app_url : str or None
        The URL of its session, once known.
    keeper : str or None
        The id of the process that launches it. None after it has written its file.
    term : int
        Counts the keepers of the cluster.
    manager : str or None
        Who keeps the cluster, for users. None: no process does.
    manages_soon : bool
        Whether a process in the scheduler's session is about to keep the cluster.
    rank : Rank
        The rank of the process that keeps the cluster. An observer's: none has connected.
    closed : str or None
        Why the cluster ended with it. None: it runs, or was lost.
    protocol : int or None
        The version of its protocol with keepers and remotes.
    revision : int
        Counts the changes of what watchers are told.
    restarts : int
        Number of schedulers in a row that replaced lost ones, and have not computed a task yet.
    orphan_timeout : float or None
        Time without a watcher and a client after which it closes, in seconds. None: never.
    hours : float or None
        Hours from the cluster's creation until its end. None: no limit.
    report : mapping
        The last report of a keeper, see :class:`dask_cml.protocol.Report`.
    mail : sequence of Letter
        What users have asked for, and no keeper has carried out yet.
    posted : mapping of str to int
        The numbers of the last requests of processes, by their ids.
    maker : Maker or None
        The process that launches it, or the user's process that keeps the cluster then. None: there is none.
    activity : mapping
        What the cluster has done, for its history.
    workers : Present
        How many Dask workers are connected.
    """

    number: int = 0
    groups: Mapping[str, WantedGroup] = field(default_factory=lambda: {DEFAULT_GROUP: WantedGroup()})
    address: str | None = None
    session: str | None = None
    app_url: str | None = None
    keeper: str | None = None
    term: _Count = 0
    manager: str | None = None
    manages_soon: bool = False
    rank: Rank = Rank.OBSERVER
    closed: str | None = None
    protocol: _Count | None = None
    revision: _Count = 0
    restarts: _Count = 0
    orphan_timeout: _Duration | None = None
    hours: _Duration | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    mail: Sequence[Letter] = field(default_factory=list)
    posted: Mapping[str, _Count] = field(default_factory=dict)
    maker: Maker | None = None
    activity: Mapping[str, Any] = field(default_factory=dict)
    workers: Present = field(default_factory=Present)

    @classmethod
    def from_json(cls, number: int, text: str | bytes) -> SchedulerState:
        """Read a scheduler's file, and check it.

        Raises
        ------
        ValueError
            If the text is no such file.
        """
        content = {name: value for name, value in _loads(text).items() if value is not None}
        state = validate({**content, "number": number}, cls, "state of a scheduler")
        groups = after_mail(state.report.get("groups", {}), state.mail)
        return replace(state, groups=groups, session=state.session if is_session_id(state.session) else None)


@dataclass(frozen=True)
class Record:
    """All that other processes need to find a cluster, and to manage it.

    It contains no secrets of the cluster, only the paths of its keys. The cluster's creator writes the fields
    up to `version`, once. The last scheduler writes `scheduler`. Keepers and the sessions themselves write
    the rest, see :mod:`dask_cml.sessions.entry`.

    Parameters
    ----------
    name : str
        The cluster's name.
    id : str
        Distinguishes the cluster from other clusters that had or will have its name.
    maker : Maker
        The process that created it.
    created : datetime
        The time of its creation.
    options : mapping
        The cluster's options, for JSON.
    security : mapping of str to str, or None
        The parameters of :class:`distributed.Security`: absolute paths of the key files.
    version : int
        The version of the format.
    scheduler : SchedulerState
        What the scheduler has written.
    launches : mapping of str to Launch
        The running and queued sessions, by id, the oldest first.
    ended : mapping of str to Launch
        The sessions that have ended, if they were read, too.
    folder : Path
        The cluster's folder.
    """

    name: _Text
    id: _Text = field(default_factory=lambda: secrets.token_hex(8))
    maker: Maker = field(default_factory=Maker.this_process)
    created: _Time = field(default_factory=_this_second)
    options: Mapping[str, Any] = field(default_factory=dict)
    security: Mapping[str, str] | None = None
    version: Annotated[int, Meta(gt=0)] = VERSION
    scheduler: SchedulerState = field(default_factory=SchedulerState)
    launches: Mapping[str, Launch] = field(default_factory=dict)
    ended: Mapping[str, Launch] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)

    @property
    def launcher(self) -> Maker:
        """The process that launches the last scheduler, or keeps the cluster, or else has created it."""
        return self.scheduler.maker or self.maker

    @property
    def manager(self) -> str | None:
        """Who keeps the cluster, for users. None: no process does, or it was killed."""
        was_killed = self.scheduler.manager == self.launcher.words and self.launcher.lives() is False
        return None if was_killed else self.scheduler.manager

    @property
    def owner(self) -> str | None:
        """The id of the session that owns the cluster's sessions. None: outside of CML, all processes do."""
        launch = {**self.ended, **self.launches}.get(self.scheduler.session or "")
        return self.maker.session if launch is None or launch.owner is None else launch.owner

    @property
    def out_of_reach(self) -> str | None:
        """Why this process may not reach the cluster's sessions, as a clause. None: its user created them."""
        creator, user = self.maker.user, this_user()
        if creator is None or user in (None, creator):
            return None
        return (
            f"user {creator} created the cluster, and this process belongs to user {user}: CML may block "
            "connections between the sessions of different users. Create a cluster of your own, or ask an "
            "administrator"
        )

    @property
    def start_timeout(self) -> float:
        """Time limit for the start of a scheduler, in seconds.

        Raises
        ------
        ValueError, TypeError
            If the options are invalid.
        """
        names = ("pending_timeout", "scheduler_timeout")
        return sum(seconds(name, self.options[name]) for name in names if name in self.options)

    @property
    def age(self) -> float:
        """Time since the cluster's creation, in seconds."""
        return (datetime.now(timezone.utc) - self.created).total_seconds()

    @property
    def sessions(self) -> dict[str, str]:
        """The keys of the sessions by their ids: a key is the name of a worker, or ``"scheduler"``."""
        return {session: launch.key for session, launch in self.launches.items()}

    @property
    def groups(self) -> dict[str, Mapping[str, Any]]:
        """The options of the worker groups by name, the default group first."""
        others = {name: group.options for name, group in self.scheduler.groups.items()}
        others.pop(DEFAULT_GROUP, None)  # which has the cluster's options
        return {DEFAULT_GROUP: self.options, **others}

    @property
    def dashboard_link(self) -> str | None:
        """The URL of the scheduler's dashboard. None if it has none, or before its URL is known."""
        return dashboard_link(self.scheduler.app_url, self.options.get("scheduler_args") or ()) or None

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """The minimum and the maximum of the worker groups that adapt, by name."""
        return {
            name: (group.adapt.get("minimum", 0), group.adapt.get("maximum", 0))
            for name, group in self.scheduler.groups.items()
            if group.adapt
        }

    @property
    def ends(self) -> list[str]:
        """When the cluster ends by itself, as clauses."""
        ends, state = [], self.scheduler
        idle_timeout = self.options.get("idle_timeout")
        if isinstance(idle_timeout, (int, float)):
            ends.append(f"after {format_duration(idle_timeout)} without tasks")
        if state.orphan_timeout is not None:
            ends.append(f"after {format_duration(state.orphan_timeout)} without a process or client")
        if state.hours is not None:
            ends.append(f"at an age of {round(state.hours, 2):g} h")
        if state.orphan_timeout is not None and self.manager == self.maker.words:
            ends.append(f"with the creator's process {self.maker.pid} on {self.maker.host}")
        launches = [launch for launch in self.launches.values() if launch.key == SCHEDULER]
        ends += [f"with session {launch.owner}" for launch in launches if launch.owner]
        return ends

    def to_json(self) -> str:
        """Return the fields that the creator writes, as JSON.

        Raises
        ------
        TypeError
            If JSON cannot represent the options.
        """
        fields = {name: getattr(self, name) for name in _OWN}
        return json.dumps({**fields, "maker": asdict(self.maker), "created": self.created.isoformat()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Read a record, and check it.

        Raises
        ------
        ValueError
            If the text is not a record, or a newer release has written it.
        """
        content = _loads(text)
        if not isinstance(content.get("version"), int):
            raise ValueError("it is not the record of a cluster")
        if content["version"] > VERSION:
            raise ValueError(f"a newer dask-cml wrote it, in format {content['version']}: upgrade dask-cml")
        if missing := {*_OWN} - content.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        record = validate({name: content[name] for name in _OWN}, cls, "record")
        validate(record.options, _ReadOptions, "options")
        return record

    def get_security(self) -> Security | None:
        """Return the cluster's security with the files of its keys. Return None if it has no keys."""
        if self.security is None:
            return None
        return Security(require_encryption=True, **self.security)

    def logs(self) -> SessionLogs:
        """Return the logs of the cluster's sessions."""
        return SessionLogs(self.name, log_folder(self.folder, self.options.get("log_directory")))

    async def ask_scheduler(self, op: str, timeout: float, **arguments: Any) -> Any:
        """Call a handler of the cluster's scheduler, see :func:`dask_cml.protocol.ask_with_keys`."""
        return await ask_with_keys(str(self.scheduler.address), self.get_security(), op, timeout, **arguments)


def _loads(text: str | bytes) -> dict[str, Any]:
    """Read JSON of another process."""
    # msgspec's own reader refuses surrogates, which stand for bytes of file names that are no text.
    return validate(json.loads(text), dict[str, Any], "file")


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
    launch = min(launches, key=_order, default=None)
    return replace(launch, **end) if launch and end else launch


def write_entries(launched: Iterable[Launch], ends: Iterable[str], folder: Path) -> None:
    """Create files of a cluster's sessions in its folder, unless they exist."""
    # Nobody reads the end of a session that is not in the record, such as the engine of a refused launch.
    for name in (*(file_name(launch, folder.name) for launch in launched), *ends):
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # a removed folder does not come back
            os.close(os.open(folder / SESSIONS_FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


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


def give_up_scheduler(record: Record) -> None:
    """Say that this process does not launch the scheduler that it has claimed, so that others do at once."""
    file = record.folder / board_file(record.scheduler.number)
    restarts = max(0, record.scheduler.restarts - 1)  # whoever launches the next one counts the loss, too
    board = {**json.loads(read_file(file)), "maker": None, "manager": None, "restarts": restarts}
    write_file(file, json.dumps(board).encode())


def write_sessions(record: Record, launched: Iterable[Launch], ends: Iterable[str] = ()) -> None:
    """Write sessions into a cluster's record.

    A process that removes the cluster after this returns gets these sessions from :func:`remove`.

    Parameters
    ----------
    record : Record
        The cluster's record.
    launched : iterable of Launch
        New sessions.
    ends : iterable of str
        The names of files from :func:`end_file`.

    Raises
    ------
    NoSuchCluster
        If the cluster does not exist any more, or another one has its name. The caller must stop the
        sessions that it launched.
    """
    _check_exists(record)
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


def is_removed(record: Record) -> bool:
    """Return whether a known cluster does not exist any more. An unreadable record is no proof of that."""
    try:
        return not _has(record.folder, record)
    except RecordUnreadable:
        return False


def records() -> list[Record]:
    """Read all records, sorted by name. Ignore what is damaged, not private or no folder; warn once."""
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
        report_ignored(directory, "it is not a folder")
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

    Raises
    ------
    OSError
        If these sessions cannot be read now. The cluster stays.
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
    try:
        last = read_entries(aside, record.name, {}) if SESSIONS_FOLDER in os.listdir(aside) else []
    except OSError:
        with contextlib.suppress(OSError):  # so that it can be deleted later, with these sessions
            os.rename(aside, record.folder)
        raise
    sessions = {launch.id: launch.key for launch in last if launch.ended is None}
    # A session may write its log meanwhile. The files of many sessions take long, and nobody needs to wait.
    delete = functools.partial(shutil.rmtree, aside, ignore_errors=True)
    with contextlib.suppress(NoAnswer):
        block_within(timing.files / 2, delete)
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


# -- which clusters run, by their files and the platform's list of sessions


class State(enum.Enum):
    """The state of a cluster's scheduler, as far as it is known."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """What was found out about a cluster.

    Parameters
    ----------
    state : State
        The state of the cluster.
    why : str
        The reason, as a clause.
    """

    state: State
    why: str = ""


def silence(record: Record) -> float | None:
    """Return the seconds since a scheduler of a cluster dated its file last. Blocks.

    Return None if no scheduler has written a file, and 0 if the file system does not say.
    """
    folder = record.folder
    try:
        # NFS may cache that a file does not exist, so list the folder.
        numbers = [scheduler_number(name) for name in os.listdir(folder)]
        last = max(number for number in numbers if number is not None)
        # NFS may cache an old time of a file, but not of a file that was just opened.
        with open_regular(folder / scheduler_file(last)) as file:
            written = os.fstat(file.fileno()).st_mtime
        # The file system's clock dated the file, so it also has to say what time it is now.
        os.utime(folder.parent)
        return max(0.0, folder.parent.stat().st_mtime - written)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError:
        return 0.0


def why_ended(record: Record, listing: Mapping[str, SessionInfo] | None = None) -> str | None:
    """Return the proof that a cluster's last scheduler has ended, as a clause. Return None if there is none.

    It has ended if

    - it has closed, by its file, or
    - the platform lists its session as ended, or
    - the platform does not list its session here, whose program says in the record that it has ended, or
    - the process that was to launch it has ended before its session was launched.

    No silence proves that, however long: the scheduler may be busy, frozen or unreachable, and its file
    system may be full. Blocks.

    Parameters
    ----------
    record : Record
        The cluster's record.
    listing : mapping of str to SessionInfo, optional
        The sessions that the platform lists here.
    """
    scheduler, listing = record.scheduler, listing or {}
    if scheduler.closed is not None:
        return f"its scheduler has closed: {scheduler.closed}"
    if scheduler.address is None:
        return "its creator ended before its scheduler answered" if _is_abandoned(record, listing) else None
    session = scheduler.session or ""
    if session in listing:
        return f"its scheduler's session {session} has ended" if has_ended(listing[session]) else None
    return f"the program of its scheduler's session {session} has ended" if session in record.ended else None


def _is_abandoned(record: Record, listing: Mapping[str, SessionInfo]) -> bool:
    """Return whether the process that was to launch a scheduler has ended before one can start.

    A session that is launched may start later. If a scheduler has left a sign of life lately, another process
    may launch the next one.
    """
    sessions = [launch.id for launch in record.launches.values() if launch.key == SCHEDULER]
    if record.launcher.lives() is not False:
        return False
    have_ended = all(session in listing and has_ended(listing[session]) for session in sessions)
    return have_ended and not _spoke_lately(silence(record))


def _spoke_lately(silent: float | None) -> bool:
    """Return whether a scheduler has left a sign of life lately, by the result of :func:`silence`."""
    return silent is not None and silent < timing.silence


async def judge(
    records: Iterable[Record], timeout: float = 1.5, api: WorkersAPI | None = None
) -> dict[str, Finding]:
    """Find out which clusters are alive, which are dead, and which may be either, see :func:`seen`.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    timeout : float
        Time limit of each platform to list its sessions, in seconds.
    api : WorkersAPI, optional
        Lists the sessions. Default: a new one for the platform in the record.

    Returns
    -------
    dict of str to Finding
        The findings by the names of the clusters.
    """
    records = [*records]
    listing = await listed(records, timeout, api)
    return await asyncio.to_thread(lambda: {record.name: seen(record, listing) for record in records})


async def listed(
    records: Iterable[Record], timeout: float = 1.5, api: WorkersAPI | None = None
) -> dict[str, SessionInfo]:
    """Return the sessions of clusters that the platform lists here.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    timeout : float
        Time limit of each platform, in seconds.
    api : WorkersAPI, optional
        Lists the sessions. Default: a new one for the platform in the record.
    """
    found: dict[str, SessionInfo] = {}
    for platform in {record.options.get("platform", "auto") for record in records}:
        used_api = None
        try:
            used_api = api or WorkersAPI(load_platform(platform))
            found |= await asyncio.wait_for(used_api.sessions(), timeout)
        except Exception as error:  # without a listing the state stays unknown, whatever the platform raises
            logger.info("Sessions of platform %s not listed: %r", platform, error)
        finally:
            if used_api is not None and used_api is not api:
                await used_api.close()
    return found


def seen(record: Record, listing: Mapping[str, SessionInfo]) -> Finding:
    """Judge a cluster by its files and a list of the platform's sessions, and contact nobody. Blocks.

    A cluster is *dead* by proof alone, see :func:`why_ended`, and *alive* if its scheduler has left a sign of
    life in the last two minutes. Otherwise it is *unknown*. So is a cluster with a dead scheduler while its
    last manager, or else its creator, runs or may run, which shuts it down or replaces the scheduler, unless
    the scheduler's own session managed it last. The platform lists a session only to its owner.

    Parameters
    ----------
    record : Record
        The cluster's record.
    listing : mapping of str to SessionInfo
        The result of :func:`listed`.
    """
    scheduler, why = record.scheduler, why_ended(record, listing)
    if why is not None:
        manager_lives = record.launcher.lives()
        # What manages a cluster in its scheduler's session ends with that, and its creator has left before.
        if manager_lives and scheduler.rank is not Rank.RESIDENT:
            why += f", but its manager or creator still runs, process {record.launcher.pid}"
        elif manager_lives is None and scheduler.closed is None and scheduler.session not in listing:
            why += ", but a process of another session may replace its scheduler"
        else:
            return Finding(State.DEAD, why)
        return Finding(State.UNKNOWN, why)
    if scheduler.address is None:
        return Finding(State.UNKNOWN, "its scheduler has not answered yet")
    silent = silence(record)
    if _spoke_lately(silent):
        return Finding(State.ALIVE)
    lately = "lately" if silent is None else f"for {format_duration(silent)}"
    return Finding(State.UNKNOWN, f"its scheduler at {scheduler.address} has left no sign of life {lately}")


async def replaced(record: Record, api: WorkersAPI) -> Record:
    """Return the record of a cluster as soon as another scheduler is to take the place of the one in it.

    Raises
    ------
    NoSuchCluster
        If the cluster is deleted meanwhile.
    CMLError
        If it has ended.
    """
    latest = record
    while latest.scheduler.number == record.scheduler.number:
        latest = await _later(latest, await listed([latest], api=api))
    return latest


async def wait_until_running(record: Record) -> Record:
    """Wait until the scheduler of a cluster that another process creates listens, and return its record.

    Parameters
    ----------
    record : Record
        The cluster's record. Its time-outs count.

    Raises
    ------
    NoSuchCluster
        If the cluster is deleted meanwhile.
    CMLError
        If its scheduler does not listen in time, or its creator has ended before.
    """
    name, timeout = record.name, record.start_timeout
    deadline = time.monotonic() + timeout
    while record.scheduler.address is None:
        if time.monotonic() > deadline:
            raise CMLError(
                f"the scheduler of cluster {name!r} did not answer within {timeout:g} s: to see why, run "
                f"{command('logs', name)}; to stop its sessions, run {command('delete', name)}"
            )
        record = await _later(record, {})
    return record


async def _later(record: Record, listing: Mapping[str, SessionInfo]) -> Record:
    """Return the record of a cluster a moment later. Raise an error if it has ended or is deleted by then."""
    finding = await asyncio.to_thread(seen, record, listing)
    if finding.state is State.DEAD:
        raise CMLError(
            f"not connected to cluster {record.name!r}, which has ended: {finding.why}. To remove what is "
            f"left of it, run {command('delete', record.name)}"
        )
    await asyncio.sleep(_POLL_INTERVAL)
    with contextlib.suppress(RecordUnreadable):  # for a moment, perhaps
        return await asyncio.to_thread(read_again, record)
    return record
