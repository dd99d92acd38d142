"""The page of ``dask cml serve`` with many clusters: how long its polls take, and what it costs.

The page and the schedulers are processes, as in use. Workers are connections that have registered as such,
and send nothing from then on: all other messages to the schedulers come from the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
import psutil
from distributed.comm import connect

from benchmarks.counting import VARIABLE
from benchmarks.report import MARK, Report, figure, save_figure
from benchmarks.sessions import Platform, SimulatedSession, registration, scheduler_address, security_of
from dask_cml import CMLCluster
from dask_cml.records import operations, store
from dask_cml.serve.access import TOKEN_VARIABLE

CLUSTERS, WORKERS = 50, 20
VIEWERS = (0, 1, 10)
#: Seconds of each measurement, and between two looks of a viewer.
SECONDS, POLL = 30.0, 2.0
_POLLS = 25
_STARTS_AT_ONCE = 4
_PATIENCE = 300.0
_PATHS = ("/api/clusters", "/")

#: The platform of the page's process: none of the sessions are its own.
_PLATFORM = """
def list_workers():
    return []

def stop_workers(*ids):
    return []

def launch_workers(*args, **kwargs):
    raise RuntimeError("the page is to launch nothing")

await_workers = launch_workers
"""


class Registered(Platform):
    """A platform whose worker sessions register with their scheduler, and do nothing more."""

    async def _run_worker(self, session: SimulatedSession, command: list[str]) -> None:
        address = await asyncio.to_thread(scheduler_address, command)
        arguments = security_of(command).get_connection_args("worker")
        comm = await connect(address, **arguments)
        message = registration(session.key, session.id, 1024 + int(session.key.rpartition("-")[2]))
        await comm.write(message, serializers=["msgpack"])
        await comm.read(deserializers=["msgpack"])
        self._stops[session.id] = lambda: self._loop.call_soon_threadsafe(comm.abort)


async def create_clusters() -> None:
    """Create all clusters, and leave them without a keeper."""
    slots = asyncio.Semaphore(_STARTS_AT_ONCE)

    async def create(name: str) -> None:
        async with slots:
            cluster = await CMLCluster(
                name=name,
                n_workers=WORKERS,
                cpu=2,
                memory=8,
                shutdown_on_close=False,
                scheduler_args=["--no-dashboard", "--preload", "benchmarks.counting"],
                asynchronous=True,
                quiet=True,
            )
            await cluster.wait_for_workers(WORKERS)
            await cluster.leave()

    await asyncio.gather(*(create(f"cluster-{i:02d}") for i in range(CLUSTERS)))


class Page:
    """The page as a process of its own.

    Parameters
    ----------
    folder : Path
        Where its platform is written.
    """

    def __init__(self, folder: Path) -> None:
        package = folder / "cml"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "workers_v1.py").write_text(_PLATFORM)
        self.token = secrets.token_urlsafe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dask", "cml", "serve", "--port", "0"],
            env={**os.environ, "PYTHONPATH": str(folder), TOKEN_VARIABLE: self.token},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        link = self._process.stdout.readline().split()[-1]
        self.port = urlsplit(link).port
        self._usage = psutil.Process(self._process.pid)

    def cpu(self) -> float:
        """Return how many seconds of CPU the page has used so far."""
        times = self._usage.cpu_times()
        return times.user + times.system

    @property
    def memory(self) -> int:
        """Its memory in bytes."""
        return self._usage.memory_info().rss

    def close(self) -> None:
        """End it as an Application is ended."""
        self._process.terminate()
        self._process.communicate()


class Viewer:
    """A browser's connection to the page.

    Parameters
    ----------
    page : Page
        The page.
    """

    def __init__(self, page: Page) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=_PATIENCE)
        self._headers = {"Authorization": f"Bearer {page.token}", "X-Live": "1"}

    def get(self, path: str) -> tuple[float, bytes]:
        """Return how many seconds an answer takes, and the answer."""
        begin = time.perf_counter()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return time.perf_counter() - begin, content

    def look_until(self, end: threading.Event) -> None:
        """Get the page every few seconds, as the page itself does where it is visible."""
        while not end.wait(POLL):
            self.get("/")


def wait_until_complete(viewer: Viewer) -> float:
    """Wait until the page shows all workers of all clusters, and return for how long."""
    begin = time.monotonic()
    while True:
        clusters = json.loads(viewer.get("/api/clusters")[1])["clusters"]
        complete = [
            cluster
            for cluster in clusters
            if (cluster["status"], cluster["n_arrived"]) == ("running", WORKERS)
        ]
        if len(complete) == CLUSTERS:
            return time.monotonic() - begin
        if time.monotonic() - begin > _PATIENCE:
            raise TimeoutError(f"the page shows {len(complete)} of {CLUSTERS} clusters as complete")
        time.sleep(0.5)


def counts(folder: Path) -> list[Counter[str]]:
    """Return the messages that each scheduler has got so far."""
    files = sorted(folder.glob("*.json"))
    written = {path: path.stat().st_mtime_ns for path in files}
    for path in files:
        os.kill(int(path.stem), signal.SIGUSR1)
    while any(path.stat().st_mtime_ns == before for path, before in written.items()):
        time.sleep(0.01)
    return [Counter(json.loads(path.read_text())) for path in files]


@contextlib.contextmanager
def viewers(page: Page, n: int) -> Iterator[None]:
    """Have so many viewers look at the page, at moments spread over the time between two looks."""
    end = threading.Event()
    threads = [threading.Thread(target=Viewer(page).look_until, args=(end,)) for _ in range(n)]
    for thread in threads:
        thread.start()
        time.sleep(POLL / n)
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def measure(page: Page, folder: Path, n: int) -> dict[str, Any]:
    """Measure what the page costs while so many look, and then how long one more waits."""
    with viewers(page, n):
        time.sleep(POLL)
        before, cpu, begin = counts(folder), page.cpu(), time.monotonic()
        time.sleep(SECONDS)
        seconds, cpu = time.monotonic() - begin, page.cpu() - cpu
        got = [now - then for now, then in zip(counts(folder), before, strict=True)]
        viewer = Viewer(page)
        polls = {path: [viewer.get(path)[0] for _ in range(_POLLS)] for path in _PATHS}
    per_minute = [60 * counter.total() / seconds for counter in got]
    total = sum(got, Counter())
    by_name = {name: 60 * count / seconds / len(got) for name, count in total.items()}
    return {
        "cpu": cpu / seconds,
        "requests": statistics.mean(per_minute),
        "most requests": max(per_minute),
        "by name": {name: round(n, 1) for name, n in sorted(by_name.items())},
        "polls": {path: [round(duration, 5) for duration in times] for path, times in polls.items()},
    }


def run(repeats: int = 1) -> Report:
    """Measure and report."""
    report = Report(
        "serve",
        f"The page with {CLUSTERS} clusters and {CLUSTERS * WORKERS:,} workers",
        ["viewers", *(f"ms of {path}" for path in _PATHS), "CPU, % of a core", "requests", "most requests"],
    )
    runs: dict[int, list[dict[str, Any]]] = {n: [] for n in VIEWERS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "counts").mkdir()
        state = str(folder / "state")
        environment = {"DASK_CML__STATE_DIRECTORY": state, VARIABLE: str(folder / "counts")}
        os.environ.update(environment)
        config = {"cml.state-directory": state, "distributed.scheduler.worker-ttl": None}
        stack.enter_context(dask.config.set(config))
        stack.enter_context(Registered(workers=True).installed())
        try:
            asyncio.run(create_clusters())
            page = Page(folder)
            stack.callback(page.close)
            complete = wait_until_complete(Viewer(page))
            for _ in range(repeats):
                for n in VIEWERS:
                    runs[n].append(measure(page, folder / "counts", n))
            memory = page.memory
        finally:
            asyncio.run(operations.end_all(store.records()))
            for name in environment:
                del os.environ[name]
    for n, case_runs in runs.items():
        middle = sorted(case_runs, key=lambda run: run["cpu"])[len(case_runs) // 2]
        polls = [1000 * statistics.median(middle["polls"][path]) for path in _PATHS]
        most = max(run["most requests"] for run in case_runs)
        report.rows.append((str(n), *polls, 100 * middle["cpu"], middle["requests"], most))
    report.figures = {
        "clusters": CLUSTERS,
        "workers": CLUSTERS * WORKERS,
        "seconds until complete": round(complete, 2),
        "memory": memory,
        "runs": runs,
    }
    return report


def plot(report: Report) -> None:
    """Draw the share of a core that the page uses."""
    fig, axes = figure(6, 2)
    for n, runs in report.figures["runs"].items():
        label = f"{n} viewer{'s' * (n != 1)}"
        values = [100 * run["cpu"] for run in runs]
        axes.barh(label, statistics.median(values), color="tab:blue" if n else "tab:grey")
        axes.plot(values, [label] * len(values), "|", color=MARK)
    axes.set_xlabel(f"% of a core, {CLUSTERS} clusters with {CLUSTERS * WORKERS:,} workers")
    save_figure(fig, report.name)
