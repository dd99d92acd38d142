"""The errors that dask-cml raises of its own accord."""

from __future__ import annotations

import logging
import shlex
import traceback
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

#: Packages whose frames explain nothing to the reader of an error of the platform.
_OURS = frozenset({"IPython", "asyncio", "concurrent", "dask_cml", "distributed", "tornado"})


class CMLError(RuntimeError):
    """Something that the platform or a session did, or did not do."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the error first, then the frames of the user's code."""
        shown = [f"{type(self).__name__}: {self}"]
        for frame, line in traceback.walk_tb(self.__traceback__):
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
                continue
            [summary] = traceback.StackSummary.extract([(frame, line)])
            # The file of a notebook's cell is a name that IPython made up.
            where = f'File "{summary.filename}"' if Path(summary.filename).exists() else "Cell"
            shown.append(f"  {where}, line {line}, in {summary.name}\n    {summary.line}")
        return shown


_Error = TypeVar("_Error", bound=CMLError)


def without_frames(error: _Error) -> _Error:
    """Return an error without the frames that it has passed so far, for ``raise … from None``.

    An error of the platform says all in its words, which its reader shall not search under the calls by which
    the cluster got them. Those are logged at the level ``DEBUG``.
    """
    logger.debug("%s", error, exc_info=error)
    return error.with_traceback(None)


class NotOnCML(CMLError):
    """Neither ``cml.workers_v1`` nor ``cdsw`` can be imported here."""


class LaunchRefused(CMLError):
    """The platform did not grant a session, most often for a quota.

    Parameters
    ----------
    name : str
        What the session was to be.
    reason : str
        The platform's own words.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"CML refused to launch {name}: {reason}")
        self.reason = reason


class SessionFailed(CMLError):
    """A session ended before its Dask process was heard of."""


class SchedulerTimeout(CMLError, TimeoutError):
    """The scheduler's session did not run, or its scheduler did not answer, in time."""


class ClusterExists(CMLError):
    """A cluster of this name is there already.

    Parameters
    ----------
    name : str
        The cluster's.
    why : str, optional
        Why it cannot be taken for dead, if it does not answer.
    """

    def __init__(self, name: str, why: str = "") -> None:
        doubt = f" ({why})" if why else ""
        super().__init__(
            f"there is a cluster named {name!r} already{doubt}; take another name, or delete it first: "
            f"`dask cml delete {shlex.quote(name)}`"
        )
        self.name = name


class NoSuchCluster(CMLError, LookupError):
    """No record of a cluster of this name is there.

    Parameters
    ----------
    name : str
        What was looked for.
    known : tuple of str
        The names of the clusters that are there.
    """

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        there = f"there are {', '.join(map(repr, sorted(known)))}" if known else "there is none at all"
        super().__init__(f"there is no cluster named {name!r}; {there}")
        self.name = name
        self.known = known
