"""Dask workers with GPUs: how many run, which GPU they use, what they offer. No GPU is needed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import dask
import pytest
from clusters import log_of, make
from distributed import Client

from dask_cml.options import Options
from dask_cml.sessions.plan import Place, plan_worker
from dask_cml.worker import process

#: Starts as many Dask workers as there are GPUs, with dask-cuda's arguments and names. Their nannies preload
#: what Dask's configuration says.
DASK_CUDA_WORKER = """\
#!{python}
import os, sys
sys.path[0] = os.getcwd()  # as `python -m dask` does
from distributed.cli import dask_worker

class Nanny(dask_worker.Nanny):
    def __init__(self, *args, preload_nanny, **options):
        super().__init__(*args, **options)

if __name__ == "__main__":
    dask_worker.Nanny = Nanny
    dask_worker.main([*sys.argv[1:], "--nworkers", "2"])
"""


def plan(**options):
    return plan_worker(Options.read(name="mine", **options), Place(Path("/nowhere")), "mine-0", "tcp://x:1")


# -- how many GPUs a session has


def test_gpus_are_counted_by_nvidia_smi_or_by_their_devices_without_it(nvidia_smi, monkeypatch, tmp_path):
    nvidia_smi(3)
    assert process.count_gpus() == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(process, "_DEVICES", devices)
    assert process.count_gpus() == 0
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (devices / device).touch()
    assert process.count_gpus() == 2


# -- which workers run


@pytest.fixture
def dask_cuda(tmp_path, monkeypatch):
    """An installed dask-cuda, which nobody imports."""
    (tmp_path / "dask_cuda.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"nvidia_gpu": 2, "processes": 2}, ["dask", "cuda", "worker"]),
        ({"nvidia_gpu": 1}, ["dask", "cuda", "worker"]),
        ({}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "processes": 1}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "worker_args": ["--lifetime", "1 hour"]}, ["dask", "worker"]),
        ({"nvidia_gpu": 2, "worker_command": ["dask", "worker"]}, ["dask", "worker"]),
    ],
)
def test_dask_cuda_runs_the_workers_if_it_is_installed(dask_cuda, options, command):
    code = plan(**options).code
    expected = [sys.executable, "-m", *command, "tcp://x:1", "--name", "mine-0"]
    assert f"'command': {expected!r}"[:-1] in code
    is_dask_cuda = "cuda" in command
    assert ("--nworkers" in code) != is_dask_cuda
    assert ("--preload-nanny" in code) != is_dask_cuda


# -- real sessions


@pytest.mark.slow
async def test_dask_cuda_gives_tasks_their_gpu_and_moves_data_before_its_session_stops(
    platform, tmp_path, holds
):
    program = tmp_path / "dask-cuda-worker"
    program.write_text(DASK_CUDA_WORKER.format(python=sys.executable))
    program.chmod(0o755)
    platform.configure(stop_grace=30)
    async with (
        make(name="mine", n_workers=1, cpu=2, nvidia_gpu=2, worker_command=[str(program)]) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        workers = cluster.scheduler_info["workers"].values()
        assert {worker["name"] for worker in workers} == {"mine-0-0", "mine-0-1"}
        assert [worker["resources"] for worker in workers] == [{"GPU": 1}, {"GPU": 1}]
        await holds(lambda: cluster.n_pending == 0)
        assert await client.submit(sum, [1, 2], resources={"GPU": 1}) == 3
        with dask.annotate(resources={"GPU": 1}):
            task = dask.delayed(sum)([1, 2, 3])
        assert await client.compute(task, optimize_graph=False) == 6
        other = client.submit(sum, [1], resources={"FPGA": 1}, pure=False)
        while await client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.unrunnable)) != 1:
            await asyncio.sleep(0.1)
        assert other.status == "pending"
        # Clusters that tasks start are none of dask-cml's.
        preloads = await client.run(lambda: dask.config.get("distributed.nanny.preload"))
        assert [*preloads.values()] == [[], []]
        [session] = [session.id for session in cluster.sessions if session.role == "worker"]
        await asyncio.to_thread(platform.evict, session, notice=True)
        await holds(lambda: "Worker mine-0" in log_of(cluster))
        assert "Worker mine-0 evicted, with notice; launching a replacement" in log_of(cluster)
