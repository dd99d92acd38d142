"""What adaptive scaling decides, over time, for sessions that take long to start.

The clock, the sessions and the scheduler are simulated: nothing here waits, and each run is the same.
"""

from __future__ import annotations

import heapq
import math
from types import SimpleNamespace

import pytest
from distributed.deploy.adaptive import Adaptive

from dask_cml import CMLAdaptive
from dask_cml.manager import adaptive
from dask_cml.scheduler.wanted_group import WantedGroup

TICK = 0.05
MAXIMUM = 20


class Simulation:
    """A cluster with adaptive scaling, a scheduler with a queue of equal tasks, and a clock.

    Parameters
    ----------
    start : float
        Seconds that a session takes to start.
    task : float
        Seconds that a task takes.
    known : bool
        Whether the scheduler knows that; otherwise it takes tasks to last 0.5 s until one is over.
    """

    def __init__(
        self,
        start,
        task=1.0,
        *,
        known=False,
        there=0,
        kind=CMLAdaptive,
        maximum=MAXIMUM,
        processes=1,
        nthreads=None,
        **options,
    ):
        self.now, self.start, self.task, self.known = 0.0, start, task, known
        self.options = SimpleNamespace(processes=processes, nthreads=nthreads or processes, resources={})
        self.waiting, self.ends, self.comes = 0, {}, {}
        self.worker_spec, self.workers, self.here = {}, {}, []
        self.launched = self.closed = self.killed = 0
        self.session_seconds = 0.0
        self.quota = math.inf
        self.state = SimpleNamespace(leads=True, start_time=start, fleet=self, client=self, backoffs=self)
        self.manager = SimpleNamespace(state=self.state)
        self.loop = SimpleNamespace(add_callback=lambda *_: None)
        self.scheduler_comm = self
        self.want(there)
        self.here, self.launched = [*self.worker_spec], 0
        options = {"minimum": 0, "interval": "1s", "wait_count": 3, "target_duration": "5s", **options}
        self.adaptive = kind(self, maximum=maximum, **options)

    # -- the cluster

    plan = requested = property(lambda self: set(self.worker_spec))
    observed = property(
        lambda self: (
            {f"{key}-{i}" for key in self.here for i in range(self.options.processes)}
            if self.options.processes > 1
            else set(self.here)
        )
    )

    name, groups = "mine", ("default",)
    states = property(lambda self: [self.group("default")])

    def group(self, name):
        assert name == "default"
        return SimpleNamespace(
            name=name,
            options=self.options,
            wanted=WantedGroup(target=len(self.worker_spec), adapting={"minimum": 0}),
            names=[*self.worker_spec],
        )

    def arrived(self, group):
        return {*self.here}

    def affordable(self, n, group):
        return min(n, self.quota)

    def want(self, n):
        while len(self.worker_spec) < n:
            key = f"session{self.launched:03d}-{self.now}"
            self.launched += 1
            self.worker_spec[key] = None
            self.workers[key] = SimpleNamespace(launched_at=self.now)
            self.comes[key] = self.now + self.start

    async def scale(self, n):
        self.want(n)

    async def decide(self, op, group, key, n=0, names=()):
        assert key == self.adaptive.key
        if op == "resize":
            self.want(n)
        else:
            assert op == "shrink"
            await self.scale_down(names)

    async def choose(self, n):
        order = [key for key in self.worker_spec if key not in self.here]
        order += [key for key in self.here[::-1] if key not in self.ends]
        return (order + self.here[::-1])[:n]

    async def scale_down(self, keys):
        for key in keys:
            self.closed += 1
            self.killed += key not in self.here
            self.waiting += self.ends.pop(key, None) is not None
            del self.worker_spec[key], self.workers[key], self.comes[key]
            self.here = [other for other in self.here if other != key]

    # -- the scheduler

    async def demand(self, max_age):
        tasks = self.waiting + len(self.ends)
        seconds = tasks * (self.task if self.known else 0.5)
        work = {"resources": {}, "tasks": tasks, "unrunnable": 0, "seconds": seconds}
        sessions = {"sessions": len(self.here), "busy": len(self.ends), "managed": 0, "limit": 0}
        return {"work": [work] if tasks else [], "restricted": [], "groups": {"default": sessions}}

    async def adaptive_target(self, target_duration):
        tasks = self.waiting + len(self.ends)
        workers = len(self.here) * self.options.processes
        threads = len(self.here) * self.options.nthreads
        n = min(tasks, math.ceil(tasks * (self.task if self.known else 0.5) / target_duration))
        if workers:
            n = math.ceil(n / threads * workers)
        elif self.waiting:
            n = max(1, n)
        idle = [key for key in self.here if key not in self.ends]
        return n if n >= workers else workers - len(idle) * self.options.processes

    async def workers_to_close(self, target, **_):
        return [key for key in self.here if key not in self.ends][: max(0, len(self.here) - target)]

    async def retire_workers(self, **_):
        pass

    # -- the time

    async def work(self, times):
        """Have tasks submitted at these times from now on; return the seconds until all are done."""
        begin, times = self.now, sorted(times, reverse=True)
        while times or self.waiting or self.ends:
            while times and begin + times[-1] <= self.now:
                times.pop()
                self.waiting += 1
            await self.tick()
        return self.now - begin

    async def idle(self, seconds):
        end = self.now + seconds
        while self.now < end:
            await self.tick()

    async def tick(self):
        for key in [key for key, end in self.ends.items() if end <= self.now]:
            del self.ends[key]
            self.known = True
        self.here += [key for key, at in self.comes.items() if at <= self.now and key not in self.here]
        free = [key for key in self.here if key not in self.ends][: self.waiting]
        self.waiting -= len(free)
        self.ends.update((key, self.now + self.task) for key in free)
        if round(self.now / TICK) % round(1 / TICK) == 7:
            await self.adaptive.adapt()
        self.session_seconds += TICK * len(self.worker_spec)
        self.now = round(self.now + TICK, 6)


@pytest.fixture
def simulate(monkeypatch):
    """Make a simulation, and have its clock be the one that adaptive scaling looks at."""

    def simulate(*arguments, **options):
        made = []
        monkeypatch.setattr(adaptive, "monotonic", lambda: made[0].now if made else 0.0)
        monkeypatch.setattr(adaptive, "choose", lambda state, n, *_: state.fleet.choose(n))
        made.append(Simulation(*arguments, **options))
        return made[0]

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
    seconds = best = needed = 0.0
    for times in WORKLOADS[workload]:
        seconds += await run.work(times)
        await run.idle(60)
        shortest = ideal(times, MAXIMUM, start, run.task)
        best += shortest
        needed += next(n for n in range(1, 21) if ideal(times, n, start, run.task) <= 1.1 * shortest)
    assert seconds <= 1.1 * best
    assert run.launched <= 1.2 * needed
    assert run.session_seconds <= 1.15 * min(MAXIMUM * best, await seconds_of_dask(simulate, workload, start))
    assert not run.worker_spec
    assert run.killed == 0


async def seconds_of_dask(simulate, workload, start):
    """Return the session seconds of Dask's Adaptive."""
    run = simulate(start, kind=Adaptive)
    for times in WORKLOADS[workload]:
        await run.work(times)
        await run.idle(60)
    return run.session_seconds


async def test_the_simulation_shows_the_flaws_of_dasks_defaults(simulate):
    run = simulate(20, kind=Adaptive)
    await run.work(TRICKLE)
    assert run.launched >= 2 * 8


@pytest.mark.parametrize("start", [0.5, 5, 20, 60])
async def test_work_that_ends_before_a_session_would_come_launches_none(simulate, start):
    run = simulate(start, known=True, there=4, minimum=4)
    await run.work([0.0] * int(4 * start))
    assert run.launched == 0


async def test_work_that_outlasts_a_start_launches_more_sessions(simulate):
    run = simulate(20, known=True, there=4, minimum=4)
    assert await run.work([0.0] * 400) < 20 + 400 / 20
    assert run.launched > 10


async def test_no_starting_session_is_closed_while_work_waits(simulate):
    run = simulate(20)
    await run.work([0.0] * 10)
    launched = run.launched
    await run.work([i / 2 for i in range(60)])
    assert (run.launched, run.killed) == (launched, 0)


@pytest.mark.parametrize("start", [0, 5, 20])
async def test_unneeded_sessions_are_kept_for_the_time_of_a_start(simulate, start):
    run = simulate(start)
    await run.work(BURST)
    run.task = 1000
    run.waiting = 1
    await run.idle(start)
    assert run.closed == 0
    await run.idle(6)
    assert len(run.worker_spec) == 1


@pytest.mark.parametrize("start", [0, 5, 20])
async def test_when_all_work_is_done_idle_sessions_are_closed_at_once(simulate, start):
    run = simulate(start)
    await run.work(BURST)
    await run.idle(1.5)
    assert run.closed == 0
    await run.idle(2)
    assert not run.worker_spec


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
    assert not run.worker_spec


async def test_sessions_are_not_kept_for_work_that_came_back_later(simulate):
    run = simulate(20)
    for pause in 8, 60:
        await run.work(BURST)
        await run.idle(pause)
    await run.work(BURST)
    await run.idle(4)
    assert not run.worker_spec


async def test_few_long_tasks_get_a_session_each(simulate):
    run = simulate(20, 100.0, known=True, there=1, minimum=1)
    assert await run.work([0.0] * 10) < 125
    assert run.launched == 9


async def test_tasks_that_turn_out_to_be_long_get_more_sessions(simulate):
    run = simulate(5, 20.0)
    await run.work([0.0] * 40)
    assert run.launched >= 15


async def test_start_times_are_learned_from_new_sessions(simulate):
    run = simulate(30)
    run.state.start_time = 2.0
    assert run.adaptive.start_time == 2.0
    await run.work(BURST)
    assert run.adaptive.start_time == pytest.approx(30, abs=1.1)


async def test_start_times_are_not_learned_from_sessions_that_ran_before(simulate):
    run = simulate(30, there=3)
    run.now += 500
    await run.idle(3)
    assert run.adaptive.start_time == 30


async def test_without_any_start_the_start_time_is_zero(simulate):
    run = simulate(0)
    run.state.start_time = None
    assert run.adaptive.start_time == 0


async def test_sessions_that_threads_launch_at_once_are_all_counted(simulate):
    run = simulate(20, known=True, processes=4, nthreads=16)
    run.waiting = 3200
    assert await run.adaptive.target() == 3200 // 16 // 5


async def test_no_more_sessions_are_requested_than_the_quota_allowed(simulate):
    run = simulate(5)
    run.quota = 3
    await run.work([0.0] * 60)
    assert run.launched == 3


async def test_minimum_and_maximum_hold(simulate):
    run = simulate(5, minimum=2, maximum=3)
    await run.work(BURST)
    assert run.launched == 3
    await run.idle(100)
    assert len(run.worker_spec) == 2


async def test_target_duration_and_wait_count_are_respected(simulate):
    run = simulate(0, known=True, target_duration="60s", wait_count=30)
    await run.work([0.0] * 120)
    assert run.launched == 2
    await run.idle(28)
    assert run.closed == 0
