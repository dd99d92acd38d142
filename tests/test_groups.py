"""Groups of workers of several sizes in one cluster, on real sessions."""

from __future__ import annotations

import asyncio
import json

import clusters
import dask
import pytest
from click.testing import CliRunner
from clusters import arrived, limits, name_of, rebuild, scheduler_of, until_written
from distributed import Client, get_worker
from simulated.faults import HTTPError, Mishap
from simulated.testing import eventually, simulated

from dask_cml import CMLAdaptive, CMLCluster, CMLError, cli
from dask_cml.options import Options
from dask_cml.records import store


@pytest.fixture(autouse=True)
def locally(platform, light, monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")
    with dask.config.set({"cml.platform": "local"}):
        yield platform


def make(**options):
    return clusters.make(**{"name": "mine", "cpu": 1, "memory": 1, **options})


def mine(**options):
    return clusters.simulate(**{"name": "mine", "cpu": 1, "memory": 1, **options})


def names(cluster):
    return {worker["name"] for worker in cluster.scheduler_info["workers"].values()}


@pytest.mark.slow
async def test_each_group_has_its_own_size_and_number(platform, holds):
    gpu = {"n_workers": 1, "cpu": 2, "memory": 2, "processes": 2, "nvidia_gpu": 2, "worker_args": []}
    async with (
        make(n_workers=1, worker_groups={"gpu": gpu}) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await holds(lambda: names(cluster) == {"mine-0", "mine-gpu-0-0", "mine-gpu-0-1"})
        sizes = {
            name_of(session): (session["cpu"], session["memory"], session["nvidia_gpu"])
            for session in platform.sessions()
        }
        assert (sizes["mine-0"], sizes["mine-gpu-0"]) == ((1, 1, 0), (2, 2, 2))

        on_gpu = client.map(lambda _: get_worker().name, range(4), resources={"GPU": 1})
        assert {*await client.gather(on_gpu)} <= {"mine-gpu-0-0", "mine-gpu-0-1"}

        cluster.scale(2)
        await holds(lambda: "mine-1" in names(cluster))
        cluster.scale(0, worker_group="gpu")
        await holds(lambda: names(cluster) == {"mine-0", "mine-1"})

        groups = cluster.worker_groups
        assert {name: (group.n_workers, group.n_arrived) for name, group in groups.items()} == {
            "default": (2, 2),
            "gpu": (0, 0),
        }
        assert groups["gpu"].resources == {"GPU": 2}
        html = cluster._repr_html_()
        assert "Worker group" in html
        assert "GPU=2" in html
        assert "# mine-2: cpu=1" in cluster.job_script()
        assert "# mine-gpu-1: cpu=2" in cluster.job_script()
        assert {"mine-0", "mine-gpu-0"} <= {*await cluster.get_logs()}


@simulated
async def test_a_remote_adds_scales_and_deletes_groups(it):
    async with mine(n_workers=1) as cluster:
        async with rebuild("mine") as remote:
            await remote.add_worker_group("big", 1, memory=2)
            await eventually(lambda: "mine-big-0" in names(cluster))
            assert cluster.worker_groups.keys() == {"default", "big"}
            cluster.scale(2, worker_group="big")
            await eventually(lambda: remote.worker_groups["big"].n_arrived == 2)
            remote.scale(1, worker_group="big")
            await eventually(lambda: len(cluster.workers) == 2)
            assert remote.worker_groups["default"].n_workers == 1
        async with rebuild("mine") as another:
            assert another.worker_groups["big"].size.memory == 2
            assert another.worker_groups["big"].n_workers == 1
            await another.delete_worker_group("big")
            assert another.worker_groups.keys() == {"default"}
            await eventually(lambda: cluster.worker_groups.keys() == {"default"})
            await eventually(lambda: names(cluster) == {"mine-0"})
            await eventually(lambda: [*store.read("mine").groups] == ["default"])
        await cluster.add_worker_group("big", 1)
        await eventually(lambda: cluster.worker_groups["big"].n_arrived == 1)
        assert len({session.key for session in it.platform.all.values()}) == len(it.platform.all)


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_the_workers_of_a_deleted_group_stay_until_others_can_take_their_data(it, who):
    groups = {"big": {"n_workers": 1}}
    async with (
        mine(worker_groups=groups) as cluster,
        rebuild("mine") as remote,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        [held] = await client.scatter(["data"])
        it.platform.doom("silent")
        cluster.scale(1)
        await eventually(lambda: "mine-0" in cluster.workers)
        words = "worker group 'big' of cluster mine deleted, but mine-big-0 stay until other workers can take"
        with pytest.raises(CMLError, match=words):
            await {"keeper": cluster, "remote": remote}[who].delete_worker_group("big")
        assert cluster.worker_groups.keys() == remote.worker_groups.keys() == {"default"}
        assert await held == "data"
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-1"})
        assert await held == "data"


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_a_deleted_group_is_gone_at_once_while_its_sessions_stop(it, who):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        user = {"keeper": cluster, "remote": remote}[who]
        with it.platform.held("stop_workers"):
            deleting = asyncio.create_task(user.delete_worker_group("big"))
            await eventually(lambda: "big" not in user.worker_groups)
            with pytest.raises(ValueError, match="invalid worker_group='big': expected one of 'default'"):
                user.scale(1, worker_group="big")
            await asyncio.sleep(10)
            assert not deleting.done()
        await asyncio.wait_for(deleting, 60)
        assert cluster.workers == {}


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_deleting_a_group_fails_with_the_reason_if_its_sessions_are_not_stopped(it, who):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        it.platform.fail("stop_workers", *[HTTPError(401)] * 1000)
        words = "'big' of cluster mine deleted, but mine-big-0 not stopped yet: CML did not stop stub.*401"
        with pytest.raises(CMLError, match=words):
            await {"keeper": cluster, "remote": remote}[who].delete_worker_group("big")
        it.platform.heal()
        await eventually(lambda: cluster.workers == {})
        await eventually(lambda: cluster.problem is remote.problem is None)


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_deleting_a_group_has_an_end_if_the_platform_does_not_answer(it, who):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        words = "mine-big-0 not stopped yet: nothing has changed for 45 s"
        with it.platform.held("stop_workers"), pytest.raises(CMLError, match=words):
            await {"keeper": cluster, "remote": remote}[who].delete_worker_group("big")
        await eventually(lambda: cluster.workers == {})


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_a_failed_launch_of_another_group_does_not_fail_the_deletion_of_one(it, who):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        it.platform.fail("launch_workers", *[HTTPError(503)] * 1000)
        cluster.scale(1)
        await eventually(lambda: "did not launch mine-0" in str(remote.problem))
        it.platform.plan("stop_workers", Mishap(before=8.0))
        await {"keeper": cluster, "remote": remote}[who].delete_worker_group("big")
        it.platform.heal()
        await eventually(lambda: arrived(cluster) == 1)


@simulated
async def test_the_failure_of_a_launch_ends_when_nobody_wants_it_any_more(it):
    async with mine() as cluster, rebuild("mine") as remote:
        it.platform.fail("launch_workers", *[HTTPError(503)] * 1000)
        cluster.scale(1)
        await eventually(lambda: cluster.problem and remote.problem)
        cluster.scale(0)
        await eventually(lambda: cluster.problem is remote.problem is None)
        it.platform.heal()


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_a_group_may_be_added_again_while_the_sessions_of_the_deleted_one_stop(it, who):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        user = {"keeper": cluster, "remote": remote}[who]
        deleting = asyncio.create_task(user.delete_worker_group("big"))
        await eventually(lambda: "big" not in user.worker_groups)
        await user.add_worker_group("big", n_workers=1, memory=2)
        await asyncio.wait_for(deleting, 60)
        await eventually(lambda: names(cluster) == {"mine-big-1"}, seconds=60)
        assert cluster.workers["mine-big-1"].session.size.memory == 2
        assert user.worker_groups["big"].size.memory == 2


@simulated
async def test_a_remote_sees_other_workers_after_a_group_with_workers_was_deleted(it):
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)
        await cluster.delete_worker_group("big")
        cluster.scale(1)
        await eventually(lambda: cluster.worker_groups["default"].n_arrived == 1)
        await eventually(lambda: remote.worker_groups["default"].n_arrived == 1, seconds=60)


@simulated
async def test_of_two_who_add_one_name_at_once_one_is_refused(it):
    async with mine() as cluster, rebuild("mine") as remote:
        added = await asyncio.gather(
            cluster.add_worker_group("big", 1, memory=2),
            remote.add_worker_group("big", 1, memory=1.5),
            return_exceptions=True,
        )
        [error] = [result for result in added if result is not None]
        assert "invalid name='big': expected a name that no worker group" in str(error)
        memory = 2 if added[0] is None else 1.5
        for user in cluster, remote:
            await eventually(lambda user=user: "big" in user.worker_groups)
            assert user.worker_groups["big"].size.memory == memory


@simulated
async def test_a_worker_that_is_lost_while_the_scheduler_chooses_is_one_of_those_that_go(it):
    async with mine(n_workers=3) as cluster:
        await eventually(lambda: cluster.worker_groups["default"].n_arrived == 3)
        handlers = scheduler_of(it, cluster).handlers
        choose = handlers["workers_to_close"]

        async def choose_late(**arguments):
            await asyncio.sleep(5)
            return choose(**arguments)

        handlers["workers_to_close"] = choose_late
        cluster.scale(2)
        assert cluster.worker_groups["default"].n_workers == 2
        it.platform.evict(cluster.workers["mine-0"].session_id)
        await eventually(lambda: {*cluster.workers} == {"mine-1", "mine-2"})
        await asyncio.sleep(10)
        assert names(cluster) == {"mine-1", "mine-2"}
        assert it.platform.count("launch_workers") == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda cluster: cluster.scale(1, worker_group="big"),
        lambda cluster: cluster.adapt(1, 1, worker_group="big"),
        lambda cluster: cluster.add_worker_group("new", n_workers=1),
        lambda cluster: cluster.delete_worker_group("big"),
    ],
    ids=["scale", "adapt", "add", "delete"],
)
@simulated
async def test_a_remote_that_gets_no_answer_says_so_and_nothing_is_remembered(it, change):
    async with mine(worker_groups={"big": {}}) as cluster, rebuild("mine") as remote:
        handlers = scheduler_of(it, cluster).handlers

        async def hang(**arguments):
            await asyncio.sleep(3600)

        answer, handlers["cml_post"] = handlers["cml_post"], hang
        asked = change(remote)
        if isinstance(asked, CMLAdaptive):
            asked = until_written(remote)
        with pytest.raises(CMLError, match=r"the scheduler of cluster 'mine' at tcp://.* does not answer"):
            await asked
        handlers["cml_post"] = answer
        await asyncio.sleep(10)
        for user in cluster, remote:
            assert user.worker_groups.keys() == {"default", "big"}
            assert user.worker_groups["big"].n_workers == 0
            assert limits(user, "big") is None


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_bad_groups_are_refused_and_nothing_is_lost(it, who):
    async with mine(worker_groups={"big": {}}) as cluster, rebuild("mine") as remote:
        user = {"keeper": cluster, "remote": remote}[who]
        for call, error, words in (
            (lambda: user.add_worker_group("0gpu"), ValueError, "invalid name='0gpu': expected"),
            (lambda: user.add_worker_group("default"), ValueError, "invalid name='default': expected"),
            (lambda: user.add_worker_group(3), TypeError, "invalid name=3: expected"),
            (lambda: user.add_worker_group("big"), ValueError, "invalid name='big': expected a name that no"),
            (lambda: user.add_worker_group("a", -1), ValueError, "invalid n_workers=-1: expected"),
            (lambda: user.add_worker_group("a", cpu=0), ValueError, "invalid cpu=0: expected"),
            (
                lambda: user.add_worker_group("a", launch_options={"no": 1}),
                ValueError,
                "invalid launch_options 'no'",
            ),
            (
                lambda: user.add_worker_group("a", worker_class="no.such.Class"),
                ValueError,
                "invalid worker_class='no.such.Class': expected",
            ),
            (lambda: user.delete_worker_group("default"), ValueError, "invalid name='default': expected"),
            (lambda: user.delete_worker_group("no"), ValueError, "invalid name='no': expected"),
            (lambda: user.scale(1, worker_group="no"), ValueError, "invalid worker_group='no': expected"),
            (lambda: user.adapt(0, 1, worker_group="no"), ValueError, "invalid worker_group='no': expected"),
        ):
            with pytest.raises(error, match=words):
                await call()
        assert user.worker_groups.keys() == {"default", "big"}
        assert [*store.read("mine").groups] == ["default", "big"]
        assert [session.key for session in it.platform.all.values()] == ["scheduler"]


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        ([1], TypeError, "invalid worker_groups=[1]: expected a mapping"),
        ({"0": {}}, ValueError, "invalid worker_groups='0': expected at most 40"),
        ({"gpu": 3}, TypeError, "worker_groups['gpu'] of type int: expected a mapping of options"),
        ({"gpu": {"cpus": 3}}, ValueError, "in worker_groups['gpu']: invalid option cpus"),
        ({"gpu": {"env": {"A": 3}}}, TypeError, "in worker_groups['gpu']: invalid env['A']=3"),
    ],
)
def test_bad_groups_of_a_new_cluster_are_refused_before_any_launch(platform, groups, error, words):
    with pytest.raises(error) as caught:
        CMLCluster(worker_groups=groups)
    assert words in str(caught.value)
    assert platform.sessions() == []


def test_groups_in_the_configuration_inherit_the_options_of_the_cluster():
    with dask.config.set({"cml.worker-groups": {"gpu": {"nvidia-gpu": 2, "cpu": 8, "env": {"B": "2"}}}}):
        options = Options.read(env={"A": "1"}, memory=3, worker_args=[]).groups()["gpu"]
    assert (options.nvidia_gpu, options.cpu, options.memory, options.nthreads) == (2, 8, 3, 8)
    assert options.processes == 2
    assert options.resources == {"GPU": 2}
    assert options.env.items() >= {"A": "1", "B": "2"}.items()


@pytest.mark.parametrize(
    ("cluster", "group", "reserve"),
    [
        ({"memory": 16, "memory_reserve": 2}, {"memory": 32}, 2),
        ({"memory": 16, "memory_reserve": 0}, {"memory": 32}, 0),
        ({"memory": 16, "memory_reserve": 2}, {"memory": 32, "memory_reserve": 3}, 3),
        ({"memory": 16}, {"memory": 32}, 0.25 + 0.02 * 32),
    ],
)
def test_a_group_with_another_memory_keeps_the_reserve_that_the_cluster_was_given(cluster, group, reserve):
    options = Options.read(**cluster)
    assert options.of_group(group).memory_reserve == reserve
    running = Options.of_running("mine", options.arguments())  # in another process
    assert running.of_group(group).memory_reserve == reserve


def test_a_group_too_small_for_the_reserve_of_the_cluster_is_refused():
    with pytest.raises(ValueError, match=r"invalid memory_reserve=2.0: expected less than memory=1 GiB"):
        Options.read(memory=16, memory_reserve=2).of_group({"memory": 1})


@pytest.mark.slow
def test_the_shell_adds_scales_lists_and_deletes_groups(until):
    def run(*arguments, code=0):
        result = CliRunner().invoke(cli.cml, [*map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output

    with CMLCluster(name="mine", quiet=True) as cluster:
        add = ["group", "add", "mine", "big", "--n-workers", 1, "--memory", "2 GiB", "--resources", "BIG=1"]
        assert run(*add) == "Worker group big added to cluster mine: 1 worker\n"
        assert "invalid name='big'" in run(*add, code=1)
        assert (
            run("scale", "mine", 2, "--group", "big")
            == "Cluster mine scaled to 2 workers in worker group big\n"
        )
        groups = {group["name"]: group for group in json.loads(run("group", "list", "mine", "--json"))}
        assert (groups["big"]["n_workers"], groups["big"]["resources"]) == (2, {"BIG": 1})
        assert groups["default"]["n_workers"] == 0
        [head, _, big] = run("group", "list", "mine").splitlines()
        assert head.split() == ["group", "workers", "cpu", "memory", "gpus", "resources"]
        assert big.split() == ["big", "2", "of", "2", "1", "2", "GiB", "0", "BIG=1"]
        # The scheduler writes its file some seconds later.
        until(lambda: json.loads(run("info", "mine", "--json"))["groups"] == {"default": 0, "big": 2})
        assert "big  2 Dask workers connected, cpu=1 memory=2 nvidia_gpu=0" in run("info", "mine")
        assert run("group", "delete", "mine", "big") == "Worker group big deleted from cluster mine\n"
        until(lambda: cluster.worker_groups.keys() == {"default"})
        assert "invalid name='big': expected" in run("group", "delete", "mine", "big", code=1)
        assert "invalid worker_group='big': expected" in run("scale", "mine", 1, "--group", "big", code=1)
