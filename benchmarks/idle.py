"""What a cluster without tasks costs: calls of the Workers API, operations on its files, and CPU time.

Worker sessions are names, and their Dask workers run without nannies in one other process. So this process is
the notebook's, and the scheduler's session is as in use. strace slows processes down: it runs after the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Worker
from distributed.security import Security

from benchmarks.report import MARK, Report, figure, save_figure
from benchmarks.sessions import Platform

COUNTS = (0, 10, 100)
#: Names the folder of another release, which is measured in turns with this one.
BEFORE = "BENCHMARK_BEFORE"
#: Seconds after which nothing of the start goes on, and of each of the two measurements.
_SETTLE, _SECONDS = 20.0, 60.0
_KEYS = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")


async def run_workers(address: str, keys: Sequence[str], n: int) -> None:
    """Run Dask workers that get no tasks."""
    security = Security(require_encryption=True, **dict(zip(_KEYS, keys, strict=True)))
    options: dict[str, Any] = {"nthreads": 1, "memory_limit": 0, "dashboard": False, "security": security}
    workers = [await Worker(address, name=f"idle-{i}", **options) for i in range(n)]
    await asyncio.gather(*(worker.finished() for worker in workers))


def cpu_of(processes: Iterable[psutil.Process]) -> float:
    """Return the seconds of CPU that processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def traced(processes: dict[str, list[psutil.Process]], folder: Path) -> dict[str, int]:
    """Count for some seconds the operations of processes on the files of the clusters in a folder."""
    if shutil.which("strace") is None:
        return {}
    tracers = {}
    for who, group in processes.items():
        options = [word for process in group for word in ("-p", str(process.pid))]
        command = ["strace", "-f", "-qq", "-y", "-e", "trace=%file", "-o", str(folder / who), *options]
        tracers[who] = subprocess.Popen(command)
    time.sleep(_SECONDS)
    counts = {}
    for who, tracer in tracers.items():
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        lines = (folder / who).read_text().splitlines()
        counts[who] = sum(f"{folder}/state" in line and " resumed>" not in line for line in lines)
    return counts


def one_run(n: int) -> dict[str, Any]:
    """Measure a cluster in this process, in each minute and hour."""
    from dask_cml import CMLCluster

    logging.disable(logging.ERROR)
    platform = Platform()
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({"cml.state-directory": f"{folder}/state"}),
        platform.installed(),
        CMLCluster(n, name="idle", quiet=True) as cluster,
    ):
        processes = {"notebook": [psutil.Process()], "scheduler": psutil.Process().children(recursive=True)}
        keys = [str(getattr(cluster.security, key)) for key in _KEYS]
        command = [sys.executable, __file__, "workers", cluster.scheduler.address, str(n), *keys]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as workers:
            while len(cluster.scheduler_info["workers"]) < n:
                time.sleep(0.1)
            time.sleep(_SETTLE)
            calls, before = len(platform.calls), {who: cpu_of(group) for who, group in processes.items()}
            time.sleep(_SECONDS)
            cpu = {who: cpu_of(group) - before[who] for who, group in processes.items()}
            calls = len(platform.calls) - calls
            operations = traced(processes, Path(folder))
            workers.kill()
    return {
        "API calls": calls * 60 / _SECONDS,
        **{f"{who}: file operations": count * 60 / _SECONDS for who, count in operations.items()},
        **{f"{who}: CPU seconds": seconds * 3600 / _SECONDS for who, seconds in cpu.items()},
    }


def run(repeats: int = 3) -> Report:
    """Measure and report."""
    if shutil.which("strace") is None:
        print("No file operations are counted: strace is missing, see `apt-get install strace`")
    releases = {"now": str(Path(__file__).parents[1])}
    if BEFORE in os.environ:
        releases = {"before": os.environ[BEFORE], **releases}
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for n in COUNTS:
            for release, source in releases.items():
                command = [sys.executable, __file__, str(n)]
                env = {**os.environ, "PYTHONPATH": source}
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=source, env=env)
                runs.setdefault(f"{n} {release}", []).append(json.loads(done.stdout.splitlines()[-1]))
    columns = [*next(iter(runs.values()))[0]]
    heads = [f"{what} {'an hour' if 'CPU' in what else 'a minute'}" for what in columns]
    report = Report("idle", f"Of an idle cluster, median of {repeats}", ["workers", "release", *heads])
    for case, results in runs.items():
        report.rows.append(
            (*case.split(), *(statistics.median(run[what] for run in results) for what in columns))
        )
    report.figures = {"runs": runs}
    return report


def plot(report: Report) -> None:
    """Draw the CPU time."""
    fig, axes = figure(6, 2.5)
    for case, runs in report.figures["runs"].items():
        for who, colour in (("scheduler", "tab:blue"), ("notebook", "tab:grey")):
            values = [run[f"{who}: CPU seconds"] for run in runs]
            axes.barh(f"{who}, {case}", statistics.median(values), color=colour)
            axes.plot(values, [f"{who}, {case}"] * len(values), "|", color=MARK)
    axes.set_xlabel("CPU seconds an hour")
    save_figure(fig, report.name)


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        asyncio.run(run_workers(sys.argv[2], sys.argv[4:], int(sys.argv[3])))
    else:
        print(json.dumps(one_run(int(sys.argv[1]))))
