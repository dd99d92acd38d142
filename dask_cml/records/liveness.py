"""Finds out which clusters run, by the answers of their schedulers or by their files, within a time limit."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dask_cml.cancellation import cancel
from dask_cml.layout import SCHEDULER, scheduler_file, scheduler_number
from dask_cml.output import get_logger
from dask_cml.private_files import open_regular
from dask_cml.protocol import HELLO
from dask_cml.records.record import Record
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions.workers_api import SessionInfo, WorkersAPI, has_ended, load_platform
from dask_cml.timing import timing
from dask_cml.words import format_duration

logger = get_logger(__name__)

#: Seconds in which schedulers usually answer. After that, the platform is asked about the others.
_PROMPT = 1.0


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
    silent = silence(record)
    spoke_lately = silent is not None and silent < timing.silence
    return all(id in listing and has_ended(listing[id]) for id in schedulers) and not spoke_lately


async def judge(
    records: Iterable[Record], timeout: float = 5.0, api: WorkersAPI | None = None
) -> dict[str, Finding]:
    """Find out which clusters are alive, which are dead, and which may be either.

    A cluster is *alive* if its scheduler answers, with the id in the record. It is *dead* by proof alone: its
    scheduler has ended, see :func:`why_ended`, or another program answers at its address. Otherwise it is
    *unknown*. So is a cluster with a dead scheduler while its creator runs or may run, which shuts it down or
    replaces the scheduler, unless the scheduler's own session managed it last. The platform lists a session
    only to its owner.

    A cluster without keys is judged by its files alone: another program may answer at its address.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    timeout : float
        Time limit for all schedulers to answer, in seconds. The platform gets as long again.
    api : WorkersAPI, optional
        Lists the sessions. Default: a new one for the platform in the record.

    Returns
    -------
    dict of str to Finding
        The findings by the names of the clusters.
    """
    records = [*records]
    looks = {record.name: asyncio.create_task(_look_at(record, timeout)) for record in records}
    try:
        if looks:
            await asyncio.wait(looks.values(), timeout=_PROMPT)
        doubtful = [record for record in records if not _is_known(looks[record.name])]
        listing = await listed(doubtful, timeout, api)
        return {record.name: await _judge(record, looks[record.name], listing) for record in records}
    finally:
        await cancel(*looks.values())


def _is_known(look: asyncio.Task[Finding]) -> bool:
    """Return whether a look has found out whether a cluster is alive or dead."""
    return look.done() and look.result().state is not State.UNKNOWN


async def _judge(record: Record, look: asyncio.Task[Finding], listing: Mapping[str, SessionInfo]) -> Finding:
    """Judge a cluster. Do not wait for a scheduler that has ended by proof: Dask repeats its connection."""
    if not _is_known(look):
        ended = await asyncio.to_thread(judge_end, record, listing)
        if ended is not None:
            return ended
    finding = await look
    if finding.state is not State.UNKNOWN:
        return finding
    by_files = await asyncio.to_thread(seen, record, listing)
    return Finding(State.UNKNOWN, by_files.why or finding.why)


def judge_end(record: Record, listing: Mapping[str, SessionInfo]) -> Finding | None:
    """Judge a cluster whose scheduler has ended. Return None if there is no proof of that. Blocks."""
    why, scheduler = why_ended(record, listing), record.scheduler
    if why is None:
        return None
    creator_lives = record.launcher.lives()
    # What manages a cluster in its scheduler's session ends with that, and its creator has left before.
    if creator_lives and scheduler.manager != WHO:
        return Finding(State.UNKNOWN, f"{why}, but its creator still runs, process {record.launcher.pid}")
    if creator_lives is None and scheduler.closed is None and scheduler.session not in listing:
        return Finding(State.UNKNOWN, f"{why}, but a process of another session may replace its scheduler")
    return Finding(State.DEAD, why)


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

    Its scheduler is *alive* if it has left a sign of life in the last two minutes, and *dead* by proof alone.

    Parameters
    ----------
    record : Record
        The cluster's record.
    listing : mapping of str to SessionInfo
        The result of :func:`listed`.
    """
    ended = judge_end(record, listing)
    if ended is not None:
        return ended
    address = record.scheduler.address
    if address is None:
        return Finding(State.UNKNOWN, "its scheduler has not answered yet")
    silent = silence(record)
    if silent is not None and silent < timing.silence:
        return Finding(State.ALIVE)
    lately = "lately" if silent is None else f"for {format_duration(silent)}"
    return Finding(State.UNKNOWN, f"its scheduler at {address} has left no sign of life {lately}")


async def _look_at(record: Record, timeout: float) -> Finding:
    address, ended = record.scheduler.address, await asyncio.to_thread(judge_end, record, {})
    if ended is not None:
        return ended
    if address is None or record.security is None:
        return await asyncio.to_thread(seen, record, {})
    try:
        hello = await record.ask_scheduler(HELLO, timeout)
    except Exception as error:  # of Dask: the program there may speak another protocol
        logger.debug("Scheduler of cluster %s did not answer: %r", record.name, error)
        return Finding(State.UNKNOWN, f"its scheduler at {address} does not answer; it may be busy")
    if not isinstance(hello, dict):
        return Finding(State.DEAD, f"another program answers at {address}")
    if hello.get("record") == record.id:
        return Finding(State.ALIVE)
    return Finding(State.DEAD, f"another scheduler answers at {address}")
