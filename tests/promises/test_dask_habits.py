"""What users of Dask are used to holds in sessions, too."""

from __future__ import annotations

import logging
from pathlib import Path

import dask
import pytest
from clusters import NOTEBOOK, arrived, rebuild, simulate
from distributed import Client, WorkerPlugin
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster

MARKS = """
import atexit, os, pathlib

def mark(kind):
    pathlib.Path(os.environ["MARKS"], f"{kind}-{os.getpid()}").touch()

def dask_setup(worker):
    atexit.register(mark, "exit")

def dask_teardown(worker):
    mark("teardown")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["scale", "close"])
def test_teardowns_and_exit_functions_run_when_workers_close(platform, until, tmp_path, end):
    platform.configure(stop_grace=60.0)
    (tmp_path / "marks.py").write_text(MARKS)
    with (
        dask.config.set({"distributed.worker.preload": [str(tmp_path / "marks.py")]}),
        CMLCluster(n_workers=2, platform="local", quiet=True, env={"MARKS": str(tmp_path)}) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        if end == "scale":
            cluster.scale(0)
        else:
            cluster.close()
        until(lambda: len([*tmp_path.glob("teardown-*")]) == len([*tmp_path.glob("exit-*")]) == 2)


def test_levels_of_loggers_hold_in_workers(platform, until, light):
    def chat() -> None:
        logging.getLogger("mine.tasks").info("said in a task")

    with (
        dask.config.set({"logging": {"mine.tasks": "info"}}),
        CMLCluster(n_workers=1, platform="local", quiet=True, name="mine") as cluster,
        Client(cluster) as client,
    ):
        client.submit(chat).result()
        until(lambda: "said in a task" in str(cluster.get_logs()["mine-0"]))


PRELOAD = """
import click

@click.command()
@click.option("--flavour")
def dask_setup(worker, flavour):
    worker.flavour = flavour
"""


def test_workers_that_connect_later_have_uploaded_modules_plugins_and_preloads(platform, light, tmp_path):
    class Plugin(WorkerPlugin):
        def setup(self, worker):
            worker.of_plugin = "set up"

    (tmp_path / "preload.py").write_text(PRELOAD)
    (tmp_path / "uploaded.py").write_text("VALUE = 3")
    options = {
        "distributed.worker.preload": [str(tmp_path / "preload.py")],
        "distributed.worker.preload-argv": ["--flavour", "sweet"],
    }
    with (
        dask.config.set(options),
        CMLCluster(n_workers=0, platform="local", quiet=True) as cluster,
        Client(cluster) as client,
    ):
        client.upload_file(str(tmp_path / "uploaded.py"))
        client.register_plugin(Plugin())
        cluster.scale(1)
        client.wait_for_workers(1)
        found = client.run(
            lambda dask_worker: (
                __import__("uploaded").VALUE,
                dask_worker.of_plugin,
                dask_worker.flavour,
            )
        )
        assert [*found.values()] == [(3, "set up", "sweet")]


def test_the_temporary_folder_of_the_configuration_may_contain_variables(
    platform, light, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        dask.config.set({"temporary-directory": "~/of-$CDSW_ENGINE_ID"}),
        CMLCluster(n_workers=1, platform="local", quiet=True) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1)
        [used] = client.run(lambda dask_worker: dask_worker.local_directory).values()
        [session] = [session.id for session in cluster.sessions if session.role == "worker"]
        assert (tmp_path / f"of-{session}") in Path(used).parents


@simulated
async def test_the_idle_time_is_right_although_clocks_differ(it):
    async with simulate(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1 and "idle for" in repr(cluster))
        it.loop.set_clock(1200)  # the scheduler has said before since when the cluster is idle
        assert "min" not in repr(cluster)


LAG = "a notebook that does not manage the cluster learns of workers up to a second after the scheduler"


@pytest.mark.parametrize(
    "by", ["cluster", pytest.param("name", marks=pytest.mark.xfail(strict=True, reason=LAG))]
)
@simulated
async def test_no_worker_is_pending_after_wait_for_workers_in_a_second_notebook(it, by):
    async with simulate(name="lab", n_workers=1):
        second = it.process("second", NOTEBOOK)
        await second.start(scale_in_a_second_notebook(by))


async def scale_in_a_second_notebook(by: str) -> None:
    async with (
        rebuild("lab") as cluster,
        Client(cluster if by == "cluster" else "cml://lab", asynchronous=True) as client,
    ):
        for n in (2, 3, 4, 6):
            cluster.scale(n)
            await client.wait_for_workers(n)
            assert f"workers={n}," in repr(cluster)
