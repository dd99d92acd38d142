"""The end of a cluster of 30 live sessions."""

from __future__ import annotations

import logging
import tempfile
import time

import dask

from benchmarks.report import MARK, Report, figure, save_figure, spread
from benchmarks.sessions import Platform

SESSIONS = 30
LATENCY = 0.1


def one_run() -> dict[str, float]:
    """Close a cluster whose workers live; then stop as many sessions by one plain call."""
    from distributed import Client

    from dask_cml import CMLCluster

    logging.disable(logging.ERROR)
    platform = Platform(latency=LATENCY, workers=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set({"cml.state-directory": folder}),
        platform.installed(),
    ):
        made = CMLCluster(n_workers=SESSIONS, quiet=True)
        with Client(made) as client:
            client.wait_for_workers(SESSIONS, timeout=120)
        begin = time.perf_counter()
        made.close()
        close = time.perf_counter() - begin
        if platform.live:
            raise RuntimeError(f"close() left {platform.live}")
    others = Platform(latency=LATENCY)
    ids = [session["id"] for session in others.launch_workers(SESSIONS + 1, cpu=1, memory=1)]
    begin = time.perf_counter()
    others.stop_workers(*ids)
    plain = time.perf_counter() - begin
    logging.disable(logging.NOTSET)
    return {
        "close()": close,
        "one stop_workers(*ids)": plain,
        "stop requests of close()": platform.requests["stop_workers"],
    }


def run(repeats: int = 5) -> Report:
    """Measure and report."""
    report = Report(
        "close",
        f"Seconds to end {SESSIONS} workers and a scheduler, {LATENCY} s a request",
        ["", "median", "min", "max"],
    )
    runs = [one_run() for _ in range(repeats)]
    for what in ("close()", "one stop_workers(*ids)"):
        figures = spread([run[what] for run in runs])
        report.rows.append((what, *figures.values()))
    report.figures = {"latency": LATENCY, "sessions": SESSIONS, "runs": runs}
    return report


def plot(report: Report) -> None:
    """Draw the runs."""
    fig, axes = figure(6, 2)
    for i, what in enumerate(("one stop_workers(*ids)", "close()")):
        values = [run[what] for run in report.figures["runs"]]
        axes.barh(what, spread(values)["median"], color=("tab:grey", "tab:blue")[i])
        axes.plot(values, [what] * len(values), "|", color=MARK)
    axes.set_xlabel(f"seconds for {SESSIONS + 1} sessions")
    save_figure(fig, report.name)
