"""What the import of dask-cml adds to that of Dask, and to every ``dask`` command."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.report import MARK, Report, figure, save_figure, spread

_HELP = "import sys, dask.cli; sys.argv = ['dask', '--help']; dask.cli.run_cli()"
#: As where dask-cml is not installed.
_HELP_WITHOUT = f"""
import importlib.metadata, dask.cli
found = importlib.metadata.entry_points
without = lambda **group: [entry_point for entry_point in found(**group) if entry_point.name != "cml"]
importlib.metadata.entry_points = dask.cli.entry_points = without
{_HELP}
"""
#: Programs with dask-cml, each below the one that it is compared with.
PROGRAMS = {
    "import dask": "import dask",
    "import dask_cml": "import dask_cml",
    "from distributed import LocalCluster": "from distributed import LocalCluster",
    "from dask_cml import CMLCluster": "from dask_cml import CMLCluster",
    "import distributed": "import distributed",
    "import dask_cml.cluster": "import dask_cml.cluster",
    "dask --help, without dask-cml": _HELP_WITHOUT,
    "dask --help": _HELP,
}


def seconds(program: str) -> float:
    """Return the CPU time of a program, which other programs lengthen less than its time."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def run(repeats: int = 9) -> Report:
    """Measure all programs in turns, and report."""
    title = f"Seconds of CPU, the start of Python included, median of {repeats}"
    report = Report("imports", title, ["program", "median", "max", "ratio"])
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(repeats):
        for name, program in PROGRAMS.items():
            times[name].append(seconds(program))
    medians = {name: spread(values)["median"] for name, values in times.items()}
    names = [*PROGRAMS]
    for without, ours in zip(names[::2], names[1::2], strict=True):
        report.rows.append((f"`{without}`", medians[without], spread(times[without])["max"], ""))
        ratio = f"{medians[ours] / medians[without]:.2f}"
        report.rows.append((f"`{ours}`", medians[ours], spread(times[ours])["max"], ratio))
    report.figures = {"cpu seconds": times}
    return report


def plot(report: Report) -> None:
    """Draw the runs."""
    fig, axes = figure(7, 3)
    for i, (name, values) in enumerate(report.figures["cpu seconds"].items()):
        axes.barh(name, spread(values)["median"], color="tab:blue" if i % 2 else "tab:grey")
        axes.plot(values, [name] * len(values), "|", color=MARK)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of CPU")
    save_figure(fig, report.name)
