"""The memory of an idle session by process, and a shuffle of twice the cluster's memory."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.local_platform import local_platform
from benchmarks.report import Report, figure, save_figure
from dask_cml import CMLCluster
from dask_cml.local import state

GIB, GB = 2**30, 10**9
WORKERS, MEMORY, SCRATCH = 2, 1.0, 5.0
#: The data of the shuffle, as a multiple of the memory of all Dask workers.
TIMES = 2
_PARTITIONS, _COLUMNS = 120, 8
_INTERVAL = 0.1


class Peaks:
    """The largest memory of each session and of each of its processes, and its largest scratch space.

    Parameters
    ----------
    state : Path
        The state directory of the local platform.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._stopped = threading.Event()
        self.sessions: dict[str, int] = {}
        self.processes: dict[str, int] = {}
        self.scratch: dict[str, int] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look until the end of the block."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        for folder in (self._state / "local").glob("sessions-*/*"):
            used = 0
            for process, role in _processes(folder):
                with contextlib.suppress(psutil.Error):
                    memory = process.memory_info()
                    self.processes[role] = max(memory.rss, self.processes.get(role, 0))
                    used += memory.rss - memory.shared  # libraries are shared by the processes
            self.sessions[folder.name] = max(used, self.sessions.get(folder.name, 0))
            du = subprocess.run(["du", "-s", "-B1", folder / "tmp"], capture_output=True, check=False)
            if du.stdout:
                self.scratch[folder.name] = max(int(du.stdout.split()[0]), self.scratch.get(folder.name, 0))


def _processes(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the processes of a session, with what each is."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR") != str(state.temporary_of(folder.name)):
                continue
            command = " ".join(process.cmdline())
            if "session = {" in command:
                yield process, "kernel"
            elif "dask worker" in command:
                yield process, "nanny"
            elif "spawn_main" in command:
                yield process, "worker"
            elif "dask scheduler" in command:
                yield process, "scheduler"
            else:
                yield process, "other"


def idle() -> Mapping[str, int]:
    """Return the largest memory of each kind of process in sessions without tasks."""
    with local_platform() as (_, folder):
        peaks = Peaks(folder)
        with CMLCluster(n_workers=1, cpu=4, processes=4, memory=4, quiet=True) as cluster, peaks.watched():
            cluster.wait_for_workers(4)
            time.sleep(5)
    return peaks.processes


def shuffle() -> dict[str, Any]:
    """Shuffle a dataframe of twice the memory of all Dask workers, and return the peaks."""
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd
    from distributed import Client, wait

    with local_platform(scratch=int(SCRATCH * GB)) as (_, folder):
        peaks = Peaks(folder)
        with (
            CMLCluster(n_workers=WORKERS, memory=MEMORY, scratch=f"{SCRATCH} GB", quiet=True) as cluster,
            Client(cluster) as client,
            peaks.watched(),
        ):
            client.wait_for_workers(WORKERS)
            data = TIMES * WORKERS * cluster.options.worker_memory * GIB
            rows = int(data / 8 / (_COLUMNS + 1) / _PARTITIONS)

            def part(seed: int) -> pd.DataFrame:
                rng = np.random.default_rng(seed)
                frame = pd.DataFrame(rng.random((rows, _COLUMNS)), columns=[*"abcdefgh"])
                return frame.assign(key=rng.integers(0, 10**6, rows))

            begin = time.perf_counter()
            frame = dd.from_map(part, range(_PARTITIONS)).persist()
            wait(frame)
            shuffled = (
                frame.shuffle("key")
                .map_partitions(lambda partition: partition.groupby("key").sum())
                .persist()
            )
            groups = len(shuffled)
            seconds = time.perf_counter() - begin
            usage = cluster.usage()["default"]
    return {
        "data": data,
        "seconds": seconds,
        "groups": groups,
        "session": max(peaks.sessions.values()),
        "worker": peaks.processes["worker"],
        "worker limit": cluster.options.worker_memory * GIB,
        "scratch": max(peaks.scratch.values()),
        "sessions": usage.sessions,
        "lost": dict(usage.lost),
    }


def run(repeats: int = 1) -> Report:
    """Measure and report. The repeats are those of the shuffle."""
    memory = idle()
    report = Report("memory", "Memory and disk", ["", "peak", "limit"])
    report.rows = [
        (f"{role}, idle (MB)", memory[role] / 1e6, "-") for role in ("kernel", "nanny", "worker", "scheduler")
    ]
    runs = [shuffle() for _ in range(repeats)]
    worst = {name: max(run[name] for run in runs) for name in ("session", "worker", "scratch", "seconds")}
    first = runs[0]
    report.rows += [
        ("Dask worker in a shuffle (GiB)", worst["worker"] / GIB, first["worker limit"] / GIB),
        ("session in a shuffle (GiB)", worst["session"] / GIB, MEMORY),
        ("scratch space in a shuffle (GB)", worst["scratch"] / GB, SCRATCH),
        ("lost sessions", sum(sum(run["lost"].values()) for run in runs), "-"),
        (f"seconds, {first['data'] / GB:.1f} GB", worst["seconds"], "-"),
    ]
    report.figures = {"idle": memory, "shuffles": runs}
    return report


def plot(report: Report) -> None:
    """Draw the peaks next to the limits."""
    fig, axes = figure(6, 2)
    worst = report.figures["shuffles"][0]
    shares = {
        "Dask worker": worst["worker"] / worst["worker limit"],
        "session": worst["session"] / GIB / MEMORY,
        "scratch space": worst["scratch"] / GB / SCRATCH,
    }
    axes.barh([*shares], [*shares.values()], color="tab:blue")
    axes.axvline(1, color="tab:red")
    axes.set_xlabel(f"peak in a shuffle of {TIMES} times the cluster's memory, of the limit")
    save_figure(fig, report.name)
