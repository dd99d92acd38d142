"""Adaptive scaling of a cluster: it counts sessions, and only the keeper scales, whoever has asked for it."""

import asyncio
import gc
from itertools import product

import numpy as np
import pytest
from clusters import (
    adapting_of,
    arrived,
    create_elsewhere,
    cut_off,
    is_keeper,
    limits,
    manages,
    rebuild,
    scheduler_of,
    simulate,
    start_time,
    supplied,
    target,
    until_written,
)
from distributed.deploy.adaptive import Adaptive
from simulated.testing import eventually, simulated

from dask_cml import CMLAdaptive, CMLError
from dask_cml.records import store

FAST = {"interval": "1 s", "wait_count": 2}


class Work:
    """The answers of a scheduler: its long tasks, what it says of groups, and who costs least to close."""

    def __init__(self, it, cluster, tasks=0, gpu_tasks=0, cheapest=()):
        self.tasks, self.gpu_tasks, self.cheapest = tasks, gpu_tasks, cheapest
        self.groups = {}
        self.questions = 0
        self.choices = []
        scheduler = scheduler_of(it, cluster)
        scheduler.handlers |= {"cml_demand": self.answer, "workers_to_close": self.choose}

    def answer(self):
        self.questions += 1
        work = [({}, self.tasks), ({"GPU": 1}, self.gpu_tasks)]
        work = [
            {"resources": needs, "tasks": n, "seconds": 1000.0 * n, "unrunnable": 0} for needs, n in work if n
        ]
        return {"work": work, "restricted": [], "groups": self.groups}

    def choose(self, **arguments):
        self.choices.append(arguments)
        return self.cheapest


@pytest.mark.images
@pytest.mark.parametrize(("bounds", "tasks", "n"), [((2, 9), 0, 2), ((0, 9), 17, 5)])
@simulated
async def test_sessions_are_counted_not_their_dask_workers(it, bounds, tasks, n):
    async with simulate(name="mine", cpu=4, processes=4, worker_args=[]) as cluster:
        work = Work(it, cluster, tasks)
        adaptive = cluster.adapt(*bounds, **FAST)
        words = f"worker_group='default', minimum={bounds[0]}, maximum={bounds[1]}"
        assert repr(adaptive) == f"CMLAdaptive('mine', {words})"
        names = {f"mine-{i}" for i in range(n)}
        await eventually(lambda: adaptive.observed == names)
        assert adaptive.plan == adaptive.requested == {*cluster.workers} == names
        await eventually(lambda: len(cluster.scheduler_info["workers"]) == 4 * n)
        work.tasks = 0
        await eventually(lambda: len(cluster.workers) == bounds[0])


@pytest.mark.images
@simulated
async def test_sessions_that_are_not_connected_are_closed_first(it):
    async with supplied(name="mine", n_workers=3) as cluster:
        it.platform.doom("silent", times=2)
        cluster.scale(5)
        await eventually(lambda: len(cluster.workers) == 5)
        work = Work(it, cluster, cheapest=["mine-1", "mine-0", "mine-2"])
        cluster.adapt(3, 9, **FAST)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-1", "mine-2"})
        assert work.choices == []
        it.platform.doom("silent")
        cluster.scale(4)
        await eventually(lambda: len(cluster.workers) == 4)
        cluster.adapt(2, 9, memory_ratio=3, **FAST)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-2"})
        assert {choice["memory_ratio"] for choice in work.choices} == {3}  # the user's argument


@pytest.mark.images
@simulated
async def test_idle_sessions_are_closed_before_those_that_run_another_groups_tasks(it):
    groups = {"gpu": {"n_workers": 4, "nvidia_gpu": 1}}
    async with simulate(name="mine", n_workers=1, worker_groups=groups) as cluster:
        await eventually(lambda: arrived(cluster) == 5)
        # The scheduler knows nothing of groups: it names the idle one, then those that hold least.
        order = ["mine-gpu-0", "mine-gpu-2", "mine-gpu-1", "mine-gpu-3", "mine-0"]
        work = Work(it, cluster, tasks=1, gpu_tasks=3, cheapest=order)
        held = {"managed": 0, "limit": 0}
        plain = {"sessions": 1, "busy": 1, "borrowed": [], **held}
        gpu = {"sessions": 4, "busy": 3, "borrowed": ["mine-gpu-1", "mine-gpu-3"], **held}
        work.groups = {"default": plain, "gpu": gpu}
        cluster.adapt(1, 1, **FAST)
        cluster.adapt(0, 4, worker_group="gpu", **FAST)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-gpu-1", "mine-gpu-2", "mine-gpu-3"})
        work.gpu_tasks = 0
        work.groups = {"default": plain, "gpu": {**gpu, "sessions": 3}}
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-gpu-2"})


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no answer", "an error"])
@simulated
async def test_a_question_without_an_answer_does_not_end_adapting(it, fault, caplog):
    async with simulate(n_workers=1) as cluster:
        work = Work(it, cluster, tasks=3)

        async def hang():
            await asyncio.sleep(3600)

        def fail():
            raise OSError("it failed")

        scheduler = scheduler_of(it, cluster)
        scheduler.handlers["cml_demand"] = {"no answer": hang, "an error": fail}[fault]
        cluster.adapt(0, 5, **FAST)
        await eventually(lambda: "Adaptive scaling got no answer from the scheduler" in caplog.text)
        assert target(cluster) == 1
        scheduler.handlers["cml_demand"] = work.answer
        await eventually(lambda: arrived(cluster) == 3)


@simulated
async def test_adapting_closes_workers_by_the_groups_of_their_key(it):
    async with supplied(n_workers=2) as cluster:
        for key, closed in (lambda worker: "all", 0), (lambda worker: worker.name, 1):
            adaptive = cluster.adapt(minimum=0, maximum=2, interval="1 hour", worker_key=key)
            assert len(await adaptive.workers_to_close(1)) == closed


@simulated
async def test_a_group_that_adapts_may_be_deleted_and_added_again(it):
    async with simulate(name="mine", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster:
        Work(it, cluster, gpu_tasks=2)
        adaptive = cluster.adapt(0, 5, worker_group="gpu", **FAST)
        await eventually(lambda: arrived(cluster) == 2)
        await cluster.delete_worker_group("gpu")
        assert adaptive.plan == set()
        assert not cluster.workers
        await cluster.add_worker_group("gpu", nvidia_gpu=1)
        await asyncio.sleep(10)
        assert limits(cluster, "gpu") is None
        assert not cluster.workers
        cluster.adapt(1, 1, worker_group="gpu", **FAST)
        await eventually(lambda: {*cluster.workers} == {"mine-gpu-2"})


@simulated
async def test_a_remote_lets_the_keeper_adapt(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        work = Work(it, cluster, tasks=3)
        adaptive = remote.adapt(1, 5, interval="2 s", wait_count=np.int64(7), target_duration=np.float32(9))
        await eventually(lambda: arrived(cluster) == 3)
        await eventually(lambda: store.read("mine").bounds == {"default": (1, 5)})
        taken = cluster._adaptive
        assert taken.limits == adaptive.limits == adapting_of(cluster) == adapting_of(remote)
        assert {"minimum": 1, "maximum": 5, "interval": 2.0, "wait_count": 7}.items() < taken.limits.items()
        assert taken.limits["target_duration"] == 9.0
        adaptive.stop()
        await eventually(lambda: limits(cluster) is limits(remote) is None)
        work.tasks = 5
        await asyncio.sleep(20)
        assert target(cluster) == target(remote) == 3
        await cluster.add_worker_group("gpu")
        await eventually(lambda: "gpu" in remote.worker_groups)
        adaptive = remote.adapt(0, 1, worker_group="gpu")
        await eventually(lambda: limits(cluster, "gpu") == (0, 1))
        await cluster.delete_worker_group("gpu")
        await eventually(lambda: "gpu" not in remote.worker_groups)
        adaptive.stop()


@pytest.mark.images
@simulated
async def test_what_stops_adapting_here_or_elsewhere_keeps_the_number_of_workers(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        work = Work(it, cluster)
        for n, stops in enumerate(("adaptive", "cluster", "remote"), 1):
            work.tasks = n
            replaced = cluster.adapt(0, n, **FAST)
            await eventually(lambda n=n: arrived(cluster) == n and limits(remote) == (0, n))
            adaptive = cluster.adapt(0, 5, **FAST)
            replaced.stop()  # it counts no more
            await eventually(lambda: limits(remote) == (0, 5))
            if stops == "adaptive":
                adaptive.stop()
                adaptive.stop()
            else:
                {"cluster": cluster, "remote": remote}[stops].scale(n)
            await eventually(lambda: limits(cluster) is limits(remote) is None)
            work.tasks = 5
            await asyncio.sleep(20)
            assert target(cluster) == target(remote) == n
            assert replaced.periodic_callback is adaptive.periodic_callback is None
        adaptive = remote.adapt(0, 1)
        await eventually(lambda: limits(cluster) == (0, 1))
        await remote.close()
        adaptive.stop()  # as at the end of its own process
        assert limits(cluster) == (0, 1)


@simulated
async def test_invalid_arguments_of_adapting_are_refused_and_change_nothing(it, caplog):
    invalid = [{"interval": 0}, {"target_duration": 0}, {"target_duration": "x"}]
    invalid += [{"wait_count": -1}, {"wait_count": 1.5}]
    another = {"Adaptive": Adaptive, "worker_group": "gpu"}
    async with simulate(name="mine", worker_groups={"gpu": {}}) as cluster, rebuild("mine") as remote:
        for user, options in product([remote, cluster], [*invalid, another]):
            with pytest.raises((TypeError, ValueError), match=f"invalid {next(iter(options))}="):
                user.adapt(1, **options)
            await until_written(user)
            for group in "default", "gpu":
                assert limits(cluster, group) is limits(remote, group) is None
    assert "no finite maximum" not in caplog.text


@pytest.mark.images
@pytest.mark.parametrize(
    ("where", "who"), [("cluster", "cluster"), ("cluster", "remote"), ("remote", "remote")]
)
@simulated
async def test_a_user_who_scales_stops_an_adaptive_of_another_class(it, where, who):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        wanted, asked = [1], []
        handlers = scheduler_of(it, cluster).handlers

        async def answer_late(**_):
            asked.append(wanted[-1])
            await asyncio.sleep(0.5)
            return asked[-1]

        handlers["adaptive_target"] = answer_late
        users = {"cluster": cluster, "remote": remote}
        adaptive = users[where].adapt(Adaptive=Adaptive, interval="1 s", wait_count=1)
        await eventually(lambda: arrived(cluster) == 1)
        wanted.append(2)
        await eventually(lambda: arrived(cluster) == 2)
        wanted.append(1)
        await eventually(lambda: target(cluster) == 1)
        n = len(asked)
        await eventually(lambda: len(asked) > n)  # and is not answered yet
        users[who].scale(3)
        await asyncio.sleep(30)
        assert target(cluster) == target(remote) == arrived(cluster) == 3
        assert adaptive.periodic_callback is None


@pytest.mark.images
@simulated
async def test_another_class_goes_on_although_nobody_holds_it_until_the_cluster_adapts_otherwise(it):
    async with simulate() as cluster:
        wanted = [1]
        scheduler_of(it, cluster).handlers["adaptive_target"] = lambda **_: wanted[-1]
        cluster.adapt(Adaptive=Adaptive, interval="1 s")
        await eventually(lambda: arrived(cluster) == 1)
        gc.collect()
        wanted.append(2)
        await eventually(lambda: arrived(cluster) == 2, seconds=60.0)
        former = cluster._adaptive
        await former.cluster.scale_down(["laptop"])  # a Dask worker that a user has joined
        cluster.adapt(3, 3)
        await eventually(lambda: arrived(cluster) == 3)
        assert former.periodic_callback is None


@simulated
async def test_an_adaptive_that_is_refused_does_not_stop_a_later_one(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        wanted, handlers = [1], scheduler_of(it, cluster).handlers
        answer = handlers["cml_post"]

        async def hang(**_):
            handlers["cml_post"] = answer
            await asyncio.sleep(3600)

        handlers |= {"cml_post": hang, "adaptive_target": lambda **_: wanted[-1]}
        refused = remote.adapt(Adaptive=Adaptive, interval="1 s")
        remote.adapt(Adaptive=Adaptive, interval="1 s")
        with pytest.raises(CMLError, match="does not answer"):
            await until_written(remote)
        assert refused.periodic_callback is None
        await until_written(remote)
        wanted.append(2)
        await eventually(lambda: arrived(cluster) == 2)


@simulated
async def test_an_adaptive_of_another_class_goes_on_when_its_process_takes_over_with_its_requests(it):
    creator = await create_elsewhere(it, name="mine", n_workers=1)
    async with rebuild("mine", shutdown_on_close=True) as remote:
        await eventually(lambda: arrived(remote) == 1)
        [scheduler] = it.sessions.program(remote.sessions[0].id)
        wanted = [2]
        scheduler.handlers["adaptive_target"] = lambda **_: wanted[-1]
        creator.kill()
        remote.adapt(Adaptive=Adaptive, interval="1 s", wait_count=1)
        await eventually(lambda: is_keeper(remote) and arrived(remote) == 2)
        wanted.append(3)
        await eventually(lambda: arrived(remote) == 3)


@simulated
async def test_the_next_keeper_adapts_and_knows_start_times_and_the_object_of_the_user_stops_it(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as other:
        adaptive = cluster.adapt(1, 3, **FAST)
        await until_written(cluster)
        await eventually(lambda: arrived(other) == 1)
        await asyncio.sleep(2)
        heal = cut_off(cluster)
        await eventually(lambda: is_keeper(other))
        heal()
        await eventually(lambda: not manages(cluster))
        assert limits(other) == (1, 3)
        assert 0.5 < start_time(other, "default") < 30
        Work(it, other, tasks=3)
        await eventually(lambda: arrived(other) == 3)
        adaptive.stop()
        await until_written(cluster)
        await eventually(lambda: limits(other) is limits(cluster) is None)


def wanting(cls):
    """Return a class of adaptive scaling that wants as many sessions as its user says."""

    class Wanting(cls):
        wanted = 0

        async def target(self):
            return self.wanted

    return Wanting


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "fails"), [(Adaptive, "scale_down"), (CMLAdaptive, "safe_target")])
@simulated
async def test_a_class_of_a_user_has_its_own_target_and_an_error_is_logged_once(it, cls, fails, caplog):
    failures = []

    async def fail(**_):
        failures.append(fails)
        raise OSError("it failed")

    async with simulate() as cluster:
        adaptive = cluster.adapt(Adaptive=wanting(cls), minimum=0, maximum=4, **FAST)
        for n in (3, 9, 2):
            adaptive.wanted = n
            await eventually(lambda n=n: len(cluster.workers) == arrived(cluster) == min(n, 4))
            assert len(adaptive.plan) == min(n, 4)
        setattr(adaptive, fails, fail)
        adaptive.wanted = 0
        await eventually(lambda: len(failures) > 3)
        assert "it failed" in caplog.text
        if cls is CMLAdaptive:  # Dask's class logs by itself
            assert caplog.text.count("Adaptive scaling of cluster") == 1
        assert adaptive.state == "running"
        assert adaptive.periodic_callback.is_running()
        delattr(adaptive, fails)
        await eventually(lambda: not cluster.workers)
        adaptive.stop()
        adaptive.wanted = 2
        await asyncio.sleep(20)
        assert target(cluster) == 0
