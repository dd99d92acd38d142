"""Preloaded by a scheduler: counts the messages that it gets, by their names.

At SIGUSR1 the counts are written to a file below the folder that ``VARIABLE`` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.scheduler import Scheduler

VARIABLE = "BENCHMARK_COUNTS"


class _Counted(dict[str, Callable[..., Any]]):
    """Handlers that are counted as they are looked up, which is done for each message."""

    def __init__(self, handlers: Mapping[str, Callable[..., Any]], counts: Counter[str]) -> None:
        super().__init__(handlers)
        self._counts = counts

    def __getitem__(self, name: str) -> Callable[..., Any]:
        self._counts[name] += 1
        return super().__getitem__(name)


async def dask_setup(scheduler: Scheduler) -> None:
    """Count from now on."""
    counts: Counter[str] = Counter()
    scheduler.handlers = _Counted(scheduler.handlers, counts)
    scheduler.stream_handlers = _Counted(scheduler.stream_handlers, counts)
    path = Path(os.environ[VARIABLE]) / f"{os.getpid()}.json"

    def write() -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(counts))
        new.replace(path)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
    write()
