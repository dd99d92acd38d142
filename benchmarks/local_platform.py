"""The local platform, with a state of its own for a measurement."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import dask

from dask_cml import CMLCluster  # noqa: F401  # its defaults are read before others are set

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import testbed

_ENDED = ("succeeded", "failed", "stopped", "timedout")


@contextlib.contextmanager
def local_platform(**settings: Any) -> Iterator[tuple[ModuleType, Path]]:
    """Have the local platform configured so, and a folder that is on its project file system."""
    variable = "DASK_CML_LOCAL_DIRECTORY"
    before = os.environ.get(variable)
    # A short path, because it becomes part of sockets' names.
    with tempfile.TemporaryDirectory(prefix="cml-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        testbed.set_up(folder / "local")
        os.environ[variable] = str(folder / "local")
        try:
            testbed.configure(variables={"DASK_CML__STATE_DIRECTORY": name}, **settings)
            with dask.config.set({"cml.state-directory": name, "cml.platform": "local"}):
                yield testbed, folder
        finally:
            testbed.configure(latency=0.0)
            end_all()
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def end_all() -> None:
    """Stop what lives, and wait until its processes are gone."""
    deadline = time.monotonic() + 30
    while live := [session["id"] for session in testbed.list_workers() if session["status"] not in _ENDED]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"sessions do not end: {live}")
        testbed.stop_workers(*live)
        time.sleep(0.1)
