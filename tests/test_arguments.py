"""Unknown arguments: the message names the argument that other cluster managers call so, or the nearest."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from dask_cml import CMLCluster
from dask_cml.options import OPTION_NAMES
from dask_cml.options.arguments import unexpected_argument

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
