"""``dask cml list`` among many records, of which half are stale."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distributed import LocalCluster

from benchmarks.report import MARK, Report, figure, save_figure, spread
from dask_cml.records.record import Record
from dask_cml.records.store import claim

RECORDS = 200


def write_records(directory: Path, live: LocalCluster, refusing: str, silent: str) -> None:
    """Half of the clusters are alive, a quarter refuses connections, and a quarter never answers."""
    scheduler_id = live.scheduler_info["id"]
    for i in range(RECORDS):
        address = [live.scheduler_address, refusing, live.scheduler_address, silent][i % 4]
        record = Record(f"cluster-{i:03d}", scheduler_address=address, scheduler_id=scheduler_id)
        claim(record, directory)


def seconds(directory: Path) -> float:
    """Run the command as a program of its own."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "dask", "cml", "list", "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "DASK_CML__STATE_DIRECTORY": str(directory)},
    )
    return time.perf_counter() - begin


def run(repeats: int = 5) -> Report:
    """Measure with the records and without any, in turns, and report."""
    report = Report(
        "listing", f"Seconds of `dask cml list`, median of {repeats}", ["records", "median", "max"]
    )
    with contextlib.ExitStack() as stack:
        many, none = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        refusing, silent = (stack.enter_context(socket.socket()) for _ in range(2))
        for endpoint in (refusing, silent):
            endpoint.bind(("127.0.0.1", 0))
        silent.listen(RECORDS)
        scheduler = stack.enter_context(LocalCluster(n_workers=1, processes=False, dashboard_address=None))
        addresses = [f"tcp://127.0.0.1:{endpoint.getsockname()[1]}" for endpoint in (refusing, silent)]
        write_records(many, scheduler, *addresses)
        times: dict[int, list[float]] = {0: [], RECORDS: []}
        for _ in range(repeats):
            times[0].append(seconds(none))
            times[RECORDS].append(seconds(many))
    for n, values in times.items():
        report.rows.append((str(n), spread(values)["median"], spread(values)["max"]))
    report.figures = {"seconds": times}
    return report


def plot(report: Report) -> None:
    """Draw the runs."""
    fig, axes = figure(6, 2)
    for (n, values), colour in zip(report.figures["seconds"].items(), ("tab:grey", "tab:blue"), strict=True):
        label = f"{n} records"
        axes.barh(label, spread(values)["median"], color=colour)
        axes.plot(values, [label] * len(values), "|", color=MARK)
    axes.set_xlabel("seconds of `dask cml list`, the start of Python included")
    save_figure(fig, report.name)
