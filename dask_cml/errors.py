"""The errors that dask-cml raises, and the frames that their tracebacks show."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from dask_cml.output import get_logger
from dask_cml.words import command, printable_lines

logger = get_logger(__name__)

#: Packages whose frames do not help to understand an error of the platform.
_OURS = frozenset({"IPython", "asyncio", "concurrent", "dask_cml", "distributed", "tornado"})

_Error = TypeVar("_Error", bound=BaseException)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_short(error: BaseException) -> list[str]:
    """Return the lines that IPython shows: the error first, then the frames of the user's code."""
    frames = [pair for pair in traceback.walk_tb(error.__traceback__) if _package_of(pair[0]) not in _OURS]
    lines = traceback.StackSummary.extract(frames).format()
    return [f"{type(error).__name__}: {error}", *map(str.rstrip, lines)]


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def shows_errors_in_short(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show the errors of a function that a user calls without frames that do not help to understand them.

    The messages are complete. IPython shows the errors of its arguments in short.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (CMLError, TimeoutError, KeyboardInterrupt) as error:  # it would show those of the event loop
            if not isinstance(error, CMLError):  # which shows itself so
                error._render_traceback_ = functools.partial(in_short, error)  # type: ignore[union-attr]
            raise without_frames(error) from None
        except (TypeError, ValueError) as error:
            *_, (last, _) = traceback.walk_tb(error.__traceback__)
            if _package_of(last) == "dask_cml":
                error._render_traceback_ = functools.partial(in_short, error)  # type: ignore[union-attr]
            raise

    return call


class CMLError(RuntimeError):
    """An operation failed on CML or in a session. All errors of dask-cml are subclasses.

    Parameters
    ----------
    text : str
        What failed, why, and what the user can do.
    """

    def __str__(self) -> str:
        # It may be the text of a task, a log or the platform, and Python prints it into a terminal.
        return printable_lines(super().__str__())

    def _render_traceback_(self) -> list[str]:
        return in_short(self)


class NotOnCML(CMLError):
    """The process runs outside CML: it can import neither ``cml.workers_v1`` nor ``cdsw``."""


class LaunchRefused(CMLError):
    """CML refused to launch a session, most often because a quota is exhausted.

    Parameters
    ----------
    name : str
        The name of the session.
    reason : str
        CML's error message.
    advice : str, optional
        What the user can do.
    """

    def __init__(self, name: str, reason: str, advice: str = "") -> None:
        super().__init__(f"CML refused to launch {name}: {reason}" + (f"\n{advice}" if advice else ""))
        self.name, self.reason, self.advice = name, reason, advice


class SessionFailed(CMLError):
    """A session ended before its scheduler or worker answered."""


class SchedulerTimeout(CMLError, TimeoutError):
    """The scheduler's session did not start, or its scheduler did not answer, within the time limit."""


class CallFailed(CMLError):
    """All tries of a call failed, or its error is permanent. The message contains the platform's error."""


class NoAnswer(CMLError, TimeoutError):
    """A call did not return within its time limit. A later try may succeed."""


class ClusterExists(CMLError):
    """A cluster with this name exists already.

    Parameters
    ----------
    name : str
        The name of the cluster.
    why : str, optional
        Why the cluster may still run, if it does not answer.
    purpose : str
        What the user can do, as the words before the command that deletes the cluster.
    """

    def __init__(self, name: str, why: str = "", purpose: str = "to delete it") -> None:
        doubt = f" ({why})" if why else ""
        super().__init__(
            f"a cluster named {name!r} exists already{doubt}: {purpose}, run {command('delete', name)}\n"
            "To connect to it, in Python pass create_mode='create-or-connect' or call "
            f"CMLCluster.from_name({name!r})"
        )
        self.name = name


class NoSuchCluster(CMLError, LookupError):
    """No cluster with this name exists.

    Parameters
    ----------
    name : str
        The name of the cluster.
    known : tuple of str
        The names of the existing clusters.
    """

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        others = f"no clusters exist: to create it, run {command('create', name)}"
        if known:
            others = f"existing clusters: {', '.join(map(repr, sorted(known)))}"
        super().__init__(f"no cluster named {name!r}; {others}")
        self.name = name
        self.known = known


def reason_of(error: object) -> str:
    """Return an error as words for users: an error of the operating system names its file first."""
    if isinstance(error, OSError) and not isinstance(error, CMLError) and error.strerror:
        return error.strerror if error.filename is None else f"cannot use {error.filename}: {error.strerror}"
    return str(error)


def without_frames(error: _Error) -> _Error:
    """Return an error without its frames so far, for ``raise … from None``.

    The message of an error of the platform is complete. The log contains the frames, at the level ``DEBUG``.
    """
    logger.debug("%s", error, exc_info=error)
    return error.with_traceback(None)
