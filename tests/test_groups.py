"""Groups of workers of several sizes in one cluster, changed by its keeper and by other processes."""

import asyncio
from types import SimpleNamespace

import clusters
import pytest
from clusters import connected, cut_off, limits, manager, observe, rebuild, scheduler_of, until_written
from distributed import Adaptive, Client
from simulated.faults import HTTPError, Mishap
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, CMLError
from dask_cml.core.groups import Groups
from dask_cml.options import Options
from dask_cml.records import store
from dask_cml.scheduler import resident


def mine(**options):
    return clusters.simulate(**{"name": "mine", "cpu": 1, "memory": 1, **options})


@simulated
async def test_a_new_process_knows_changed_groups_and_all_show_them(it):
    gpu = {"cpu": 2, "memory": 2, "processes": 2, "nvidia_gpu": 2, "worker_args": []}
    async with mine(worker_groups={"gpu": gpu}) as cluster:
        assert cluster.worker_groups["gpu"].resources == {"GPU": 2}
        assert "GPU=2" in cluster._repr_html_()
        assert "# mine-0: cpu=1" in cluster.job_script()
        assert "# mine-gpu-0: cpu=2" in cluster.job_script()
        await cluster.delete_worker_group("gpu")
        await cluster.add_worker_group("big", 1, memory=2)
        cluster.scale(2, worker_group="big")
        await eventually(lambda: cluster.worker_groups["big"].n_arrived == 2)
        async with rebuild("mine") as another:
            assert another.worker_groups.keys() == {"default", "big"}
            big = another.worker_groups["big"]
            assert (big.size.memory, big.n_workers) == (2, 2)
            await another.delete_worker_group("big")
        await eventually(lambda: [*store.read("mine").groups] == ["default"])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_the_sessions_of_a_deleted_group_stop_or_the_user_hears_why_not(it, who):
    async with (
        mine(worker_groups={"big": {"n_workers": 1}}) as cluster,
        rebuild("mine") as remote,
        Client(cluster, asynchronous=True) as client,
    ):
        user = {"keeper": cluster, "remote": remote}[who]
        deleted = "worker group 'big' of cluster mine deleted, but mine-big"

        async def has(name):
            await eventually(lambda: connected(cluster) == {name})
            await eventually(lambda: remote.worker_groups["big"].n_arrived == 1)

        # no other worker can take its data
        await has("mine-big-0")
        [held] = await client.scatter(["data"])
        it.platform.doom("silent")
        cluster.scale(1)
        await eventually(lambda: "mine-0" in cluster.workers)
        with pytest.raises(CMLError, match=f"{deleted}-0 stay until other workers can take"):
            await user.delete_worker_group("big")
        assert cluster.worker_groups.keys() == remote.worker_groups.keys() == {"default"}
        assert await held == "data"
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-1"})
        assert await held == "data"
        del held
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)

        # the platform does not answer, or refuses
        await user.add_worker_group("big", n_workers=1)
        await has("mine-big-1")
        with it.platform.held("stop_workers"):
            deleting = asyncio.create_task(user.delete_worker_group("big"))
            await eventually(lambda: "big" not in user.worker_groups)
            with pytest.raises(ValueError, match="invalid worker_group='big': expected one of 'default'"):
                user.scale(1, worker_group="big")
            with pytest.raises(CMLError, match=f"{deleted}-1 not stopped yet: nothing has changed for 45 s"):
                await deleting
        await eventually(lambda: cluster.workers == {})
        await user.add_worker_group("big", n_workers=1)
        await has("mine-big-2")
        it.platform.fail("stop_workers", *[HTTPError(401)] * 1000)
        with pytest.raises(CMLError, match=f"{deleted}-2 not stopped yet: CML did not stop stub.*401"):
            await user.delete_worker_group("big")
        it.platform.heal()
        await eventually(lambda: cluster.workers == {} and cluster.problem is remote.problem is None)

        # another group has a problem, which ends when nobody wants its workers any more
        await user.add_worker_group("big", n_workers=1)
        await has("mine-big-3")
        it.platform.fail("launch_workers", *[HTTPError(503)] * 1000)
        cluster.scale(1)
        await eventually(lambda: "did not launch mine-2" in str(remote.problem))
        it.platform.plan("stop_workers", Mishap(before=8.0))
        deleting = asyncio.create_task(user.delete_worker_group("big"))
        await eventually(lambda: "big" not in user.worker_groups)
        await user.add_worker_group("big", memory=2)  # while the sessions of the deleted one stop
        await asyncio.wait_for(deleting, 60)
        cluster.scale(0)
        await eventually(lambda: cluster.problem is remote.problem is None)
        it.platform.heal()
        await user.scale(1, worker_group="big")
        await has("mine-big-4")
        assert cluster.workers["mine-big-4"].session.size.memory == 2
        assert user.worker_groups["big"].size.memory == 2


def test_a_group_that_is_added_while_another_thread_counts_sessions_is_no_error(monkeypatch):
    options = Options.read(name="mine")
    groups = Groups(SimpleNamespace(worker_spec={}), options)
    add = groups._options.update
    monkeypatch.setattr(groups, "target", lambda group: add(big=options) or 0)
    assert len(groups.others()) == 2


@simulated
async def test_a_deleted_group_is_not_waited_for_if_nobody_manages_the_cluster(it, monkeypatch):
    monkeypatch.setattr(resident, "run", lambda cluster, folder, closes: closes.wait())
    async with mine(worker_groups={"big": {"n_workers": 1}}) as cluster:
        await eventually(lambda: connected(cluster) == {"mine-big-0"})
        observer = await observe("mine")
        heal = cut_off(cluster)
        await eventually(lambda: manager("mine") is None)
        with pytest.raises(CMLError, match="mine-big-0 not stopped yet: no process manages the cluster"):
            await asyncio.wait_for(observer.delete_worker_group("big"), 100)
        heal()


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
        assert connected(cluster) == {"mine-1", "mine-2"}
        assert it.platform.count("launch_workers") == 4


@simulated
async def test_a_remote_that_gets_no_answer_says_so_and_nothing_is_remembered(it):
    async with mine(worker_groups={"big": {}}) as cluster, rebuild("mine") as remote:
        handlers = scheduler_of(it, cluster).handlers

        async def hang(**arguments):
            await asyncio.sleep(3600)

        answer, handlers["cml_post"] = handlers["cml_post"], hang
        for change in (
            lambda: remote.scale(1, worker_group="big"),
            lambda: remote.adapt(1, 1, worker_group="big"),
            lambda: remote.adapt(Adaptive=Adaptive),
            lambda: remote.add_worker_group("new", n_workers=1),
            lambda: remote.delete_worker_group("big"),
        ):
            asked = change()
            written = until_written(remote) if isinstance(asked, Adaptive) else asked
            words = r"the scheduler of cluster 'mine' at tcp://.* does not answer"
            with pytest.raises(CMLError, match=words):
                await written
            assert getattr(asked, "state", None) != "running"
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
        add = user.add_worker_group
        for call, error, words in (
            (lambda: add("0gpu"), ValueError, "invalid name='0gpu': expected"),
            (lambda: add("default"), ValueError, "invalid name='default': expected"),
            (lambda: add(3), TypeError, "invalid name=3: expected"),
            (lambda: add("big"), ValueError, "invalid name='big': expected a name that no"),
            (lambda: add("a", -1), ValueError, "invalid n_workers=-1: expected"),
            (lambda: add("a", cpu=0), ValueError, "invalid cpu=0: expected"),
            (lambda: add("a", launch_options={"no": 1}), ValueError, "invalid launch_options 'no'"),
            (lambda: add("a", worker_class="x.y"), ValueError, "invalid worker_class='x.y': expected"),
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
        ({"0": {}}, ValueError, "invalid name in worker_groups='0': expected at most 40"),
        ({"default": {}}, ValueError, "invalid name in worker_groups='default': expected a name other"),
        ({"big": {"memry": 1}}, ValueError, "invalid worker_groups['big'].memry: expected memory"),
        ({"gpu": 3}, TypeError, "worker_groups['gpu'] of type int: expected a mapping of options"),
        ({"gpu": {"cpus": 3}}, ValueError, "invalid worker_groups['gpu'].cpus: expected cpu"),
        ({"gpu": {"env": {"A": 3}}}, TypeError, "invalid worker_groups['gpu'].env['A']=3"),
        ({"big": {"env": {"A": "x" * 600_000}}}, ValueError, "options of worker group 'big' with 600"),
    ],
)
def test_bad_groups_of_a_new_cluster_are_refused_before_any_launch(platform, groups, error, words):
    with pytest.raises(error) as caught:
        CMLCluster(worker_groups=groups, platform="local")
    assert words in str(caught.value)
    assert platform.sessions() == []


@pytest.mark.parametrize(
    ("cluster", "group", "reserve"),
    [
        ({"memory": 16, "memory_reserve": 0}, {"memory": 32}, 0),
        ({"memory": 16, "memory_reserve": 2}, {"memory": 32, "memory_reserve": 3}, 3),
        ({"memory": 16}, {"memory": 32}, 0.25 + 0.02 * 32),
        ({"memory": 1, "processes": 8, "memory_reserve": 0}, {"memory": 4}, 0),
        ({"memory": 1, "processes": 8, "memory_reserve": 0}, {}, 0),
    ],
)
def test_a_group_with_another_memory_keeps_the_reserve_that_the_cluster_was_given(cluster, group, reserve):
    options = Options.read(**cluster)
    assert options.of_group(group).memory_reserve == reserve
    running = Options.read(options.arguments(), name="mine", worker_groups={})  # in another process
    assert running.of_group(group).memory_reserve == reserve
    with pytest.raises(ValueError, match=r"memory_reserve=2.0: expected at most 0.875 GiB, with memory=1 G"):
        Options.read(memory=16, memory_reserve=2).of_group({"memory": 1})
