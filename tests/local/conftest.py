import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from simulated.platform import SimulatedPlatform

from dask_cml import local
from dask_cml.local import state

# "cml" runs the contract against the platform itself, from inside one of its sessions.
PLATFORM = os.environ.get("DASK_CML_TEST_PLATFORM", "local")
#: Seconds until a session must have got somewhere: on CML a node may have to be added first.
PATIENCE = 900.0 if PLATFORM == "cml" else 120.0
FOREVER = "import time; time.sleep(600)"
#: How sessions of these codes end, for what runs no code.
ENDS = {
    "pass": "succeeded",
    "1 / 0": "failed",
    "import time; time.sleep(0.2)": "succeeded",
    "!no-such-command": "succeeded",
    "!exit 3": "succeeded",
}


def supervisor_of(session: dict[str, Any]) -> int:
    return int(state.read_session(session["id"])["supervisor"])


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def workers_v1(request: pytest.FixtureRequest) -> Any:
    """An implementation of the Workers API. The tests' own platform is the default."""
    kind = getattr(request, "param", None)
    if kind == "cml":
        return importlib.import_module("cml.workers_v1")
    if kind == "simulated":
        return SimulatedPlatform(ends=ENDS.get)
    platform = request.getfixturevalue("platform")
    if kind == "local":
        (state.directory() / "platform.py").unlink()
        return local
    return platform


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that this process shares with all sessions."""
    root = Path.home() if PLATFORM == "cml" else None
    with tempfile.TemporaryDirectory(prefix="cml_", dir=root) as path:
        yield Path(path)


@pytest.fixture
def launch(workers_v1: Any) -> Iterator[Callable[..., Any]]:
    """Launch sessions that are stopped after the test."""
    ids = []

    def launch(n: int = 1, **options: Any) -> list[dict[str, Any]]:
        sessions = workers_v1.launch_workers(n, **{"cpu": 1, "memory": 1, **options})
        ids.extend(session.get("id") or session["engineId"] for session in sessions)
        return sessions

    yield launch
    if ids:
        workers_v1.stop_workers(*ids)


@pytest.fixture
def find(workers_v1: Any) -> Callable[[str], dict[str, Any]]:
    def find(session_id: str) -> dict[str, Any]:
        return next(session for session in workers_v1.list_workers() if session["id"] == session_id)

    return find


@pytest.fixture
def reaches(find: Any, until: Any) -> Callable[..., dict[str, Any]]:
    """Wait until a session has one of some statuses, and return it."""

    def reaches(session: dict[str, Any] | str, *statuses: str) -> dict[str, Any]:
        session_id = session if isinstance(session, str) else session["id"]

        def reached() -> bool:
            try:
                return find(session_id)["status"] in statuses
            except StopIteration:
                return False

        until(reached, PATIENCE)
        return find(session_id)

    return reaches


@pytest.fixture
def output_of(launch: Any, reaches: Any, directory: Path) -> Callable[..., str]:
    def output_of(code: str, **options: Any) -> str:
        path = directory / "output"
        [session] = launch(code=code.replace("{output}", str(path)), **options)
        reaches(session, "succeeded", "failed")
        return path.read_text()

    return output_of
