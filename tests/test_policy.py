"""How many sessions a worker group needs for the work that is known: at one moment, and over time.

Over time, the clock, the sessions and the scheduler are simulated: nothing waits, and each run is the same.
"""

import asyncio
import heapq
from types import SimpleNamespace

import pytest

from dask_cml import CMLAdaptive
from dask_cml.core import groups
from dask_cml.core.policy import Snapshot, Supply, Work, sessions_to_finish, sessions_wanted, unrunnable

GPU = {"GPU": 1}


def supply(name="default", **values):
    return Supply(name, **{"adapts": True, **values})


def gpus(name="gpu", n=1.0, **values):
    return supply(name, **{"nthreads": 4, "resources": {"GPU": n}, **values})


def work(n, seconds=1.0, unrunnable=0, **resources):
    return Work(resources, n, n * seconds, unrunnable)


def wanted(
    snapshot, group="default", *, arrived=0, planned=None, underway=(), start=0.0, target=5.0, minimum=0
):
    return sessions_wanted(
        snapshot,
        group,
        arrived=arrived,
        planned=arrived + len(underway) if planned is None else planned,
        underway=underway,
        start_time=start,
        target_duration=target,
        minimum=minimum,
    )


FIXED = {"adapts": False}
BOTH = gpus("both")
BOTH.resources["FPGA"] = 1


@pytest.mark.parametrize(
    ("supplies", "needs", "group"),
    [
        # the one that offers what they need
        ([supply(), gpus()], {}, "default"),
        ([supply(), gpus()], {"GPU": 1}, "gpu"),
        ([supply(), gpus()], {"FPGA": 1}, None),
        ([supply()], {"GPU": 0}, "default"),
        # one of whose Dask workers can run them
        ([supply(), gpus(processes=2)], {"GPU": 1}, None),
        ([supply(), gpus(processes=2)], {"GPU": 0.5}, "gpu"),
        # the one that offers the least beyond their needs
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 1}, "one"),
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 2}, "four"),
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 1, "FPGA": 1}, "both"),
        # of several alike, the default one
        ([supply(), supply("more")], {}, "default"),
        ([gpus("default"), gpus("more")], {"GPU": 1}, "default"),
        # one that adapts before one of a fixed size
        ([supply(target=2, **FIXED), supply("more")], {}, "more"),
        ([supply(), gpus(target=1, **FIXED), gpus("more", 4)], {"GPU": 1}, "more"),
        # one with GPUs only where no plain group has workers
        ([supply(target=1, **FIXED), gpus()], {}, "default"),
        ([supply(target=0, **FIXED), gpus()], {}, "gpu"),
        ([gpus("default")], {}, "default"),
    ],
)
def test_tasks_scale_up_the_one_group_that_fits_best(supplies, needs, group):
    snapshot = Snapshot([work(1, **needs)], supplies)
    assert [supply.name for supply in supplies if snapshot.work_of(supply.name)] == [group] * bool(group)


@pytest.mark.parametrize(
    ("size", "tasks", "sessions"),
    [
        ({}, work(0), 0),
        ({}, work(100), 20),
        ({}, work(101), 21),
        ({"nthreads": 4}, work(100), 5),
        ({"nthreads": 4, "processes": 2}, work(100), 5),
        ({}, work(3, 1000.0), 3),  # never more than there are tasks
        ({"nthreads": 4}, work(3, 1000.0), 1),
        ({}, work(1, 0.001), 1),
        ({}, work(5, 0.0), 1),  # the scheduler was told that they take no time
        ({"nthreads": 8, "resources": {"GPU": 1}}, work(100, GPU=1), 20),
        ({"nthreads": 8, "resources": {"GPU": 4}}, work(100, GPU=1), 5),
        ({"nthreads": 8, "resources": {"GPU": 4}}, work(100, GPU=2), 10),
        ({"nthreads": 2, "resources": {"GPU": 4}}, work(100, GPU=1), 10),  # threads are fewer than GPUs
        ({"nthreads": 8, "resources": {"GPU": 3}}, work(100, GPU=2), 20),  # the third GPU is of no use
        ({"nthreads": 8, "processes": 2, "resources": {"GPU": 3}}, work(100, GPU=1), 10),
        ({"nthreads": 8, "resources": {"GPU": 0.3}}, work(100, GPU=0.1), 7),
        ({"nthreads": 8, "resources": {"GPU": 4, "FPGA": 1}}, work(100, GPU=1, FPGA=1), 20),
    ],
)
def test_sessions_for_one_need(size, tasks, sessions):
    assert sessions_to_finish(Supply("group", **size), [tasks], 5.0) == sessions


@pytest.mark.parametrize(
    ("tasks", "sessions"),
    [
        ([work(100, GPU=1), work(100)], 20),  # plain tasks use threads that the others leave
        ([work(100, GPU=1), work(700)], 40),  # 20 for the GPUs; but 800 tasks need 160 threads
        ([work(50, GPU=1), work(100, GPU=0.5)], 20),
        ([work(50, GPU=1), work(50, GPU=0.5)], 15),
    ],
)
def test_several_needs_share_threads_and_resources(tasks, sessions):
    assert sessions_to_finish(gpus(), tasks, 5.0) == sessions


def test_each_group_is_judged_by_its_own_work():
    snapshot = Snapshot([work(100), work(10, GPU=1)], [supply(), gpus()])
    assert wanted(snapshot) == 20
    assert wanted(snapshot, "gpu") == 2
    snapshot = Snapshot([work(100, GPU=1)], [supply(sessions=3), gpus()])
    assert wanted(snapshot, arrived=3) == 0


def test_sessions_that_do_the_work_of_another_group_go_unless_it_has_none_or_they_have_their_own():
    borrowed = gpus(sessions=3, busy=3, borrowed=[0, 2])
    snapshot = Snapshot([work(9)], [supply(sessions=1, busy=1), borrowed])
    assert wanted(snapshot, "gpu", arrived=3) == 1
    assert (snapshot.borrowed("gpu"), snapshot.has_work("gpu")) == ([0, 2], True)
    snapshot = Snapshot([work(9)], [snapshot.supplies[0], gpus(sessions=1, busy=1, borrowed=[0])])
    assert not snapshot.has_work("gpu")
    assert wanted(Snapshot([work(9)], [supply(), borrowed]), "gpu", arrived=3) == 3
    assert wanted(Snapshot([work(9)], [supply(adapts=False), borrowed]), "gpu", arrived=3) == 3


@pytest.mark.parametrize(
    ("tasks", "have", "sessions"),
    [
        ([work(1)], {"sessions": 5, "busy": 3}, 3),  # busy ones stay
        ([work(10, 100.0)], {"sessions": 1, "busy": 1}, 10),  # few long tasks get one each
        # more than 60 % of the memory wants twice as many
        ([work(3)], {"sessions": 3, "busy": 3, "managed": 181, "limit": 300}, 6),
        ([work(3)], {"sessions": 3, "busy": 3, "managed": 180, "limit": 300}, 3),
        # those that remain can hold twice the data
        *(([], {"sessions": 3, "managed": n, "limit": 300}, m) for n, m in ((0, 0), (1, 1), (100, 2))),
        *(([], {"sessions": 3, "managed": n, "limit": 300}, 3) for n in (101, 150)),
        # without a limit of memory they stay while they hold anything
        ([], {"sessions": 3, "managed": 1}, 3),
        ([], {"sessions": 3, "managed": 0}, 0),
    ],
)
def test_how_many_sessions_are_wanted_of_those_that_are_there(tasks, have, sessions):
    snapshot, n = Snapshot(tasks, [supply(**have)]), have["sessions"]
    assert wanted(snapshot, arrived=n, start=20, minimum=int(n == 1)) == sessions


def test_data_that_others_cannot_hold_keeps_a_group_and_no_two_count_on_each_other():
    held = {"sessions": 2, "managed": 10, "limit": 200}
    snapshot = Snapshot([], [supply(**held), gpus(**held)])
    assert (wanted(snapshot, arrived=2), wanted(snapshot, "gpu", arrived=2)) == (1, 0)
    fixed = Snapshot([], [supply(**held), gpus(**held | {"adapts": False, "target": 2})])
    assert wanted(fixed, arrived=2) == 0
    snapshot = Snapshot([], [supply(), gpus(sessions=2, managed=150, limit=200)])
    assert wanted(snapshot, "gpu", arrived=2) == 4  # it is full
    snapshot = Snapshot([], [supply(sessions=1, limit=100), gpus(sessions=2, managed=100, limit=200)])
    assert (wanted(snapshot, arrived=1), wanted(snapshot, "gpu", arrived=2)) == (1, 1)


def test_tasks_that_no_worker_will_run_are_reported_and_no_others():
    fixed, adapt = [supply(adapts=False), gpus(adapts=False)], [supply(), gpus()]
    restricted = {("mine-7",): 1, ("mine-8", "mine-9"): 2, ("mine-1",): 3}
    will_not_run = [
        "1 task is restricted to mine-7, which the cluster does not have",
        "2 tasks are restricted to mine-8 or mine-9, which the cluster does not have",
    ]
    nobody = "3 tasks wait, but the cluster has no workers: call cluster.scale(n) or cluster.adapt()"
    no_group = "3 tasks need FPGA=1, which no worker group offers"
    tasks, offer = [work(1, unrunnable=1, GPU=0.5)], "1 task needs GPU=0.5; worker group gpu offers it"
    unscaled = f"{offer}, but has no workers: call cluster.scale(1, worker_group='gpu')"
    for snapshot, words in (
        (Snapshot([work(3, unrunnable=3, FPGA=1)], adapt), [no_group]),
        (Snapshot([work(3, unrunnable=3)], fixed), [nobody]),
        (Snapshot(restricted=restricted), will_not_run),
        (Snapshot([work(3, FPGA=1), work(3, unrunnable=3)], [supply(adapts=False, target=1)]), []),
        (Snapshot([work(3, FPGA=1), work(3, unrunnable=3)], [supply()]), []),  # it adapts
        (Snapshot(tasks, [supply(), gpus(adapts=False)]), [unscaled]),
        (Snapshot(tasks, [supply(), gpus(adapts=False, target=1)]), []),
        (Snapshot(tasks, adapt), []),
    ):
        assert [*unrunnable(snapshot, ["mine-0", "mine-1"]).values()] == words


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
    keeps, sharing = True, SimpleNamespace(is_keeper=True)

    def __init__(self, start, task=1.0, *, is_known=False, n_workers=0, **options):
        self.now, self.start, self.task, self.is_known = 0.0, start, task, is_known
        self.n_waiting = 0
        self.task_ends, self.arrivals, self.workers, self.connected = {}, {}, Sessions(), []
        self.launched = self.closed = self.closed_while_starting = 0
        self.session_seconds = 0.0
        self.options = self.demand = self.processes = self.retirements = self.groups = self.look = self
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
        monkeypatch.setattr(groups, "monotonic", lambda: made.now)
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
