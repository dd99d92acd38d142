"""The sign of life that a scheduler leaves in its cluster's folder, for those that cannot reach it.

Functions block for as long as the file system takes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

PULSE_FILE = "pulse"
#: Seconds between two signs, and of silence after which a scheduler that nobody can reach is dead.
INTERVAL, LONGEST_SILENCE = 15.0, 120.0


def beat(folder: Path) -> None:
    """Leave a sign of life, unless the folder is gone.

    Parameters
    ----------
    folder : Path
        The cluster's.
    """
    with contextlib.suppress(OSError):
        (folder / PULSE_FILE).touch(mode=0o600)


def is_fresh(folder: Path) -> bool:
    """Return whether there was a sign of life lately, by one quick look and this machine's clock.

    Parameters
    ----------
    folder : Path
        The cluster's.
    """
    try:
        return time.time() - (folder / PULSE_FILE).stat().st_mtime < LONGEST_SILENCE
    except OSError:
        return False


def silence(folder: Path) -> float | None:
    """Return for how many seconds there was no sign of life; None if there never was one.

    Parameters
    ----------
    folder : Path
        The cluster's.
    """
    try:
        # The file system's clock told the time of the sign, so it tells the present, too. NFS may remember
        # an old time of a file, but not of one that was just opened.
        with open(folder / PULSE_FILE) as sign, tempfile.TemporaryFile(dir=folder.parent) as now:
            return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(sign.fileno()).st_mtime)
    except OSError:
        return None
