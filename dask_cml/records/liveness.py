"""Finds out which clusters run, by their files and the platform's list of sessions, within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dask_cml.errors import CMLError
from dask_cml.layout import SCHEDULER, scheduler_file, scheduler_number
from dask_cml.output import get_logger
from dask_cml.private_files import open_regular
from dask_cml.protocol import Rank
from dask_cml.records import store
from dask_cml.records.store import Record
from dask_cml.sessions.here import load_platform
from dask_cml.sessions.workers_api import SessionInfo, WorkersAPI, has_ended
from dask_cml.timing import timing
from dask_cml.words import command, format_duration

logger = get_logger(__name__)

_POLL_INTERVAL = 0.5


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
    schedulers = [launch.id for launch in record.launches.values() if launch.key == SCHEDULER]
    if record.launcher.lives() is not False:
        return False
    have_ended = all(id in listing and has_ended(listing[id]) for id in schedulers)
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
    creator runs or may run, which shuts it down or replaces the scheduler, unless the scheduler's own session
    managed it last. The platform lists a session only to its owner.

    Parameters
    ----------
    record : Record
        The cluster's record.
    listing : mapping of str to SessionInfo
        The result of :func:`listed`.
    """
    scheduler, why = record.scheduler, why_ended(record, listing)
    if why is not None:
        creator_lives = record.launcher.lives()
        # What manages a cluster in its scheduler's session ends with that, and its creator has left before.
        if creator_lives and scheduler.rank is not Rank.RESIDENT:
            why += f", but its creator still runs, process {record.launcher.pid}"
        elif creator_lives is None and scheduler.closed is None and scheduler.session not in listing:
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


async def refuse_ended(record: Record, api: WorkersAPI) -> None:
    """Raise an error if a cluster is dead. Otherwise never return, so that nobody waits for that.

    Raises
    ------
    CMLError
        If it has ended.
    """
    name = record.name
    finding = (await judge([record], api=api))[name]
    if finding.state is State.DEAD:
        raise CMLError(
            f"not connected to cluster {name!r}, which has ended: {finding.why}. To remove what is "
            f"left of it, run {command('delete', name)}"
        )
    await asyncio.Event().wait()


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
    name, delete = record.name, command("delete", record.name)
    timeout = record.start_timeout
    deadline = time.monotonic() + timeout
    while record.scheduler.address is None:
        finding = await asyncio.to_thread(seen, record, {})
        if finding.state is State.DEAD:
            raise CMLError(f"cluster {name!r} has ended: {finding.why}; run {delete}")
        if time.monotonic() > deadline:
            raise CMLError(
                f"the scheduler of cluster {name!r} did not answer within {timeout:g} s: to see why, run "
                f"{command('logs', name)}; to stop its sessions, run {delete}"
            )
        await asyncio.sleep(_POLL_INTERVAL)
        with contextlib.suppress(store.RecordUnreadable):  # for a moment, perhaps
            record = await asyncio.to_thread(store.read_again, record)
    return record
