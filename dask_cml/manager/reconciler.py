"""Keeps a cluster at the requested number of workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any

import dask.config
from dask.utils import parse_timedelta

from dask_cml.aio import cancel
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.manager.backoff import Backoffs
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.launch import Launcher
from dask_cml.manager.leadership import Leadership
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.retirement import Retirements
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.manager.unmet import UnmetWork
from dask_cml.manager.watch import Watch
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.sessions.answers import CallFailed
from dask_cml.sessions.process import CMLWorker

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 3.0

#: Seconds within which the platform usually stops sessions. Until then nothing is launched, to free quota.
_STOPS_WITHIN = 5.0
#: Seconds without an answer from the scheduler, after which the manager disconnects if the platform does not
#: list the scheduler's session here. The platform lists a session only to the session that launched it.
_SILENCE = 120.0
#: Seconds within which the record disappears of a cluster that another process deletes, after its scheduler.
_DELETED_WITHIN = 3.0


class Outcome(Enum):
    """Why the manager stops keeping a cluster."""

    ENDED = "the scheduler's session has ended"
    OUT_OF_SIGHT = "nothing says whether the scheduler still runs"


class Reconciler:
    """Compares the wanted workers with their sessions and with the scheduler's workers, and acts.

    :meth:`step` launches and stops sessions until they match the fleet's keys. :meth:`run` finds lost
    sessions and replaces them. Both decide by a snapshot of the fleet, do their I/O, and pass the result to
    a method of the fleet, which checks again.

    Parameters
    ----------
    fleet : Fleet
        The cluster's workers.
    client : SchedulerClient
        Asks the scheduler.
    launcher : Launcher
        Creates sessions.
    leadership : Leadership
        Knows whether this manager leads.
    record_keeper : RecordKeeper
        Knows whether another process has removed the cluster.
    correct_state : callable
        Starts :meth:`step`, never twice at a time, and returns its future.
    log : callable
        Gets each line for the user.
    watch : bool
        Whether to look for nodes that have failed, too.
    interval : float, optional
        Time between two looks while nothing changes, in seconds. Default 3.
    """

    def __init__(
        self,
        fleet: Fleet[CMLWorker],
        client: SchedulerClient,
        launcher: Launcher,
        leadership: Leadership,
        record_keeper: RecordKeeper,
        *,
        correct_state: Callable[[], Awaitable[None]],
        log: Callable[[str], None],
        watch: bool = True,
        interval: float | None = None,
    ) -> None:
        self.backoffs = Backoffs(fleet, log)
        self._fleet = fleet
        self._client = client
        self._launcher = launcher
        self._api = launcher.api
        self._leadership = leadership
        self._record_keeper = record_keeper
        self._correct_state = correct_state
        self._log = log
        self._end: str | None = None
        self._outage: str | None = None
        self._missing_since: dict[str, float] = {}
        self._lost: dict[str, str] = {}
        self._stops: dict[asyncio.Task[None], set[str]] = {}
        self._told_waiting = False
        self._heard = time.monotonic()
        self._changed = asyncio.Event()
        self._retirements = Retirements(fleet, client, lambda: leadership.leads, log, self.poke)
        self._watch = Watch(fleet, self._api, client, self.poke) if watch else None
        self._interval = interval or _LOOK_INTERVAL
        self._unmet = UnmetWork(fleet, client, lambda: leadership.leads, log, self._interval)

    def poke(self, *_: object) -> None:
        """Look again now. Call this in the event loop."""
        self._changed.set()

    @property
    def problem(self) -> str | None:
        """The current problem, as a clause. None if there is none."""
        return (
            self._end or self.backoffs.words or self._outage or self._retirements.words or self._unmet.words
        )

    async def run(self) -> Outcome:
        """Keep the cluster until its scheduler ends. Return why it ended."""
        watching = [asyncio.create_task(each.run()) for each in (self._unmet, self._watch) if each]
        try:
            while (outcome := await self._look()) is None:
                # While sessions start, look as often as the platform may be asked.
                on_its_way = self._missing_since.keys() - self._fleet.waits.keys()
                interval = 0.1 if on_its_way else self._interval
                pause = min(interval, self.backoffs.shortest_pause or interval)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause)
            return outcome
        finally:
            await cancel(*watching)

    async def close(self) -> None:
        """Stop waiting for all that :meth:`step` has started."""
        await self._retirements.close()
        await cancel(*self._stops)

    async def _look(self) -> Outcome | None:
        """Find lost sessions, replace them, and run a step."""
        self._changed.clear()
        try:
            self._lost, outcome = await self._find_lost()
            if outcome is not None:
                return outcome
            await self._correct_state()
        except CallFailed:
            pass  # _tell_outage logs it once
        except CMLError as error:
            logger.warning("Cannot manage cluster %s: %s", self._fleet.name, error)
        except Exception:
            logger.exception("Cannot manage cluster %s", self._fleet.name)
        finally:
            self._lost = {}
        self._tell_outage()
        return None

    def _tell_outage(self) -> None:
        before, self._outage = self._outage, self._api.problem
        if self._outage and not before:
            logger.warning("Cannot manage cluster %s: %s", self._fleet.name, self._outage)
        elif before and not self._outage:
            logger.warning("Managing cluster %s again", self._fleet.name)

    # -- lost sessions

    async def _find_lost(self) -> tuple[dict[str, str], Outcome | None]:
        """Return the workers to replace, each with the reason."""
        now = time.monotonic()
        if scheduler_answers := await self._client.refresh():
            self._heard = time.monotonic()
        workers = self._fleet.wanted_workers
        here = self._retirements.here(workers.keys())
        for group in {self._fleet.group_of(key) for key in self._fleet.registered(here)}:
            self.backoffs.of(group).arrived()
        missing = workers.keys() - here
        self._missing_since = {key: self._missing_since.get(key, now) for key in missing}
        settled = all(worker.is_known_to_run for worker in workers.values())
        if not missing and settled and scheduler_answers:
            return {}, None
        listing = await self._api.sessions()
        scheduler = self._launcher.scheduler
        assert scheduler is not None
        if scheduler.update(listing):
            await self._say_why_it_ended()
            return {}, Outcome.ENDED
        if not scheduler_answers:
            if scheduler.session_id not in listing and now - self._heard > _SILENCE:
                self._end = (
                    f"the scheduler at {scheduler.address} has not answered for {_SILENCE:g} s, and CML does "
                    f"not list its session {scheduler.session_id} here; to check it, run "
                    "`dask cml list`"
                )
                self._log(f"Disconnected from cluster {self._fleet.name}: {self.problem}")
                return {}, Outcome.OUT_OF_SIGHT
            return {}, None
        ended = {key for key, worker in workers.items() if worker.update(listing)}
        self._tell_waiting()
        reasons = {key: "ended" if key in ended else self._why_late(key, workers[key]) for key in missing}
        return {key: await workers[key].failure(why, brief=True) for key, why in reasons.items() if why}, None

    async def _say_why_it_ended(self) -> None:
        scheduler = self._launcher.scheduler
        assert scheduler is not None
        unharmed = scheduler.info.get("status") in ("succeeded", "stopped")
        if unharmed and await self._record_keeper.is_removed(_DELETED_WITHIN):
            self._end = "another process shut it down"
        else:
            self._end = await scheduler.failure("ended")
        self._log(f"Cluster {self._fleet.name} shut down: {self.problem}")

    def _tell_waiting(self) -> None:
        waits = self._fleet.waits
        if waits and not self._told_waiting:
            n = f"{len(waits)} of {len(self._fleet.keys)} worker sessions"
            self._log(f"Cluster {self._fleet.name} waiting for room for {n}")
        self._told_waiting = bool(waits)

    def _why_late(self, key: str, worker: CMLWorker) -> str | None:
        now = time.monotonic()
        if self._fleet.has_registered(key):
            patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            if now - self._missing_since[key] > patience:
                return "lost a Dask worker"
        elif worker.runs_for > worker.options.worker_timeout:
            return f"did not connect within {worker.options.worker_timeout:g} s"
        return None

    def _replace(self, lost: dict[str, str]) -> None:
        """Replace lost workers in the fleet."""
        workers = self._fleet.workers
        # A session that succeeds after it was connected was closed on purpose, for example by a client.
        closed = {
            key
            for key in lost.keys() & workers.keys()
            if self._fleet.has_registered(key) and workers[key].info.get("status") == "succeeded"
        }
        # A session that was unwanted before the platform listed it has ended on purpose.
        gone = self._fleet.replace(lost)
        for key in gone:
            if key in closed:
                self._log(f"Worker {key} closed; launching a replacement")
        for group in self._fleet.groups:
            failed = [key for key in gone if key not in closed and self._fleet.group_of(key) == group]
            if failed:
                self.backoffs.of(group).failed(lost[failed[0]], len(failed))

    # -- the sessions

    async def step(self) -> None:
        """Launch and stop sessions until they match the wanted workers, as far as the platform answers."""
        with contextlib.suppress(CallFailed):
            # Not before this manager knows that it leads: another leader may have stopped these workers.
            self._replace(self._lost)
            await self._shrink()
            await self._close_unwanted()
            await self._launch_missing()

    async def choose(
        self,
        n: int,
        worker_key: Callable[[WorkerState], Hashable] | None = None,
        group: str = DEFAULT_GROUP,
        **more: Any,
    ) -> list[str]:
        """Choose the `n` sessions of a worker group that cost least to stop.

        Sessions that wait for room come first, then those that are not connected yet.

        Parameters
        ----------
        n : int
            Number of sessions.
        worker_key : callable, optional
            Groups workers that are closed together or not at all. Then the result may be fewer than `n`.
        group : str
            The worker group.
        **more
            Arguments of ``Scheduler.workers_to_close``.
        """
        wanted, waits = [*self._fleet.group(group).keys], self._fleet.waits
        present = self._fleet.arrived(self._client.observed)
        arrived = [key for key in wanted if key in present]
        absent = [key for key in reversed(wanted) if key not in present]
        chosen = sorted(absent, key=lambda key: key not in waits)[:n]
        n -= len(chosen)
        if not n:
            return chosen

        # Include workers of other groups and retiring ones, because the scheduler may name these first.
        workers = {name: key for key in self._fleet.workers for name in self._fleet.dask_names(key)}

        def session_of(worker: WorkerState) -> str:  # pickled by value for the scheduler
            return workers.get(str(worker.name), str(worker.name))

        shared = len(workers) > len(self._fleet.workers)
        among = n * self._fleet.group(group).options.processes if worker_key else len(workers)
        names = await self._client.cheapest(among, worker_key or (session_of if shared else None), **more)
        keys = {name: key for key in arrived for name in self._fleet.dask_names(key)}
        order = [keys[name] for name in names if name in keys]
        if worker_key is None:
            order += arrived[::-1]
        return chosen + list(dict.fromkeys(order))[:n]

    async def _shrink(self) -> None:
        """Remove excess sessions from the wanted ones, after scale()."""
        self._fleet.replace(self._retirements)  # another manager that led meanwhile wants these
        for group in self._fleet.groups:
            while (excess := self._fleet.group(group).excess) > 0:
                self._fleet.trim(await self.choose(excess, group=group), group)

    async def _close_unwanted(self) -> None:
        """Stop the sessions of unwanted workers that hold no data any more."""
        fleet = self._fleet
        retired = await self._retirements.carry_on(fleet.unwanted_workers.keys())
        # Some may be wanted again because of their data, and another manager may have stopped others.
        closing = {key: worker for key, worker in fleet.unwanted_workers.items() if key in retired}
        kept = [worker for key, worker in fleet.workers.items() if key not in closing]
        # Also sessions without a worker, such as the engine of a refused launch that could not be stopped
        # before.
        known = {each.session_id for each in (self._launcher.scheduler, *kept) if each is not None}
        known.update(*self._stops.values())
        if ids := self._api.live - known:
            await self._stop(ids)
        for key, worker in closing.items():
            if worker.session_id not in self._api.live:
                await worker.close()
                fleet.stopped(key)

    async def _stop(self, ids: set[str]) -> None:
        """Stop sessions in a task, so that a call that hangs blocks no other."""
        task = asyncio.create_task(self._api.stop(*sorted(ids)))
        self._stops[task] = ids
        task.add_done_callback(self._stopped)
        await asyncio.wait([task], timeout=_STOPS_WITHIN)
        if task.done():
            task.result()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        del self._stops[task]
        if not task.cancelled() and task.exception() is None:
            self.poke()

    async def _launch_missing(self) -> None:
        fleet = self._fleet
        wishes = {group.name: group.wishes for group in fleet.states}
        missing: dict[str, list[str]] = {}
        for key in fleet.missing:
            if not self.backoffs.of(group := fleet.group_of(key)).pause:
                missing.setdefault(group, []).append(key)
        if not missing:
            return
        refusals: dict[str, LaunchRefused] = {}
        failures: dict[str, list[CMLError]] = {}
        outages: list[CallFailed] = []
        queue = iter([(group, key) for group, keys in missing.items() for key in keys])

        async def launch() -> None:
            for group, key in queue:
                if outages:
                    return
                if group in refusals or not fleet.wants(key):
                    continue
                worker = self._launcher.make_worker(key)
                try:
                    await worker
                except LaunchRefused as error:
                    refusals[group] = error
                except CallFailed as error:
                    outages.append(error)
                except CMLError as error:
                    failures.setdefault(group, []).append(error)
                else:
                    fleet.launched(key, worker)

        # As many at once as the API allows, so that an exhausted quota refuses only a few of a hundred
        # launches.
        await asyncio.gather(*[launch() for _ in range(self._api.threads)])
        for group, keys in missing.items():
            if group in refusals:
                if numbers := fleet.refuse(keys, wishes[group], group):
                    self.backoffs.of(group).refused(*numbers, refusals[group].reason)
            elif group in failures:
                self.backoffs.of(group).failed(str(failures[group][0]), len(failures[group]))
            elif not outages:
                there = [key for key in fleet.workers if fleet.group_of(key) == group]
                self.backoffs.of(group).granted(len(there))
        if outages:
            raise outages[0]
        self.poke()
