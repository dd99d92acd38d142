"""What TLS costs: data from worker to worker, and tasks a second, of two clusters side by side."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.local_platform import local_platform
from benchmarks.report import MARK, Report, figure, save_figure, spread

TASKS = 1000
#: How often arrays go from one worker to the other, how many at once, and of how many megabytes each is. Of
#: larger ones it is measured how fast the system finds the memory.
TRANSFERS = {
    "arrays of 20 MB, one by one": (10, 1, 20.0),
    "arrays of 0.1 MB, 200 at once": (1, 200, 0.1),
}
WAYS = {"TCP": False, "TLS": True}


def _make(megabytes: float, number: int) -> Any:
    import numpy

    return numpy.random.default_rng(number).integers(0, 255, int(megabytes * 1e6), dtype="uint8")


def _size(*arrays: Any) -> int:
    return sum(array.nbytes for array in arrays)


def _increment(number: int) -> int:
    return number + 1


def timed(client: Any, work: Callable[[], float]) -> tuple[float, float]:
    """Return how much a second is done by some work, and the CPU time of the cluster's processes."""

    def busy() -> float:
        of_workers = client.run(time.process_time).values()
        return float(sum(of_workers) + client.run_on_scheduler(time.process_time))

    before, start = busy(), time.perf_counter()
    amount = work()
    return amount / (time.perf_counter() - start), busy() - before


def transfer(client: Any, times: int, count: int, megabytes: float) -> tuple[float, float]:
    """Have one worker get arrays from the other: megabytes a second, and CPU time."""
    rounds = [_transfer(client, count, megabytes) for _ in range(times)]
    return statistics.harmonic_mean([speed for speed, _ in rounds]), sum(cpu for _, cpu in rounds)


def _transfer(client: Any, count: int, megabytes: float) -> tuple[float, float]:
    from distributed import wait

    here, there = sorted(client.scheduler_info(n_workers=-1)["workers"])
    arrays = client.map(_make, [megabytes] * count, range(count), workers=[here], pure=False)
    with client.as_current():
        wait(arrays)
    return timed(client, lambda: client.submit(_size, *arrays, workers=[there], pure=False).result() / 1e6)


def tasks(client: Any) -> tuple[float, float]:
    """Have tasks done that do nothing: tasks a second, and CPU time."""
    return timed(client, lambda: len(client.gather(client.map(_increment, range(TASKS), pure=False))))


def _transferring(times: int, count: int, megabytes: float) -> Callable[[Any], tuple[float, float]]:
    return partial(transfer, times=times, count=count, megabytes=megabytes)


#: What is measured, with its unit.
MEASURES: dict[tuple[str, str], Callable[[Any], tuple[float, float]]] = {
    **{(f"transfer of {what}", "MB/s"): _transferring(*sizes) for what, sizes in TRANSFERS.items()},
    (f"{TASKS} tasks", "tasks/s"): tasks,
}


def one_run(clients: dict[str, Any], turn: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Measure both ways in turns."""
    found: dict[str, dict[str, tuple[float, float]]] = {what: {} for what, _ in MEASURES}
    for (what, _), measure in MEASURES.items():
        for way in [*clients][:: 1 if turn % 2 else -1]:
            found[what][way] = measure(clients[way])
    return found


def run(repeats: int = 9) -> Report:
    """Measure and report; of each figure it is the median of all runs."""
    from distributed import Client

    from dask_cml import CMLCluster

    report = Report(
        "encryption",
        "Two workers of one thread, without and with TLS",
        ["", "unit", *WAYS, "TLS / TCP", "min", "max", "CPU time, TLS / TCP"],
    )
    logging.disable(logging.ERROR)
    with local_platform(), ExitStack() as stack:
        clients = {}
        for way, security in WAYS.items():
            cluster = stack.enter_context(CMLCluster(n_workers=2, quiet=True, security=security))
            clients[way] = stack.enter_context(Client(cluster, set_as_default=False))
            clients[way].wait_for_workers(2)
        runs = [one_run(clients, turn) for turn in range(repeats)]
    logging.disable(logging.NOTSET)
    for what, unit in MEASURES:
        speeds = {way: [run[what][way][0] for run in runs] for way in WAYS}
        cpu = {way: [run[what][way][1] for run in runs] for way in WAYS}
        ratios, cpu_ratios = _ratios(speeds), _ratios(cpu)
        medians = [statistics.median(speeds[way]) for way in WAYS]
        report.rows.append([what, unit, *medians, *spread(ratios).values(), statistics.median(cpu_ratios)])
        report.figures[what] = {"unit": unit, "speed": speeds, "ratios": ratios, "CPU seconds": cpu}
    return report


def _ratios(ways: dict[str, list[float]]) -> list[float]:
    return [tls / tcp for tcp, tls in zip(ways["TCP"], ways["TLS"], strict=True)]


def plot(report: Report) -> None:
    """Draw the ratios of all runs."""
    drawn, axes = figure(5.5, 2.4)
    for what, figures in report.figures.items():
        ratios = figures["ratios"]
        axes.barh(what, statistics.median(ratios), color="tab:blue")
        axes.plot(ratios, [what] * len(ratios), "|", color=MARK)
    axes.axvline(1, color="tab:grey")
    axes.set_xlabel("speed with TLS relative to TCP")
    save_figure(drawn, report.name)
