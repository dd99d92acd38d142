"""What a read of a record and its usage cost after tens of thousands of sessions have ended."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import dask

from benchmarks.cases import measure
from benchmarks.report import MARK, Report, figure, save_figure, spread

COUNTS = (0, 3_000, 30_000)
#: Sessions that run all the time, sessions that begin and end between two reads, and reads.
_LIVE, _CHANGED, _READS = 50, 10, 50
_BEGUN = 1_790_000_000
#: Seconds after which a folder that has not changed is not listed again.
_RESOLUTION = 2.1


def write(directory: str, begun: range, ended: range) -> None:
    """Let sessions begin and end, as the keeper does, in another process than the reader."""
    from dask_cml.options import SessionSize
    from dask_cml.records import store
    from dask_cml.records.entries import fact
    from dask_cml.sessions.entry import Launch

    with dask.config.set({"cml.state-directory": directory}):
        record = store.read("bench")
        size = SessionSize(4, 16)
        launched = [Launch(f"session{i:09}", f"bench-{i}", "o" * 16, _BEGUN + i, size) for i in begun]
        facts = [fact(f"session{i:09}", "ended", _BEGUN + i + 600, "") for i in ended]
        store.write_sessions(record, launched, facts)
        store.pack_ended(record)


def milliseconds(read: Callable[..., Any], *arguments: Any) -> float:
    """Return the CPU time of a call in this process."""
    begin = time.process_time()
    read(*arguments)
    return (time.process_time() - begin) * 1000


def one_run(n: int) -> dict[str, Any]:
    """Let sessions end, and measure reads of their record in this process."""
    from dask_cml.options import state_directory
    from dask_cml.records import store
    from dask_cml.records.record import Record
    from dask_cml.records.usage import usage_of

    with (
        tempfile.TemporaryDirectory() as directory,
        dask.config.set({"cml.state-directory": directory}),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other,
    ):

        def change(begun: range, ended: range) -> None:
            other.submit(write, directory, begun, ended).result()

        store.claim(Record("bench", folder=state_directory() / "bench"), {"groups": {}})
        change(range(n + _LIVE), range(0))
        for i in range(0, n, 500):
            change(range(0), range(i, min(i + 500, n)))
        figures: dict[str, Any] = {"n": n, "first": milliseconds(store.read, "bench")}
        usage_of(store.read("bench"), _BEGUN)
        reads: dict[str, list[float]] = {"changed": [], "usage": []}
        for i in range(0, _READS * _CHANGED, _CHANGED):
            change(range(n + _LIVE + i, n + _LIVE + i + _CHANGED), range(n + i, n + i + _CHANGED))
            reads["changed"].append(milliseconds(store.read, "bench"))
            record = store.read("bench")
            reads["usage"].append(milliseconds(usage_of, record, _BEGUN))
            assert (len(record.launches), len(record.ended)) == (_LIVE, n + i + _CHANGED)
        time.sleep(_RESOLUTION)
        store.read("bench")
        reads["unchanged"] = [milliseconds(store.read, "bench") for _ in range(_READS)]
        return {**figures, **{what: spread(values) for what, values in reads.items()}}


def run(repeats: int = 1) -> Report:
    """Measure and report."""
    report = Report(
        "records",
        f"Reads of a record of which {_CHANGED} sessions have begun and ended, ms of CPU, median of {_READS}",
        ["ended sessions", "first read", "changed", "max", "unchanged", "usage after a change", "max"],
    )
    runs = [measure("benchmarks.records", n) for n in COUNTS for _ in range(repeats)]
    for n in COUNTS:
        best = min((run for run in runs if run["n"] == n), key=lambda run: run["changed"]["median"])
        changed, usage = best["changed"], best["usage"]
        row = [n, best["first"], changed["median"], changed["max"], best["unchanged"]["median"]]
        report.rows.append([*row, usage["median"], usage["max"]])
    report.figures = {"runs": runs}
    return report


def plot(report: Report) -> None:
    """Draw the CPU time by the number of ended sessions."""
    fig, axes = figure(6, 3)
    runs = report.figures["runs"]
    for what in ("changed", "unchanged", "usage"):
        axes.plot([run["n"] for run in runs], [run[what]["median"] for run in runs], "o-", label=what)
    axes.axhline(20, color=MARK)
    axes.set_xlabel("ended sessions")
    axes.set_ylabel("ms of CPU")
    axes.legend()
    save_figure(fig, report.name)


if __name__ == "__main__":
    print(json.dumps(one_run(int(sys.argv[1]))))
