"""What every benchmark hands in: a table, its figures as JSON, and a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distributed
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
IMAGES = HERE.parent / "docs" / "images"
#: The benchmarks whose plots the documentation shows.
SHOWN = ("start", "adapt", "encryption")
#: Colours of text and lines, and of marks on bars, that are readable on light pages and on dark ones.
INK, MARK = "#7a7a7a", "tab:red"


@dataclass
class Report:
    """The result of one benchmark.

    Parameters
    ----------
    name : str
        Names the files.
    title : str
        Stands above the table.
    columns : sequence of str
        Heads of the table's columns.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def save(self, results: Path = RESULTS) -> None:
        """Print the table, and write it for the documentation, and the figures."""
        rows = [[_shown(cell) for cell in row] for row in self.rows]
        table = Table(title=self.title)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console(width=140).print(table)
        loads = [round(load, 1) for load in (self.load_before, os.getloadavg()[0])]
        machine = {
            "cpus": os.cpu_count(),
            "load before and after": loads,
            "seconds": round(time.time() - self.started, 1),
            "python": platform.python_version(),
            "distributed": distributed.__version__,
        }
        content = {"benchmark": self.name, "machine": machine, **self.figures}
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *rows]
        said = (
            f"{machine['cpus']} CPUs, whose load was {loads[0]} before and {loads[1]} after; "
            f"Python {machine['python']}, distributed {machine['distributed']}."
        )
        text = "\n".join([*[f"| {' | '.join(line)} |" for line in lines], "", said, ""])
        results.mkdir(parents=True, exist_ok=True)
        (results / f"{self.name}.md").write_text(text)
        (results / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _shown(cell: Any) -> str:
    """Return a table's cell, with three digits if it is a number below 1,000."""
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest of some values."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def figure(width: float = 8, height: float = 4, rows: int = 1) -> tuple[Any, Any]:
    """Return an empty figure and its axes, below one another if there are more."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    pyplot.rcParams.update(dict.fromkeys(inked, INK))
    return pyplot.subplots(rows, figsize=(width, height), layout="constrained")


def save_figure(figure: Any, name: str, images: Path | None = None) -> None:
    """Write a plot into the documentation if a page shows it, or else next to the results."""
    images = images or (IMAGES if name in SHOWN else RESULTS)
    images.mkdir(parents=True, exist_ok=True)
    for axes in figure.axes:
        if legend := axes.get_legend():
            legend.get_frame().set_alpha(0)
    figure.savefig(images / f"benchmark-{name}.png", dpi=160, transparent=True)
