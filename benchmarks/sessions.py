"""The simulated platform of the tests with sessions that run by the machine's clock.

The scheduler's session is a process that runs its code. Worker sessions are names and nothing more, or, with
``workers=True``, Dask workers in a thread of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulated.platform import SimulatedPlatform
from simulated.session import SimulatedSession, program_of

#: Seconds within which the sessions must be gone once there is nothing to do.
_AFTERGLOW = 60.0
_START_TIMEOUT = 10.0


class Platform(SimulatedPlatform):
    """A platform in memory: as many sessions as one likes, on one machine.

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
        super().__init__(latency=latency)
        self.runner = self
        self.start_delay, self.runs_workers = start_delay, workers
        self._stops: dict[str, Callable[[], Any]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="platform").start()

    def wait_until_only(self, schedulers: int) -> None:
        """Wait until no session is left but those of so many schedulers, a minute at most."""
        deadline = time.monotonic() + _AFTERGLOW
        while len(self.live) > schedulers and time.monotonic() < deadline:
            time.sleep(0.1)

    # -- the life of a session

    def launched(self, session: SimulatedSession) -> None:
        if self.start_delay or self.runs_workers or session.key == "scheduler":
            asyncio.run_coroutine_threadsafe(self._run(session), self._loop)
        else:
            self.set(session.id, "running", ip_address="127.0.0.1")

    def stopped(self, session: SimulatedSession) -> None:
        with self._lock:
            session.reach("stopped")
            stop = self._stops.pop(session.id, None)
        if stop:
            stop()

    evicted = stopped

    async def _run(self, session: SimulatedSession) -> None:
        await asyncio.sleep(self.start_delay)
        if not session.live:
            return
        self.set(session.id, "running", ip_address="127.0.0.1")
        if session.key == "scheduler":
            given = {name: str(value) for name, value in session.launched_with["env"].items()}
            ids = {"CDSW_ENGINE_ID": session.id, "CDSW_MASTER_ID": session.master}
            process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", session.code],
                env={**os.environ, **given, **ids},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # of a code whose program was terminated
                start_new_session=True,
            )
            # The scheduler, too, which the code has started.
            self._stops[session.id] = lambda: _end_group(process.pid)
        elif self.runs_workers and (program := program_of(session.code)):
            await self._run_worker(session, program["command"])

    async def _run_worker(self, session: SimulatedSession, command: list[str]) -> None:
        from distributed import Worker

        address = await asyncio.to_thread(scheduler_address, command)
        given = dict(pairwise(command))
        offered = (pair.split("=") for pair in given.get("--resources", "").split())
        worker = Worker(
            address,
            name=session.key,
            nthreads=int(given["--nthreads"]),
            memory_limit=int(given["--memory-limit"]),
            resources={resource: float(n) for resource, n in offered},
            security=security_of(command),
            dashboard=False,
        )
        starting = asyncio.ensure_future(worker)
        self._stops[session.id] = lambda: asyncio.run_coroutine_threadsafe(
            self._end(worker, starting), self._loop
        )
        with contextlib.suppress(Exception):  # the scheduler may be gone
            await starting

    async def _end(self, worker: Any, starting: asyncio.Future[Any]) -> None:
        # A worker that closes while it starts keeps its connection, and the scheduler sends it tasks.
        await asyncio.wait([starting], timeout=_START_TIMEOUT)
        with contextlib.suppress(Exception):
            await worker.close(timeout=1, executor_wait=False, nanny=False)


def seconds_of(session: SimulatedSession) -> float:
    """Return how long a session has existed until now, or until its end."""
    end = session.finished_at.timestamp() if session.finished_at else time.time()
    return end - session.created_at.timestamp()


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)


def registration(name: str, session: str, port: int) -> dict[str, Any]:
    """Return the message by which a Dask worker registers with its scheduler."""
    from distributed.versions import get_versions

    return {
        "op": "register-worker",
        "reply": False,
        "address": f"tls://127.0.0.1:{port}",
        "server_id": session,
        "name": name,
        "status": "running",
        "nthreads": 2,
        "memory_limit": 8 * 2**30,
        "resources": {},
        "services": {},
        "nanny": "",
        "pid": os.getpid(),
        "local_directory": "",
        "versions": get_versions(),
        "metrics": {
            "cpu": 0,
            "memory": 2**28,
            "managed_bytes": 0,
            "spilled_bytes": {"memory": 0, "disk": 0},
            "bandwidth": {"total": 10**8, "workers": {}, "types": {}},
            "digests_total_since_heartbeat": {},
            "event_loop_interval": 0.02,
        },
        "extra": {},
        "now": time.time(),
        "stimulus_id": f"worker-connect-{time.time()}",
    }


def security_of(command: list[str]) -> Any:
    """Return the keys on a worker's command line. None if there are none."""
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
            return str(json.loads(file.read_text())["address"])
        except (OSError, ValueError):
            time.sleep(0.05)
