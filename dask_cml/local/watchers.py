"""Threads in which a supervisor looks at what its session uses."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds of pause after a look of one second, at least: looks take a thirtieth of a CPU at most.
_PAUSE = 30.0


def repeat(look: Callable[[], object], interval: float, then: Callable[[], None] | None = None) -> None:
    """Call a function in a thread every `interval` seconds. If it returns true, call `then` and end."""

    def run() -> None:
        with contextlib.suppress(FileNotFoundError):  # the session has ended
            while True:
                begin = time.monotonic()
                if look() and then:
                    return then()
                time.sleep(max(interval, _PAUSE * (time.monotonic() - begin)))

    threading.Thread(target=run, daemon=True).start()


def gibibytes(folder: Path) -> float:
    """Return the size of a folder on the disk."""
    # Files may disappear meanwhile, and the folder, too.
    du = subprocess.run(["du", "-sk", folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return int((du.stdout.split() or [b"0"])[0]) / 2**20
