"""What adaptive scaling decides, over time, for sessions that take long to start.

The clock, the sessions and the scheduler are simulated: nothing here waits, and each run is the same.
"""

from __future__ import annotations

import asyncio
import heapq
from types import SimpleNamespace

import pytest

from dask_cml import CMLAdaptive
from dask_cml.core import adaptive
from dask_cml.core.policy import Snapshot, Supply, Work

TICK = 0.05
MAXIMUM = 20


class Sessions(dict):
    """The sessions that are launched, which are the wanted ones of the group."""

    def __call__(self, group):
        return [*self]


class Simulation:
    """As much of a cluster and its scheduler as adaptive scaling uses, with equal tasks.

    A session takes `start` seconds to start, and a task `task` seconds. Unless the scheduler knows that, it
    takes tasks to last 0.5 s until one is over.
    """

    name = "mine"
    sharing = SimpleNamespace(keeps=True)
    _is_keeper = True

    def __init__(self, start, task=1.0, *, is_known=False, n_workers=0, **options):
        self.now, self.start, self.task, self.is_known = 0.0, start, task, is_known
        self.n_waiting = 0
        self.task_ends, self.arrivals, self.workers, self.connected = {}, {}, Sessions(), []
        self.launched = self.closed = self.closed_while_starting = 0
        self.session_seconds = 0.0
        self.options = self.demand = self.processes = self.retirements = self.groups = self
        self.woken = asyncio.Event()
        self.resize("default", n_workers, ())
        self.connected, self.launched = [*self.workers], 0
        defaults = {"minimum": 0, "maximum": MAXIMUM}
        defaults |= {"interval": "1s", "wait_count": 3, "target_duration": "5s"}
        self.adaptive = CMLAdaptive(self, **{**defaults, **options})

    # -- the cluster and its keeper

    def arrived(self, group):
        return {*self.connected}

    def affordable(self, n, group):
        return n

    def start_time(self, group):
        return self.start

    def __contains__(self, group):
        return group == "default"

    def target(self, group):
        return len(self.workers)

    def resize(self, group, n, absent):
        while len(self.workers) < n:
            name = f"mine-{len(self.arrivals)}"
            self.launched += 1
            self.workers[name] = SimpleNamespace(launched_at=self.now)
            self.arrivals[name] = self.now + self.start

    async def choose(self, group, n, **more):
        starting = [name for name in self.workers if name not in self.connected]
        idle = [name for name in self.connected if name not in self.task_ends]
        return [*dict.fromkeys([*starting, *reversed(idle), *reversed(self.connected)])][:n]

    def drop(self, names):
        for name in names:
            self.closed += 1
            self.closed_while_starting += name not in self.connected
            self.n_waiting += self.task_ends.pop(name, None) is not None
            del self.workers[name]
            self.connected = [other for other in self.connected if other != name]

    # -- the scheduler

    @property
    def n_tasks(self):
        return self.n_waiting + len(self.task_ends)

    async def snapshot(self, max_age):
        seconds = self.n_tasks * (self.task if self.is_known else 0.5)
        work = [Work({}, tasks=self.n_tasks, seconds=seconds)] if self.n_tasks else []
        n, busy = len(self.connected), len(self.task_ends)
        supply = Supply("default", adapts=True, target=len(self.workers), sessions=n, busy=busy)
        return Snapshot(work, [supply])

    # -- the time

    async def work(self, times):
        """Have tasks submitted at these times from now on. Return the seconds until all are done."""
        begin, times = self.now, sorted(times, reverse=True)
        while times or self.n_tasks:
            while times and begin + times[-1] <= self.now:
                times.pop()
                self.n_waiting += 1
            await self.tick()
        return self.now - begin

    async def idle(self, seconds):
        end = self.now + seconds
        while self.now < end:
            await self.tick()

    async def tick(self):
        for name in [name for name, end in self.task_ends.items() if end <= self.now]:
            del self.task_ends[name]
            self.is_known = True
        starting = [name for name in self.workers if name not in self.connected]
        self.connected += [name for name in starting if self.arrivals[name] <= self.now]
        free = [name for name in self.connected if name not in self.task_ends][: self.n_waiting]
        self.n_waiting -= len(free)
        self.task_ends.update((name, self.now + self.task) for name in free)
        if round(self.now / TICK) % round(1 / TICK) == 7:
            await self.adaptive.adapt()
        self.session_seconds += TICK * len(self.workers)
        self.now = round(self.now + TICK, 6)


@pytest.fixture
def simulate(monkeypatch):
    """Make a simulation, and let adaptive scaling look at its clock."""

    def simulate(*arguments, **options):
        made = Simulation(*arguments, **options)
        monkeypatch.setattr(adaptive, "monotonic", lambda: made.now)
        return made

    return simulate


def ideal(times, n, start, task):
    """Return the seconds that n sessions need, launched when the work begins."""
    free = [start] * n
    for moment in sorted(times):
        heapq.heapreplace(free, max(free[0], moment) + task)
    return max(free)


BURST = [0.0] * 600
TRICKLE = [i / 7.5 for i in range(2250)]
WORKLOADS = {"one burst": [BURST], "two bursts": [BURST, BURST], "trickle": [TRICKLE]}


@pytest.mark.parametrize("start", [0, 5, 20])
@pytest.mark.parametrize("workload", WORKLOADS)
async def test_time_sessions_and_cost_are_close_to_the_best(simulate, workload, start):
    run = simulate(start)
    seconds = best = needed = cost = 0.0
    for times in WORKLOADS[workload]:
        seconds += await run.work(times)
        await run.idle(60)
        shortest = ideal(times, MAXIMUM, start, run.task)
        n = next(n for n in range(1, 21) if ideal(times, n, start, run.task) <= 1.1 * shortest)
        best += shortest
        needed += n
        cost += n * shortest
    assert seconds <= 1.1 * best
    assert run.launched <= 1.2 * needed
    assert run.session_seconds <= 1.2 * cost
    assert not run.workers
    assert run.closed_while_starting == 0


@pytest.mark.parametrize("start", [0.5, 5, 20, 60])
async def test_work_that_ends_before_a_session_would_come_launches_none(simulate, start):
    run = simulate(start, is_known=True, n_workers=4, minimum=4)
    await run.work([0.0] * int(4 * start))
    assert run.launched == 0


@pytest.mark.parametrize("start", [0, 5, 20])
async def test_unneeded_sessions_are_kept_for_the_time_of_a_start(simulate, start):
    run = simulate(start)
    await run.work(BURST)
    run.task = 1000
    run.n_waiting = 1
    await run.idle(start)
    assert run.closed == 0
    await run.idle(6)
    assert len(run.workers) == 1


async def test_sessions_are_kept_for_work_that_comes_back_sooner_than_they_start(simulate):
    run = simulate(20)
    await run.idle(5)
    await run.work(BURST)
    await run.idle(8)
    assert run.closed == 20
    for _ in range(5):
        await run.work(BURST)
        await run.idle(8)
    assert run.closed == 20
    await run.idle(20)
    assert not run.workers


async def test_target_duration_and_wait_count_are_respected(simulate):
    run = simulate(0, is_known=True, target_duration="60s", wait_count=30)
    await run.work([0.0] * 120)
    assert run.launched == 2
    await run.idle(28)
    assert run.closed == 0
