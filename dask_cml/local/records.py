"""The sessions' records: one folder for each session, which every function reads anew.

``plan.json`` describes the launch and never changes. The session's supervisor writes its status to
``status.json``. The file ``stop`` requests that the session stops. The supervisor holds the file ``lock``
while it runs. If it dies, the kernel releases the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import secrets
import shutil
import signal
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_cml.local import network, processes, state

ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
#: HTTP statuses that the platform answers with.
_OK, _NOT_FOUND = 204, 404
_ALPHABET = string.ascii_lowercase + string.digits


@dataclasses.dataclass(frozen=True)
class Record:
    """A session at one moment."""

    folder: Path
    plan: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The session's id."""
        return self.folder.name

    @property
    def live(self) -> bool:
        """Whether the session has not ended."""
        return self.status["status"] not in ENDED

    @property
    def half_made(self) -> bool:
        """Whether the record is of an engine that a refused launch left behind."""
        return self.plan["fate"] == "refused"

    @property
    def waits(self) -> bool:
        """Whether the session waits for room, because the quota is exhausted."""
        return self.plan["waits"] and not self.status.get("admitted")

    @property
    def stop_requested(self) -> bool:
        """Whether the session was asked to stop."""
        return (self.folder / "stop").exists()


def new_id() -> str:
    """Return 16 random letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(16))


def create(plan: Mapping[str, Any]) -> int:
    """Create the record of a new session.

    Returns
    -------
    int
        A file descriptor with the session's lock. The session fails when all copies of it are closed.
    """
    sessions = state.directory() / "sessions"
    hidden = sessions / f".{plan['id']}"
    hidden.mkdir(mode=0o700)
    lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    state.write_json(hidden / "plan.json", plan)
    state.write_json(hidden / "status.json", {"status": "scheduling"})
    hidden.rename(sessions / plan["id"])
    return lock


def read(session_id: str) -> Record | None:
    """Return the current record of a session. Return None if no session has this id.

    If the session has not ended but its supervisor has died, mark it as failed.
    """
    return _read_and_check(state.directory() / "sessions" / session_id)


def read_all() -> list[Record]:
    """Return the current records of all sessions, the oldest first."""
    with os.scandir(state.directory() / "sessions") as entries:
        folders = [Path(entry.path) for entry in entries]
    records = [record for record in map(_read_and_check, folders) if record]
    return sorted(records, key=lambda record: record.plan["created_at"])


def _read_and_check(folder: Path) -> Record | None:
    if not folder.name.isalnum():
        return None
    record = _read(folder)
    if record and record.live and not record.half_made and not supervised(record):
        return fail(record)
    return record


def _read(folder: Path) -> Record | None:
    status = state.read_json(folder / "status.json")
    try:
        return Record(folder, _plan(folder), status) if status else None
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=1000)
def _plan(folder: Path) -> Mapping[str, Any]:
    """Return the plan, which never changes."""
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_bytes())
    return plan


def supervised(record: Record) -> bool:
    """Return whether the session's supervisor runs, or another process cleans up after it."""
    return bool(state.is_locked(record.folder / "lock"))


def fail(record: Record) -> Record | None:
    """Kill the processes of a session without a supervisor, and return its record."""
    return _end(record, "failed")


def _end(record: Record, how: str) -> Record | None:
    """Write the end of a session that has no supervisor to write it."""
    try:
        lock = os.open(record.folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return record
    else:
        now = _read(record.folder)
        if now and now.live:
            free(record.plan)
            ended = {**now.status, "status": how, "finished_at": time.time()}
            state.write_json(record.folder / "status.json", ended)
        return _read(record.folder)
    finally:
        os.close(lock)


def free(plan: Mapping[str, Any], group: int | None = None) -> None:
    """Kill every process of a session, and free its network.

    Parameters
    ----------
    plan : mapping
        The session's plan.
    group : int, optional
        See :func:`processes.pids`.
    """
    processes.kill(plan["id"], group)
    if plan["network"]:
        network.remove(plan["network"])


def stop(session_id: str) -> int:
    """Ask a session to stop, without waiting for it.

    Returns
    -------
    int
        The HTTP status: 204, or 404 if no session has this id.
    """
    record = read(session_id)
    if record is None:
        return _NOT_FOUND
    if record.live:
        with contextlib.suppress(FileNotFoundError):  # the session has ended, and its record was removed
            (record.folder / "stop").touch(mode=0o600)
        if record.half_made:
            _end(record, "stopped")
        else:
            wake(record, signal.SIGTERM)
    return _OK


def wake(record: Record, signum: signal.Signals) -> None:
    """Send a signal to the session's supervisor, if it is ready for signals."""
    now = _read(record.folder)
    if now and now.live and "supervisor" in now.status and supervised(now):
        with contextlib.suppress(ProcessLookupError):
            os.kill(now.status["supervisor"], signum)


def evict(session_id: str, silently: bool) -> None:
    """Kill a session, as the failure of its node does."""
    record = read(session_id)
    if silently and record and record.live:
        if not record.plan["network"]:
            raise RuntimeError('invalid silently=True: expected a session with network="namespaces"')
        network.cut(record.plan["network"])
    while (record := read(session_id)) and record.live:
        if record.half_made:
            _end(record, "failed")
        wake(record, signal.SIGKILL)
        time.sleep(0.01)
    if record is None:
        raise LookupError(f"no session {session_id!r}")


def remove(record: Record) -> None:
    """Remove the record of a session that has ended."""
    shutil.rmtree(record.folder, ignore_errors=True)


def public(record: Record) -> dict[str, Any]:
    """Return a session as the platform describes it."""
    plan, status = record.plan, record.status
    description = {
        "id": record.id,
        "name": plan["name"],
        "status": _told_status(record),
        "created_at": _timestamp(plan["created_at"]),
        "running_at": _timestamp(status.get("running_at")),
        "finished_at": _timestamp(status.get("finished_at")),
        "duration": None,
        "app_url": plan["app_url"],
        "cpu": plan["cpu"],
        "memory": plan["memory"],
        "nvidia_gpu": plan["nvidia_gpu"],
        "kernel": plan["kernel"],
        "script": plan["script"],
    }
    if "finished_at" in status:
        begin = status.get("running_at", plan["created_at"])
        description["duration"] = round(max(0.0, status["finished_at"] - begin), 3)
    if status["status"] != "scheduling":
        known_at = status.get("running_at", float("inf")) + plan["hide_ip"]
        description["ip_address"] = plan["ip"] if time.time() >= known_at else "unknown"
    return description


def _told_status(record: Record) -> str:
    plan, status = record.plan, record.status
    if plan["stopping"] and record.live and record.stop_requested:
        return "STOPPING"
    if status["status"] == "running" and time.time() < status["running_at"] + plan["hide_status"]:
        return "UNKNOWN"
    told: str = status["status"]
    return told


def _timestamp(moment: float | None) -> str | None:
    if moment is None:
        return None
    date = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")
