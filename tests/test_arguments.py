"""Unknown arguments: the message names the argument that other cluster managers call so, or the nearest."""

from __future__ import annotations

import inspect

import pytest
from clusters import make, simulate
from simulated.testing import simulated

from dask_cml import CMLAdaptive, CMLCluster
from dask_cml.options.arguments import unexpected_argument
from dask_cml.options.table import ARGUMENTS


def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_cluster():
    for name, expected in {
        "memory_limit": "memory",
        "threads_per_worker": "nthreads",
        "cores": "cpu or nthreads",
        "num_workers": "n_workers",
        "quux": "one of ",
        "image": "none, because a session runs on the runtime of the session that launches it",
        "walltime": "none, because a worker session has no time limit: for the cluster, set idle_timeout",
        "n_worker": "n_workers",
    }.items():
        start = f"CMLCluster() got an unexpected keyword argument {name!r}: expected {expected}"
        assert unexpected_argument("CMLCluster", name, [*ARGUMENTS]).startswith(start)


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


def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_method():
    for function, name, expected in [
        ("scale", "jobs", "n"),
        ("scale", "worker_groups", "worker_group"),
        ("adapt", "minimum_jobs", "minimum"),
        ("adapt", "max_workers", "maximum"),
    ]:
        arguments = inspect.signature(getattr(CMLCluster, function)).parameters
        assert unexpected_argument(function, name, arguments).endswith(f" {name!r}: expected {expected}")


def test_an_unknown_argument_is_refused_before_a_launch(platform):
    with pytest.raises(TypeError, match=r"CMLCluster\(\) got an unexpected keyword argument 'memory_limit'"):
        CMLCluster(platform="local", memory_limit=1)
    assert platform.list_workers() == []


class Patient(CMLAdaptive):
    def __init__(self, cluster, *, patience, **kwargs):
        super().__init__(cluster, **kwargs)
        self.patience = patience


async def test_an_unknown_argument_of_a_method_changes_nothing(platform):
    unstarted = make()
    for call, expected in [
        (lambda: unstarted.scale(n_workers=2), r"scale\(\) .*'n_workers': expected n$"),
        (lambda: unstarted.adapt(maximun=2), r"adapt\(\) .*'maximun': expected maximum$"),
        (lambda: unstarted.adapt(n=3), r"adapt\(\) .*'n': expected minimum or maximum$"),
        (lambda: unstarted.adapt(key=len), r"adapt\(\) .*'key': "),
        (lambda: unstarted.add_worker_group("big", memory_limit=2), r"_group\(\) .*: expected memory$"),
    ]:
        with pytest.raises(TypeError, match=expected):
            call()
    assert [*unstarted.worker_groups] == ["default"]
    assert unstarted.worker_spec == {}
    assert not unstarted.groups.adapts("default")
    adaptive = unstarted.adapt(Adaptive=Patient, patience=3, interval="1 s", memory_ratio=4)
    assert (adaptive.patience, adaptive.interval) == (3, 1)
    await unstarted.close()
