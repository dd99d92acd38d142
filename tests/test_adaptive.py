"""Adaptive scaling counts sessions, whatever the number of Dask workers in each."""

from __future__ import annotations

import asyncio
import gc
import math

import pytest
from distributed.comm import CommClosedError
from fleets import Cluster
from tornado.ioloop import IOLoop

from dask_cml import CMLAdaptive
from dask_cml.keeper.adaptive import stop_adapting
from dask_cml.keeper.backoff import Backoffs
from dask_cml.manager.retirement import choose
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.naming import dask_names


class Scheduler:
    """Answers requests as the scheduler: with work for so many threads, and so many GPUs, for long.

    It would close the last workers first.
    """

    def __init__(self):
        self.wanted, self.wanted_gpus, self.workers = 0, 0, []
        self.groups = {}
        self.errors = []
        self.looks = 0

    async def call(self, op, limit=None, **arguments):
        return await getattr(self, op)(**arguments)

    async def cml_demand(self):
        self.looks += 1
        if self.errors:
            raise self.errors.pop()
        work = [
            {"resources": resources, "tasks": n, "unrunnable": 0, "seconds": 1000.0 * n}
            for resources, n in (({}, self.wanted), ({"GPU": 1}, self.wanted_gpus))
            if n
        ]
        return {"work": work, "restricted": [], "groups": self.groups}

    async def workers_to_close(self, n, key, attribute, **more):
        assert attribute == "name"
        self.more = more
        return self.workers[::-1][:n]


class State:
    """As much of a manager's state as adaptive scaling uses."""

    def __init__(self, processes=1, planned=0, launched=None, arrived=None, leads=True):
        self.cluster = Cluster(planned, processes, gpu={"options": {"nvidia_gpu": 2, "nthreads": 4}})
        self.fleet = self.cluster.fleet
        self.scheduler = Scheduler()
        names = [*self.fleet.group().names]
        self.cluster.launch(*names[:launched])
        self.arrive(*names[:arrived])
        client = SchedulerClient(self.fleet, False, lambda _: None)
        client.call, client.connected, client.decide = self.scheduler.call, True, self.decide
        self.leads, self.client, self.backoffs = leads, client, Backoffs(self.fleet, print)
        self.start_time = None  # it is not known how long sessions take to start
        self.did = []
        self.errors = []
        self.loop = IOLoop.current()

    def arrive(self, *names):
        """Connect all Dask workers of these sessions."""
        processes = self.fleet.options.processes
        self.cluster.connect(*(each for name in names for each in dask_names(name, processes)))
        self.scheduler.workers = sorted(self.fleet.observed)

    async def decide(self, op, group, key, n=None, names=()):
        assert self.fleet.group(group).wanted.adapting["key"] == key
        self.did.append(
            (op, {*names} if n is None else n) if group == "default" else (op, {*names} or n, group)
        )
        if self.errors:
            raise self.errors.pop()

    def stop_adapting(self, group, key):
        self.did.append(("stop", group, key))

    def __await__(self):
        return iter(())


def adaptive(state, **options):
    defaults = {"minimum": 0, "maximum": math.inf, "wait_count": 1, "interval": 0}
    adapting = CMLAdaptive(state, **{**defaults, **options})
    state.cluster.want("adapt", options.get("worker_group", "default"), 0, None, adapting.key, {})
    return adapting


async def test_the_repr_shows_the_cluster_the_group_and_the_limits():
    adapting = adaptive(State(), minimum=1)
    assert repr(adapting) == "CMLAdaptive('mine', worker_group='default', minimum=1, maximum=inf)"


async def test_plan_requested_and_observed_are_sessions():
    adapting = adaptive(State(processes=4, planned=3, arrived=1))
    assert adapting.plan == adapting.requested == {"mine-0", "mine-1", "mine-2"}
    assert adapting.observed == {"mine-0"}


async def test_a_session_that_is_not_wanted_any_more_is_not_counted():
    state = State(planned=2)
    state.cluster.want("remove", ["mine-1"])
    assert adaptive(state).requested == {"mine-0"}


@pytest.mark.parametrize(
    ("processes", "workers", "sessions"), [(1, 0, 0), (1, 7, 7), (4, 0, 0), (4, 1, 1), (4, 8, 2), (4, 9, 3)]
)
async def test_the_target_is_in_sessions_not_in_dask_workers(processes, workers, sessions):
    state = State(processes)
    state.scheduler.wanted = workers
    assert await adaptive(state).target() == sessions


async def test_further_arguments_are_passed_to_the_schedulers_choice():
    state = State(planned=2, arrived=2)
    adapting = adaptive(state, memory_ratio=3)
    assert len(await adapting.workers_to_close(1)) == 1
    assert state.scheduler.more == {"memory_ratio": 3}


async def test_the_target_stays_within_the_sessions_that_the_quota_allowed_lately():
    state = State(processes=2)
    state.scheduler.wanted = 20
    state.backoffs.affordable = lambda n, group: min(n, 3)
    assert await adaptive(state).safe_target() == 3
    assert await adaptive(state, minimum=5).safe_target() == 3


async def test_the_target_does_not_grow_while_sessions_have_waited_long_for_room():
    state = State(planned=4, arrived=2)
    state.scheduler.wanted = 20
    state.fleet.workers["mine-3"].waits_for = 11.0
    assert await adaptive(state).safe_target() == 20
    state.fleet.workers["mine-3"].waits_for = 61.0
    assert await adaptive(state).safe_target() == 4


async def test_sessions_that_wait_for_room_are_closed_before_starting_ones():
    state = State(planned=5, arrived=1)
    for key in "mine-1", "mine-2":
        state.fleet.workers[key].waits_for = 61.0
    assert await adaptive(state).workers_to_close(3) == ["mine-2", "mine-1"]


@pytest.mark.parametrize(
    ("minimum", "maximum", "workers", "n"), [(2, 9, 0, 2), (0, 3, 100, 3), (0, 9, 17, 5)]
)
async def test_minimum_and_maximum_are_sessions(minimum, maximum, workers, n):
    state = State(processes=4)
    state.scheduler.wanted = workers
    await adaptive(state, minimum=minimum, maximum=maximum).adapt()
    assert state.did == [("resize", n)]


async def test_nothing_changes_at_the_target():
    state = State(processes=4, planned=2)
    state.scheduler.wanted = 8
    await adaptive(state).adapt()
    assert state.did == []


@pytest.mark.parametrize("processes", [1, 4])
async def test_whole_sessions_are_closed_in_the_schedulers_order(processes):
    state = State(processes, planned=4)
    state.scheduler.wanted = processes
    await adaptive(state).adapt()
    assert state.did == [("shrink", {"mine-1", "mine-2", "mine-3"})]


async def test_sessions_that_are_not_connected_are_closed_first():
    state = State(processes=4, planned=5, arrived=3)
    state.scheduler.wanted = 8
    await adaptive(state).adapt()
    assert state.did == [("shrink", {"mine-2", "mine-3", "mine-4"})]


async def test_without_an_answer_no_group_of_workers_is_torn_apart():
    state = State(planned=2, arrived=2)
    state.scheduler.workers_to_close = fail
    assert await choose(state, 1) == ["mine-1"]
    assert await choose(state, 1, worker_key=str) == []


async def fail(**_):
    raise OSError("gone")


async def test_only_the_excess_is_closed_while_launches_are_delayed():
    state = State(planned=5, launched=3, arrived=2)
    state.scheduler.wanted = 2
    await adaptive(state).adapt()
    [(what, closed)] = state.did
    assert what == "shrink"
    assert len(closed) == 3
    assert "mine-0" not in closed


async def test_an_excess_is_closed_only_after_it_has_lasted():
    state = State(planned=2)
    state.scheduler.wanted = 1
    adapting = adaptive(state, wait_count=3)
    await adapting.adapt()
    await adapting.adapt()
    assert state.did == []
    await adapting.adapt()
    assert state.did == [("shrink", {"mine-1"})]


@pytest.mark.parametrize("error", [CommClosedError("gone"), OSError("refused"), asyncio.TimeoutError()])
async def test_a_question_without_an_answer_does_not_end_adapting(error, caplog):
    state = State(planned=1)
    state.scheduler.wanted, state.scheduler.errors = 3, [error]
    adapting = adaptive(state, interval="1 h")
    await adapting.adapt()
    assert state.did == []
    assert repr(error) in caplog.text
    assert adapting.periodic_callback is not None
    await adapting.adapt()
    assert state.did == [("resize", 3)]
    stop_adapting(adapting, "the test is over")


async def test_a_failed_launch_does_not_end_adapting():
    state = State()
    state.scheduler.wanted, state.errors = 3, [OSError("the disk is full")]
    adapting = adaptive(state, interval="1 h")
    await adapting.adapt()
    assert state.did == [("resize", 3)]
    assert adapting.periodic_callback is not None
    stop_adapting(adapting, "the test is over")


async def test_each_group_scales_by_the_tasks_that_need_it():
    state = State()
    plain, gpu = adaptive(state), adaptive(state, worker_group="gpu")
    state.scheduler.wanted, state.scheduler.wanted_gpus = 3, 5
    await plain.adapt()
    await gpu.adapt()
    assert state.did == [("resize", 3), ("resize", 3, "gpu")]


async def test_a_group_closes_its_own_sessions_only():
    state = State(planned=2)
    state.cluster.want("scale", "gpu", 3)
    plain, gpu = adaptive(state), adaptive(state, worker_group="gpu")
    assert (gpu.plan, gpu.observed) == ({"mine-gpu-0", "mine-gpu-1", "mine-gpu-2"}, set())
    assert plain.plan == plain.observed == {"mine-0", "mine-1"}
    state.scheduler.wanted = 2
    await plain.adapt()
    await gpu.adapt()
    assert state.did == [("shrink", gpu.plan, "gpu")]


async def test_idle_sessions_are_closed_before_those_that_run_another_groups_tasks():
    state = State(planned=1)
    state.cluster.want("scale", "gpu", 4)
    state.arrive(*state.fleet.group("gpu").names)
    held = {"managed": 0, "limit": 0}
    state.scheduler.groups = {
        "default": {"sessions": 1, "busy": 1, "lent": [0], **held},
        "gpu": {"sessions": 4, "busy": 3, "lent": [1, 3], **held},
    }
    # The scheduler knows nothing of groups: it names the idle one, then those that hold least.
    state.scheduler.workers = ["mine-0", "mine-gpu-3", "mine-gpu-1", "mine-gpu-2", "mine-gpu-0"]
    adaptive(state)
    gpu = adaptive(state, worker_group="gpu")
    state.scheduler.wanted = 1
    assert await gpu.target() == 1
    assert await gpu.workers_to_close(3) == ["mine-gpu-0"]
    assert {*await gpu.workers_to_close(1)} == {"mine-gpu-0", "mine-gpu-1", "mine-gpu-3"}


async def test_a_group_that_is_deleted_meanwhile_is_left():
    state = State()
    gpu = adaptive(state, worker_group="gpu", minimum=1)
    state.cluster.want("delete_group", "gpu")
    await gpu.adapt()
    assert state.did == []


async def test_start_times_are_those_of_the_groups_own_sessions(monkeypatch):
    state = State()
    plain, gpu = adaptive(state), adaptive(state, worker_group="gpu")
    state.cluster.want("resize", "default", 1, plain.key)
    state.cluster.want("resize", "gpu", 1, gpu.key)
    for name, launched_at in ("mine-0", 0.0), ("mine-gpu-0", -100.0):
        state.cluster.launch(name)
        state.fleet.workers[name].launched_at = launched_at
        state.arrive(name)
    monkeypatch.setattr("dask_cml.keeper.adaptive.monotonic", lambda: 10.0)
    await plain.target()
    await gpu.target()
    assert (plain.start_time, gpu.start_time) == (10.0, 110.0)


async def test_groups_that_adapt_share_one_question():
    state = State()
    adapting = [adaptive(state, worker_group=group, interval="1 h") for group in ("default", "gpu")]
    await asyncio.gather(*(each.adapt() for each in adapting))
    for each in adapting:
        await each.adapt()
        stop_adapting(each, "the test is over")
    assert state.scheduler.looks == 1


def test_adaptive_classes_with_and_without_a_reason_are_stopped():
    class Older:
        def stop(self):
            stopped.append("no reason")

    class Newer:
        def stop(self, reason="unknown"):
            stopped.append(reason)

    stopped = []
    for kind in (Older, Newer):
        stop_adapting(kind(), "the cluster closes")
    assert stopped == ["no reason", "the cluster closes"]


async def test_a_stopped_one_logs_nothing_when_it_is_collected(caplog):
    adaptive = CMLAdaptive(State(), interval="1s")
    stop_adapting(adaptive, "the test ends")
    gc.collect()  # those of other tests
    caplog.clear()
    with caplog.at_level("INFO"):
        del adaptive
        gc.collect()
    assert caplog.records == []


# -- with several managers


async def test_only_the_leader_scales():
    state = State(leads=False)
    state.scheduler.wanted = 3
    adapting = adaptive(state)
    await adapting.adapt()
    assert (state.did, state.scheduler.looks) == ([], 0)
    state.leads = True
    await adapting.adapt()
    assert state.did == [("resize", 3)]


@pytest.mark.parametrize("maximum", [4, math.inf])
async def test_the_leader_takes_over_the_limits_that_another_manager_asked_for(maximum):
    state = State()
    asked = adaptive(state, minimum=1, maximum=maximum, wait_count=7, interval="2 s", target_duration="9 s")
    state.cluster.want("adapt", "default", **asked.limits)
    stop_adapting(asked, "its manager has left")
    taken = CMLAdaptive.of(state, "default", state.fleet.group().wanted.adapting)
    assert (taken.minimum, taken.maximum, taken.key) == (1, maximum, asked.key)
    assert (taken.interval, taken.wait_count, taken.target_duration) == (2.0, 7, 9.0)
    stop_adapting(taken, "the test is over")


async def test_the_users_stop_keeps_the_number_of_workers_for_all_managers():
    state = State()
    adapting = adaptive(state)
    adapting.stop()
    adapting.stop()
    assert state.did == [("stop", "default", adapting.key)]


async def test_a_stop_because_another_request_counts_changes_nothing():
    state = State()
    stop_adapting(adaptive(state), "adapt() was called")
    assert state.did == []
