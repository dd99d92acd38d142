"""A cluster's record: all that other processes need to find the cluster, and its form as text."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict
from urllib.parse import quote

import psutil
from distributed.security import Security
from msgspec import Meta

from dask_cml.checks import is_session_id, seconds
from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.protocol import Rank, WantedGroup
from dask_cml.scheduler.board import Letter, after_mail
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import dashboard_link, this_session, this_user
from dask_cml.sessions.tls import ask
from dask_cml.validation import validate
from dask_cml.words import format_duration

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
        The last report of a keeper, see :class:`dask_cml.scheduler.board.Report`.
    mail : sequence of Letter
        What users have asked for, and no keeper has carried out yet.
    posted : mapping of str to int
        The numbers of the last requests of processes, by their ids.
    maker : Maker or None
        The process that launches it. None after it has written its file.
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
    workers: Present = field(default_factory=lambda: Present())

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
        """The process that launches the last scheduler, or else has created the cluster."""
        return self.scheduler.maker or self.maker

    @property
    def manager(self) -> str | None:
        """Who keeps the cluster, for users. None: no process does, or it is the creator, which was killed."""
        was_killed = self.scheduler.manager == self.maker.words and self.maker.lives() is False
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
            ends.append(f"at an age of {state.hours:g} h")
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

    async def ask_scheduler(self, op: str, timeout: float, **arguments: Any) -> Any:
        """Call a handler of the cluster's scheduler, see :func:`dask_cml.sessions.tls.ask`."""
        return await ask(str(self.scheduler.address), self.get_security(), op, timeout, **arguments)


def _loads(text: str | bytes) -> dict[str, Any]:
    """Read JSON of another process."""
    # msgspec's own reader refuses surrogates, which stand for bytes of file names that are no text.
    return validate(json.loads(text), dict[str, Any], "file")
