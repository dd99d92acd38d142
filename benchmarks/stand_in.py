"""A platform in memory: as many sessions as one likes, on one machine.

It follows the Workers API in what costs time: every request takes ``latency``, ``launch_workers`` and
``stop_workers`` make one a session from a pool of 10 threads, and what ``list_workers`` returns is
parsed from JSON. The scheduler's session is a process that runs its code. Worker sessions are names and
nothing more, or, with ``workers=True``, Dask workers in a thread of this process.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_THREADS = 10
#: Seconds within which the sessions must be gone once there is nothing to do.
_AFTERGLOW = 60.0
_START_TIMEOUT = 10.0


@dataclass(frozen=True)
class Response:
    """As much of an HTTP response as anybody reads."""

    status_code: int


class StandIn(types.ModuleType):
    """Stands in for ``cml.workers_v1``.

    Parameters
    ----------
    latency : float
        Seconds that each request takes.
    start_delay : float
        Seconds from a launch until the session runs.
    workers : bool
        Whether sessions other than schedulers run Dask workers, or nothing.
    """

    def __init__(self, latency: float = 0.0, start_delay: float = 0.0, workers: bool = False) -> None:
        super().__init__("cml.workers_v1")
        self.latency, self.start_delay, self.runs_workers = latency, start_delay, workers
        self.requests: Counter[str] = Counter()
        self.names: dict[str, str] = {}
        self.launched_at: dict[str, float] = {}
        self.stopped_at: dict[str, float] = {}
        self._texts: dict[str, str] = {}
        self._stops: dict[str, Callable[[], Any]] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="platform").start()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StandIn]:
        """Be the platform that ``platform="auto"`` finds."""
        package = types.ModuleType("cml")
        package.workers_v1 = self  # type: ignore[attr-defined]
        sys.modules.update({"cml": package, "cml.workers_v1": self})
        try:
            yield self
        finally:
            self.stop_workers(*self.live)
            del sys.modules["cml"], sys.modules["cml.workers_v1"]

    @property
    def live(self) -> list[str]:
        """The sessions that are not stopped."""
        with self._lock:
            return [each for each in self._texts if each not in self.stopped_at]

    def wait_until_only(self, schedulers: int) -> None:
        """Wait until no session is left but those of so many schedulers, a minute at most."""
        deadline = time.monotonic() + _AFTERGLOW
        while len(self.live) > schedulers and time.monotonic() < deadline:
            time.sleep(0.1)

    # -- the API

    def shares_host_network(self) -> bool:
        return True

    def launch_workers(
        self,
        n: int,
        cpu: float,
        memory: float,
        nvidia_gpu: int = 0,
        kernel: str = "python3",
        script: str = "",
        code: str = "",
        env: dict[str, str] = {},  # noqa: B006  # as the platform has it
        name: str = "",
    ) -> list[dict[str, Any]]:
        def post(_: int) -> dict[str, Any]:
            self._request("launch")
            return self._launch(name, code, env)

        with ThreadPoolExecutor(_THREADS) as threads:
            return [*threads.map(post, range(n))]

    def list_workers(self) -> list[dict[str, Any]]:
        self._request("list")
        with self._lock:
            answer = f"[{','.join(self._texts.values())}]"
        return json.loads(answer)

    def stop_workers(self, *ids: str) -> list[Response]:
        def put(session_id: str) -> Response:
            self._request("stop")
            return Response(self._stop(session_id))

        with ThreadPoolExecutor(_THREADS) as threads:
            return [*threads.map(put, ids)]

    def await_workers(
        self, ids: Iterable[Any], wait_for_completion: bool = True, timeout_seconds: float = 60
    ) -> dict[str, Any]:
        raise NotImplementedError

    # -- behind it

    def _request(self, kind: str) -> None:
        with self._lock:
            self.requests[kind] += 1
        time.sleep(self.latency)

    def _launch(self, name: str, code: str, env: dict[str, str]) -> dict[str, Any]:
        with self._lock:
            session_id = f"session{len(self._texts):09d}"
            self.names[session_id] = name
            self.launched_at[session_id] = time.monotonic()
            self._texts[session_id] = _described(session_id, "scheduling")
        if self.start_delay or self.runs_workers or name.endswith("-scheduler"):
            asyncio.run_coroutine_threadsafe(self._run(session_id, name, code, env), self._loop)
        else:
            self._texts[session_id] = _described(session_id, "running")
        return json.loads(self._texts[session_id])

    async def _run(self, session_id: str, name: str, code: str, env: dict[str, str]) -> None:
        await asyncio.sleep(self.start_delay)
        with self._lock:
            if session_id in self.stopped_at:
                return
            self._texts[session_id] = _described(session_id, "running")
        if name.endswith("-scheduler"):
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", code],
                env={**os.environ, **env},
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            # The scheduler, too, which the code has started.
            self._stops[session_id] = lambda: _end_group(process.pid)
        elif self.runs_workers:
            await self._run_worker(session_id, name, _command(code))

    async def _run_worker(self, session_id: str, name: str, command: list[str]) -> None:
        from distributed import Worker

        address = await asyncio.to_thread(scheduler_address, command)
        given = dict(pairwise(command))
        offered = (each.split("=") for each in given.get("--resources", "").split())
        worker = Worker(
            address,
            name=name,
            nthreads=int(given["--nthreads"]),
            memory_limit=int(given["--memory-limit"]),
            resources={resource: float(n) for resource, n in offered},
            security=security_of(command),
            dashboard=False,
        )
        starting = asyncio.ensure_future(worker)
        self._stops[session_id] = lambda: asyncio.run_coroutine_threadsafe(
            self._end(worker, starting), self._loop
        )
        with contextlib.suppress(Exception):  # the scheduler may be gone
            await starting

    async def _end(self, worker: Any, starting: asyncio.Future[Any]) -> None:
        # A worker that closes while it starts keeps its connection, and the scheduler sends it tasks.
        await asyncio.wait([starting], timeout=_START_TIMEOUT)
        with contextlib.suppress(Exception):
            await worker.close(timeout=1, executor_wait=False, nanny=False)

    def _stop(self, session_id: str) -> int:
        with self._lock:
            if session_id not in self._texts:
                return 404
            self._texts[session_id] = _described(session_id, "stopped")
            self.stopped_at.setdefault(session_id, time.monotonic())
            stop = self._stops.pop(session_id, None)
        if stop:
            stop()
        return 200


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)


def _described(session_id: str, status: str) -> str:
    return json.dumps(
        {
            "id": session_id,
            "status": status,
            "created_at": "2026-01-01T00:00:00.000Z",
            "running_at": None if status == "scheduling" else "2026-01-01T00:00:08.000Z",
            "finished_at": "2026-01-01T01:00:00.000Z" if status == "stopped" else None,
            "duration": None,
            "ip_address": "127.0.0.1" if status == "running" else "unknown",
            "app_url": f"https://{session_id}.cml.example.com/",
        }
    )


def _command(code: str) -> list[str]:
    [line] = [line for line in code.splitlines() if line.startswith("command = ")]
    return ast.literal_eval(line.removeprefix("command = "))


def security_of(command: list[str]) -> Any:
    """Return the keys on a worker's command line; None if there are none."""
    from distributed.security import Security

    given = dict(pairwise(command))
    if "--tls-key" not in given:
        return None
    files = {f"tls_worker_{part}": given[f"--tls-{part}"] for part in ("cert", "key")}
    return Security(require_encryption=True, tls_ca_file=given["--tls-ca-file"], **files)


def scheduler_address(command: list[str]) -> str:
    """Return the address on a worker's command line, or that in its scheduler file, when it is there."""
    if "--scheduler-file" not in command:
        return next(word for word in command if word.startswith(("tcp://", "tls://")))
    file = Path(command[command.index("--scheduler-file") + 1])
    while True:
        try:
            return json.loads(file.read_text())["address"]
        except (OSError, ValueError):
            time.sleep(0.05)
