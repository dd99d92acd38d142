"""The errors that dask-cml raises of its own accord."""

from __future__ import annotations

import shlex

from dask_cml.frames import render


class CMLError(RuntimeError):
    """Something that the platform or a session did, or did not do."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the error first, then the frames of the user's code."""
        return render(self)


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
