"""Another scheduler for a cluster whose scheduler is lost: who launches it, and when."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dask_cml import protocol
from dask_cml.cancellation import files_in_time, to_the_end
from dask_cml.errors import CallFailed, CMLError, LaunchRefused, NoAnswer, NoSuchCluster, SessionFailed
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.protocol import Rank
from dask_cml.records import store
from dask_cml.records.history import find_ended
from dask_cml.records.store import Record, SchedulerState
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sharing.keeper import Keeper, Link
from dask_cml.timing import timing

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

logger = get_logger(__name__)

#: Seconds before the first, the second and any later scheduler in a row.
_PAUSES = (0.0, 10.0, 30.0)


class SchedulerLost(Exception):
    """The cluster is over: it has lost its scheduler, and gets no other one. The message is the reason."""


class Failover:
    """Finds out whether a silent scheduler has ended, and connects its cluster to another one then.

    Silence is no end, see :func:`dask_cml.records.store.why_ended`. To the process in the scheduler's
    session, only the end of its standard input is a sign.

    Each scheduler of a cluster has a number, and the process that creates the file for a number launches it.
    That is the keeper or, if the keeper has vanished, too, another process after some time. All processes
    follow the last number in the record.

    Parameters
    ----------
    link : Link
        Talks to the scheduler.
    cluster : CMLCluster
        The cluster.
    """

    def __init__(self, link: Link, cluster: CMLCluster) -> None:
        self._link, self._cluster = link, cluster

    # -- has it ended?

    async def check(self, record: Record) -> None:
        """Find out whether the scheduler has ended. Connect to another one then.

        Parameters
        ----------
        record : Record
            The cluster's record, also an old one.

        Raises
        ------
        SchedulerLost
            If the cluster is over.
        RecordUnreadable, NoAnswer
            If nobody can say, because the record cannot be read now.
        """
        if self._link.board.closed is not None:
            raise SchedulerLost(self._link.board.closed)
        why = await self._why_lost(record)
        if why is not None and not self._link.connected:
            await self._connect_to_next(record, why)

    async def _why_lost(self, known: Record) -> str | None:
        """Return why the scheduler has ended. Return None without a proof."""
        record, scheduler = await self._read(known), self._cluster.scheduler
        assert scheduler is not None
        if self._cluster._rank is Rank.RESIDENT:  # whose standard input ends with the scheduler
            return None
        if record.scheduler.number > self._cluster.place.number:
            return "another process replaces it"
        with contextlib.suppress(CMLError):
            # A platform that hangs must not keep this process from connecting again.
            listing = await self._cluster.api.sessions_within(timing.listing)
            if listing is not None:
                scheduler.update(listing)
        is_listed = scheduler.is_listed and not scheduler.is_missing
        listed = {scheduler.session_id: scheduler.info} if is_listed or scheduler.has_ended else {}
        why = await files_in_time(store.why_ended, record, listed)
        if why is None:
            return None
        if scheduler.info.get("status") != "failed":
            for _ in range(10):  # another process that deletes the cluster removes its record next
                await self._read(record)
                await asyncio.sleep(timing.goodbye / 10)
        if await self._were_all_stopped(scheduler):
            raise SchedulerLost("somebody stopped all its sessions, as `stop_workers()` of CML does")
        return await scheduler.failure("ended") if scheduler.has_ended else why

    async def _were_all_stopped(self, scheduler: CMLScheduler) -> bool:
        """Return whether somebody has stopped the scheduler's session together with all worker sessions.

        The platform lists them only in the session that launched them. So they have not ended with that one.
        """
        if not self._cluster.sharing.is_keeper or scheduler.info.get("status") != "stopped":
            return False
        try:
            listing = await self._cluster.api.sessions()
        except CMLError:
            return False
        is_any_stopped, workers = False, self._cluster.processes.workers()
        for worker in workers:
            worker.update(listing)
            is_stopped = worker.info.get("status") == "stopped"
            is_any_stopped |= is_stopped
            # A worker that was stopped first may have been replaced, before the scheduler was stopped.
            if not is_stopped and worker.launched_for > timing.stray:
                return False
        return is_any_stopped or not workers

    async def _read(self, record: Record, why: str | None = None) -> Record:
        """Return the cluster's record as it is now.

        Raises
        ------
        SchedulerLost
            If the cluster was shut down: its record is gone, or says so.
        RecordUnreadable, NoAnswer
            If the record cannot be read now.
        """
        try:
            latest = await files_in_time(store.read_again, record)
        except NoSuchCluster:
            ended = await files_in_time(find_ended, record.id)
            deleted = f"another process shut it down, or deleted its folder {record.folder}"
            raise SchedulerLost(why or deleted if ended is None else ended.why) from None
        if latest.scheduler.closed is not None:
            raise SchedulerLost(latest.scheduler.closed)
        return latest

    # -- another one

    async def _connect_to_next(self, record: Record, why: str) -> None:
        """Let the cluster follow the scheduler that replaces the lost one, or launch it.

        Raises
        ------
        SchedulerLost
            If no other scheduler replaces it.
        """
        cluster = self._cluster
        # The numbers of the last scheduler in the record, and of the last one that has ended. A later one may
        # still answer, also if only the platform's answer to its launch was lost.
        number, lost = -1, cluster.place.number
        # When the platform has refused a launch first, and whether the last attempt of this process has
        # launched no scheduler as far as it knows. Then none was lost.
        refused, not_launched = None, False
        while True:
            try:
                record = await self._read(record, why)
            except (store.RecordUnreadable, NoAnswer) as error:
                cluster.sharing.note_unreached(str(error))
                await asyncio.sleep(timing.retry)
                continue
            last = record.scheduler
            if cluster.sharing.is_keeper and last.term > cluster.sharing.keeper.term:
                await cluster.sharing.yield_cluster()  # another process has kept the cluster meanwhile
            if last.number != number:
                number, since = last.number, time.monotonic()
            is_next = number > lost
            if is_next and last.protocol not in (None, protocol.PROTOCOL):
                spoken = f"protocol {last.protocol} of dask-cml, not {protocol.PROTOCOL}"
                cluster.sharing.note_unreached(f"its next scheduler speaks {spoken}")
                await asyncio.sleep(timing.retry)
                continue
            if is_next and last.address is not None:
                await self._follow(record)
                return
            if self._is_to_launch(last, time.monotonic() - since):
                # A file system may fail between the claim of this process and its launch.
                not_lost = not_launched or (number > cluster.place.number and last.keeper == self._link.id)
                not_launched = False
                try:
                    known = self._known(last)  # it may answer although its session seemed to have ended
                    if known and known.address and await known.answers(known.address, timing.retry):
                        return
                    if await self._launch_next(record, why, not_lost):
                        return
                except SchedulerLost:
                    raise
                except Exception as error:  # the platform's library may raise anything
                    await cluster.processes.stop_launching()  # until another scheduler runs
                    why = str(error) if isinstance(error, CMLError) else repr(error)
                    logger.info("Scheduler %d of cluster %s not reached: %s", number + 1, record.name, why)
                    if isinstance(error, SessionFailed):
                        lost = cluster.place.number
                    if isinstance(error, LaunchRefused):
                        refused = refused or time.monotonic()
                        not_launched = time.monotonic() - refused < cluster.options.pending_timeout
                    else:
                        not_launched = isinstance(error, CallFailed)
            cluster.sharing.note_unreached(why)
            await asyncio.sleep(timing.retry)

    def _is_to_launch(self, last: SchedulerState, waited: float) -> bool:
        """Return whether this process launches the next scheduler if nobody else has done so until now."""
        if last.number > self._cluster.place.number and last.keeper != self._link.id:
            patience = self._cluster.options.pending_timeout + self._cluster.options.scheduler_timeout
            if waited < patience and last.maker is not None and last.maker.lives() is not False:
                return False  # another process launches it, and it has time left to start
        # The process in the scheduler's session ends with that. Another keeper, if there is any, goes first.
        is_orphaned = last.rank is Rank.RESIDENT or last.manager is None or waited > timing.succession
        return self._cluster.sharing.is_keeper or (is_orphaned and self._link.rank in (Rank.OWNER, Rank.USER))

    async def _launch_next(self, record: Record, why: str, not_lost: bool) -> bool:
        """Launch the next scheduler after a pause. Return False if another process does, or the last answers.

        Parameters
        ----------
        record : Record
            The cluster's record.
        why : str
            Why the last scheduler was lost or not launched.
        not_lost : bool
            Whether the platform has just not launched it, or this process has failed to. Then none was lost.

        Raises
        ------
        SchedulerLost
            If too many schedulers were lost in a row.
        """
        limit, restarts = setting("scheduler-restarts"), record.scheduler.restarts
        if not_lost:
            await asyncio.sleep(setting("quota-retry"))
        else:
            if restarts >= limit:
                raise SchedulerLost(
                    f"{why}; it was the last of {limit} schedulers in a row" if limit else why
                )
            await asyncio.sleep(_PAUSES[min(restarts, len(_PAUSES) - 1)])
            restarts += 1
        latest, cluster = await self._read(record, why), self._cluster
        if latest.scheduler.address != record.scheduler.address:  # it answers by now, only late
            return False
        lost_at, workers = cluster.sharing.unreached_since or time.monotonic(), cluster.processes
        # Launch it once more under its number, because a launch under another one waits for none that hangs.
        # But only if its file, which others read, still says what is wanted.
        last = latest.scheduler
        again = last.number == cluster.place.number and last.groups == cluster.groups.described
        again = again and not_lost and self._has_only_claimed(last)
        if not again and not await self._claim(record, why, restarts, limit):
            return False
        async with cluster._lock:
            await workers.start(lambda: workers.launch(workers.ready, unasked=True))
        cluster._begin_looking()
        cluster._tell(
            f"Cluster {record.name} connected to another scheduler after {time.monotonic() - lost_at:.0f} s"
        )
        return True

    async def _follow(self, record: Record) -> None:
        """Follow the last scheduler in the record as soon as it answers, which another process may keep."""
        cluster, sharing = self._cluster, self._cluster.sharing
        if sharing.is_keeper:
            await sharing.yield_cluster()
        if record.scheduler.number > cluster.place.number:
            cluster._tell(
                f"Cluster {record.name} follows another scheduler, which another process has launched"
            )
        await sharing.enter(record)

    async def _claim(self, record: Record, why: str, restarts: int, limit: int) -> bool:
        """Prepare the launch of the next scheduler and all workers. Return False if another process does."""
        cluster, sharing, last = self._cluster, self._cluster.sharing, record.scheduler
        cluster.groups.given(await files_in_time(store.given_names, record))
        anew = not sharing.is_keeper
        keeper = Keeper(cluster, self._link, record, last.term) if anew else sharing.keeper
        # Before the claim, whose file says what is wanted after the mail. If another process claims it, that
        # one has the same mail, and this one follows. If the lost scheduler answers, the report says `taken`.
        keeper.go_on(last, anew=anew)
        number, board = last.number + 1, keeper.first_board(last, restarts)
        claim = asyncio.to_thread(store.claim_scheduler, record, number, board)
        if not await to_the_end(claim):  # a process that leaves must know its claim, to give it up
            return False
        keeper.term = board["term"]
        sharing.keep(keeper)
        if (lost := self._known(last)) is not None:
            loss = await lost.why_lost()
            await lost.note_loss(loss)
            if lost.session_id is not None and lost.session_id == last.session:
                why = loss.words
        cluster._tell(f"Scheduler of cluster {record.name} lost, with tasks and results: {why}")
        cluster._tell(f"Cluster {record.name} launching another scheduler ({restarts} of {limit} in a row)")
        await cluster._stop_looking()
        await sharing.forget_scheduler()
        async with cluster._lock:
            await self._stop_all(record, keeper)
            cluster._move(replace(cluster.place, number=number))
            self._link.rank = Rank.OWNER  # the next sessions belong to this one
            keeper.renew()
        return True

    def _has_only_claimed(self, last: SchedulerState) -> bool:
        """Return whether this process has claimed to launch the last scheduler, and has not launched it."""
        return last.keeper == self._link.id and self._known(last) is None

    def _known(self, last: SchedulerState) -> CMLScheduler | None:
        """Return the last scheduler. None: this process has neither launched nor followed it."""
        scheduler: CMLScheduler | None = self._cluster.scheduler
        return scheduler if scheduler is not None and scheduler.place.number == last.number else None

    async def give_up(self, record: Record) -> None:
        """Let another process launch the next scheduler if this one, which leaves, has claimed that only."""
        latest = await asyncio.to_thread(store.refreshed, record)
        if self._has_only_claimed(latest.scheduler):
            await asyncio.to_thread(store.give_up_scheduler, latest)

    async def _stop_all(self, record: Record, keeper: Keeper) -> None:
        """Stop the sessions of a lost scheduler, and of earlier attempts to replace it."""
        processes, api = self._cluster.processes, self._cluster.api
        launched = processes.launched
        await keeper.journal.write(launched)
        latest = await refreshed_in_time(record)
        await processes.close_others()
        await processes.cancel("retire")
        for session, name in latest.sessions.items():
            api.adopt(session, name)
        await processes.stop({*api.live})
        await keeper.journal.write(launched)


async def refreshed_in_time(record: Record) -> Record:
    """Return a record as it is now, or else as it was if nobody can read it in time."""
    with contextlib.suppress(NoAnswer):
        return await files_in_time(store.refreshed, record)
    return record
