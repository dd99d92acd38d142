"""What users of Dask are used to holds in sessions, too."""

import logging
from pathlib import Path

import dask
import pytest
from clusters import LIGHT, NOTEBOOK, arrived, rebuild, simulate
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


PRELOAD = """
import click

@click.command()
@click.option("--flavour")
def dask_setup(worker, flavour):
    worker.flavour = flavour
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder to which HOME is set."""
    home = tmp_path_factory.mktemp("home")
    (home / "preload.py").write_text(PRELOAD)
    (home / "uploaded.py").write_text("VALUE = 3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def client(shared_platform, home):
    """A client whose worker connects after it has uploaded a module and registered a plugin."""

    class Plugin(WorkerPlugin):  # which workers get by value
        def setup(self, worker):
            worker.of_plugin = "set up"

    options = {
        "distributed.worker.preload": [str(home / "preload.py")],
        "distributed.worker.preload-argv": ["--flavour", "sweet"],
        "logging": {"mine.tasks": "info"},
        "temporary-directory": "~/of-$CDSW_ENGINE_ID",
    }
    with (
        dask.config.set(options),
        CMLCluster(n_workers=0, name="mine", platform="local", **LIGHT) as cluster,
        Client(cluster) as client,
    ):
        client.upload_file(str(home / "uploaded.py"))
        client.register_plugin(Plugin())
        cluster.scale(1)
        client.wait_for_workers(1)
        yield client


@pytest.mark.slow
def test_levels_of_loggers_hold_in_workers(client, until):
    def chat() -> None:
        logging.getLogger("mine.tasks").info("said in a task")

    client.submit(chat).result()
    until(lambda: "said in a task" in str(client.cluster.get_logs()["mine-0"]))


def test_workers_that_connect_later_have_uploaded_modules_plugins_and_preloads(client):
    found = client.run(
        lambda dask_worker: (__import__("uploaded").VALUE, dask_worker.of_plugin, dask_worker.flavour)
    )
    assert [*found.values()] == [(3, "set up", "sweet")]


def test_the_temporary_folder_of_the_configuration_may_contain_variables(client, home):
    [used] = client.run(lambda dask_worker: dask_worker.local_directory).values()
    [session] = [session.id for session in client.cluster.sessions if session.role == "worker"]
    assert (home / f"of-{session}") in Path(used).parents


@simulated
async def test_the_idle_time_is_right_although_clocks_differ(it):
    async with simulate(n_workers=1) as cluster:
        await eventually(lambda: arrived(cluster) == 1 and "idle for" in repr(cluster))
        it.loop.set_clock(1200)  # the scheduler has said before since when the cluster is idle
        assert "min" not in repr(cluster)


@pytest.mark.parametrize("by", ["cluster", "name"])
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
