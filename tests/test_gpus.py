"""What sessions with GPUs offer to tasks, and dask-cuda's command. No GPU is needed."""

from __future__ import annotations

import sys

import dask
import pytest
from distributed import Client

from dask_cml import CMLCluster

#: Starts as many Dask workers as there are GPUs, with dask-cuda's arguments and names.
DASK_CUDA_WORKER = """\
#!{python}
import os, sys
command = [sys.executable, "-m", "dask", "worker", *sys.argv[1:], "--nworkers", "2"]
os.execv(sys.executable, command)
"""


@pytest.fixture
def dask_cuda_worker(tmp_path):
    program = tmp_path / "dask-cuda-worker"
    program.write_text(DASK_CUDA_WORKER.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
def test_tasks_that_ask_for_a_gpu_run_on_workers_with_one(platform, dask_cuda_worker, until):
    with (
        CMLCluster(
            n_workers=1, cpu=2, nvidia_gpu=2, worker_command=[dask_cuda_worker], platform="local", quiet=True
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=120)
        workers = cluster.scheduler_info["workers"].values()
        [session] = cluster.worker_spec
        assert {worker["name"] for worker in workers} == {f"{session}-0", f"{session}-1"}
        assert [worker["resources"] for worker in workers] == [{"GPU": 1}, {"GPU": 1}]
        until(lambda: cluster.n_pending == 0)
        assert client.submit(sum, [1, 2], resources={"GPU": 1}).result(120) == 3
        with dask.annotate(resources={"GPU": 1}):
            task = dask.delayed(sum)([1, 2, 3])
        assert client.compute(task, optimize_graph=False).result(120) == 6
        other = client.submit(sum, [1], resources={"FPGA": 1}, pure=False)
        until(lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.unrunnable)) == 1)
        assert other.status == "pending"
        cluster.scale(0)
        until(lambda: not cluster.workers)
