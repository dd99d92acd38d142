"""Another scheduler for a cluster whose scheduler is lost: who launches it, and when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from dask_cml import protocol
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.options import setting
from dask_cml.output import Logger
from dask_cml.records import liveness, store
from dask_cml.records.record import Record
from dask_cml.remote import Remote
from dask_cml.rpc import NO_ANSWER
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.timing import timing

if TYPE_CHECKING:
    from dask_cml.keeper.kept_cluster import KeptCluster

logger = Logger(__name__)

#: Seconds before the first, the second and any later scheduler in a row.
_PAUSES = (0.0, 10.0, 30.0)
#: Seconds for which a record may be unreadable while the cluster's folder exists.
_UNREADABLE_FOR = 30.0


class SchedulerLost(Exception):
    """The cluster has no other scheduler, or this process does not launch one. The message is the reason.

    Parameters
    ----------
    why : str
        The reason.
    ended : bool
        Whether the scheduler's session has ended. Otherwise, nothing says whether it still runs.
    """

    def __init__(self, why: str, *, ended: bool = True) -> None:
        super().__init__(why)
        self.ended = ended


class Failover:
    """Finds out whether a silent scheduler has ended, and connects its cluster to another one then.

    Each scheduler of a cluster has a number, and the process that creates the file for a number launches it.
    That is the keeper or, if the keeper has vanished, too, another process after some time. All processes
    follow the last number in the record.

    Parameters
    ----------
    cluster : KeptCluster
        The cluster.
    remote : Remote
        Talks to the scheduler.
    api : WorkersAPI
        Lists the scheduler's session.
    """

    def __init__(self, cluster: KeptCluster, remote: Remote, api: WorkersAPI) -> None:
        self._cluster, self._remote, self._api = cluster, remote, api

    async def check(self, record: Record) -> None:
        """Find out whether the scheduler has ended. Connect to another one then.

        Parameters
        ----------
        record : Record
            The cluster's record, also an old one.

        Raises
        ------
        SchedulerLost
            If the cluster has no other scheduler, or this process leaves it alone.
        """
        why = await self._why_lost(record)
        if why is not None and not self._remote.connected:
            await self._connect_to_next(record, why)

    async def _why_lost(self, known: Record) -> str | None:
        """Return why the scheduler has ended. Return None if it may answer again."""
        record, scheduler = await self._read(known), self._cluster.scheduler
        if record.scheduler.number > self._cluster.place.number:
            return "another process replaces it"
        with contextlib.suppress(CMLError):
            listing = await self._api.sessions()
            if isinstance(scheduler, CMLScheduler):
                scheduler.update(listing)
        if isinstance(scheduler, CMLScheduler) and scheduler.has_ended:
            return await self._why_it_ended(record, scheduler)
        silent = time.monotonic() - self._remote.heard
        if silent <= timing.silence + timing.answer:
            return None
        if not await asyncio.to_thread(liveness.spoke_lately, record):
            return f"its scheduler has been silent for {timing.silence:g} s"
        raise SchedulerLost(
            f"the scheduler at {self._remote.address} has not answered for {silent:.0f} s, although it "
            "runs; to check it, run `dask cml list`",
            ended=False,
        )

    async def _why_it_ended(self, record: Record, scheduler: CMLScheduler) -> str:
        if scheduler.info.get("status") in ("succeeded", "stopped"):
            for _ in range(10):  # another process that deletes the cluster removes its record next
                await self._read(record)
                await asyncio.sleep(timing.goodbye / 10)
        return await scheduler.failure("ended")

    async def _read(self, record: Record, why: str = "another process shut it down") -> Record:
        """Return the cluster's record as it is now. The file system may fail for a while.

        Raises
        ------
        SchedulerLost
            If the cluster was shut down: its record is gone, or says so.
        """
        deadline = time.monotonic() + _UNREADABLE_FOR
        while True:
            latest = await asyncio.to_thread(store.find_again, record)
            if latest is not None:
                break
            with contextlib.suppress(OSError):
                exists = await asyncio.to_thread(self._cluster.place.folder.is_dir)
                if not exists or time.monotonic() > deadline:
                    raise SchedulerLost(why)
            await asyncio.sleep(timing.retry)
        if latest.scheduler.closed is not None:
            raise SchedulerLost(latest.scheduler.closed)
        return latest

    async def _connect_to_next(self, record: Record, why: str) -> None:
        """Connect to the scheduler that replaces the lost one.

        Raises
        ------
        SchedulerLost
            If no other scheduler replaces it.
        """
        cluster = self._cluster
        begin = since = time.monotonic()
        number, refused = -1, False
        while True:
            record = await self._read(record, why)
            last = record.scheduler
            if last.number != number:
                number, since = last.number, time.monotonic()
            if last.protocol not in (None, protocol.PROTOCOL) and number > cluster.place.number:
                why = (
                    f"its next scheduler speaks protocol {last.protocol} of dask-cml, not {protocol.PROTOCOL}"
                )
                raise SchedulerLost(why, ended=False)
            waited = time.monotonic() - since
            try:
                if number > cluster.place.number and await self._may_answer(record, waited):
                    if last.address is not None:
                        await cluster.join_other(record)
                        return
                elif cluster.keeper is None and not cluster.may_keep:
                    if waited > 2 * timing.succession:
                        raise SchedulerLost(why, ended=False)
                elif cluster.keeper is not None or waited > timing.succession:
                    if await self._answers(record):
                        return
                    if await self._launch_next(record, why, refused):
                        return
                    refused = False
            except LaunchRefused as error:
                why, refused = str(error), time.monotonic() - begin < cluster.options.pending_timeout
            except CMLError as error:
                why, refused = str(error), False
                logger.info("Scheduler %d of cluster %s not reached: %s", number + 1, record.name, why)
            except SchedulerLost:
                raise
            except Exception as error:  # the platform's library may raise anything
                why, refused = repr(error), False
                logger.info("Scheduler %d of cluster %s not launched: %s", number + 1, record.name, why)
            await asyncio.sleep(timing.retry)

    async def _answers(self, record: Record) -> bool:
        """Return whether the scheduler answers, although its session seems to have ended."""
        with contextlib.suppress(*NO_ANSWER):
            hello = await self._remote.ask(protocol.HELLO, timing.retry)
            return {"record": record.id, "number": record.scheduler.number}.items() <= dict(hello).items()
        return False

    async def _may_answer(self, record: Record, waited: float) -> bool:
        """Return whether the scheduler that another process launches answers, or has time left to start."""
        last = record.scheduler
        if last.address is not None:
            return await liveness.is_alive(record)
        patience = self._cluster.options.pending_timeout + self._cluster.options.scheduler_timeout
        return waited < patience and (last.maker is None or last.maker.lives() is not False)

    async def _launch_next(self, record: Record, why: str, refused: bool) -> bool:
        """Launch the next scheduler after a pause. Return False if another process does.

        Parameters
        ----------
        record : Record
            The cluster's record.
        why : str
            Why the last scheduler was lost or not launched.
        refused : bool
            Whether the platform has just refused to launch it. Then nothing more was lost.

        Raises
        ------
        SchedulerLost
            If too many schedulers were lost in a row.
        """
        limit, restarts = setting("scheduler-restarts"), record.scheduler.restarts
        if refused:
            await asyncio.sleep(setting("quota-retry"))
        else:
            if restarts >= limit:
                raise SchedulerLost(
                    f"{why}; it was the last of {limit} schedulers in a row" if limit else why
                )
            await asyncio.sleep(_PAUSES[min(restarts, len(_PAUSES) - 1)])
            restarts += 1
        return await self._cluster.launch_next(record, why, restarts, limit)
