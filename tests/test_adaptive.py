"""Adaptive scaling counts sessions, whatever the number of Dask workers in each."""

from __future__ import annotations

import asyncio
import gc
import math
from types import SimpleNamespace

import pytest
from distributed.comm import CommClosedError
from fleets import Cluster
from tornado.ioloop import IOLoop

from dask_cml import CMLAdaptive
from dask_cml.manager.adaptive import stop_adapting
from dask_cml.manager.backoff import Backoffs
from dask_cml.manager.reconciler import Reconciler
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


class Wishes:
    """As much of a manager's wishes as adaptive scaling uses, with the real choice of what to close."""

    def __init__(self, processes=1, planned=0, launched=None, arrived=None, leads=True):
        self.cluster = Cluster(planned, processes, gpu={"options": {"nvidia_gpu": 2, "nthreads": 4}})
        self.fleet = self.cluster.fleet
        self.scheduler = Scheduler()
        names = [*self.fleet.group().wanted.names]
        self.cluster.launch(*names[:launched])
        self.arrive(*names[:arrived])
        client = SchedulerClient(self.fleet, False, lambda _: None)
        client.call, client.connected, client.decide = self.scheduler.call, True, self.decide
        # How long sessions take to start is not known.
        self.state = SimpleNamespace(
            leads=leads,
            start_time=None,
            fleet=self.fleet,
            client=client,
            backoffs=Backoffs(self.fleet, print),
        )
        self.reconciler = Reconciler(self.state)
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


def adaptive(wishes, **options):
    defaults = {"minimum": 0, "maximum": math.inf, "wait_count": 1, "interval": 0}
    adapting = CMLAdaptive(wishes, **{**defaults, **options})
    wishes.cluster.want("adapt", options.get("worker_group", "default"), 0, None, adapting.key, {})
    return adapting


async def test_the_repr_shows_the_cluster_the_group_and_the_limits():
    adapting = adaptive(Wishes(), minimum=1)
    assert repr(adapting) == "CMLAdaptive('mine', worker_group='default', minimum=1, maximum=inf)"


async def test_plan_requested_and_observed_are_sessions():
    adapting = adaptive(Wishes(processes=4, planned=3, arrived=1))
    assert adapting.plan == adapting.requested == {"mine-0", "mine-1", "mine-2"}
    assert adapting.observed == {"mine-0"}


async def test_a_session_that_is_not_wanted_any_more_is_not_counted():
    wishes = Wishes(planned=2)
    wishes.cluster.want("remove", ["mine-1"])
    assert adaptive(wishes).requested == {"mine-0"}


@pytest.mark.parametrize(
    ("processes", "workers", "sessions"), [(1, 0, 0), (1, 7, 7), (4, 0, 0), (4, 1, 1), (4, 8, 2), (4, 9, 3)]
)
async def test_the_target_is_in_sessions_not_in_dask_workers(processes, workers, sessions):
    wishes = Wishes(processes)
    wishes.scheduler.wanted = workers
    assert await adaptive(wishes).target() == sessions


async def test_further_arguments_are_passed_to_the_schedulers_choice():
    wishes = Wishes(planned=2, arrived=2)
    adapting = adaptive(wishes, memory_ratio=3)
    assert len(await adapting.workers_to_close(1)) == 1
    assert wishes.scheduler.more == {"memory_ratio": 3}


async def test_the_target_stays_within_the_sessions_that_the_quota_allowed_lately():
    wishes = Wishes(processes=2)
    wishes.scheduler.wanted = 20
    wishes.state.backoffs.affordable = lambda n, group: min(n, 3)
    assert await adaptive(wishes).safe_target() == 3
    assert await adaptive(wishes, minimum=5).safe_target() == 3


async def test_the_target_does_not_grow_while_sessions_have_waited_long_for_room():
    wishes = Wishes(planned=4, arrived=2)
    wishes.scheduler.wanted = 20
    wishes.fleet.workers["mine-3"].waits_for = 11.0
    assert await adaptive(wishes).safe_target() == 20
    wishes.fleet.workers["mine-3"].waits_for = 61.0
    assert await adaptive(wishes).safe_target() == 4


async def test_sessions_that_wait_for_room_are_closed_before_starting_ones():
    wishes = Wishes(planned=5, arrived=1)
    for key in "mine-1", "mine-2":
        wishes.fleet.workers[key].waits_for = 61.0
    assert await adaptive(wishes).workers_to_close(3) == ["mine-2", "mine-1"]


@pytest.mark.parametrize(
    ("minimum", "maximum", "workers", "n"), [(2, 9, 0, 2), (0, 3, 100, 3), (0, 9, 17, 5)]
)
async def test_minimum_and_maximum_are_sessions(minimum, maximum, workers, n):
    wishes = Wishes(processes=4)
    wishes.scheduler.wanted = workers
    await adaptive(wishes, minimum=minimum, maximum=maximum).adapt()
    assert wishes.did == [("resize", n)]


async def test_nothing_changes_at_the_target():
    wishes = Wishes(processes=4, planned=2)
    wishes.scheduler.wanted = 8
    await adaptive(wishes).adapt()
    assert wishes.did == []


@pytest.mark.parametrize("processes", [1, 4])
async def test_whole_sessions_are_closed_in_the_schedulers_order(processes):
    wishes = Wishes(processes, planned=4)
    wishes.scheduler.wanted = processes
    await adaptive(wishes).adapt()
    assert wishes.did == [("shrink", {"mine-1", "mine-2", "mine-3"})]


async def test_sessions_that_are_not_connected_are_closed_first():
    wishes = Wishes(processes=4, planned=5, arrived=3)
    wishes.scheduler.wanted = 8
    await adaptive(wishes).adapt()
    assert wishes.did == [("shrink", {"mine-2", "mine-3", "mine-4"})]


async def test_only_the_excess_is_closed_while_launches_are_delayed():
    wishes = Wishes(planned=5, launched=3, arrived=2)
    wishes.scheduler.wanted = 2
    await adaptive(wishes).adapt()
    [(what, closed)] = wishes.did
    assert what == "shrink"
    assert len(closed) == 3
    assert "mine-0" not in closed


async def test_an_excess_is_closed_only_after_it_has_lasted():
    wishes = Wishes(planned=2)
    wishes.scheduler.wanted = 1
    adapting = adaptive(wishes, wait_count=3)
    await adapting.adapt()
    await adapting.adapt()
    assert wishes.did == []
    await adapting.adapt()
    assert wishes.did == [("shrink", {"mine-1"})]


@pytest.mark.parametrize("error", [CommClosedError("gone"), OSError("refused"), asyncio.TimeoutError()])
async def test_a_question_without_an_answer_does_not_end_adapting(error, caplog):
    wishes = Wishes(planned=1)
    wishes.scheduler.wanted, wishes.scheduler.errors = 3, [error]
    adapting = adaptive(wishes, interval="1 h")
    await adapting.adapt()
    assert wishes.did == []
    assert repr(error) in caplog.text
    assert adapting.periodic_callback is not None
    await adapting.adapt()
    assert wishes.did == [("resize", 3)]
    stop_adapting(adapting, "the test is over")


async def test_a_failed_launch_does_not_end_adapting():
    wishes = Wishes()
    wishes.scheduler.wanted, wishes.errors = 3, [OSError("the disk is full")]
    adapting = adaptive(wishes, interval="1 h")
    await adapting.adapt()
    assert wishes.did == [("resize", 3)]
    assert adapting.periodic_callback is not None
    stop_adapting(adapting, "the test is over")


async def test_each_group_scales_by_the_tasks_that_need_it():
    wishes = Wishes()
    plain, gpu = adaptive(wishes), adaptive(wishes, worker_group="gpu")
    wishes.scheduler.wanted, wishes.scheduler.wanted_gpus = 3, 5
    await plain.adapt()
    await gpu.adapt()
    assert wishes.did == [("resize", 3), ("resize", 3, "gpu")]


async def test_a_group_closes_its_own_sessions_only():
    wishes = Wishes(planned=2)
    wishes.cluster.want("scale", "gpu", 3)
    plain, gpu = adaptive(wishes), adaptive(wishes, worker_group="gpu")
    assert (gpu.plan, gpu.observed) == ({"mine-gpu-0", "mine-gpu-1", "mine-gpu-2"}, set())
    assert plain.plan == plain.observed == {"mine-0", "mine-1"}
    wishes.scheduler.wanted = 2
    await plain.adapt()
    await gpu.adapt()
    assert wishes.did == [("shrink", gpu.plan, "gpu")]


async def test_idle_sessions_are_closed_before_those_that_run_another_groups_tasks():
    wishes = Wishes(planned=1)
    wishes.cluster.want("scale", "gpu", 4)
    wishes.arrive(*wishes.fleet.group("gpu").wanted.names)
    held = {"managed": 0, "limit": 0}
    wishes.scheduler.groups = {
        "default": {"sessions": 1, "busy": 1, "lent": [0], **held},
        "gpu": {"sessions": 4, "busy": 3, "lent": [1, 3], **held},
    }
    # The scheduler knows nothing of groups: it names the idle one, then those that hold least.
    wishes.scheduler.workers = ["mine-0", "mine-gpu-3", "mine-gpu-1", "mine-gpu-2", "mine-gpu-0"]
    adaptive(wishes)
    gpu = adaptive(wishes, worker_group="gpu")
    wishes.scheduler.wanted = 1
    assert await gpu.target() == 1
    assert await gpu.workers_to_close(3) == ["mine-gpu-0"]
    assert {*await gpu.workers_to_close(1)} == {"mine-gpu-0", "mine-gpu-1", "mine-gpu-3"}


async def test_a_group_that_is_deleted_meanwhile_is_left():
    wishes = Wishes()
    gpu = adaptive(wishes, worker_group="gpu", minimum=1)
    wishes.cluster.want("delete_group", "gpu")
    await gpu.adapt()
    assert wishes.did == []


async def test_start_times_are_those_of_the_groups_own_sessions(monkeypatch):
    wishes = Wishes()
    plain, gpu = adaptive(wishes), adaptive(wishes, worker_group="gpu")
    wishes.cluster.want("resize", "default", 1, plain.key)
    wishes.cluster.want("resize", "gpu", 1, gpu.key)
    for name, launched_at in ("mine-0", 0.0), ("mine-gpu-0", -100.0):
        wishes.cluster.launch(name)
        wishes.fleet.workers[name].launched_at = launched_at
        wishes.arrive(name)
    monkeypatch.setattr("dask_cml.manager.adaptive.monotonic", lambda: 10.0)
    await plain.target()
    await gpu.target()
    assert (plain.start_time, gpu.start_time) == (10.0, 110.0)


async def test_groups_that_adapt_share_one_question():
    wishes = Wishes()
    adapting = [adaptive(wishes, worker_group=group, interval="1 h") for group in ("default", "gpu")]
    await asyncio.gather(*(each.adapt() for each in adapting))
    for each in adapting:
        await each.adapt()
        stop_adapting(each, "the test is over")
    assert wishes.scheduler.looks == 1


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
    adaptive = CMLAdaptive(Wishes(), interval="1s")
    stop_adapting(adaptive, "the test ends")
    gc.collect()  # those of other tests
    caplog.clear()
    with caplog.at_level("INFO"):
        del adaptive
        gc.collect()
    assert caplog.records == []


# -- with several managers


async def test_only_the_leader_scales():
    wishes = Wishes(leads=False)
    wishes.scheduler.wanted = 3
    adapting = adaptive(wishes)
    await adapting.adapt()
    assert (wishes.did, wishes.scheduler.looks) == ([], 0)
    wishes.state.leads = True
    await adapting.adapt()
    assert wishes.did == [("resize", 3)]


@pytest.mark.parametrize("maximum", [4, math.inf])
async def test_the_leader_takes_over_the_limits_that_another_manager_asked_for(maximum):
    wishes = Wishes()
    asked = adaptive(wishes, minimum=1, maximum=maximum, wait_count=7, interval="2 s", target_duration="9 s")
    wishes.cluster.want("adapt", "default", **asked.limits)
    stop_adapting(asked, "its manager has left")
    taken = CMLAdaptive.of(wishes, "default", wishes.fleet.group().wanted.adapting)
    assert (taken.minimum, taken.maximum, taken.key) == (1, maximum, asked.key)
    assert (taken.interval, taken.wait_count, taken.target_duration) == (2.0, 7, 9.0)
    stop_adapting(taken, "the test is over")


async def test_the_users_stop_keeps_the_number_of_workers_for_all_managers():
    wishes = Wishes()
    adapting = adaptive(wishes)
    adapting.stop()
    adapting.stop()
    assert wishes.did == [("stop", "default", adapting.key)]


async def test_a_stop_because_another_request_counts_changes_nothing():
    wishes = Wishes()
    stop_adapting(adaptive(wishes), "adapt() was called")
    assert wishes.did == []
