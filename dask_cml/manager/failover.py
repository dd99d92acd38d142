"""Launches another scheduler after the scheduler's session was lost, or follows the manager that does.

Each scheduler of a cluster has a number. The manager that creates the file ``wanted-<number>.json`` launches
the scheduler with this number, with all workers at the same moment. The other managers connect to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import asdict, replace

from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.startup import first_state, follow, join
from dask_cml.manager.state import ClusterState
from dask_cml.options import setting
from dask_cml.records import liveness, store
from dask_cml.records.record import Maker, Record
from dask_cml.sessions.causes import find_cause

logger = logging.getLogger(__name__)

#: Seconds before the first, the second and each later scheduler in a row.
_PAUSES = (0.0, 10.0, 30.0)
#: Seconds for which an observer waits for other managers, which are better suited.
_OBSERVER_PATIENCE = 60.0
_LOOK_INTERVAL = 1.0
#: Seconds for which a record may be unreadable while the cluster's folder exists.
_UNREADABLE_FOR = 30.0


async def replace_scheduler(state: ClusterState, why: str) -> str | None:
    """Connect a cluster to another scheduler, with the groups, targets and limits of the lost one.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    why : str
        Why the scheduler was lost.

    Returns
    -------
    str or None
        Why the cluster has no other scheduler. None: it has one.
    """
    limit, number, since = setting("scheduler-restarts"), -1, 0.0
    begun, refused = time.monotonic(), False
    while True:
        record = await _read(state)
        if record is None:
            return why
        last = record.scheduler
        if last.closed is not None:
            return last.closed
        try:
            if last.number > state.launcher.place.number and await _answers(state, last.number):
                return None
            if last.number != number:
                number, since = last.number, time.monotonic()
            if state.observes and state.fleet.managers > 1 and time.monotonic() - since < _OBSERVER_PATIENCE:
                await asyncio.sleep(_LOOK_INTERVAL)
                continue
            if state.observes and last.orphan_timeout is not None:
                return why  # without another manager, the cluster would end as an orphan
            if last.restarts >= limit and not refused:
                return f"{why}; it was the last of {limit} schedulers in a row" if limit else why
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


async def _answers(state: ClusterState, number: int) -> bool:
    """Follow the scheduler that another manager launches. Return False if it was lost, too."""
    deadline = time.monotonic() + state.options.pending_timeout + state.options.scheduler_timeout
    while time.monotonic() < deadline:
        record = await asyncio.to_thread(state.record_keeper.read)
        if record is None or record.scheduler.number != number or record.scheduler.closed:
            return False
        if record.scheduler.address is not None:
            if not await liveness.is_alive(record):
                return False
            place = state.launcher.place
            try:
                await follow(state, record)
            except BaseException:
                state.launcher.place = place
                raise
            return True
        if record.scheduler.maker is not None and record.scheduler.maker.lives() is False:
            return False
        await asyncio.sleep(_LOOK_INTERVAL)
    return False


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
        groups,
        last.hours,
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
    await state.client.leave()
    await _stop(state, record)
    state.fleet.begin(groups)
    state.launcher.detach([each.name for each in state.fleet.members if each.gone])
    await state.launcher.relaunch(lambda: join(state, record, state.options.scheduler_timeout))
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
