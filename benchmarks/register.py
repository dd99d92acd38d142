"""What a keeper and its scheduler cost while workers register and leave, and how that grows with the cluster.

Sessions are names. The Dask workers are connections of another process, which register and do nothing more.
So the CPU time of this process is that of the keeper.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import dask
from distributed import Client, Scheduler
from distributed.comm import connect
from distributed.security import Security

from benchmarks.cases import measure
from benchmarks.report import Report, figure, save_figure
from benchmarks.scale import Stalls
from benchmarks.sessions import Platform, registration

COUNTS = (200, 600, 1200)
#: Workers that register in a second.
_RATE = 12.0
_KEYS = ("tls_ca_file", "tls_client_cert", "tls_client_key")


async def register(address: str, keys: list[str], n: int) -> None:
    """Register Dask workers one after the other, and stay connected."""
    files = dict(zip(_KEYS, keys, strict=True))
    arguments = Security(require_encryption=True, **files).get_connection_args("client")
    begin, comms = time.monotonic(), []
    for i in range(n):
        comm = await connect(address, **arguments)
        await comm.write(registration(f"bench-{i}", f"bench-{i}", 1024 + i), serializers=["msgpack"])
        await comm.read(deserializers=["msgpack"])
        comms.append(comm)
        await asyncio.sleep(max(0.0, begin + (i + 1) / _RATE - time.monotonic()))
    print("registered", flush=True)
    await asyncio.Event().wait()


async def begin_watching(dask_scheduler: Scheduler) -> None:
    """Measure a scheduler's event loop from now on."""
    dask_scheduler.stalls = Stalls(asyncio.get_running_loop())


async def watched(dask_scheduler: Scheduler) -> dict[str, float]:
    """Return a scheduler's CPU time in all, and the longest holds of its event loop since the last call."""
    return {"cpu": time.process_time(), **dask_scheduler.stalls.so_far()}


def one_run(n: int) -> dict[str, Any]:
    """Create a cluster, register its workers, and measure the keeper meanwhile."""
    from dask_cml import CMLCluster

    logging.disable(logging.ERROR)
    platform = Platform(latency=0.01, start_delay=0.1)
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({"cml.state-directory": folder}),
        platform.installed(),
        CMLCluster(n, name="bench", quiet=True, scheduler_args=["--no-dashboard"]) as cluster,
    ):
        while len(cluster.workers) < n:
            time.sleep(0.1)
        keys = [str(getattr(cluster.security, key)) for key in _KEYS]
        address = cluster.scheduler.address

        def ask_scheduler(function: Callable[..., Any]) -> Any:
            with Client(cluster) as client:  # only now: it costs CPU time, too
                return client.run_on_scheduler(function)

        ask_scheduler(begin_watching)
        before = ask_scheduler(watched)
        stalls = Stalls(cluster.loop.asyncio_loop)
        stalls.so_far()
        cpu, begin = time.process_time(), time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "workers", address, *keys, str(n)], stdout=subprocess.PIPE
        ) as workers:
            workers.stdout.readline()
            while sum(group.n_arrived for group in cluster.worker_groups.values()) < n:
                time.sleep(0.1)
            figures = {
                "n": n,
                "ms of CPU a worker": (time.process_time() - cpu) / n * 1000,
                "seconds": time.monotonic() - begin,
                **stalls.so_far(),
            }
            registered = ask_scheduler(watched)
            figures["ms of the scheduler's CPU a worker"] = (registered["cpu"] - before["cpu"]) / n * 1000
            figures["scheduler"] = registered
            stalls.so_far()
            cluster.scale(0)
            while cluster.workers:
                time.sleep(0.1)
            figures["all leave"] = {"keeper": stalls.so_far(), "scheduler": ask_scheduler(watched)}
            workers.kill()
    return figures


def run(repeats: int = 1) -> Report:
    """Measure and report."""
    figures = ("CPU a worker", "times that of the smallest", "hold", "hold while all leave")
    report = Report(
        "register",
        "The keeper and the scheduler while workers register, and their longest holds of the event loop",
        ["workers", *(f"{who}: {what}" for who in ("keeper", "scheduler") for what in figures)],
    )
    runs = [measure("benchmarks.register", "keeper", n) for n in COUNTS for _ in range(repeats)]
    best = [
        min((run for run in runs if run["n"] == n), key=lambda run: run["ms of CPU a worker"]) for n in COUNTS
    ]
    for run in best:
        row: list[Any] = [run["n"]]
        holds = {"keeper": run, "scheduler": run["scheduler"]}
        for who, what in (
            ("keeper", "ms of CPU a worker"),
            ("scheduler", "ms of the scheduler's CPU a worker"),
        ):
            hold, last_hold = (stall["busy stall"] for stall in (holds[who], run["all leave"][who]))
            row += [f"{run[what]:.1f} ms", f"{run[what] / best[0][what]:.2f}"]
            row += [f"{hold * 1000:.0f} ms", f"{last_hold * 1000:.0f} ms"]
        report.rows.append(row)
    report.figures = {"runs": runs}
    return report


def plot(report: Report) -> None:
    """Draw the CPU time by the number of workers."""
    fig, axes = figure(6, 3)
    runs = report.figures["runs"]
    axes.plot([run["n"] for run in runs], [run["ms of CPU a worker"] for run in runs], "o-")
    axes.set_xlabel("workers")
    axes.set_ylabel("ms of CPU a worker")
    axes.set_ylim(0, 1.2 * max(run["ms of CPU a worker"] for run in runs))
    save_figure(fig, report.name)


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        asyncio.run(register(sys.argv[2], sys.argv[3:6], int(sys.argv[6])))
    else:
        print(json.dumps(one_run(int(sys.argv[2]))))
