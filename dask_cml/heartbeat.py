"""The scheduler's sign of life in its cluster's folder, for processes that cannot reach the scheduler.

It is the time of the scheduler's file, which the scheduler writes regularly. Functions block while they wait
for the file system.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from dask_cml.layout import scheduler_number
from dask_cml.private_files import open_regular

#: Seconds between two signs of life, and of silence after which an unreachable scheduler counts as dead.
INTERVAL, LONGEST_SILENCE = 15.0, 120.0


def newest(folder: Path) -> Path | None:
    """Return the file of a cluster's last scheduler. Return None if no scheduler has written one.

    Parameters
    ----------
    folder : Path
        The cluster's folder. NFS may cache that a file does not exist, so this lists the folder.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    numbers = {number: name for name in names if (number := scheduler_number(name)) is not None}
    return folder / numbers[max(numbers)] if numbers else None


def is_fresh(folder: Path) -> bool:
    """Return whether the scheduler left a sign of life lately, by this machine's clock."""
    file = newest(folder)
    try:
        return file is not None and time.time() - file.stat().st_mtime < LONGEST_SILENCE
    except OSError:
        return False


def silence(folder: Path) -> float | None:
    """Return the seconds since the last sign of life. Return None if the scheduler never left one."""
    file = newest(folder)
    if file is None:
        return None
    try:
        # The file system's clock dated the sign, so use the same clock for now. NFS may cache an old time of
        # a file, but not of a file that was just opened.
        with open_regular(file) as sign, tempfile.TemporaryFile(dir=folder.parent) as now:
            return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(sign.fileno()).st_mtime)
    except (OSError, ValueError):
        return None
