"""A cluster starts as it was asked for, or says why not and leaves nothing."""

import asyncio
import os
import time

import dask
import pytest
from clusters import LIGHT, arrived, connected, simulate, supplied
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError, LaunchRefused, NotOnCML, SchedulerTimeout, SessionFailed


def test_a_block_runs_tasks_on_two_sessions_and_stops_all_at_its_end(platform, light):
    with (
        dask.config.set({"cml.platform": "local"}),
        CMLCluster(n_workers=2, cpu=4, memory=16) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=120)
        assert client.gather(client.map(lambda n: n**2, range(10))) == [n**2 for n in range(10)]
        assert {worker["nthreads"] for worker in client.scheduler_info()["workers"].values()} == {4}
        sizes = [(session["cpu"], session["memory"]) for session in platform.sessions()]
        assert sorted(sizes) == [(1, 2), (4, 16), (4, 16)]
    assert all(session["stop_requested"] or session["finished_at"] for session in platform.sessions())


@simulated
async def test_each_session_is_launched_through_workers_v1_with_its_size(it):
    async with supplied(name="dawn", n_workers=3, cpu=2, memory=8, nvidia_gpu=1):
        sizes = [
            (arguments["cpu"], arguments["memory"], arguments["nvidia_gpu"])
            for arguments in it.platform.arguments("launch_workers")
            for _ in range(arguments["n"])
        ]
        assert sorted(sizes) == [(1, 2, 0), (2, 8, 1), (2, 8, 1), (2, 8, 1)]
        assert {*it.platform.running} == {"dawn-scheduler", "dawn-0", "dawn-1", "dawn-2"}


@simulated
async def test_the_scheduler_and_the_first_workers_launch_at_the_same_moment(it):
    it.platform.configure({"sessions": 0}, waits_for_room=True)  # none gets on before all are launched
    cluster = simulate(n_workers=2)
    starting = asyncio.ensure_future(cluster)
    await eventually(lambda: len(it.platform.all) == 3, 1.0)  # two calls, one after the other, take 0.6 s
    assert {session.status for session in it.platform.live_sessions} == {"scheduling"}
    it.platform.configure()
    async with await starting:
        await eventually(lambda: arrived(cluster) == 2)


@simulated
async def test_the_constructor_returns_before_the_workers_come_and_tasks_begin_with_the_first(it):
    it.platform.configure({"sessions": 1}, waits_for_room=True)
    async with simulate(name="dawn", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        assert connected(cluster) == set()
        future = client.submit(sum, [1, 2])
        it.platform.configure({"sessions": 2}, waits_for_room=True)
        assert await future == 3
        assert len(connected(cluster)) == 1
        it.platform.configure()
        await client.wait_for_workers(2)


@simulated
async def test_nothing_is_launched_before_an_asynchronous_cluster_is_awaited(it):
    cluster = simulate(n_workers=1)
    await asyncio.sleep(10.0)
    assert it.platform.all == {}
    async with cluster:
        await eventually(lambda: arrived(cluster) == 1)


@pytest.mark.parametrize(
    ("fate", "error", "words"),
    [
        ("fails", SessionFailed, "ended before its scheduler answered, its status is failed"),
        ("succeeds", SessionFailed, "ended before its scheduler answered, its status is succeeded"),
        ("silent", SchedulerTimeout, "did not answer within 30 s, its status is running"),
        ("waits", SchedulerTimeout, "did not run within 40 s, its status is scheduling"),
        ("refused", LaunchRefused, "refused to launch mine-scheduler: .*exceeded quota"),
    ],
)
@simulated
async def test_a_start_that_fails_says_why_and_leaves_nothing(it, fate, error, words):
    if fate == "refused":
        it.platform.configure({"sessions": 0})
    elif fate == "waits":
        it.platform.configure({"sessions": 0}, waits_for_room=True)
    else:
        it.platform.doom(fate, key="scheduler")
    with pytest.raises(error, match=words) as caught:
        await simulate(name="mine", n_workers=2, scheduler_timeout=30, pending_timeout=40)
    assert isinstance(caught.value, CMLError)
    await eventually(lambda: not it.platform.live)
    assert it.clusters == []


@pytest.mark.parametrize(
    "limit", [{"scheduler_timeout": 90}, pytest.param({"pending_timeout": 120}, marks=pytest.mark.slow)]
)
@simulated
async def test_a_start_waits_for_its_scheduler_as_long_as_the_options_say(it, limit):
    [(option, seconds)] = limit.items()
    if option == "pending_timeout":
        it.platform.configure({"sessions": 0}, waits_for_room=True)
    else:
        it.platform.doom("silent", key="scheduler")
    began = time.monotonic()
    with pytest.raises(SchedulerTimeout, match=f"within {seconds} s"):
        await simulate(**limit)
    assert seconds <= time.monotonic() - began < seconds + 30


def test_outside_of_cml_the_error_names_the_local_platform(platform):
    with pytest.raises(NotOnCML, match='platform="local"'):
        CMLCluster()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "lots"}, ValueError, "invalid memory='lots': expected GiB"),
        ({"n_workers": -1}, ValueError, "invalid n_workers=-1: expected "),
        ({"cpu": "two"}, TypeError, "invalid cpu='two': expected "),
        ({"launch_options": {"gpu_label": 3}}, ValueError, "invalid launch_options 'gpu_label': expected "),
    ],
)
@simulated
async def test_an_invalid_option_is_named_with_valid_values_before_anything_is_launched(
    it, options, error, words
):
    with pytest.raises(error, match=words):
        await simulate(**options)
    assert it.platform.all == {}
    assert it.clusters == []


@simulated
async def test_an_unknown_key_is_named_with_the_right_one_before_anything_is_launched(it):
    words = "^invalid key cml.cpus from Dask's configuration: expected cml.cpu$"
    with dask.config.set({"cml.cpus": 2}), pytest.raises(ValueError, match=words):
        await simulate()
    assert it.platform.all == {}


@simulated
async def test_an_argument_overrides_the_configuration(it):
    with dask.config.set({"cml.n-workers": 2, "cml.cpu": 3}):
        async with supplied(name="mine", n_workers=1) as cluster:
            assert {session.size.cpu for session in cluster.sessions if session.role == "worker"} == {3}
            assert {*it.platform.running} == {"mine-scheduler", "mine-0"}


@simulated
async def test_a_session_runs_several_dask_workers_which_share_its_threads_and_gpus(it):
    options = {"cpu": 4, "nvidia_gpu": 2, "worker_args": []}
    async with simulate(name="mine", n_workers=1, **options) as cluster:
        await eventually(lambda: connected(cluster) == {"mine-0-0", "mine-0-1"})
        workers = cluster.scheduler_info["workers"].values()
        assert [(worker["nthreads"], worker["resources"]) for worker in workers] == [(2, {"GPU": 1.0})] * 2
        assert len(it.platform.running) == 2
    async with simulate(name="mine", n_workers=1, processes=4, **options) as cluster:
        await eventually(lambda: len(connected(cluster)) == 4)
        workers = cluster.scheduler_info["workers"].values()
        assert [(worker["nthreads"], worker["resources"]) for worker in workers] == [(1, {"GPU": 0.5})] * 4


OURS = {"distributed.scheduler.unknown-task-duration": "3s", "mine.own": 1, "others.own": 1}
ENV = {"GREETING": 'it\'s $HOME "quoted" {1+1}', "PATH": "/mine:$PATH", "PASSWORD": "a$b"}
#: The sizes of the workers, with what is left of their memory.
SIZES = [(1, 1, None, 0.73), (2, 2, None, 1.71), (3, "1.5 GiB", "512 MiB", 1.0)]


@pytest.fixture(scope="module")
def client(shared_platform):
    """The client of a cluster with a worker of each size."""
    groups = {
        f"of-{cpu}": {"cpu": cpu, "memory": memory, "memory_reserve": reserve, "n_workers": 1}
        for cpu, memory, reserve, _ in SIZES
    }
    with dask.config.set({**OURS, "cml.inherit": ["mine"]}):
        cluster = CMLCluster(platform="local", env=ENV, worker_groups=groups, **LIGHT)
    with cluster, Client(cluster) as client:
        client.wait_for_workers(len(SIZES), timeout=120)
        yield client


@pytest.mark.slow
def test_a_dask_worker_has_the_threads_and_the_memory_of_its_session_less_a_reserve(client):
    workers = sorted(client.scheduler_info()["workers"].values(), key=lambda worker: worker["nthreads"])
    for worker, (cpu, _, _, limit) in zip(workers, SIZES, strict=True):
        assert worker["nthreads"] == cpu
        assert worker["memory_limit"] / 2**30 == pytest.approx(limit, abs=0.005)


def test_variables_reach_all_sessions_and_may_use_those_of_the_session(client):
    values = {"GREETING": ENV["GREETING"].replace("$HOME", os.environ["HOME"]), "PASSWORD": "a$b"}
    for name, value in {**values, "PATH": f"/mine:{os.environ['PATH']}"}.items():
        assert {*client.run(os.getenv, name).values()} == {value}
        assert client.run_on_scheduler(os.getenv, name) == value


def test_sessions_inherit_dasks_own_configuration_and_named_sections_alone(client):
    keys = [*OURS]

    def settings():  # within this function, because sessions cannot import this module
        return [dask.config.get(key, None) for key in keys]

    assert client.run_on_scheduler(settings) == ["3s", 1, None]
    assert [*client.run(settings).values()] == [["3s", 1, None]] * len(SIZES)
