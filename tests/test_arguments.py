"""Unknown arguments: the message names the argument that other cluster managers call so, or the nearest."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from dask_cml import CMLAdaptive, CMLCluster
from dask_cml.options import OPTION_NAMES, unexpected_argument

PAGES = [Path(__file__).parents[1] / "docs" / name for name in ("coming-from.md", "from-the-prototype.md")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memory_limit", "memory"),
        ("worker_memory", "memory"),
        ("threads_per_worker", "nthreads"),
        ("cores", "cpu or nthreads"),
        ("gpus", "nvidia_gpu"),
        ("num_workers", "n_workers"),
        ("walltimes", "one of n_workers, cpu, "),
        ("n_worker", "n_workers"),
        ("scheduler_port", "none, because the cluster sets it"),
    ],
)
def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_cluster(name, expected):
    message = unexpected_argument("CMLCluster", name, OPTION_NAMES)
    start = f"CMLCluster() got an unexpected keyword argument {name!r}: expected "
    assert message.startswith(start + expected)


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


def equivalents():
    """Yield the arguments in the tables for users of other cluster managers, with those of a cluster."""
    for page in PAGES:
        for theirs, ours in re.findall(
            r"^\| `(\w+=.+?)`.* \| (.*`\w+=.*) \|$", page.read_text(), re.MULTILINE
        ):
            there = re.findall(r"[` ](\w+)[=`]", ours)
            for name in re.findall(r"\b(\w+)=", re.sub(r"[({\[].*", "", theirs)):
                if name not in OPTION_NAMES:
                    yield name, there


def test_the_tables_for_users_of_other_cluster_managers_are_read():
    assert len([*equivalents()]) > 10


@pytest.mark.parametrize(("name", "there"), [*equivalents()])
def test_an_argument_leads_where_the_documentation_leads(name, there):
    expected = unexpected_argument("CMLCluster", name, OPTION_NAMES).partition(": expected ")[2]
    assert {*expected.split(" or ")} & {*there}


@pytest.mark.parametrize("name", ["memory_limit", "walltime"])
def test_an_unknown_argument_is_refused_before_a_launch(platform, name):
    with pytest.raises(TypeError, match=rf"CMLCluster\(\) got an unexpected keyword argument '{name}'"):
        CMLCluster(platform="local", **{name: 1})
    assert platform.list_workers() == []


class Patient(CMLAdaptive):
    def __init__(self, cluster, *, patience, **kwargs):
        super().__init__(cluster, **kwargs)
        self.patience = patience


def test_unknown_arguments_of_methods_change_nothing(platform):
    with CMLCluster(platform="local") as cluster:
        for call, expected in {
            lambda: cluster.scale(n_workers=2): r"scale\(\) .*'n_workers': expected n$",
            lambda: cluster.scale(jobs=2): r"scale\(\) .*'jobs': expected n$",
            lambda: cluster.adapt(maximun=2): r"adapt\(\) .*'maximun': expected maximum$",
            lambda: cluster.adapt(maximum_jobs=2): r"adapt\(\) .*'maximum_jobs': expected maximum$",
            lambda: cluster.add_worker_group("big", memory_limit=2): r"_group\(\) .*: expected memory$",
        }.items():
            with pytest.raises(TypeError, match=expected):
                call()
        group = cluster.manager.fleet.group()
        assert ([*cluster.manager.fleet.groups], group.wanted.target, group.wanted.adapting) == (
            ["default"],
            0,
            None,
        )
        # The arguments of a class, of its base classes, and those for the choice of workers are known.
        adaptive = cluster.adapt(Adaptive=Patient, patience=3, interval="1 s", memory_ratio=4)
        assert (adaptive.patience, adaptive.interval) == (3, 1)
