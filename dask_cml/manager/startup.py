"""Connects a manager to its cluster's scheduler: creates one, takes over one, or replaces one that was lost.

Each scheduler of a cluster has a number. The manager that creates the file ``wanted-<number>.json`` launches
the scheduler with this number, with all workers at the same moment. The other managers connect to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.security import Security

from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.at_exit import unclosed
from dask_cml.manager.losses import SchedulerLost
from dask_cml.manager.state import ClusterState
from dask_cml.options import setting
from dask_cml.options.limits import check_new, limits
from dask_cml.protocol import PROTOCOL
from dask_cml.records import liveness, store
from dask_cml.records.operations import take_name
from dask_cml.records.record import VERSION, Maker, Record
from dask_cml.sessions import here, tls
from dask_cml.sessions.causes import find_cause
from dask_cml.words import span

logger = logging.getLogger(__name__)

#: Seconds before the first, the second and each later scheduler in a row.
_PAUSES = (0.0, 10.0, 30.0)
#: Seconds for which an observer waits at least for other managers, which are better suited.
_OBSERVER_PATIENCE = 60.0
_LOOK_INTERVAL, _RETRY_INTERVAL = 1.0, 0.5
#: Seconds for which a record may be unreadable while the cluster's folder exists.
_UNREADABLE_FOR = 30.0
#: Seconds for which a scheduler waits for its first manager, if it is never an orphan later.
_FIRST_PATIENCE = 300.0


async def create(state: ClusterState, new: Record, show: bool) -> None:
    """Create a cluster. Return when its scheduler answers.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager, which leads at first.
    new : Record
        Its record, as far as it is known.
    show : bool
        Whether to show the progress.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site.
    """
    options, launcher, record_keeper = state.options, state.launcher, state.record_keeper
    files = await asyncio.to_thread(launcher.prepare)
    keys = tls.paths(launcher.place.security)
    record = replace(new, options=options.arguments(), security=keys)
    orphan_timeout = options.orphan_timeout if options.shutdown_on_close else None
    groups, hours = options.first_groups(), limits().get("hours")
    wanted = first_state(state, record, groups=groups, hours=hours, orphan_timeout=orphan_timeout)
    record_keeper.record = record  # to remove it if this is cancelled
    await take_name(record, wanted, state.api)
    check_new(options)  # only now it is known that no running cluster is to be connected to
    record_keeper.start()
    if not record.maker.serves:  # the page creates clusters for several users
        _tell_others(state)
    await launcher.launch(record.id, files, show, partial(join, state, record, options.scheduler_timeout))
    await record_keeper.write()
    if not options.shutdown_on_close:
        state.log(here.lifetime(options.name))


def first_state(state: ClusterState, record: Record, **more: Any) -> dict[str, Any]:
    """Return what the next scheduler begins with: the content of its file ``wanted-<number>.json``."""
    options = state.options
    return {
        "cluster": record.name,
        "record": record.id,
        "leader": state.fleet.manager,
        "created": record.created.isoformat(),
        # The manager connects after it has launched all workers.
        "patience": max(options.orphan_timeout or _FIRST_PATIENCE, options.scheduler_timeout),
        **more,
    }


def _tell_others(state: ClusterState) -> None:
    """Name the user's other clusters in this process. A cell that runs again may have left them."""
    opened = [each.state for each in unclosed() if not each.state.observes]
    for other in opened:
        name, sessions = other.fleet.name, other.sessions
        if name != state.fleet.name and sessions:
            age = span(sessions[0].age)
            close = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).close()"
            state.log(f"This process has another cluster, open for {age}. To close it, run: {close}")


async def adopt(state: ClusterState, record: Record) -> None:
    """Take over the sessions of a running cluster.

    Raises
    ------
    CMLError
        If its scheduler does not answer.
    """
    # As long as Dask's clients wait: a busy scheduler may need it. Without a scheduler this fails at once.
    patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    if not await liveness.is_alive(record, timeout=patience):
        address = record.scheduler.address or "an unknown address"
        raise CMLError(
            f"the scheduler of cluster {record.name!r} does not answer at {address}: to stop its "
            f"sessions, run `dask cml delete {shlex.quote(record.name)}`"
        )
    await follow(state, record, patience)
    state.record_keeper.start()
    state.launcher.attach_launched(record)


def check_version(record: Record) -> None:
    """Refuse the cluster of another release.

    Raises
    ------
    CMLError
        If an older release of dask-cml has created it.
    """
    if record.version != VERSION:
        raise CMLError(
            f"cluster {record.name!r} was created by an older dask-cml: manage it with that one, or run "
            f"`dask cml delete {shlex.quote(record.name)}`"
        )


async def follow(state: ClusterState, record: Record, timeout: float) -> None:
    """Connect to the scheduler in a record, which another manager has launched."""
    await state.client.close()
    await join(state, record, timeout, record.scheduler.address, record.get_security())
    state.launcher.take_over(record)


async def join(
    state: ClusterState, record: Record, timeout: float, address: str | None, security: Security | None
) -> None:
    """Connect to a scheduler, which may be busy."""
    arguments = await asyncio.to_thread(tls.connection_args, security)
    await insist(state, timeout, lambda: state.client.join(str(address), arguments, record.id))


async def insist(state: ClusterState, timeout: float, request: Callable[[], Awaitable[Any]]) -> None:
    """Repeat a request until the scheduler answers, which may be busy.

    Raises
    ------
    CMLError
        If it does not answer within so many seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            await request()
            return
        except (OSError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline:
                raise CMLError(
                    f"the scheduler of cluster {state.fleet.name!r} at {state.client.address} did not answer "
                    f"within {timeout:g} s: {error!r}"
                ) from error
        await asyncio.sleep(_RETRY_INTERVAL)


async def replace_scheduler(state: ClusterState, why: str) -> SchedulerLost | None:
    """Connect a cluster to another scheduler, with the groups, targets and limits of the lost one.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    why : str
        Why the scheduler was lost.

    Returns
    -------
    SchedulerLost or None
        Why the cluster has no other scheduler, or why this manager leaves it alone. None: it has one.
    """
    limit, number, refused = setting("scheduler-restarts"), -1, False
    begun = since = hoped = time.monotonic()
    others = state.fleet.managers > 1
    while True:
        record = await _read(state)
        if record is None:
            return SchedulerLost(why)
        last = record.scheduler
        if last.closed is not None:
            return SchedulerLost(last.closed)
        if last.number != number:
            number = last.number
            since = hoped = time.monotonic()
        if number > state.launcher.place.number and last.protocol not in (None, PROTOCOL):
            words = f"its next scheduler speaks protocol {last.protocol} of dask-cml, this process {PROTOCOL}"
            return SchedulerLost(words, ended=False)
        try:
            if number > state.launcher.place.number and await _may_answer(state, record, since):
                hoped = time.monotonic()
                if last.address is not None:
                    await follow(state, record, state.options.scheduler_timeout)
                    return None
            elif state.observes and time.monotonic() - hoped < _patience(last.orphan_timeout, others):
                pass  # other managers are better suited
            elif state.observes and last.orphan_timeout is not None:
                return SchedulerLost(why)  # without another manager, the cluster would end as an orphan
            elif last.restarts >= limit and not refused:
                why += f"; it was the last of {limit} schedulers in a row" * bool(limit)
                return SchedulerLost(why)
            else:
                pause = _PAUSES[min(last.restarts, len(_PAUSES) - 1)]
                await asyncio.sleep(setting("quota-retry") if refused else pause)
                # A refused scheduler was not lost.
                if await _launch(state, record, why, last.restarts + (not refused), limit):
                    return None
                refused = False
        except LaunchRefused as error:
            why, refused = str(error), time.monotonic() - begun < state.options.pending_timeout
        except Exception as error:  # the platform's library may raise anything
            why, refused = str(error) if isinstance(error, CMLError) else repr(error), False
            logger.info("Scheduler %d of cluster %s not launched: %s", number + 1, record.name, why)
        await asyncio.sleep(_LOOK_INTERVAL)


async def _read(state: ClusterState) -> Record | None:
    """Return the cluster's record. The file system may fail for a while."""
    deadline = time.monotonic() + _UNREADABLE_FOR
    while (record := await asyncio.to_thread(state.record_keeper.read)) is None:
        with contextlib.suppress(OSError):
            if time.monotonic() > deadline or not await asyncio.to_thread(state.launcher.place.folder.is_dir):
                break
        await asyncio.sleep(_LOOK_INTERVAL)
    return record


async def _may_answer(state: ClusterState, record: Record, since: float) -> bool:
    """Return whether the scheduler that another manager launches answers, or has time left to begin."""
    last = record.scheduler
    if last.address is not None:
        return await liveness.is_alive(record)
    patience = state.options.pending_timeout + state.options.scheduler_timeout
    return time.monotonic() - since < patience and (last.maker is None or last.maker.lives() is not False)


def _patience(orphan_timeout: float | None, others: bool) -> float:
    """Return for how long an observer leaves the next scheduler to other managers, in seconds."""
    # A manager may be frozen, and count as gone. Without it, the scheduler would have waited as long.
    if others or orphan_timeout is not None:
        return max(_OBSERVER_PATIENCE, orphan_timeout or 0.0)
    return 0.0


async def _launch(state: ClusterState, record: Record, why: str, restarts: int, limit: int) -> bool:
    """Launch the next scheduler and all workers. Return False if another manager does."""
    begun, last = time.monotonic(), record.scheduler
    # The last answer may be newer than the scheduler's file.
    newer = last.number == state.launcher.place.number and state.fleet.revision > last.revision
    groups = state.fleet.to_json() if newer else dict(last.groups)
    number = last.number + 1
    wanted = first_state(
        state,
        record,
        groups=groups,
        hours=last.hours,
        restarts=restarts,
        orphan_timeout=last.orphan_timeout,
        activity=dict(last.activity),
        maker=asdict(Maker.this_process()),
    )
    if not await asyncio.to_thread(store.claim_scheduler, record, number, wanted):
        return False
    state.launcher.place = replace(state.launcher.place, number=number)
    if (lost := state.launcher.scheduler) is not None:
        log, said = await lost.last_lines(), lost.reported
        loss = find_cause(None, log, connected=True, noticed=False, closed=False, said=said)
        await lost.note_loss(loss)
        if lost.session_id == last.session:  # of others, the reason says why they did not start
            why = loss.words
    state.log(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
    state.log(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
    await state.client.close()
    await _stop(state, record)
    state.fleet.begin(groups)
    state.launcher.detach([each.name for each in state.fleet.members if each.gone])
    await state.launcher.relaunch(partial(join, state, record, state.options.scheduler_timeout))
    await state.record_keeper.write()
    state.log(f"Cluster {record.name} connected to another scheduler after {time.monotonic() - begun:.0f} s")
    return True


async def _stop(state: ClusterState, record: Record) -> None:
    """Stop the sessions of the lost scheduler, and of earlier attempts."""
    await state.record_keeper.write()
    now = await asyncio.to_thread(state.record_keeper.read) or record
    for session, key in now.sessions.items():
        state.api.adopt(session, key)
    try:
        await state.api.adopt_unanswered()  # their names are not used again
        await state.launcher.stop(state.api.live)
    except CMLError as error:  # the leader tries again
        logger.warning("Old sessions of cluster %s not stopped yet: %s", record.name, error)
