"""Logs once which files of records are ignored."""

from __future__ import annotations

import logging
from pathlib import Path

from dask_cml.private_files import NotPrivate

logger = logging.getLogger(__name__)

_reported: set[tuple[str, str]] = set()


def report(path: Path | str, why: str, remedy: str = "") -> None:
    """Log that a file is ignored, unless it is known.

    Parameters
    ----------
    path : Path or str
        The file.
    why : str
        Why, as a clause.
    remedy : str
        What to do, with a colon before it.
    """
    if (str(path), why) not in _reported:
        _reported.add((str(path), why))
        logger.warning("%s ignored: %s%s", path, why, remedy)


def report_open(error: NotPrivate) -> None:
    """Log that a file or folder is ignored that is not private."""
    report(error.path, f"it {error.why}", f": run `{error.command}`")
