"""Adaptive scaling counts sessions, whatever the number of Dask workers in each."""

from __future__ import annotations

import asyncio
import gc
import math
from types import SimpleNamespace

import pytest
from distributed.comm import CommClosedError
from tornado.ioloop import IOLoop

from dask_cml import CMLAdaptive
from dask_cml.manager.adaptive import stop_adapting
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.reconciler import Reconciler
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import Options


class SchedulerComm:
    """The scheduler as seen from here: with work for so many threads, and so many GPUs, for long.

    It would close the last workers first.
    """

    def __init__(self):
        self.wanted, self.wanted_gpus, self.workers = 0, 0, []
        self.groups = {}
        self.errors = []
        self.looks = 0

    async def cml_demand(self, cluster):
        assert cluster == "mine"
        self.looks += 1
        if self.errors:
            raise self.errors.pop()
        work = [
            {"resources": resources, "unrunnable": 0, "queued": n, "processing": 0, "seconds": 1000.0 * n}
            for resources, n in (({}, self.wanted), ({"GPU": 1}, self.wanted_gpus))
            if n
        ]
        return {"work": work, "restricted": [], "groups": self.groups}

    async def workers_to_close(self, n, key, attribute, **more):
        assert attribute == "name"
        self.more = more
        return self.workers[::-1][:n]


class Cluster:
    """As much of a cluster as adaptive scaling sees, with the real choice of what to close."""

    def __init__(self, processes=1, planned=0, launched=None, arrived=None):
        self.scheduler = SimpleNamespace(start_time=None)  # how long sessions take to start is not known
        options = Options.read(name="mine", processes=processes, nthreads=processes)
        gpu = Options.read(name="mine", nvidia_gpu=2, nthreads=4)
        self._fleet = Fleet(options, {"gpu": gpu})
        self._fleet.resize(planned)
        keys = self._fleet.keys
        for key in keys[:launched]:
            self._fleet.launched(key, SimpleNamespace(launched_at=None, waits_for=None))
        self._arrived = set(keys[:arrived])
        self.observed = {name for key in self._arrived for name in self._fleet.dask_names(key)}
        self._client = client = SchedulerClient()
        client.info = {"workers": {name: {"name": name} for name in self.observed}}
        client.comm = self.scheduler_comm = SchedulerComm()
        self.scheduler_comm.workers = sorted(self.observed)
        self._reconciler = Reconciler(
            self._fleet,
            client,
            SimpleNamespace(api=None),
            None,
            None,
            correct_state=None,
            log=None,
        )
        self.did = []
        self.errors = []
        self.loop = IOLoop.current()

    @property
    def worker_spec(self):
        return dict.fromkeys(self._fleet.keys)

    @property
    def workers(self):
        return self._fleet.workers

    def __await__(self):
        return iter(())

    async def _resize(self, n, driver, group):
        assert self._fleet.group(group).driver is driver
        self.did.append(("resize", n, group) if group != "default" else ("resize", n))
        if self.errors:
            raise self.errors.pop()

    async def scale_down(self, workers, driver):
        assert all(self._fleet.group(self._fleet.group_of(key)).driver is driver for key in workers)
        self.did.append(("close", set(workers)))


def adaptive(cluster, **options):
    defaults = {"minimum": 0, "maximum": math.inf, "wait_count": 1, "interval": 0}
    adapting = CMLAdaptive(cluster, **{**defaults, **options})
    cluster._fleet.drive(adapting, options.get("worker_group", "default"))
    return adapting


async def test_plan_requested_and_observed_are_sessions():
    adapting = adaptive(Cluster(processes=4, planned=3, arrived=1))
    assert adapting.plan == adapting.requested == {"mine-0", "mine-1", "mine-2"}
    assert adapting.observed == {"mine-0"}


async def test_a_session_that_is_not_wanted_any_more_is_not_counted():
    cluster = Cluster(planned=2)
    cluster._fleet.remove(["mine-1"])
    assert adaptive(cluster).requested == {"mine-0"}


@pytest.mark.parametrize(
    ("processes", "workers", "sessions"), [(1, 0, 0), (1, 7, 7), (4, 0, 0), (4, 1, 1), (4, 8, 2), (4, 9, 3)]
)
async def test_as_many_sessions_are_wanted_as_hold_the_workers(processes, workers, sessions):
    cluster = Cluster(processes)
    cluster.scheduler_comm.wanted = workers
    assert await adaptive(cluster).target() == sessions


async def test_more_arguments_are_those_of_the_schedulers_choice():
    cluster = Cluster(planned=2, arrived=2)
    adapting = adaptive(cluster, memory_ratio=3)
    assert len(await adapting.workers_to_close(1)) == 1
    assert cluster.scheduler_comm.more == {"memory_ratio": 3}


async def test_no_more_are_wanted_than_the_quota_granted_lately():
    cluster = Cluster(processes=2)
    cluster.scheduler_comm.wanted = 20
    cluster._reconciler.backoffs.affordable = lambda n, group: min(n, 3)
    assert await adaptive(cluster).safe_target() == 3
    assert await adaptive(cluster, minimum=5).safe_target() == 3


async def test_no_more_are_wanted_while_some_have_waited_long_for_room():
    cluster = Cluster(planned=4, arrived=2)
    cluster.scheduler_comm.wanted = 20
    cluster.workers["mine-3"].waits_for = 11.0
    assert await adaptive(cluster).safe_target() == 20
    cluster.workers["mine-3"].waits_for = 61.0
    assert await adaptive(cluster).safe_target() == 4


async def test_what_waits_for_room_is_closed_before_what_starts():
    cluster = Cluster(planned=5, arrived=1)
    for key in "mine-1", "mine-2":
        cluster.workers[key].waits_for = 61.0
    assert await adaptive(cluster).workers_to_close(3) == ["mine-2", "mine-1"]


@pytest.mark.parametrize(
    ("minimum", "maximum", "workers", "n"), [(2, 9, 0, 2), (0, 3, 100, 3), (0, 9, 17, 5)]
)
async def test_minimum_and_maximum_are_sessions(minimum, maximum, workers, n):
    cluster = Cluster(processes=4)
    cluster.scheduler_comm.wanted = workers
    await adaptive(cluster, minimum=minimum, maximum=maximum).adapt()
    assert cluster.did == [("resize", n)]


async def test_nothing_is_done_when_there_is_what_is_wanted():
    cluster = Cluster(processes=4, planned=2)
    cluster.scheduler_comm.wanted = 8
    await adaptive(cluster).adapt()
    assert cluster.did == []


@pytest.mark.parametrize("processes", [1, 4])
async def test_whole_sessions_are_closed_those_first_that_the_scheduler_would_close(processes):
    cluster = Cluster(processes, planned=4)
    cluster.scheduler_comm.wanted = processes
    await adaptive(cluster).adapt()
    assert cluster.did == [("close", {"mine-1", "mine-2", "mine-3"})]


async def test_what_has_not_arrived_is_closed_first():
    cluster = Cluster(processes=4, planned=5, arrived=3)
    cluster.scheduler_comm.wanted = 8
    await adaptive(cluster).adapt()
    assert cluster.did == [("close", {"mine-2", "mine-3", "mine-4"})]


async def test_no_more_are_closed_than_are_too_many_while_launches_are_held_back():
    cluster = Cluster(planned=5, launched=3, arrived=2)
    cluster.scheduler_comm.wanted = 2
    await adaptive(cluster).adapt()
    [(what, closed)] = cluster.did
    assert what == "close"
    assert len(closed) == 3
    assert "mine-0" not in closed


async def test_what_is_too_much_is_closed_only_when_it_stays_so():
    cluster = Cluster(planned=2)
    cluster.scheduler_comm.wanted = 1
    adapting = adaptive(cluster, wait_count=3)
    await adapting.adapt()
    await adapting.adapt()
    assert cluster.did == []
    await adapting.adapt()
    assert cluster.did == [("close", {"mine-1"})]


@pytest.mark.parametrize("error", [CommClosedError("gone"), OSError("refused"), asyncio.TimeoutError()])
async def test_a_question_without_an_answer_does_not_end_adapting(error, caplog):
    cluster = Cluster(planned=1)
    cluster.scheduler_comm.wanted, cluster.scheduler_comm.errors = 3, [error]
    adapting = adaptive(cluster, interval="1 h")
    await adapting.adapt()
    assert cluster.did == []
    assert repr(error) in caplog.text
    assert adapting.periodic_callback is not None
    await adapting.adapt()
    assert cluster.did == [("resize", 3)]
    stop_adapting(adapting, "the test is over")


async def test_a_failed_launch_does_not_end_adapting():
    cluster = Cluster()
    cluster.scheduler_comm.wanted, cluster.errors = 3, [OSError("the disk is full")]
    adapting = adaptive(cluster, interval="1 h")
    await adapting.adapt()
    assert cluster.did == [("resize", 3)]
    assert adapting.periodic_callback is not None
    stop_adapting(adapting, "the test is over")


async def test_each_group_scales_by_the_tasks_that_need_it():
    cluster = Cluster()
    plain, gpu = adaptive(cluster), adaptive(cluster, worker_group="gpu")
    cluster.scheduler_comm.wanted, cluster.scheduler_comm.wanted_gpus = 3, 5
    await plain.adapt()
    await gpu.adapt()
    assert cluster.did == [("resize", 3), ("resize", 3, "gpu")]


async def test_a_group_closes_its_own_sessions_only():
    cluster = Cluster(planned=2)
    cluster._fleet.resize(3, group="gpu")
    plain, gpu = adaptive(cluster), adaptive(cluster, worker_group="gpu")
    assert (gpu.plan, gpu.observed) == ({"mine-gpu-0", "mine-gpu-1", "mine-gpu-2"}, set())
    assert plain.plan == plain.observed == {"mine-0", "mine-1"}
    cluster.scheduler_comm.wanted = 2
    await plain.adapt()
    await gpu.adapt()
    assert cluster.did == [("close", gpu.plan)]


async def test_idle_sessions_are_closed_first_then_those_that_do_what_another_group_should():
    cluster = Cluster(planned=1)
    cluster._fleet.resize(4, group="gpu")
    cluster._arrived |= set(cluster._fleet.group("gpu").keys)
    cluster._client.info = {"workers": {key: {"name": key} for key in cluster._arrived}}
    held = {"managed": 0, "limit": 0}
    cluster.scheduler_comm.groups = {
        "default": {"sessions": 1, "busy": 1, "lent": [0], **held},
        "gpu": {"sessions": 4, "busy": 3, "lent": [1, 3], **held},
    }
    # The scheduler knows nothing of groups: it names the idle one, then those that hold least.
    cluster.scheduler_comm.workers = ["mine-0", "mine-gpu-3", "mine-gpu-1", "mine-gpu-2", "mine-gpu-0"]
    adaptive(cluster)
    gpu = adaptive(cluster, worker_group="gpu")
    cluster.scheduler_comm.wanted = 1
    assert await gpu.target() == 1
    assert await gpu.workers_to_close(3) == ["mine-gpu-0"]
    assert {*await gpu.workers_to_close(1)} == {"mine-gpu-0", "mine-gpu-1", "mine-gpu-3"}


async def test_a_group_that_is_deleted_meanwhile_is_left():
    cluster = Cluster()
    gpu = adaptive(cluster, worker_group="gpu", minimum=1)
    cluster._fleet.forget_group("gpu")
    await gpu.adapt()
    assert cluster.did == []


async def test_start_times_are_those_of_the_groups_own_sessions(monkeypatch):
    cluster = Cluster()
    plain, gpu = adaptive(cluster), adaptive(cluster, worker_group="gpu")
    cluster._fleet.resize(1)
    cluster._fleet.resize(1, group="gpu")
    for key, launched_at in ("mine-0", 0.0), ("mine-gpu-0", -100.0):
        cluster._fleet.launched(key, SimpleNamespace(launched_at=launched_at, waits_for=None))
        cluster._arrived.add(key)
    monkeypatch.setattr("dask_cml.manager.adaptive.monotonic", lambda: 10.0)
    await plain.target()
    await gpu.target()
    assert (plain.start_time, gpu.start_time) == (10.0, 110.0)


async def test_several_groups_that_adapt_cost_one_look():
    cluster = Cluster()
    adapting = [adaptive(cluster, worker_group=group, interval="1 h") for group in ("default", "gpu")]
    await asyncio.gather(*(each.adapt() for each in adapting))
    for each in adapting:
        await each.adapt()
        stop_adapting(each, "the test is over")
    assert cluster.scheduler_comm.looks == 1


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


async def test_what_has_stopped_logs_nothing_when_it_is_collected(caplog):
    adaptive = CMLAdaptive(Cluster(), interval="1s")
    stop_adapting(adaptive, "the test ends")
    caplog.clear()
    with caplog.at_level("INFO"):
        del adaptive
        gc.collect()
    assert caplog.records == []
