"""What keeps a cluster at the workers that it was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import dask.config
from dask.utils import parse_timedelta
from distributed.objects import SchedulerInfo
from distributed.protocol import pickle

from dask_cml.aio import cancel
from dask_cml.checks import integer, seconds
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.retirement import Retirements
from dask_cml.manager.watch import Watch
from dask_cml.options import setting
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.process import CMLWorker

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

    from dask_cml.cluster import CMLCluster

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_INTERVAL = 3.0
_ANSWER_TIMEOUT, _GONE_TIMEOUT = 10.0, 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: So long a scheduler may be silent whose session the platform does not list here, as it lists to a session
#: only those that this one launched.
_SILENCE = 120.0
#: Within which the record goes of a cluster that another process ends, after its scheduler's end.
_DELETED_WITHIN = 3.0


class Reconciler:
    """Compare the wanted workers with their sessions and with what the scheduler sees, and act.

    :meth:`step` makes the fleet's sessions agree with what it is asked for, and :meth:`run` finds those that
    are lost and puts others in their place.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster that is kept.
    """

    def __init__(self, cluster: CMLCluster) -> None:
        self.cluster = cluster
        self._failure: str | None = None
        self._shortage: str | None = None
        self._outage: str | None = None
        self._failures = 0
        self._not_before = 0.0
        self._failure_limit: int = setting("failure-limit", integer, 1)
        self._quota_pause: float = setting("quota-retry", seconds)
        self._ceiling: tuple[int, float] | None = None
        self._arrived: set[str] = set()
        self._missing_since: dict[str, float] = {}
        self._told_waiting = False
        self._heard = time.monotonic()
        self._changed = asyncio.Event()
        self._retirements = Retirements(cluster)
        self._watch = Watch(cluster)

    def poke(self, *_: object) -> None:
        """Look again now. To be called in the event loop."""
        self._changed.set()

    def start_anew(self) -> None:
        """Forget earlier failures and refusals, as the user's own wish to scale does."""
        self._failures, self._not_before, self._ceiling = 0, 0.0, None
        self._failure = self._shortage = None

    @property
    def trouble(self) -> str | None:
        """What is wrong, in words: failures until a worker arrives, a quota until it grants more."""
        return self._failure or self._shortage or self._outage or self._retirements.words

    def affordable(self, n: int) -> int:
        """Return how many of `n` sessions may be asked for, given what the quota allowed lately.

        After ``cml.quota-retry`` one more than was granted is tried. When sessions have waited for room for
        as long, no more are asked for than there are.
        """
        if any(waited > self._quota_pause for waited in self.waits):
            n = min(n, len(self.cluster._fleet.keys))
        if self._ceiling is None:
            return n
        granted, since = self._ceiling
        return min(n, granted + (time.monotonic() - since > self._quota_pause))

    @property
    def waits(self) -> list[float]:
        """For how many seconds each wanted session that waits for room has done so."""
        return [waited for key in self.cluster._fleet.keys if (waited := self._waits_for(key)) is not None]

    def _waits_for(self, key: str) -> float | None:
        worker = None if key in self._arrived else self.cluster._fleet.workers.get(key)
        return None if worker is None else worker.waits_for

    async def run(self) -> None:
        """Keep the cluster until cancelled."""
        watching = asyncio.create_task(self._watch.run())
        try:
            await self._keep()
        finally:
            await cancel(watching)

    async def close(self) -> None:
        """Wait for nothing any more that :meth:`step` has begun."""
        await self._retirements.close()

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            try:
                lost = await self._find_lost()
                if self.cluster._leadership.leads:
                    self._replace(lost)
                await self.cluster._correct_state()
            except CallFailed:
                pass  # the outage is told once, however long it lasts
            except CMLError as error:
                logger.warning("The cluster %s cannot be looked after: %s", self.cluster.name, error)
            except Exception:
                logger.exception("The cluster %s cannot be looked after", self.cluster.name)
            self._tell_outage()
            # What is on its way is looked at as often as the platform is asked.
            on_its_way = any(self._waits_for(key) is None for key in self._missing_since)
            pause = 0.1 if on_its_way else _LOOK_INTERVAL
            if time.monotonic() < self._not_before:
                pause = min(pause, self._not_before - time.monotonic())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)

    async def step(self) -> None:
        """Make the sessions agree with the wanted workers, once, as far as the platform does its part."""
        with contextlib.suppress(CallFailed):
            await self._shrink()
            await self._close_unwanted()
            await self._launch_missing()

    def _tell_outage(self) -> None:
        before, self._outage = self._outage, self.cluster._api.trouble
        if self._outage and not before:
            logger.warning("The cluster %s cannot be looked after: %s", self.cluster.name, self._outage)
        elif before and not self._outage:
            logger.warning("The cluster %s is looked after again", self.cluster.name)

    async def choose(
        self, n: int, worker_key: Callable[[WorkerState], Hashable] | None = None, **more: Any
    ) -> list[str]:
        """Pick the `n` sessions whose end costs least.

        Those that wait for room come first, then those that have not arrived yet.

        Parameters
        ----------
        n : int
            Sessions.
        worker_key : callable, optional
            Groups workers that are closed together or not at all, so that they may be fewer.
        **more
            For ``Scheduler.workers_to_close``.
        """
        present = self.cluster._arrived
        wanted = self.cluster._fleet.keys
        arrived = [key for key in wanted if key in present]
        absent = [key for key in reversed(wanted) if key not in present]
        chosen = sorted(absent, key=lambda key: self._waits_for(key) is None)[:n]
        n -= len(chosen)
        if not n:
            return chosen

        def session_of(worker: WorkerState) -> str:  # pickled by value for the scheduler
            return str(worker.name).rpartition("-")[0]

        key = worker_key or (session_of if self.cluster.options.processes > 1 else None)
        names: Iterable[str] = ()
        # It names those that are being retired, too.
        retiring = 0 if worker_key else len(self._retirements)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            names = await self.answer(
                self.cluster.scheduler_comm.workers_to_close(
                    n=(n + retiring) * self.cluster.options.processes,
                    key=pickle.dumps(key) if key else None,
                    attribute="name",
                    **more,
                )
            )
        keys = {name: key for key in arrived for name in self.names(key)}
        order = [keys[name] for name in names if name in keys]
        if worker_key is None:
            order += arrived[::-1]
        return chosen + list(dict.fromkeys(order))[:n]

    def names(self, key: str) -> set[str]:
        """Return the names of the Dask workers in a session."""
        return set(self.cluster._fleet.dask_names(key))

    async def answer(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for what the scheduler answers, but not for long once it is most likely gone.

        Parameters
        ----------
        call : coroutine
            The call of the scheduler.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If it does not answer.
        """
        asking = asyncio.ensure_future(call)
        told_of_changes = self.cluster._watch_worker_status_task  # ends with its connection
        try:
            if not told_of_changes.done():
                await asyncio.wait(
                    {asking, told_of_changes}, timeout=_ANSWER_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
                )
            return await asyncio.wait_for(asking, _GONE_TIMEOUT)
        finally:
            asking.cancel()

    async def _find_lost(self) -> dict[str, str]:
        """Return the workers that are not to be waited for any more, each with the reason."""
        cluster, now = self.cluster, time.monotonic()
        if scheduler_answers := await self._refresh():
            self._heard = time.monotonic()
        observed = cluster.observed
        workers = cluster._fleet.wanted_workers
        here = {key for key in workers if self.names(key) <= observed}
        if here - self._arrived:
            self._failures, self._failure = 0, None
        self._arrived = (self._arrived | here) & workers.keys()
        missing = workers.keys() - here
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        settled = all(worker.is_known_to_run for worker in workers.values())
        if not missing and settled and scheduler_answers:
            return {}
        listing = await cluster._api.sessions()
        if cluster.scheduler.update(listing):
            await self._scheduler_ended()
            return {}
        if not scheduler_answers:
            if cluster.scheduler.session_id not in listing and now - self._heard > _SILENCE:
                self._scheduler_is_silent()
            return {}
        ended = {key for key, worker in workers.items() if worker.update(listing)}
        self._tell_waiting()
        reasons = {key: "ended" if key in ended else self._why_late(key, workers[key]) for key in missing}
        return {key: await workers[key].failure(why, brief=True) for key, why in reasons.items() if why}

    def _tell_waiting(self) -> None:
        waits = self.waits
        if waits and not self._told_waiting:
            n = f"{len(waits)} of {len(self.cluster._fleet.keys)} worker sessions"
            self.cluster._log(f"The cluster {self.cluster.name} waits for room for {n}")
        self._told_waiting = bool(waits)

    def _why_late(self, key: str, worker: CMLWorker) -> str | None:
        now = time.monotonic()
        if key in self._arrived:
            patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            if now - self._missing_since[key] > patience:
                return "lost a Dask worker"
        elif worker.runs_for > worker.options.worker_timeout:
            return f"did not register within {worker.options.worker_timeout:g} s"
        return None

    async def _refresh(self) -> bool:
        """Learn the scheduler's workers; return whether it answers.

        Its worker-status plugin tells changes as they come, but to one manager only: another one that
        connects takes its place without a word.
        """
        cluster = self.cluster
        try:
            ncores = await self.answer(cluster.scheduler_comm.ncores())
            if ncores.keys() != cluster.scheduler_info["workers"].keys():
                info = await self.answer(cluster.scheduler_comm.identity())
                cluster.scheduler_info = SchedulerInfo(info)
        except (OSError, asyncio.TimeoutError):
            return False
        return True

    async def _scheduler_ended(self) -> None:
        unharmed = self.cluster.sessions[0].status in ("succeeded", "stopped")
        if unharmed and await self.cluster._record_keeper.is_removed(_DELETED_WITHIN):
            self._failure = "another process has ended it"
        else:
            self._failure = await self.cluster.scheduler.failure("ended")
        self.cluster._log(f"The cluster {self.cluster.name} ends: {self.trouble}")
        self.cluster._end_soon(shutdown=True)

    def _scheduler_is_silent(self) -> None:
        scheduler = self.cluster.scheduler
        self._failure = (
            f"the scheduler at {scheduler.address} has not answered for {_SILENCE:g} s, and the platform "
            f"does not tell this session what became of the scheduler's, {scheduler.session_id}"
        )
        self.cluster._log(f"The cluster {self.cluster.name} is left: {self.trouble}")
        self.cluster._end_soon(shutdown=False)

    def _replace(self, lost: dict[str, str]) -> None:
        cluster = self.cluster
        # What was not wanted any more while the platform was asked has ended on purpose.
        gone = cluster._fleet.replace(lost)
        closed = [key for key in gone if self._was_closed(key)]
        for key in closed:
            cluster._log(f"The worker {key} was closed; another one takes its place")
        if failed := [key for key in gone if key not in closed]:
            self._count_failure(lost[failed[0]], len(failed))

    def _was_closed(self, key: str) -> bool:
        """Whether a worker ended well after it had come, as when a client retires it."""
        session = self.cluster._fleet.workers[key].session
        return key in self._arrived and session is not None and session.status == "succeeded"

    def _count_failure(self, reason: str, n: int) -> None:
        self._failures += 1
        pause = min(_FIRST_PAUSE * 2 ** (self._failures - 1), _LONGEST_PAUSE)
        self._not_before = time.monotonic() + (pause if self._failures > 1 else 0)
        more = f" (and {n - 1} more)" if n > 1 else ""
        self._failure = f"{reason}{more}"
        self.cluster._log(f"A worker failed: {self.trouble}")
        if self.gave_up:
            self._failure = f"no new workers after {self._failures} failures in a row: {reason}"
            self.cluster._log(f"The cluster launches {self.trouble}. scale() makes it try again.")

    @property
    def gave_up(self) -> bool:
        """Whether no worker is launched any more, after too many failures, until `start_anew`."""
        return self._failures >= self._failure_limit

    async def _shrink(self) -> None:
        """Take those out of the wanted workers that scale() found to be too many."""
        fleet = self.cluster._fleet
        fleet.replace(self._retirements)  # another manager that led meanwhile counts these
        while (excess := fleet.excess) > 0:
            fleet.trim(await self.choose(excess))

    async def _close_unwanted(self) -> None:
        """Stop the sessions of workers that are not wanted and hold nothing any more."""
        cluster, fleet = self.cluster, self.cluster._fleet
        retired = await self._retirements.carry_on(fleet.unwanted_workers.keys())
        # It may have found that some are wanted nevertheless, and another manager may have stopped others.
        closing = {key: worker for key, worker in fleet.unwanted_workers.items() if key in retired}
        kept = [worker for key, worker in fleet.workers.items() if key not in closing]
        # Also what nobody has, such as half a session of a refused launch that could not be stopped then.
        if ids := cluster._api.live - {process.session_id for process in (cluster.scheduler, *kept)}:
            await cluster._api.stop(*sorted(ids))
        for key, worker in closing.items():
            await worker.close()
            fleet.stopped(key)

    async def _launch_missing(self) -> None:
        cluster = self.cluster
        if self.gave_up or time.monotonic() < self._not_before:
            return
        fleet = cluster._fleet
        wish, missing = fleet.wish, fleet.missing
        if not missing:
            return
        refusals: list[LaunchRefused] = []
        failures: list[CMLError] = []
        outages: list[CallFailed] = []
        queue = iter(missing)

        async def launch() -> None:
            for key in queue:
                if refusals or outages:
                    return
                if not fleet.wants(key):
                    continue
                worker = cluster.make_worker(key)
                try:
                    await worker
                except LaunchRefused as error:
                    refusals.append(error)
                except CallFailed as error:
                    outages.append(error)
                except CMLError as error:
                    failures.append(error)
                else:
                    fleet.launched(key, worker)

        # No more than the API takes at once, so that a quota met by a hundred launches is not asked for each.
        await asyncio.gather(*[launch() for _ in range(cluster._api.threads)])
        if refusals:
            self._accept_refusal(missing, wish, refusals[0])
        elif outages:
            raise outages[0]
        elif failures:
            self._count_failure(str(failures[0]), len(failures))
        elif self._ceiling is None or len(fleet.workers) > self._ceiling[0]:
            self._shortage = None
        self.poke()

    def _accept_refusal(self, missing: Iterable[str], wish: int, refusal: LaunchRefused) -> None:
        numbers = self.cluster._fleet.refuse(missing, wish)
        if numbers is None:
            return
        granted, asked = numbers
        known = self._ceiling is not None and self._ceiling[0] == granted
        self._ceiling = (granted, time.monotonic())
        self._shortage = f"{granted} of {asked} workers granted: {refusal.reason}"
        if not known:
            self.cluster._log(f"The cluster {self.cluster.name} has {self._shortage}")
