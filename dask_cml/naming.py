"""The names of worker sessions and of their Dask workers.

A session's name consists of its cluster, its worker group and its number: ``mine-0`` in the default group,
``mine-gpu-0`` in the group ``gpu``. Its Dask worker has the same name. Several Dask workers of one session
have the suffixes ``-0``, ``-1`` and so on. In them, ``.`` stands for a ``-`` before a digit in a group's
name, so names are unambiguous: ``mine-gpu.1-0`` in the group ``gpu-1``.

A subclass of the cluster, or a spec that a user adds, may name sessions otherwise. So a session's group is
known from its spec, from the record, or from what its Dask workers say. Only where none of them says it, the
name does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

#: The group of workers that users request without a group's name.
DEFAULT_GROUP = "default"

#: Names that no other group can have: the name of the scheduler's session ends with one.
RESERVED = (DEFAULT_GROUP, "scheduler")

_REST = r"[A-Za-z0-9_]*"
GROUP_NAME = re.compile(rf"[A-Za-z]{_REST}(?:-[A-Za-z0-9]{_REST})*", re.ASCII)
_GROUP = rf"[A-Za-z]{_REST}(?:-[A-Za-z]{_REST}|\.[0-9]{_REST})*"
_WORKER = re.compile(rf"-(?:({_GROUP})-)?([0-9]{{1,9}})(?:-[0-9]{{1,9}})?", re.ASCII)
_BEFORE_DIGIT = re.compile("-(?=[0-9])")


def session_name(cluster: str, group: str, number: int) -> str:
    """Return the name of a worker session.

    Examples
    --------
    >>> session_name("mine", "default", 0), session_name("mine", "gpu", 3), session_name("mine", "gpu-1", 3)
    ('mine-0', 'mine-gpu-3', 'mine-gpu.1-3')
    """
    if group == DEFAULT_GROUP:
        return f"{cluster}-{number}"
    return f"{cluster}-{_BEFORE_DIGIT.sub('.', group)}-{number}"


def dask_names(session: str, processes: int) -> list[str]:
    """Return the names of the Dask workers in a session, as ``dask worker --name`` composes them.

    Examples
    --------
    >>> dask_names("mine-0", 1), dask_names("mine-0", 2)
    (['mine-0'], ['mine-0-0', 'mine-0-1'])
    """
    return [f"{session}-{i}" for i in range(processes)] if processes > 1 else [session]


# The keeper of thousands of sessions reads each name in every look.
@lru_cache(maxsize=2**16)
def read_name(cluster: str, name: str) -> tuple[str, int] | None:
    """Return the group and the number of a session, by its name or that of one of its Dask workers.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    name : str
        The session's or Dask worker's name.

    Returns
    -------
    tuple of str and int, or None
        The group and the number. None if no session of this cluster has such a name.

    Examples
    --------
    >>> read_name("mine", "mine-gpu-3"), read_name("mine", "mine-0-1"), read_name("mine", "other-0")
    (('gpu', 3), ('default', 0), None)
    """
    match = _WORKER.fullmatch(name.removeprefix(cluster)) if name.startswith(cluster) else None
    if match is None or match[1] in RESERVED:
        return None
    return (match[1] or DEFAULT_GROUP).replace(".", "-"), int(match[2])


def session_of(cluster: str, worker: str, about: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return the group and the name of the session in which a Dask worker runs.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    worker : str
        The Dask worker's name.
    about : mapping or None
        What the Dask worker says of itself, see :mod:`dask_cml.worker.process`.

    Returns
    -------
    tuple of str, or None
        The group and the name. None if it runs in no session of this cluster.

    Examples
    --------
    >>> session_of("mine", "a-w0-1", {"name": "a-w0", "group": "gpu"}), session_of("mine", "mine-0-1", None)
    (('gpu', 'a-w0'), ('default', 'mine-0'))
    """
    if about and about.get("name"):
        return about.get("group") or DEFAULT_GROUP, about["name"]
    group_and_number = read_name(cluster, worker)
    if group_and_number is None:
        return None
    return group_and_number[0], session_name(cluster, *group_and_number)
