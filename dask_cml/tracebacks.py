"""The traceback of an error: its message, and the frames of the user's code."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

#: Packages whose frames do not help to understand an error of the platform.
_OURS = frozenset({"IPython", "asyncio", "concurrent", "dask_cml", "distributed", "tornado"})

_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """Return an error without its frames so far, for ``raise … from None``.

    The message of an error of the platform is complete. The log contains the frames, at the level ``DEBUG``.
    """
    logger.debug("%s", error, exc_info=error)
    return error.with_traceback(None)


def render(error: BaseException) -> list[str]:
    """Return the lines that IPython shows: the error first, then the frames of the user's code."""
    shown = [f"{type(error).__name__}: {error}"]
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
            continue
        [summary] = traceback.StackSummary.extract([(frame, line)])
        # IPython invents the file name of a notebook's cell.
        where = f'File "{summary.filename}"' if Path(summary.filename).exists() else "Cell"
        shown.append(f"  {where}, line {line}, in {summary.name}\n    {summary.line}")
    return shown
