"""A real scheduler with dask-cml's plugin, in the test's own event loop."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from distributed import Scheduler
from distributed.security import Security

from dask_cml.layout import board_file
from dask_cml.protocol import Rank
from dask_cml.scheduler.dashboard_guard import ForeignSockets
from dask_cml.scheduler.plugin import NAME, CMLSchedulerPlugin

#: The id of the cluster's record.
RECORD = "0123456789abcdef"
#: The message of somebody who watches the board, and reads it at once.
WATCH: dict[str, Any] = {
    "watcher": "somebody",
    "rank": int(Rank.USER),
    "who": "somebody",
    "since": 0,
    "wait": 0.1,
}


def prepare(
    folder: Path,
    keeper: str | None = None,
    number: int = 0,
    restarts: int = 0,
    *,
    orphan_timeout: float | None = None,
    patience: float | None = None,
    **groups: Mapping[str, Any],
) -> Path:
    """Write in a cluster's folder what a keeper writes that launches a scheduler. Return the folder."""
    folder.mkdir(mode=0o700, exist_ok=True)
    content = {
        "cluster": folder.name,
        "record": RECORD,
        "keeper": keeper,
        "restarts": restarts,
        "orphan_timeout": orphan_timeout,
        "patience": patience,
        "report": {"groups": {"default": {}, **groups}},
    }
    file = folder / board_file(number)
    file.touch(0o600)
    file.write_text(json.dumps(content))
    return folder


def begin_with(folder: Path, number: int, **content: Any) -> None:
    file = prepare(folder, number=number) / board_file(number)
    file.write_text(json.dumps(json.loads(file.read_text()) | content))


def post(number: int = 1, sender: str = "a", **request: Any) -> dict[str, Any]:
    return {"sender": sender, "number": number, "request": request}


def report(**values: Any) -> dict[str, Any]:
    """Return the message of a keeper that reports, by default with nothing new."""
    message = {"keeper": "keeper", "term": 1, "report": {}, "asked": 0, "events": [], "n_before": 0}
    return {**message, "leaves": False, **values}


@contextlib.asynccontextmanager
async def scheduler_in(
    folder: Path, *, number: int = 0, security: Security | None = None
) -> AsyncIterator[Scheduler]:
    running = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0", security=security)
    async with running:
        plugin = CMLSchedulerPlugin(folder, number, ForeignSockets())
        await running.register_scheduler_plugin(plugin, name=NAME, idempotent=True)
        yield running
