"""The forwarded dashboard compared with the direct connection: requests at once, and open WebSockets.

The scheduler, the forwarder and the browser are processes of their own, as they are in use,
though all on one machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from distributed.security import Security
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

from benchmarks.report import Report, figure, save_figure
from dask_cml.layout import FOLDER, NUMBER, board_file
from dask_cml.sessions.plan import PRELOAD

REQUESTS = 100
SOCKETS = 20
SECONDS = 5.0
PATHS = {
    "2 bytes": "/health",
    "a page": "/info/main/workers.html",
    "1 MB": "/static/js/bokeh.min.js",
}
PANE = "/individual-task-stream"

FORWARDER = """
import asyncio, functools, sys
from distributed.security import Security
from dask_cml.dashboard.proxy import DashboardForwarder, open_comm

async def manage(address, folder):
    keys = {}
    if address.startswith("tls"):
        for part in ("ca_file", "client_cert", "client_key"):
            keys[f"tls_{part}"] = f"{folder}/{part}"
    arguments = Security(**keys).get_connection_args("client")
    forwarder = DashboardForwarder(functools.partial(open_comm, address, arguments, timeout=60))
    print(forwarder.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await forwarder.close()

asyncio.run(manage(*sys.argv[1:]))
"""


async def fetch(client: AsyncHTTPClient, port: int, path: str) -> tuple[float, int]:
    start = time.perf_counter()
    request = HTTPRequest(f"http://127.0.0.1:{port}{path}", request_timeout=300, connect_timeout=300)
    answer = await client.fetch(request)
    return time.perf_counter() - start, len(answer.body)


async def requests(port: int, path: str) -> dict[str, float]:
    """Send all requests at the same moment, each on a connection of its own."""
    client = AsyncHTTPClient(force_instance=True, max_clients=REQUESTS)
    try:
        await fetch(client, port, path)
        start = time.perf_counter()
        answers = await asyncio.gather(*(fetch(client, port, path) for _ in range(REQUESTS)))
        took = time.perf_counter() - start
    finally:
        client.close()
    return {
        "per second": REQUESTS / took,
        "MB/s": sum(size for _, size in answers) / took / 1e6,
        "median ms": statistics.median(seconds for seconds, _ in answers) * 1e3,
        "worst ms": max(seconds for seconds, _ in answers) * 1e3,
    }


class Pane:
    """A pane's WebSocket."""

    async def open(self, port: int) -> None:
        client = AsyncHTTPClient(force_instance=True)
        page = await client.fetch(f"http://127.0.0.1:{port}{PANE}", request_timeout=300)
        client.close()
        match = re.search(r'"token":"([^"]+)"', page.body.decode())
        assert match is not None
        address = f"ws://127.0.0.1:{port}{PANE}/ws"
        self.socket = await websocket_connect(address, subprotocols=["bokeh", match.group(1)])
        self.socket.protocol.set_nodelay(True)  # or what is measured is how long the system collects
        await self.receive()

    async def receive(self) -> dict[str, str]:
        """Return the header of a message of Bokeh's protocol."""
        parts = [json.loads(await self.socket.read_message() or "null") for _ in range(3)]
        return parts[0]

    async def ask(self, until: float) -> list[float]:
        """Ask the server over and over, and return how long each answer took."""
        took: list[float] = []
        while time.perf_counter() < until:
            number = str(len(took))
            start = time.perf_counter()
            for part in {"msgid": number, "msgtype": "SERVER-INFO-REQ"}, {}, {}:
                await self.socket.write_message(json.dumps(part))
            while (await self.receive()).get("reqid") != number:
                pass  # the document is updated meanwhile
            took.append(time.perf_counter() - start)
        return took


async def sockets(port: int) -> dict[str, float]:
    """Keep panes open at the same time, each with its WebSocket, and ask all of them without a pause."""
    panes = [Pane() for _ in range(SOCKETS)]
    for pane in panes:
        await pane.open(port)
    start = time.perf_counter()
    answers = await asyncio.gather(*(pane.ask(start + SECONDS) for pane in panes))
    seconds = time.perf_counter() - start
    for pane in panes:
        pane.socket.close()
    took = [duration for answer in answers for duration in answer]
    return {
        "per second": len(took) / seconds,
        "median ms": statistics.median(took) * 1e3,
        "worst ms": max(took) * 1e3,
    }


@contextlib.contextmanager
def process(*command: str, **options: object):  # type: ignore[no-untyped-def]
    with subprocess.Popen([sys.executable, *command], **options) as started:  # type: ignore[call-overload]
        try:
            yield started
        finally:
            started.terminate()


@contextlib.contextmanager
def ports(folder: Path, security: Security | None):  # type: ignore[no-untyped-def]
    """Start a scheduler and a forwarder, and return the dashboard's own port and the forwarder's."""
    file = folder / "scheduler.json"
    command = ["-m", "dask", "scheduler", "--scheduler-file", str(file), "--dashboard-address", "127.0.0.1:0"]
    command += ["--host", f"{'tls' if security else 'tcp'}://127.0.0.1:0"]
    if security is not None:
        for part in ("ca_file", "client_cert", "client_key", "scheduler_cert", "scheduler_key"):
            (folder / part).write_text(getattr(security, f"tls_{part}"))
        for role, part in {"ca-file": "ca_file", "cert": "scheduler_cert", "key": "scheduler_key"}.items():
            command += [f"--tls-{role}", str(folder / part)]
    cluster = {"cluster": "forwarding", "record": "0", "keeper": None, "groups": {"default": {}}}
    (folder / board_file(0)).write_text(json.dumps(cluster))
    command += ["--preload", PRELOAD]
    environment = {**os.environ, FOLDER: str(folder), NUMBER: "0"}
    with process(*command, stderr=subprocess.DEVNULL, env=environment):
        while not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.05)
        scheduler = json.loads(file.read_text())
        arguments = ("-c", FORWARDER, scheduler["address"], str(folder))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with process(*arguments, **pipes) as forwarder:
            yield scheduler["services"]["dashboard"], int(forwarder.stdout.readline())


def one_run() -> dict[str, dict[str, dict[str, float]]]:
    """Measure each way to the dashboard."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for security in None, Security.temporary():
        with tempfile.TemporaryDirectory() as folder, ports(Path(folder), security) as (direct, forwarded):
            ways = {} if security else {"direct": direct}
            for way, port in {**ways, "forwarded, TLS" if security else "forwarded": forwarded}.items():
                for size, path in PATHS.items():
                    what = f"{REQUESTS} requests at once, {size}"
                    found.setdefault(what, {})[way] = asyncio.run(requests(port, path))
                found.setdefault(f"{SOCKETS} WebSockets", {})[way] = asyncio.run(sockets(port))
    return found


def run(repeats: int = 3) -> Report:
    """Measure and report; of each figure it is the median of all runs."""
    columns = ["", "", "per second", "MB/s", "median ms", "worst ms"]
    report = Report("forwarding", "The dashboard, direct and forwarded", columns)
    runs = [one_run() for _ in range(repeats)]
    for what, ways in runs[0].items():
        for way, figures in ways.items():
            medians = {key: statistics.median(run[what][way][key] for run in runs) for key in figures}
            report.figures.setdefault(what, {})[way] = {
                key: round(value, 3) for key, value in medians.items()
            }
            report.rows.append([what, way, *(medians.get(column, "") for column in columns[2:])])
    return report


def plot(report: Report) -> None:
    """Draw how much each way carries."""
    drawn, axes = figure()
    ways = [*next(iter(report.figures.values()))]
    for i, way in enumerate(ways):
        heights = [figures[way]["per second"] for figures in report.figures.values()]
        axes.bar([at + i * 0.27 for at in range(len(heights))], heights, width=0.25, label=way)
    axes.set_xticks([at + 0.27 for at in range(len(report.figures))], [*report.figures], fontsize="small")
    axes.set_ylabel("answers a second")
    axes.legend()
    save_figure(drawn, report.name)


if __name__ == "__main__":
    for row in run(1).rows:
        cells = [cell if isinstance(cell, str) else f"{cell:.1f}" for cell in row]
        print("{:32} {:15} {:>10} {:>8} {:>10} {:>10}".format(*cells))
