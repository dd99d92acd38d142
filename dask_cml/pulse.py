"""The scheduler's sign of life in its cluster's folder, for processes that cannot reach the scheduler.

Functions block while they wait for the file system.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from dask_cml.private_files import open_regular

PULSE_FILE = "pulse"
#: Seconds between two signs of life, and of silence after which an unreachable scheduler counts as dead.
INTERVAL, LONGEST_SILENCE = 15.0, 120.0


def beat(folder: Path) -> None:
    """Leave a sign of life, unless the folder does not exist.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    """
    with contextlib.suppress(OSError):
        (folder / PULSE_FILE).touch(mode=0o600)


def is_fresh(folder: Path) -> bool:
    """Return whether the scheduler left a sign of life lately, by this machine's clock and without waiting.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    """
    try:
        return time.time() - (folder / PULSE_FILE).stat().st_mtime < LONGEST_SILENCE
    except OSError:
        return False


def silence(folder: Path) -> float | None:
    """Return the seconds since the last sign of life. Return None if the scheduler never left one.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    """
    try:
        # The file system's clock dated the sign, so use the same clock for now. NFS may cache an old time of
        # a file, but not of a file that was just opened.
        with open_regular(folder / PULSE_FILE) as sign, tempfile.TemporaryFile(dir=folder.parent) as now:
            return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(sign.fileno()).st_mtime)
    except (OSError, ValueError):
        return None
