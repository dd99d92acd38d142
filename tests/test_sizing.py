"""The number of worker sessions for what a user asks for: numbers that make no sense are errors at once."""

from __future__ import annotations

import math

import pytest
from clusters import make

from dask_cml.options import Options

OPTIONS = Options.read(cpu=2, memory=16)
NONE = (None, None, None)
MANY = 10**12


def test_sessions_have_at_least_the_memory_and_the_threads_in_all():
    assert OPTIONS.sessions_for(3) == 3
    assert OPTIONS.sessions_for(1, cores=5) == 3
    assert OPTIONS.sessions_for(0, memory="48 GiB") == 3
    assert OPTIONS.sessions_for(0, memory=48.1, cores=2) == 4
    assert OPTIONS.bounds(NONE, NONE) == (0, math.inf)
    assert OPTIONS.bounds((1, None, 3), (9, None, 15)) == (2, 7)
    assert OPTIONS.bounds((None, "32 GiB", None), (None, "48 GiB", None)) == (2, 3)


def test_more_sessions_than_a_cluster_can_have_are_refused():
    n, memory, cores = (MANY, None, None), (None, "1000 PiB", None), (None, None, MANY)
    for named, call in {
        "n": lambda: OPTIONS.sessions_for(MANY),
        "memory": lambda: OPTIONS.sessions_for(0, memory="1000 PiB"),
        "cores": lambda: OPTIONS.sessions_for(0, cores=MANY),
        "minimum": lambda: OPTIONS.bounds(n, NONE),
        "maximum": lambda: OPTIONS.bounds(NONE, n),
        "minimum_cores": lambda: OPTIONS.bounds(cores, NONE),
        "maximum_cores": lambda: OPTIONS.bounds(NONE, cores),
        "minimum_memory": lambda: OPTIONS.bounds(memory, NONE),
        "maximum_memory": lambda: OPTIONS.bounds(NONE, memory),
    }.items():
        with pytest.raises(ValueError, match=rf"^invalid {named}=.*expected .*100000"):
            call()


async def test_a_cluster_refuses_invalid_numbers_before_it_names_a_session(platform):
    cluster = make()
    for request in (
        lambda: cluster.scale(MANY),
        lambda: cluster.scale(memory="1000 PiB"),
        lambda: cluster.adapt(maximum=MANY),
        lambda: cluster.add_worker_group("big", n_workers=MANY),
    ):
        with pytest.raises(ValueError, match="100000"):
            request()
    assert cluster.worker_spec == {}
    assert [*cluster.worker_groups] == ["default"]
    await cluster.close()
