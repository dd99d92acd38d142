"""Thousands of sessions: what launching and stopping them costs."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from typing import Any

import dask
import psutil

from benchmarks.cases import measure
from benchmarks.report import Report, figure, save_figure
from benchmarks.sessions import Platform

LATENCY = 0.1
COUNTS = (1000, 5000)
_STEADY_SECONDS = 5.0


class Stalls:
    """How long the event loop did not come round, and how long this process worked meanwhile.

    On a machine that is busy with other things too, the first contains time in which this process was not
    run at all; the second does not.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        The loop, which runs in another thread.
    """

    _TICK = 0.005

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest = self.longest_busy = 0.0
        self._task = asyncio.run_coroutine_threadsafe(self._watch(), loop)

    async def _watch(self) -> None:
        last, last_cpu = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(self._TICK)
            now, cpu = time.perf_counter(), time.process_time()
            stall = now - last - self._TICK
            self.longest = max(self.longest, stall)
            self.longest_busy = max(self.longest_busy, min(stall, cpu - last_cpu))
            last, last_cpu = now, cpu

    def so_far(self) -> dict[str, float]:
        """Return the longest stalls since the last call, in seconds."""
        longest = {"stall": round(self.longest, 4), "busy stall": round(self.longest_busy, 4)}
        self.longest = self.longest_busy = 0.0
        return longest


class Phase:
    """Measures a part of a run: seconds, CPU seconds, requests, memory, stalls."""

    def __init__(self, platform: Platform, stalls: Stalls | None = None) -> None:
        self.platform, self.stalls, self.process = platform, stalls, psutil.Process()

    def __enter__(self) -> Phase:
        self.requests = self.platform.requests.copy()
        self.memory = self.process.memory_info().rss
        if self.stalls:
            self.stalls.so_far()
        self.begin, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self.begin
        self.figures: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "cpu": round(time.process_time() - self.cpu, 3),
            "requests": dict(self.platform.requests - self.requests),
            "lists per second": round((self.platform.requests - self.requests)["list_workers"] / seconds, 2),
            "memory": self.process.memory_info().rss - self.memory,
        }
        if self.stalls:
            self.figures.update(self.stalls.so_far())


def plain(n: int, platform: Platform) -> dict[str, Any]:
    """Launch and stop by one call each, which is all that the platform offers."""
    with Phase(platform) as launch:
        sessions = platform.launch_workers(n, cpu=1, memory=2, code="pass")
    with Phase(platform) as stop:
        platform.stop_workers(*[session["id"] for session in sessions])
    return {"launch": launch.figures, "stop": stop.figures}


def clustered(n: int, platform: Platform) -> dict[str, Any]:
    """Have a cluster launch, look after, and stop them. None of its workers ever registers."""
    from dask_cml import CMLCluster

    with CMLCluster(worker_timeout="1 hour", quiet=True) as cluster:
        loop = cluster.loop.asyncio_loop
        stalls = Stalls(loop)

        def wait_for(there: int) -> None:
            while len(cluster.workers) != there:
                time.sleep(0.01)

        with Phase(platform, stalls) as launch:
            cluster.scale(n)
            wait_for(n)
        with Phase(platform, stalls) as steady:
            time.sleep(_STEADY_SECONDS)
        with Phase(platform, stalls) as stop:
            cluster.scale(0)
            wait_for(0)
    return {"launch": launch.figures, "steady": steady.figures, "stop": stop.figures}


def one_run(kind: str, n: int) -> None:
    """Measure in this process, and print the figures as JSON."""
    with tempfile.TemporaryDirectory() as folder, dask.config.set({"cml.state-directory": folder}):
        platform = Platform(latency=LATENCY)
        with platform.installed():
            figures = {"plain": plain, "cluster": clustered}[kind](n, platform)
            platform.latency = 0
    assert threading.active_count() < 50
    print(json.dumps(figures), flush=True)


def run(repeats: int = 3) -> Report:
    """Measure and report."""
    report = Report(
        "scale",
        f"Simulated sessions, {LATENCY} s a request",
        ["", "n", "seconds", "CPU ms a session", "lists/s", "longest stall ms", "busy", "KiB a session"],
    )
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for n in COUNTS:
            for kind in ("plain", "cluster"):
                runs.setdefault(f"{kind} {n}", []).append(measure("benchmarks.scale", kind, n))
    # The median run of each, by the time it took to launch.
    middle = {
        key: sorted(case_runs, key=lambda r: r["launch"]["seconds"])[len(case_runs) // 2]
        for key, case_runs in runs.items()
    }
    for n in COUNTS:
        for phase in ("launch", "steady", "stop"):
            for kind in ("plain", "cluster"):
                figures = middle[f"{kind} {n}"].get(phase)
                if figures is None:
                    continue
                case_runs = runs[f"{kind} {n}"]
                stalls = [
                    1000 * max(r[phase].get(key, 0.0) for r in case_runs) for key in ("stall", "busy stall")
                ]
                report.rows.append(
                    (
                        f"{phase}, {kind}",
                        str(n),
                        figures["seconds"],
                        1000 * figures["cpu"] / n,
                        figures["lists per second"],
                        *(stalls if kind == "cluster" else ("", "")),
                        figures["memory"] / n / 1024 if phase == "launch" else "",
                    )
                )
    report.figures = {"latency": LATENCY, "runs": runs}
    return report


def plot(report: Report) -> None:
    """Draw seconds and CPU a session."""
    runs = report.figures["runs"]
    fig, axes = figure()
    labels, seconds, cpu = [], [], []
    for n in COUNTS:
        for phase in ("launch", "stop"):
            for kind in ("plain", "cluster"):
                case_runs = runs[f"{kind} {n}"]
                labels.append(f"{phase} {n:,}\n{kind}")
                seconds.append(sorted(r[phase]["seconds"] for r in case_runs)[len(case_runs) // 2])
                cpu.append(sorted(r[phase]["cpu"] for r in case_runs)[len(case_runs) // 2])
    colours = ["tab:grey", "tab:blue"] * (len(labels) // 2)
    axes.bar(labels, seconds, color=colours)
    axes.bar(labels, cpu, color="tab:orange", width=0.4, label="of that, CPU")
    axes.set_ylabel("seconds")
    axes.set_title(f"Simulated sessions, {LATENCY} s a request, ten at a time")
    axes.tick_params(axis="x", labelsize=7)
    axes.legend()
    save_figure(fig, report.name)


if __name__ == "__main__":
    one_run(sys.argv[1], int(sys.argv[2]))
