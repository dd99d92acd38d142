"""Finds out which clusters run, by the answers of their schedulers, within a time limit."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import shlex
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from distributed.comm.addressing import get_address_host_port, parse_address

from dask_cml.identity import Identity
from dask_cml.layout import scheduler_file, scheduler_number
from dask_cml.msgpack_comm import InvalidMessage
from dask_cml.options import state_directory
from dask_cml.private_files import open_regular
from dask_cml.protocol import LONGEST_SILENCE
from dask_cml.records.record import Record
from dask_cml.sessions.workers_api import WorkersAPI, has_ended, load_platform

logger = logging.getLogger(__name__)

#: Shares of the time limit: for the scheduler's answer, and for all steps.
_ANSWERED, _FOUND = 0.75, 0.95
#: Seconds for the answer of a scheduler that left a sign of life lately. It, or its machine, may be busy.
PATIENCE = 10.0


class State(enum.Enum):
    """The state of a cluster's scheduler, as far as it is known."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """The result of a look at a cluster.

    Parameters
    ----------
    state : State
        The state of the cluster.
    why : str
        The reason, as a clause.
    identity : Identity, optional
        The scheduler's answer, if it answered.
    refused : bool
        Whether nothing accepts connections at the scheduler's address.
    """

    state: State
    why: str = ""
    identity: Identity | None = None
    refused: bool = False


def silence(record: Record) -> float | None:
    """Return the seconds since a scheduler of a cluster wrote its file last. Blocks.

    Return None if none has written any.
    """
    folder = state_directory() / record.name
    try:
        # NFS may cache that a file does not exist, so list the folder.
        numbers = {number for name in os.listdir(folder) if (number := scheduler_number(name)) is not None}
        file = folder / scheduler_file(max(numbers))
        # The file system's clock dated the file, so use the same clock for now. NFS may cache an old time of
        # a file, but not of a file that was just opened.
        with open_regular(file) as sign, tempfile.TemporaryFile(dir=folder.parent) as now:
            return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(sign.fileno()).st_mtime)
    except (OSError, ValueError):
        return None


def spoke_lately(record: Record) -> bool:
    """Return whether a scheduler of a cluster has left a sign of life in the last two minutes. Blocks."""
    silent = silence(record)
    return silent is not None and silent < LONGEST_SILENCE


def is_abandoned(record: Record) -> bool:
    """Return whether a cluster's scheduler has no address yet, and the process that launches it has ended.

    If a scheduler has left a sign of life lately, another manager may launch the next one. Blocks.
    """
    return record.scheduler.address is None and record.launcher.lives() is False and not spoke_lately(record)


async def judge(
    records: Iterable[Record],
    timeout: float = 5.0,
    patience: float | None = None,
    api: WorkersAPI | None = None,
) -> dict[str, Finding]:
    """Find out which clusters are alive, which are dead, and which may be either.

    A cluster is *alive* if its scheduler answers, with the id in the record. It is *dead* if

    - another scheduler answers at its address, or
    - its address accepts no connection, and the scheduler has closed, or
    - its address accepts no connection, and the platform lists the scheduler's session as ended, or
    - its address accepts no connection, and the scheduler has left no sign of life in the cluster's folder
      for two minutes, or
    - its address is not known yet, its creator has ended, and no scheduler has left a sign of life for two
      minutes: another manager may launch the next one.

    Otherwise it is *unknown*: the scheduler may be busy, or unreachable for a moment. A cluster with a dead
    scheduler is also unknown while its creator runs, because the creator shuts it down. The platform lists a
    session only to its owner. In other sessions, a refused connection counts after the two minutes only.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    timeout : float
        Time limit for all schedulers to answer, in seconds. The platform gets the same time again.
    patience : float, optional
        Longer time limit for schedulers that left a sign of life lately, in seconds. Default: `timeout`.
    api : WorkersAPI, optional
        Lists the sessions. Default: one for the platform in each record.

    Returns
    -------
    dict
        For each cluster's name, a :class:`Finding`.
    """
    records = [*records]
    findings = await look(records, timeout=timeout, patience=patience)
    ended = await _ended([each for each in records if findings[each.name].refused], timeout, api)
    return {each.name: await asyncio.to_thread(_judge, each, findings[each.name], ended) for each in records}


def _judge(record: Record, finding: Finding, ended: Collection[str]) -> Finding:
    """Judge a cluster by a look at it, and by the sessions that the platform lists as ended. Blocks."""
    if is_abandoned(record):
        return Finding(State.DEAD, "its creator ended before its scheduler answered")
    if finding.refused:
        finding = _judge_refused(record, ended)
    if finding.state is State.DEAD and record.launcher.lives():
        why = f"{finding.why}, but its creator still runs, process {record.launcher.pid}"
        return Finding(State.UNKNOWN, why)
    return finding


def _judge_refused(record: Record, ended: Collection[str]) -> Finding:
    session = record.scheduler.session
    if session in ended:
        return Finding(State.DEAD, f"its scheduler's session {session} has ended")
    if (closed := record.scheduler.closed) is not None:
        return Finding(State.DEAD, f"its scheduler has closed: {closed}")
    why = f"nothing accepts connections at {record.scheduler.address}"
    silent = silence(record)
    if silent is not None and silent >= LONGEST_SILENCE:
        return Finding(State.DEAD, f"{why}, and the scheduler's last sign of life is {silent:.0f} s old")
    return Finding(State.UNKNOWN, f"{why}, but nothing shows that the scheduler has ended")


async def _ended(records: Iterable[Record], timeout: float, api: WorkersAPI | None) -> set[str]:
    """Return the sessions that the platform lists as ended, if it lists any here."""
    ended: set[str] = set()
    for platform in {record.options.get("platform", "auto") for record in records}:
        own = None
        try:
            own = api or WorkersAPI(load_platform(platform))
            listing = await asyncio.wait_for(own.sessions(), timeout)
            ended.update(session for session, info in listing.items() if has_ended(info))
        except Exception as error:  # without a listing the state stays unknown, whatever the platform raises
            logger.info("Sessions of platform %s not listed: %r", platform, error)
        finally:
            if own is not None and own is not api:
                await own.close()
    return ended


async def look(
    records: Iterable[Record],
    timeout: float = 2.5,
    patience: float | None = None,
) -> dict[str, Finding]:
    """Ask the schedulers of clusters for their identity, concurrently.

    Parameters
    ----------
    records : iterable of Record
        The records of the clusters.
    timeout : float
        Time limit for all schedulers together, in seconds.
    patience : float, optional
        Longer time limit for schedulers that left a sign of life lately, in seconds. Default: `timeout`.

    Returns
    -------
    dict
        For each cluster's name, a :class:`Finding`. :func:`judge` finds more.
    """
    records = [*records]

    async def bounded(record: Record) -> Finding:
        limit = timeout
        if patience is not None and await asyncio.to_thread(spoke_lately, record):
            limit = max(timeout, patience)
        try:
            return await asyncio.wait_for(_look_at(record, limit), limit)
        except asyncio.TimeoutError:
            return Finding(State.UNKNOWN, f"no answer within {limit:g} s")

    findings = await asyncio.gather(*map(bounded, records))
    return {record.name: finding for record, finding in zip(records, findings, strict=True)}


async def is_alive(record: Record, timeout: float = 5.0) -> bool:
    """Return whether a cluster's scheduler answers with the id in the record.

    Parameters
    ----------
    record : Record
        The cluster's record.
    timeout : float
        Time limit, in seconds. A scheduler that needs longer may still run; see :func:`judge`.
    """
    return (await look([record], timeout))[record.name].state is State.ALIVE


async def _look_at(record: Record, timeout: float) -> Finding:
    address = record.scheduler.address
    if address is None:
        return Finding(State.UNKNOWN, "its scheduler has not answered yet")
    begin, why = asyncio.get_running_loop().time(), None
    try:
        why = await asyncio.to_thread(why_not_contacted, record)
        if why is None:
            return await asyncio.wait_for(_ask(record, timeout), _ANSWERED * timeout)
    except (ValueError, InvalidMessage) as error:
        why = str(error)
    except Exception as error:  # a program at this address may speak another protocol
        logger.debug("Scheduler of cluster %s did not answer: %r", record.name, error)
    left = _FOUND * timeout - (asyncio.get_running_loop().time() - begin)
    try:
        await asyncio.wait_for(_reach(address), left)
    except Exception:  # the address may be invalid in any way
        return Finding(State.UNKNOWN, f"nothing accepts connections at {address}", refused=True)
    busy = f"its scheduler accepts connections at {address} but does not answer; it may be busy"
    return Finding(State.UNKNOWN, why or busy)


def why_not_contacted(record: Record) -> str | None:
    """Return why to send nothing to the address in a record. Return None if its scheduler runs or has keys.

    Without keys, another program that now has the address could answer, and pretend to be the scheduler.
    Blocks while it waits for the file system.
    """
    address = record.scheduler.address
    has_keys = record.security is not None or str(address).startswith("tls:")
    if has_keys or record.maker.lives() or spoke_lately(record):
        return None
    return (
        "it has no keys, and its scheduler has left no sign of life for two minutes, so another program may "
        f"have the address {address}: if the cluster does not run any more, run "
        f"`dask cml delete {shlex.quote(record.name)}`"
    )


async def _ask(record: Record, timeout: float) -> Finding:
    identity = Identity.read(await record.ask_scheduler("identity", timeout))
    if identity.id == record.scheduler.id:
        return Finding(State.ALIVE, identity=identity)
    return Finding(State.DEAD, f"another scheduler answers at {record.scheduler.address}")


async def _reach(address: str) -> None:
    """Connect once, and send nothing. Raise OSError or wait if that is not possible."""
    scheme, _ = parse_address(address)
    if scheme in ("tcp", "tls"):
        _, writer = await asyncio.open_connection(*get_address_host_port(address))
        writer.transport.abort()
