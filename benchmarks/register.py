"""What a keeper costs while its workers register, and how that grows with the cluster.

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
from typing import Any

import dask
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
        stalls = Stalls(cluster.loop.asyncio_loop)
        stalls.so_far()
        cpu, begin = time.process_time(), time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "workers", address, *keys, str(n)], stdout=subprocess.PIPE
        ) as workers:
            workers.stdout.readline()
            while len(cluster.view.arrived()) < n:
                time.sleep(0.1)
            figures = {
                "n": n,
                "ms of CPU a worker": (time.process_time() - cpu) / n * 1000,
                "seconds": time.monotonic() - begin,
                **stalls.so_far(),
            }
            workers.kill()
    return figures


def run(repeats: int = 1) -> Report:
    """Measure and report."""
    report = Report(
        "register",
        "The keeper while its workers register",
        ["workers", "CPU a worker", "times that of the smallest", "longest hold of the event loop"],
    )
    runs = [measure("benchmarks.register", "keeper", n) for n in COUNTS for _ in range(repeats)]
    least = min(run["ms of CPU a worker"] for run in runs if run["n"] == COUNTS[0])
    for n in COUNTS:
        best = min((run for run in runs if run["n"] == n), key=lambda run: run["ms of CPU a worker"])
        cpu = best["ms of CPU a worker"]
        report.rows.append((n, f"{cpu:.1f} ms", f"{cpu / least:.2f}", f"{best['busy stall'] * 1000:.0f} ms"))
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
