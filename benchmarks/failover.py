"""From the loss of the scheduler's session to N workers of another scheduler, compared with a start."""

from __future__ import annotations

import logging
import time
from typing import Any

from distributed import Client

from benchmarks.local_platform import end_all, local_platform
from benchmarks.report import MARK, Report, figure, save_figure, spread

COUNTS = (1, 4)
START_DELAYS = (1, 8)
LATENCY = 0.05


def one_run(n: int, platform: Any) -> dict[str, float]:
    """Start a cluster and compute; evict its scheduler, and compute again with the same client."""
    from dask_cml import CMLCluster

    begin = time.perf_counter()
    with CMLCluster(n_workers=n, cpu=1, memory=1, quiet=True) as cluster, Client(cluster) as client:
        client.wait_for_workers(n, timeout=120)
        client.submit(abs, -1).result()
        start = time.perf_counter() - begin
        begin = time.perf_counter()
        platform.evict(cluster.scheduler.session_id)
        while client.status != "connecting":
            time.sleep(0.01)
        while client.status != "running":
            time.sleep(0.01)
        client.wait_for_workers(n, timeout=300)
        client.submit(abs, -2).result()
        return {"start": start, "failover": time.perf_counter() - begin}


def run(repeats: int = 3) -> Report:
    """Measure and report."""
    report = Report(
        "failover",
        f"Seconds until N workers have computed a task, median of {repeats}",
        ["session start s", "N", "start", "after the scheduler was evicted", "ratio"],
    )
    logging.disable(logging.CRITICAL)
    figures = []
    for delay in START_DELAYS:
        with local_platform(start_delay=delay, latency=LATENCY) as (platform, _):
            for n in COUNTS:
                runs = []
                for _ in range(repeats):
                    runs.append(one_run(n, platform))
                    end_all()
                middle = {what: spread([run[what] for run in runs])["median"] for what in runs[0]}
                ratio = middle["failover"] / middle["start"]
                report.rows.append((delay, n, middle["start"], middle["failover"], ratio))
                figures.append({"delay": delay, "n": n, "runs": runs})
    logging.disable(logging.NOTSET)
    report.figures = {"latency": LATENCY, "cases": figures}
    return report


def plot(report: Report) -> None:
    """Draw the runs."""
    fig, axes = figure(6, 2.5)
    for case in report.figures["cases"]:
        for what, colour in (("failover", "tab:blue"), ("start", "tab:grey")):
            name = f"{what}, N={case['n']}, sessions of {case['delay']} s"
            values = [run[what] for run in case["runs"]]
            axes.barh(name, spread(values)["median"], color=colour)
            axes.plot(values, [name] * len(values), "|", color=MARK)
    axes.set_xlabel("seconds")
    save_figure(fig, report.name)
