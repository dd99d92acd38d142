"""Logs once which files of records are ignored."""

from __future__ import annotations

import logging
from pathlib import Path

from dask_cml.private_files import NotPrivate

logger = logging.getLogger(__name__)

_reported: set[tuple[str, str]] = set()


def report(path: Path | str, why: Exception | str) -> None:
    """Log that a file is ignored, unless it is known.

    Parameters
    ----------
    path : Path or str
        The file.
    why : Exception or str
        Why, as a clause. An error of :mod:`dask_cml.private_files` names the file itself, and what to do.
    """
    remedy = ""
    if isinstance(why, NotPrivate):
        path, remedy = why.path, f": run `{why.command}`"  # each such error has another command
        why = f"it {why.why}"
    if (str(path), str(why)) not in _reported:
        _reported.add((str(path), str(why)))
        logger.warning("%s ignored: %s%s", path, why, remedy)
