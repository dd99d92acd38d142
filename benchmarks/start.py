"""From nothing to N connected workers."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.local_platform import end_all, local_platform
from benchmarks.report import MARK, Report, figure, save_figure, spread

COUNTS = (1, 4, 8)
START_DELAYS = (1, 8)
LATENCY = 0.05
_SIZE = {"cpu": 1, "memory": 1}
_LOOK_INTERVAL = 0.1


def floor(n: int, platform: Any, folder: Path) -> float:
    """Launch everything at once by plain calls; workers find the scheduler by its file."""
    begin = time.perf_counter()
    file = folder / f"scheduler-{time.time_ns()}.json"
    scheduler = _dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    worker = _dask("worker", "--scheduler-file", str(file), *_WORKER)
    with ThreadPoolExecutor(2) as threads:
        launches = [
            threads.submit(platform.launch_workers, 1, **_SIZE, code=scheduler),
            threads.submit(platform.launch_workers, n, **_SIZE, code=worker),
        ]
    for launch in launches:
        launch.result()
    while True:
        try:
            address = json.loads(file.read_text())["address"]
            break
        except (OSError, ValueError):
            time.sleep(_LOOK_INTERVAL)
    return _connected(address, n, begin)


def two_phases(n: int, platform: Any, folder: Path) -> float:
    """Launch and await the scheduler, then launch and await the workers, as the public helpers do."""
    begin = time.perf_counter()
    port = _free_port()
    code = _dask("scheduler", "--host", "127.0.0.1", "--port", str(port))
    [scheduler] = platform.launch_workers(1, **_SIZE, code=code)
    _await(platform, [scheduler])
    [ip] = [s["ip_address"] for s in platform.list_workers() if s["id"] == scheduler["id"]]
    address = f"tcp://{ip}:{port}"
    workers = platform.launch_workers(n, **_SIZE, code=_dask("worker", address, *_WORKER))
    _await(platform, workers)
    return _connected(address, n, begin)


def cluster(n: int, platform: Any, folder: Path) -> float:
    """Make a CMLCluster."""
    from dask_cml import CMLCluster

    begin = time.perf_counter()
    with CMLCluster(n_workers=n, **_SIZE, quiet=True) as made:
        return _connected(made, n, begin)


WAYS: dict[str, Callable[[int, Any, Path], float]] = {
    "floor": floor,
    "CMLCluster": cluster,
    "two phases": two_phases,
}
_WORKER = ("--nworkers", "1", "--nthreads", "1", "--no-dashboard")


def _dask(*arguments: str) -> str:
    command = [sys.executable, "-m", "dask", *arguments]
    return f"import subprocess; subprocess.run({command!r})"


def _await(platform: Any, sessions: list[dict[str, Any]]) -> None:
    result = platform.await_workers(sessions, wait_for_completion=False, timeout_seconds=90)
    if result["failures"]:
        raise RuntimeError(f"sessions failed: {result['failures']}")


def _connected(where: Any, n: int, begin: float) -> float:
    with Client(where, timeout=60) as client:
        client.wait_for_workers(n, timeout=120)
        return time.perf_counter() - begin


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(repeats: int = 3) -> Report:
    """Measure the ways in turns, so that each meets the same load, and report."""
    report = Report(
        "start",
        f"Seconds from nothing to N connected workers, median of {repeats}",
        ["session start s", "N", *WAYS, "CMLCluster / floor", "CMLCluster / two phases"],
    )
    figures = []
    for delay in START_DELAYS:
        with local_platform(start_delay=delay, latency=LATENCY) as (platform, folder):
            cluster(1, platform, folder)  # what is imported once is not measured
            for n in COUNTS:
                times: dict[str, list[float]] = {way: [] for way in WAYS}
                for i in range(repeats):
                    ways = [*WAYS]
                    for way in ways[i % 3 :] + ways[: i % 3]:
                        times[way].append(WAYS[way](n, platform, folder))
                        end_all()
                middle = {way: spread(seconds) for way, seconds in times.items()}
                medians = {way: middle[way]["median"] for way in WAYS}
                case = {
                    "start delay": delay,
                    "n": n,
                    "seconds": times,
                    "of floor": _ratio(times, "floor"),
                    "of two phases": _ratio(times, "two phases"),
                }
                figures.append(case)
                report.rows.append(
                    (
                        str(delay),
                        str(n),
                        *[f"{seconds:.1f}" for seconds in medians.values()],
                        f"{case['of floor']:.2f}",
                        f"{case['of two phases']:.2f}",
                    )
                )
    report.figures = {"latency": LATENCY, "cases": figures}
    return report


def _ratio(times: dict[str, list[float]], to: str) -> float:
    """Return the median ratio of runs that followed each other."""
    return spread([a / b for a, b in zip(times["CMLCluster"], times[to], strict=True)])["median"]


def plot(report: Report) -> None:
    """Draw the medians."""
    fig, axes = figure(5.5, 3.5)
    colours = {"floor": "tab:grey", "CMLCluster": "tab:blue", "two phases": "tab:orange"}
    labels = {"floor": "floor: all at once by plain calls", "two phases": "two phases with await_workers"}
    cases = report.figures["cases"]
    for i, way in enumerate(WAYS):
        positions = [x + 0.27 * (i - 1) for x in range(len(cases))]
        medians = [spread(case["seconds"][way]) for case in cases]
        axes.bar(
            positions, [m["median"] for m in medians], 0.25, color=colours[way], label=labels.get(way, way)
        )
        axes.errorbar(
            positions,
            [m["median"] for m in medians],
            [[m["median"] - m["min"] for m in medians], [m["max"] - m["median"] for m in medians]],
            fmt="none",
            ecolor=MARK,
            capsize=2,
        )
    axes.set_xticks(range(len(cases)), [f"N = {c['n']}\n{c['start delay']} s" for c in cases])
    axes.set_xlabel("workers; time that a session takes to start")
    axes.set_ylabel("seconds until N workers are connected")
    axes.legend()
    save_figure(fig, report.name)
