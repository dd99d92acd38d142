"""Unknown arguments: the message names the argument that other cluster managers call so, or the nearest."""

from __future__ import annotations

import inspect

import pytest
from clusters import make, simulate
from simulated.testing import simulated

from dask_cml import CMLAdaptive, CMLCluster
from dask_cml.options.arguments import unexpected_argument
from dask_cml.options.table import ARGUMENTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memory_limit", "memory"),
        ("worker_memory", "memory"),
        ("threads_per_worker", "nthreads"),
        ("cores", "cpu or nthreads"),
        ("gpus", "nvidia_gpu"),
        ("num_workers", "n_workers"),
        ("quux", "one of "),
        ("image", "none, because a session runs on the runtime of the session that launches it"),
        ("walltime", "none, because a worker session has no time limit: for the cluster, set idle_timeout"),
        ("n_worker", "n_workers"),
        ("scheduler_port", "none, because the cluster sets it"),
    ],
)
def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_cluster(name, expected):
    message = unexpected_argument("CMLCluster", name, [*ARGUMENTS])
    start = f"CMLCluster() got an unexpected keyword argument {name!r}: expected "
    assert message.startswith(start + expected)


@simulated
async def test_a_subclass_may_have_attributes_of_these_names(it):
    class Mine(CMLCluster):
        def __init__(self, memory):
            super().__init__(name="lab", memory=memory, asynchronous=True, quiet=True)
            self.memory = memory

    async with Mine(memory=3) as cluster:
        assert cluster.memory == 3


@simulated
async def test_a_subclass_may_have_attributes_of_the_names_of_options(it):
    class WithMemory(CMLCluster):
        memory = 1

        def __init__(self, **options):
            self.env = "mine"
            super().__init__(**options)

    async with simulate(WithMemory, name="lab") as cluster:
        cluster.memory, cluster.env = 2, "yours"
        assert (cluster.memory, cluster.env) == (2, "yours")


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        ("scale", "n_workers", "n"),
        ("scale", "jobs", "n"),
        ("scale", "worker_groups", "worker_group"),
        ("adapt", "minimum_jobs", "minimum"),
        ("adapt", "max_workers", "maximum"),
    ],
)
def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_method(function, name, expected):
    arguments = inspect.signature(getattr(CMLCluster, function)).parameters
    assert unexpected_argument(function, name, arguments).endswith(f" {name!r}: expected {expected}")


@pytest.mark.parametrize("name", ["memory_limit", "walltime"])
def test_an_unknown_argument_is_refused_before_a_launch(platform, name):
    with pytest.raises(TypeError, match=rf"CMLCluster\(\) got an unexpected keyword argument '{name}'"):
        CMLCluster(platform="local", **{name: 1})
    assert platform.list_workers() == []


@pytest.fixture
async def unstarted(platform):
    cluster = make()
    yield cluster
    await cluster.close()


class Patient(CMLAdaptive):
    def __init__(self, cluster, *, patience, **kwargs):
        super().__init__(cluster, **kwargs)
        self.patience = patience


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda cluster: cluster.scale(n_workers=2), r"scale\(\) .*'n_workers': expected n$"),
        (lambda cluster: cluster.adapt(maximun=2), r"adapt\(\) .*'maximun': expected maximum$"),
        (lambda cluster: cluster.adapt(n=3), r"adapt\(\) .*'n': expected minimum or maximum$"),
        (lambda cluster: cluster.adapt(key=len), r"adapt\(\) .*'key': "),
        (lambda cluster: cluster.add_worker_group("big", memory_limit=2), r"_group\(\) .*: expected memory$"),
    ],
)
async def test_an_unknown_argument_of_a_method_changes_nothing(unstarted, call, expected):
    with pytest.raises(TypeError, match=expected):
        call(unstarted)
    assert [*unstarted.worker_groups] == ["default"]
    assert unstarted.worker_spec == {}
    assert not unstarted.groups.adapts("default")


async def test_adapting_knows_the_arguments_of_a_class_and_of_the_choice_of_workers(unstarted):
    adaptive = unstarted.adapt(Adaptive=Patient, patience=3, interval="1 s", memory_ratio=4)
    assert (adaptive.patience, adaptive.interval) == (3, 1)
