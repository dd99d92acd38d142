"""Workers whose memory and disk are full: what users see, and what adaptive scaling does."""

from __future__ import annotations

from types import SimpleNamespace

import dask
from distributed.core import Status

from dask_cml.doctor import environment
from dask_cml.scheduler.health import Health
from dask_cml.timing import timing

GB = 10**9
FULL = {
    "name": "lab-3",
    "status": Status.paused,
    "metrics": {"spilled_bytes": {"memory": 9 * GB, "disk": 8 * GB}},
    "extra": {"cml": {"session": "s", "max_spill": 8 * GB}},
    "memory": SimpleNamespace(process=0.9 * 2**30),
    "memory_limit": 2**30,
}


def problem_of(*workers):
    health = Health()
    for now in 0.0, timing.pause:
        health.look([SimpleNamespace(address=n, **worker) for n, worker in enumerate(workers)], now)
    return health.problem


def test_the_problem_names_a_full_worker_and_a_remedy():
    what = "worker lab-3 has spilled 8.0 of 8.0 GB and is paused"
    remedy = "scale up, or give workers more memory"
    assert problem_of(FULL) == f"{what}: {remedy}"
    assert problem_of(FULL, FULL) == f"{what}, like 1 more: {remedy}"
    for change in (  # of one that can spill more, or is without dask-cml
        {"extra": {"cml": {"max_spill": None}}},
        {"extra": {}},
        {"metrics": {}},
        {"metrics": {"spilled_bytes": {"disk": 2 * GB}}},
    ):
        words = problem_of({**FULL, **change})
        assert "is paused and starts no tasks: 0.90 of 1.00 GiB memory are used" in words, change


# -- the doctor


def test_the_doctor_warns_of_scratch_space_on_the_project_file_system_or_nearly_full(monkeypatch, tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        for free, state in (9, "warning"), (11, "ok"):
            usage = 100 * GB, (100 - free) * GB, free * GB
            monkeypatch.setattr(environment.shutil, "disk_usage", lambda path, usage=usage: usage)
            found = environment.scratch()
            assert (found.state, found.words) == (state, f"{tmp_path} has {free}.0 of 100.0 GB free.")
    monkeypatch.setattr(environment, "launches_sessions", lambda: True)
    folders = {"cml.state-directory": str(tmp_path), "temporary-directory": str(tmp_path / "new")}
    with dask.config.set(folders):
        found = environment.scratch()
    assert (found.state, found.command) == ("warning", "export TMPDIR=/tmp")
    assert f"{tmp_path / 'new'} is on the project file system" in found.words
