"""The names of worker sessions, and of the Dask workers in them.

A session's name says its cluster, its worker group and its number: ``mine-0`` in the default group,
``mine-gpu-0`` in the group ``gpu``. The Dask worker in it has the same name; several get ``-0``, ``-1`` and
so on behind it. No word of a group's name begins with a digit, so a name has one reading only.
"""

from __future__ import annotations

import re
from functools import lru_cache

#: The group of the workers that are asked for without the name of a group.
DEFAULT_GROUP = "default"

#: What no other group is called: the scheduler's session ends with it.
RESERVED = (DEFAULT_GROUP, "scheduler")

_WORD = r"[A-Za-z][A-Za-z0-9_]*"
GROUP_NAME = re.compile(rf"{_WORD}(?:-{_WORD})*", re.ASCII)
_WORKER = re.compile(rf"-(?:({GROUP_NAME.pattern})-)?([0-9]{{1,9}})(?:-[0-9]{{1,9}})?", re.ASCII)


def session_name(cluster: str, group: str, number: int) -> str:
    """Return the name of a worker session.

    Examples
    --------
    >>> session_name("mine", "default", 0), session_name("mine", "gpu", 3)
    ('mine-0', 'mine-gpu-3')
    """
    return f"{cluster}-{number}" if group == DEFAULT_GROUP else f"{cluster}-{group}-{number}"


def dask_names(session: str, processes: int) -> list[str]:
    """Return the names of the Dask workers in a session, as ``dask worker --name`` makes them.

    Examples
    --------
    >>> dask_names("mine-0", 1), dask_names("mine-0", 2)
    (['mine-0'], ['mine-0-0', 'mine-0-1'])
    """
    return [f"{session}-{i}" for i in range(processes)] if processes > 1 else [session]


# Managers of thousands of sessions ask for each of them at every look.
@lru_cache(maxsize=2**16)
def read_name(cluster: str, name: str) -> tuple[str, int] | None:
    """Return the group and the number of a session, by its own name or that of a Dask worker in it.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    name : str
        The session's, or the Dask worker's.

    Returns
    -------
    tuple of str and int, or None
        None if no session of this cluster has such a name.

    Examples
    --------
    >>> read_name("mine", "mine-gpu-3"), read_name("mine", "mine-0-1"), read_name("mine", "other-0")
    (('gpu', 3), ('default', 0), None)
    """
    match = _WORKER.fullmatch(name.removeprefix(cluster)) if name.startswith(cluster) else None
    if match is None or match[1] in RESERVED:
        return None
    return match[1] or DEFAULT_GROUP, int(match[2])
