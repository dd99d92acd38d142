"""Tasks that wait for what no worker offers: the user is told once, and again if they come again."""

from __future__ import annotations

import asyncio

from clusters import arrived, lines_of, rebuild, scheduler_of, simulate
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml.timing import timing

NO_FPGA = "3 tasks need FPGA=1, which no worker group offers"
NO_GPU = "1 task needs GPU=1; worker group gpu offers it, but has no workers: "
CALL = "call cluster.scale(1, worker_group='gpu')"


def reported(cluster):
    """The lines about tasks that cannot run."""
    return [line for line in lines_of(cluster) if "cannot run all tasks" in line]


@simulated
async def test_a_need_that_no_group_offers_is_a_problem_until_one_offers_it(it):
    async with (
        simulate(name="mine", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster,
        rebuild("mine") as remote,
        Client(cluster, asynchronous=True) as client,
    ):
        assert cluster.problem is None
        future = client.submit(abs, -1, resources={"GPU": 1})
        await eventually(lambda: cluster.problem == f"{NO_GPU}{CALL}")
        cluster.scale(1, worker_group="gpu")
        assert await future == 1
        del future
        await eventually(lambda: cluster.problem is None)
        cluster.scale(0, worker_group="gpu")
        await eventually(lambda: not cluster.workers)
        futures = client.map(abs, range(3), resources={"FPGA": 1})
        await eventually(lambda: f"problem: {NO_FPGA}" in repr(cluster))
        await eventually(lambda: remote.problem == NO_FPGA)
        futures += client.map(abs, range(3, 5), resources={"FPGA": 1})
        await eventually(lambda: cluster.problem == NO_FPGA.replace("3", "5"))
        futures += client.map(abs, range(5, 7), resources={"LICENSE": 1})
        await eventually(lambda: "; 2 tasks need LICENSE=1" in cluster.problem)
        assert reported(cluster) == [
            f"Cluster mine cannot run all tasks: {NO_GPU}{CALL}",
            f"Cluster mine cannot run all tasks: {NO_FPGA}",
            f"Cluster mine cannot run all tasks: {NO_FPGA.replace('3', '2').replace('FPGA', 'LICENSE')}",
        ]
        await cluster.add_worker_group("fpga", n_workers=1, resources={"FPGA": 3, "LICENSE": 1})
        assert await client.gather(futures) == [*range(7)]
        await eventually(lambda: cluster.problem is remote.problem is None)
        again = client.submit(abs, 7, resources={"GPU": 1})
        await eventually(lambda: reported(cluster)[3:] == reported(cluster)[:1])
        del again


@simulated
async def test_tasks_for_connected_or_wanted_workers_are_no_problem(it):
    async with (
        simulate(
            name="mine", n_workers=1, worker_groups={"gpu": {"processes": 2, "worker_args": []}}
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        it.platform.doom("silent")
        cluster.scale(1, worker_group="gpu")
        [(address, worker)] = cluster.scheduler_info["workers"].items()
        known = ["mine-0", address, worker["host"], "mine-gpu-0-1"]
        futures = [client.submit(abs, i, workers=[name]) for i, name in enumerate(known)]
        assert await client.gather(futures[:3]) == [0, 1, 2]
        await eventually(lambda: scheduler_of(it, cluster).unrunnable)
        await asyncio.sleep(2 * timing.look)
        assert cluster.problem is None
        futures.append(client.submit(abs, 4, workers=["tcp://10.0.0.8:1"]))
        words = "1 task is restricted to tcp://10.0.0.8:1, which the cluster does not have"
        await eventually(lambda: cluster.problem == words)
        assert words in cluster._repr_html_()
