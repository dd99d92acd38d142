"""Workers with GPUs: which GPU each one sees, and what a user is told if there is none. No GPU is needed."""

from __future__ import annotations

import os
import re

import dask
import pytest
from clusters import arrived, connected, log_of, make
from distributed import Client


async def seen(cluster, client):
    """Return the GPUs that each worker sees, by the worker's name."""
    names = {address: worker["name"] for address, worker in cluster.scheduler_info["workers"].items()}
    answers = await client.run(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {names[address]: answer for address, answer in answers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "options", "expected"),
    [
        (2, {}, ["0", "1"]),
        (1, {}, [None, None]),
        (2, {"env": {"CUDA_VISIBLE_DEVICES": "1"}}, ["1", "1"]),
    ],
    ids=["all found", "too few found", "set by the user"],
)
async def test_each_worker_of_a_session_sees_its_own_gpu(
    platform, nvidia_smi, holds, found, options, expected
):
    nvidia_smi(found)
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "5 minutes"}):  # of a loaded machine
        cluster = await make(name="night", n_workers=1, cpu=2, nvidia_gpu=2, **options)
    async with cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(2)
        await holds(lambda: connected(cluster) == {"night-0-0", "night-0-1"})
        named = {"night-0-0": expected[0], "night-0-1": expected[1]}
        assert await seen(cluster, client) == named
        log = (await cluster.get_logs())["night-0"]
        said = re.findall(r"WARNING - Worker night-0-(\d): 1 of 2 GPUs found in this session", log)
        assert sorted(said) == (["0", "1"] if found == 1 else [])
        await client.restart()
        assert await seen(cluster, client) == named


@pytest.mark.slow
@pytest.mark.images
@pytest.mark.parametrize("worker_args", [[], ["--no-nanny"]])
async def test_a_session_without_a_gpu_is_told_and_its_workers_start_nevertheless(
    platform, nvidia_smi, holds, worker_args
):
    nvidia_smi(0)
    group = {"n_workers": 2, "nvidia_gpu": 1, "worker_args": worker_args}
    async with (
        make(name="night", worker_groups={"gpu": group}) as cluster,
        make(name="night", create_mode="connect") as other,
        Client(cluster, asynchronous=True) as client,
    ):
        await holds(lambda: arrived(cluster) == 2)
        assert await client.submit(sum, [1, 2], resources={"GPU": 1}) == 3
        words = (
            r"worker night-gpu-\d found 0 of 1 GPUs in its session(, and so did 1 more)?; tasks run there "
            "nevertheless; start from an image with CUDA, or ask your CML administrator"
        )
        await holds(lambda: "1 more" in str(cluster.problem) and "1 more" in str(other.problem))
        await holds(lambda: "GPU" in log_of(cluster))
        assert re.fullmatch(words, cluster.problem)
        assert re.fullmatch(words, other.problem)
        assert re.fullmatch(f"Cluster night: {words}", log_of(cluster))
        assert re.search(f"problem: {words}", repr(cluster))
