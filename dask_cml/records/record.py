"""What is known of a cluster beyond the process that made it, and how that is written down."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

import psutil
from distributed.security import Security

from dask_cml.checks import is_session_id
from dask_cml.options import SessionSize
from dask_cml.sessions.owner import this_session, this_user

VERSION = 1
RECORD_FILE = "record.json"
#: Of the addresses by which Dask's clients find clusters; see :mod:`dask_cml.address`.
SCHEME = "cml"

#: psutil derives the time when a process was made from the clock, which may be set meanwhile.
_CLOCK_TOLERANCE = 10.0


def cluster_address(name: str) -> str:
    """Return the address by which clients of the project find the cluster of this name."""
    return f"{SCHEME}://{quote(name, safe='')}"


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
    user : str or None
        The user's name.
    serves : bool or None
        Whether it is the page of ``dask cml serve``, which takes up what an earlier one has made.
    """

    host: str
    pid: int
    started: float
    session: str | None
    user: str | None = None
    serves: bool | None = False

    @classmethod
    def this_process(cls, user: str | None = None, serves: bool = False) -> Maker:
        """Return what describes the calling process.

        Parameters
        ----------
        user : str, optional
            For whom it acts. Default: whoever runs it.
        serves : bool
            Whether it is the page of ``dask cml serve``.
        """
        process = psutil.Process()
        started, session = process.create_time(), this_session()
        return cls(socket.gethostname(), process.pid, started, session, user or this_user(), serves)

    def lives(self) -> bool | None:
        """Return whether the process is there; None if that cannot be seen from here."""
        if (self.host, self.session) != (socket.gethostname(), this_session()):
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_TOLERANCE
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return None


@dataclass(frozen=True)
class Record:
    """What is needed to find a cluster and to rebuild its manager.

    It holds no secrets of the cluster itself, only where they are. Its maker writes it, but for the sessions
    and the worker groups: each manager writes those that it launches and adds, see
    :mod:`dask_cml.records.session_files` and :mod:`dask_cml.records.group_files`.

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
    security : mapping of str to str, or None
        The parameters of :class:`distributed.Security`: absolute paths of the keys' files.
    version : int
        Of the format.
    more : mapping
        What a newer release has written beyond this; it is kept.
    sessions : mapping of str to str
        The ids of all its sessions: the key of a worker, or ``"scheduler"``.
    owners : mapping of str to str
        The ids of its sessions, as far as known: the id of the session with which each ends.
    launched : mapping of str to int
        The ids of its sessions: when each was launched, in seconds since 1970.
    waiting : mapping of str to int
        The same for those that wait for room.
    began : mapping of str to int
        The ids of its sessions that have waited for room: when each got it, in seconds since 1970.
    sizes : mapping of str to SessionSize
        The ids of its sessions, as far as known: each one's size.
    groups : mapping of str to mapping
        The options of its worker groups beside the default one, by name.
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
    security: Mapping[str, str] | None = None
    version: int = VERSION
    more: Mapping[str, Any] = field(default_factory=dict)
    sessions: Mapping[str, str] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    began: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, SessionSize] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return what the maker writes, as text.

        Raises
        ------
        TypeError
            If the options are not what JSON can hold.
        """
        own = {name: getattr(self, name) for name in _own_fields()}
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
        known = set(_own_fields())
        own = {key: content.pop(key) for key in known & set(content)}
        if missing := known - own.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        for key, value in own.items():
            if not _CHECKS.get(key, _is_text_or_none)(value):
                raise ValueError(f"its {key} cannot be {repr(value)[:100]}")
        maker = {each.name: own["maker"].get(each.name) for each in fields(Maker)}
        return cls(**{**own, "maker": Maker(**maker)}, more=content)

    def get_security(self) -> Security | None:
        """Return the cluster's security with the files of its keys; None if it has none of its own."""
        if self.security is None:
            return None
        return Security(require_encryption=True, **self.security)


def _own_fields() -> list[str]:
    """Return the names of what the maker writes."""
    others = {"more", "sessions", "owners", "launched", "waiting", "began", "sizes", "groups"}
    return [each.name for each in fields(Record) if each.name not in others]


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_maker(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("started"), (int, float)):
        return False
    if not isinstance(value.get("user"), (str, type(None))) or value.get("serves") not in (None, True, False):
        return False
    return isinstance(value.get("host"), str) and isinstance(value.get("pid"), int) and value["pid"] > 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "name": _is_text,
    "id": _is_text,
    "created": _is_text,
    "maker": _is_maker,
    "options": lambda value: isinstance(value, dict),
    "scheduler_session": lambda value: value is None or is_session_id(value),
    "security": lambda value: value is None or _is_texts(value),
    "version": lambda value: value > 0,
}
