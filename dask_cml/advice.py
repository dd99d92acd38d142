"""What a user can do about an error or a line, as values.

``str`` says it for Python, ``cli/console.py`` for a shell, and ``serve/words.py`` for the web UI.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TypeAlias

from dask_cml.naming import DEFAULT_GROUP


@dataclass(frozen=True)
class Scale:
    """Scale a worker group.

    Parameters
    ----------
    cluster : str
        The name of the cluster.
    n : int, optional
        Number of worker sessions. None: any.
    group : str
        The worker group.
    or_adapt : bool
        Whether adaptive scaling helps, too.

    Examples
    --------
    >>> print(Scale("lab", or_adapt=True))
    call cluster.scale(n) or cluster.adapt()
    """

    cluster: str
    n: int | None = None
    group: str = DEFAULT_GROUP
    or_adapt: bool = False

    def __str__(self) -> str:
        n = "n" if self.n is None else str(self.n)
        group = "" if self.group == DEFAULT_GROUP else f", worker_group={self.group!r}"
        return f"call cluster.scale({n}{group})" + (" or cluster.adapt()" if self.or_adapt else "")


@dataclass(frozen=True)
class ShutDown:
    """Shut a cluster down."""

    cluster: str

    def __str__(self) -> str:
        return "call cluster.shutdown()"


@dataclass(frozen=True)
class AskForLess:
    """Create a cluster of fewer or smaller workers, or launch the workers later."""

    def __str__(self) -> str:
        return (
            "Ask for fewer or smaller workers. Or create the cluster with n_workers=0 and call "
            "cluster.scale(n): it launches as many as there is room for. To see what runs, run "
            "`dask cml list`"
        )


@dataclass(frozen=True)
class UseOrDelete:
    """Connect to the cluster that has the name, or delete it."""

    cluster: str

    def __str__(self) -> str:
        return (
            "to connect to it, pass create_mode='create-or-connect' or call "
            f"CMLCluster.from_name({self.cluster!r}); to delete it, run `{delete_command(self.cluster)}`"
        )


#: What a user can do.
Advice: TypeAlias = Scale | ShutDown | AskForLess | UseOrDelete


def delete_command(cluster: str) -> str:
    """Return the command that deletes a cluster."""
    return f"dask cml delete {shlex.quote(cluster)}"
