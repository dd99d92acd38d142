"""CMLCluster is a SpecCluster: what Dask documents and tests of it holds.

On purpose, these differ from SpecCluster:

- `CMLCluster` has no arguments ``workers``, ``worker`` and ``scheduler``: sizes and worker groups make the
  specs. A subclass changes ``worker_spec``, ``new_spec`` and ``scheduler_spec`` afterwards.
- The names in the spec begin with the cluster's name. A replacement has a new name: Dask's has the old one.
- A lost worker is replaced at once. SpecCluster waits for somebody to await it.
- `scale` to fewer removes entries once the scheduler has chosen them. SpecCluster removes the last at once.
- After the start, a launch that fails is tried again, and reported by ``problem``. No error is raised.
- The status is ``created`` until the cluster runs, not ``starting``. The representation says "starting".
- A failed start raises the error of its cause, and not a RuntimeError that contains its text.
- ``shutdown_scheduler`` does not exist: ``shutdown_on_close=False`` and `leave` keep workers and scheduler.
- `workers` of a process that does not keep the cluster is empty.
"""

import asyncio
import inspect
import linecache
import re
import warnings
from pathlib import Path
from unittest.mock import Mock

import distributed
import pytest
from clusters import arrived, limits, rebuild, scheduler_number, scheduler_of, simulate, supplied, target
from distributed import Client, SpecCluster
from distributed.core import Status
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import CMLCluster
from dask_cml.sessions.process import CMLScheduler, CMLWorker

#: The release of distributed whose lines the comments name, and how they do.
RELEASE = "2026.8.0"
MENTION = re.compile(r"\b(SpecCluster|Cluster|SyncMethodMixin)\.(\w+) \((spec|cluster|utils)\.py:([0-9]+)\)")
DASKS = {cls.__name__: cls for cls in SpecCluster.__mro__[:-1]}


def names(cluster):
    return {worker["name"] for worker in cluster.scheduler_info["workers"].values()}


class Elsewhere:
    """A worker of another resource manager, with no more than SpecCluster's documentation asks for."""

    def __init__(self, scheduler, **options):
        self.scheduler, self.options, self.state = scheduler, options, "created"

    def __await__(self):
        async def start():
            self.state = "running"
            return self

        return start().__await__()

    async def close(self):
        self.state = "closed"

    @property
    def worker_address(self):
        return "tcp://10.1.2.3:4567"


@simulated
async def test_the_spec_is_what_is_wanted_and_workers_are_its_instances(it):
    async with simulate(name="mine", n_workers=2) as cluster:
        assert [*cluster.worker_spec] == ["mine-0", "mine-1"]
        assert {*cluster.workers} == {*cluster.worker_spec}
        for name, spec in cluster.worker_spec.items():
            assert isinstance(cluster.workers[name], spec["cls"])
            assert cluster.workers[name].name == name
            assert cluster.workers[name].options.nthreads == spec["options"]["nthreads"]
        assert isinstance(cluster.scheduler, cluster.scheduler_spec["cls"])
        assert (cluster._threads_per_worker(), cluster._memory_per_worker()) == (1, 2 * 2**30)
        assert cluster._supports_scaling
        cluster.name = "label"
        assert cluster.name == cluster._cluster_info["name"] == "label"
        await eventually(lambda: names(cluster) == {*cluster.worker_spec})


def sizes(cluster):
    connected = cluster.observed
    workers = [session for session in cluster.sessions if session.role == "worker"]
    return sorted(worker.size.memory for worker in workers if worker.name in connected)


@simulated
async def test_a_worker_is_replaced_by_its_own_spec(it):
    async with simulate(name="mine", n_workers=1) as cluster:
        own = {**cluster.new_spec["options"], "memory": 8, "cpu": 2}
        cluster.worker_spec["large"] = {**cluster.new_spec, "options": own}
        with pytest.raises(ValueError, match=r"invalid worker_spec\['other'\] of type dict: expected"):
            cluster.worker_spec["other"] = {"options": {"memory": 8}}
        for name in ("", ".", "..", "a/b", "a\n", "cluster", "scheduler", "mine-scheduler"):
            with pytest.raises(ValueError, match="invalid worker name="):
                cluster.worker_spec[name] = cluster.new_spec
        cluster.worker_spec["other"] = {"cls": Elsewhere}
        await cluster
        await eventually(lambda: sizes(cluster) == [2, 8])
        it.platform.evict(it.platform.running["large"])
        await eventually(lambda: "large" not in cluster.worker_spec and sizes(cluster) == [2, 8])
        other = cluster.workers["other"]
        it.platform.evict(it.platform.running["mine-scheduler"])
        await eventually(lambda: scheduler_number(cluster) == 1 and sizes(cluster) == [2, 8])
        workers = [worker for worker in cluster.workers.values() if isinstance(worker, CMLWorker)]
        assert {worker.options.nthreads for worker in workers} == {1, 2}
        assert other.state == "closed"
        assert cluster.workers["other"].state == "running"
        assert target(cluster) == 3
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)


@simulated
async def test_other_classes_may_be_in_the_spec_and_beside_them_a_group_adapts(it, caplog):
    async with simulate(name="mine", n_workers=1, silence_logs=False) as cluster:
        cluster.worker_spec["other"] = {"cls": Elsewhere, "options": {"size": "large"}}
        cluster.worker_spec["another"] = {"cls": Elsewhere}
        await cluster
        other, another = cluster.workers["other"], cluster.workers["another"]
        assert (other.state, other.options) == ("running", {"name": "other", "size": "large"})
        assert other.scheduler == cluster.scheduler.address
        del cluster.worker_spec["other"]
        await cluster._correct_state()
        assert "other" not in cluster.workers
        assert other.state == "closed"
        cluster.adapt(3, 4, interval="1s")
        await eventually(lambda: arrived(cluster) == 2)
        await asyncio.sleep(30.0)
        assert {*cluster.workers} == {"mine-0", "mine-1", "another"}
        assert "Adaptive scaling of cluster mine failed" not in caplog.text
        another.close = Mock(side_effect=BrokenError("it stays"))
    assert "Worker another not closed: BrokenError('it stays')" in caplog.text
    assert not it.platform.live


@simulated
async def test_dasks_own_workers_may_be_in_the_spec_by_the_name_of_their_class(it):
    async with simulate(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        options = {"nthreads": 3, "dashboard": False, "memory_limit": 0}
        cluster.worker_spec["own"] = {"cls": "distributed.Worker", "options": options}
        await cluster
        await eventually(lambda: names(cluster) == {"mine-0", "own"})
        assert cluster.plan == cluster.requested == cluster.observed == {"mine-0", "own"}
        assert arrived(cluster) == target(cluster) == 2
        assert await client.submit(sum, [1, 2], workers="own") == 3
        await cluster.workers["own"].close()
        await eventually(lambda: len(cluster.workers) == 1)
        await eventually(lambda: names(cluster) == {"mine-0", "own"})
        cluster.scale(0)
        await eventually(lambda: not cluster.workers and not names(cluster))


@simulated
async def test_scale_adds_workers_of_the_given_form_whose_plan_is_at_first_neither_requested_nor_observed(it):
    async with simulate(name="mine") as cluster:
        with it.platform.held("launch_workers"):
            cluster.scale(2)
            form = cluster.new_spec
            assert cluster.worker_spec == {"mine-0": form, "mine-1": form}
            assert cluster.plan == {"mine-0", "mine-1"}
            assert cluster.requested == cluster.observed == set()
        await eventually(lambda: cluster.requested == cluster.plan)
        assert cluster.observed == set()
        await eventually(lambda: cluster.observed == cluster.plan)


class Noted(CMLWorker):
    """A worker whose class a subclass of the cluster has chosen."""


class NotedScheduler(CMLScheduler):
    """A scheduler whose class a subclass of the cluster has chosen."""


class Own(CMLCluster):
    """A cluster that chooses names, sizes and classes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.new_spec = {**self.new_spec, "cls": Noted}
        self.scheduler_spec["cls"] = NotedScheduler

    def _new_worker_name(self, worker_number):
        return f"prefix-{self.name}-{worker_number}-suffix"

    def new_worker_spec(self):
        [(name, spec)] = super().new_worker_spec().items()
        return {name: {**spec, "options": {**spec["options"], "memory": 1 + len(self.worker_spec)}}}


@simulated
async def test_a_subclass_may_choose_names_specs_and_classes(it):
    async with simulate(Own, name="mine", n_workers=1) as cluster:
        assert type(cluster.scheduler) is NotedScheduler
        cluster.scale(3)
        await cluster
        assert [session.size.memory for session in cluster.sessions[1:]] == [1, 2, 3]
        own = [f"prefix-mine-{i}-suffix" for i in range(4)]
        assert [*cluster.worker_spec] == own[:3]
        await eventually(lambda: names(cluster) == {*own[:3]})
        assert arrived(cluster) == target(cluster) == 3
        it.platform.evict(cluster.workers[own[0]].session_id)
        await eventually(lambda: names(cluster) == {*own[1:]})
        assert {type(cluster.workers[name]) for name in own[1:3]} == {Noted}
        assert repr(cluster).startswith("Own(mine, 'tcp://")
        assert "Own" in cluster._repr_html_()
        cluster.scale(1)
        await eventually(lambda: len(cluster.workers) == len(names(cluster)) == 1)


class BrokenError(Exception):
    """What a worker raises that cannot start."""


class Broken(Elsewhere):
    def __await__(self):
        raise BrokenError("it does not start")
        yield


@simulated
async def test_a_start_fails_with_the_error_of_its_worker_and_of_an_invalid_spec_before_any_launch(it):
    for cls, error in ("no_such_module.Worker", ImportError), (Broken, BrokenError):
        assert it.platform.all == {}
        cluster = simulate(name="mine", n_workers=1)
        cluster.worker_spec["broken"] = {"cls": cls}
        with pytest.raises(error, match=r"no_such_module|it does not start"):
            async with cluster:
                pass
    assert it.platform.live == []
    assert cluster.status == Status.closed


@simulated
async def test_a_cluster_is_shown_at_any_time(it):
    def is_shown():
        return cluster._repr_html_() and repr(cluster) and cluster._scaling_status() and cluster.job_script()

    cluster = simulate(n_workers=1, cpu=4, memory=16)
    assert is_shown()
    assert "cpu=4 memory=16" in cluster.job_script()
    assert it.platform.all == {}
    assert "Scheduler not started yet" in cluster._repr_html_()
    starting = asyncio.ensure_future(cluster)
    while not starting.done():
        assert is_shown()
        await asyncio.sleep(0.1)
    assert "Total memory" in cluster._repr_html_()
    await cluster.close()
    assert is_shown()
    cluster = simulate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await cluster.close()
    assert is_shown()


@simulated
async def test_a_closed_cluster_is_shown_with_what_it_used_and_without_what_is_gone(it):
    async with simulate(scheduler_args=["--no-dashboard"]) as cluster:
        assert cluster.dashboard_link == ""
    html = cluster._repr_html_()
    for text in repr(cluster), html:
        assert re.search(r"closed after [\d.]+ (s|min); 1 session, 0\.\d\d vCPU hours", text)
    assert "Sessions:" not in html
    assert 'colspan="2"' not in html
    assert '<strong>Dashboard:</strong> <a href=""' in html


@simulated
async def test_the_widget_shows_the_mode_and_the_workers(it):
    async with supplied(n_workers=1) as cluster:
        assert "Manual" in cluster._scaling_status()
        cluster.scale(3)
        assert "1 / 3" in cluster._scaling_status()
        cluster.adapt(3, 3)
        await eventually(lambda: "Adaptive" in cluster._scaling_status())
        async with rebuild(cluster.options.name) as remote:
            assert "Adaptive" in remote._scaling_status()
            await cluster.scale(2)
            await eventually(lambda: "Manual" in remote._scaling_status())
            assert "Manual" in cluster._scaling_status()


def test_what_a_cluster_has_beside_dasks_members_is_documented():
    api = Path(__file__).parent.parent / "docs" / "api.rst"
    documented = re.search(r"autoclass:: CMLCluster\n +:members: (.*)", api.read_text())[1].split(", ")
    own = {name for name in dir(CMLCluster) if not name.startswith("_")} - {*dir(SpecCluster)}
    assert own <= {*documented}


@simulated
async def test_an_entry_of_several_dask_workers_has_the_suffixes_of_their_names(it):
    async with simulate(name="mine", n_workers=2, cpu=3, processes=3, worker_args=[]) as cluster:
        assert [spec["group"] for spec in cluster.worker_spec.values()] == [["-0", "-1", "-2"]] * 2
        of_all = {f"mine-{i}-{j}" for i in range(2) for j in range(3)}
        await eventually(lambda: names(cluster) == of_all)
        assert cluster.plan == cluster.requested == cluster.observed == of_all
        assert {worker.name for worker in scheduler_of(it, cluster).workers.values()} == of_all
        cluster.scale(3)
        new = {"mine-2-0", "mine-2-1", "mine-2-2"}
        assert cluster.plan - cluster.requested == new
        assert "6 / 9" in cluster._scaling_status()
        await cluster
        assert cluster.plan == cluster.requested != cluster.observed
        await cluster.scale_down(["mine-0-1"])
        await eventually(lambda: {*cluster.workers} == {"mine-1", "mine-2"})
        await eventually(lambda: names(cluster) == cluster.plan)
        assert len(cluster.plan) == 6


class Numbered(CMLCluster):
    def _new_worker_name(self, worker_number):
        return worker_number


@simulated
async def test_names_may_be_numbers_as_in_the_examples_of_speccluster(it):
    async with simulate(Numbered, name="mine", n_workers=1) as cluster, rebuild("mine") as remote:
        cluster.worker_spec[7] = cluster.new_spec
        await cluster
        await eventually(lambda: names(cluster) == names(remote) == {"0", "7"})
        await eventually(lambda: arrived(cluster) == arrived(remote) == 2)
        assert remote.problem is cluster.problem is None
        it.platform.evict(cluster.workers["0"].session_id)
        await eventually(lambda: names(cluster) == {"1", "7"})
        assert 7 in cluster.worker_spec
        # A thread that shows the cluster copies this view in one step, whatever the event loop changes.
        assert isinstance(cluster.worker_spec.items(), type({}.items()))
        del cluster.worker_spec[7]
        await eventually(lambda: arrived(cluster) == arrived(remote) == 1)
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)


@simulated
async def test_scale_and_scale_down_as_dask_calls_them(it):
    async with simulate(name="mine") as cluster:
        await cluster.scale_up(3)
        await cluster
        assert {*cluster.workers} == {"mine-0", "mine-1", "mine-2"}
        await cluster.scale_down(["mine-0", "mine-2", "mine-7"])
        assert {*cluster.worker_spec} == {"mine-1"}
        await eventually(lambda: {*cluster.workers} == {"mine-1"} == names(cluster))
        assert target(cluster) == 1
        await cluster.add_worker_group("gpu", n_workers=1)
        cluster.adapt(0, 4)
        await cluster.scale_up(memory="4 GiB")
        assert {*cluster.worker_spec} == {"mine-1", "mine-3", "mine-gpu-0"}
        assert limits(cluster) is None


def overridden():
    own = vars(CMLCluster)
    not_compared = vars(object).keys() - {"__repr__"} | {"__module__", "__annotations__", "__dict__"}
    of_dask = {name for cls in DASKS.values() for name in vars(cls)} - not_compared
    return {name: own[name] for name in sorted(of_dask & own.keys()) if not name.startswith("__static")}


def sources():
    return [path.read_text() for path in Path(dask_cml.__file__).parent.rglob("*.py")]


def test_few_members_of_speccluster_and_cluster_are_overridden_and_each_has_a_reason():
    # SpecCluster leaves `from_name` and `_new_worker_name` to its subclasses, and `scale_up` is `scale`.
    assert len(overridden().keys() - {"from_name", "_new_worker_name", "scale_up"}) <= 16
    for name, member in overridden().items():
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        source = inspect.getsource(inspect.unwrap(member))
        owner = next(cls for cls in DASKS if name in vars(DASKS[cls]))
        assert (owner, name) in {mention[:2] for mention in MENTION.findall(source)}


def test_the_lines_of_dask_in_comments_are_those_of_the_functions():
    for text in sources():
        assert len(MENTION.findall(text)) == len(re.findall(r"\b(?:spec|cluster|utils)\.py:[0-9]", text))
    mentions = {mention for text in sources() for mention in MENTION.findall(text)}
    assert {name for _, name, _, _ in mentions} >= {*overridden()}
    for cls, name, file, number in mentions:
        member = vars(DASKS[cls])[name]
        member = member.fget if isinstance(member, property) else member
        if distributed.__version__ != RELEASE:
            continue
        function = inspect.unwrap(getattr(member, "__func__", member))
        path, number = inspect.getsourcefile(function), int(number)
        lines, first = inspect.getsourcelines(function)
        is_alias = linecache.getline(path, number).strip().startswith(f"{name} = ")
        assert Path(path).name == f"{file}.py"
        assert is_alias or first <= number < first + len(lines), f"{name} is not in line {number} of {path}"
