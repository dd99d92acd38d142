"""The names of sessions and of Dask workers have one reading."""

from __future__ import annotations

from itertools import product

import pytest

from dask_cml.naming import DEFAULT_GROUP, GROUP_NAME, dask_names, read_name, session_name, session_of
from dask_cml.options import Options
from dask_cml.sessions.plan import Place, plan_worker
from dask_cml.worker import process

CLUSTERS = ("mine", "mine-gpu", "mine-0", "a b", "ü-1")
GROUPS = (DEFAULT_GROUP, "gpu", "big-memory", "g2", "A_b-c", "gpu-1", "gpu-1-0", "a-2b-c-3")


@pytest.mark.parametrize("processes", [1, 2, 12])
def test_names_of_workers_say_their_group_and_number(processes):
    for cluster, group, number in product(CLUSTERS, GROUPS, (0, 7, 1234)):
        session = session_name(cluster, group, number)
        for name in {session, *dask_names(session, processes)}:
            assert read_name(cluster, name) == (group, number)


def test_no_two_sessions_share_a_name():
    whose = {}
    for group, number, processes in product(GROUPS, range(13), (1, 12)):
        session = session_name("mine", group, number)
        for name in {session, *dask_names(session, processes)}:
            assert whose.setdefault(name, (group, number)) == (group, number)


async def test_a_dask_worker_repeats_the_name_and_group_of_its_session(tmp_path, monkeypatch):
    plan = plan_worker(Options.read(name="mine"), Place(tmp_path), "a-w0", None, "gpu")
    for name, value in plan.env.items():
        monkeypatch.setenv(name, value)
    assert session_of("mine", "a-w0-1", await process._about(None)) == ("gpu", "a-w0")


def test_a_dask_worker_says_its_session_and_else_its_name_does():
    assert session_of("mine", "mine-gpu-0", {"name": "mine-gpu-0", "group": "default"}) == (
        "default",
        "mine-gpu-0",
    )
    assert session_of("mine", "mine-gpu.1-0-3", {"session": None}) == ("gpu-1", "mine-gpu.1-0")
    assert session_of("mine", "a-w0", {"name": "a-w0"}) == ("default", "a-w0")
    assert session_of("mine", "a-w0", None) is None


def test_no_other_name_is_that_of_a_session_or_of_a_group():
    sessions = "mine mine- mine-gpu mine-scheduler other-0 mine-0-1-2 mine--0 mine-scheduler-0 mine-default-0"
    assert not any(read_name("mine", name) for name in ["", *sessions.split()])
    groups = ["", "0", "0gpu", "gpu.0", "gpu-", "-gpu", "g p", "gpü", "gpu\n", "a/b"]
    assert not any(map(GROUP_NAME.fullmatch, groups))
