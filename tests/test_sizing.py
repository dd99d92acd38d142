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


def test_limits_of_adaptive_scaling_may_be_totals():
    assert OPTIONS.bounds(NONE, NONE) == (0, math.inf)
    assert OPTIONS.bounds((1, None, 3), (9, None, 15)) == (2, 7)
    assert OPTIONS.bounds((None, "32 GiB", None), (None, "48 GiB", None)) == (2, 3)


@pytest.mark.parametrize("total", [{"n": MANY}, {"n": 0, "memory": "1000 PiB"}, {"n": 0, "cores": MANY}])
def test_more_sessions_than_a_cluster_can_have_are_refused(total):
    with pytest.raises(ValueError, match=rf"^invalid {[*total][-1]}=.*expected .*100000"):
        OPTIONS.sessions_for(**total)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (((MANY, None, None), NONE), "minimum"),
        ((NONE, (MANY, None, None)), "maximum"),
        (((None, None, MANY), NONE), "minimum_cores"),
        ((NONE, (None, None, MANY)), "maximum_cores"),
        (((None, "1000 PiB", None), NONE), "minimum_memory"),
        ((NONE, (None, "1000 PiB", None)), "maximum_memory"),
    ],
)
def test_limits_above_the_largest_cluster_are_refused(arguments, named):
    with pytest.raises(ValueError, match=rf"^invalid {named}=.*expected .*100000"):
        OPTIONS.bounds(*arguments)


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
