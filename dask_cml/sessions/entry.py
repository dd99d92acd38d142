"""The file of a cluster's session. It is empty: its name describes the session.

The keeper writes a file for every session that it launches, and a session writes its own when it starts.
Its name is ``<id>,<key>,<owner>,<launched>,<size>,<group>``. See :class:`Launch`. What is unknown is empty,
and so is a group that the key says. At the beginning of the key, ``@`` stands for the cluster's name, which
may be long. Ambiguous characters in a key are percent-encoded.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from dask_cml.checks import SESSION_ID
from dask_cml.naming import DEFAULT_GROUP, GROUP_NAME, read_name
from dask_cml.options import SessionSize, exact

#: A time in a name.
TIME = "[1-9][0-9]{0,11}"
_NUMBER = "[0-9.e+-]+"
_SIZE = rf"({_NUMBER})x({_NUMBER})x([0-9]+)"
_ID = SESSION_ID.pattern
_NAME = re.compile(rf"({_ID}),([^,]+),({_ID})?,({TIME}),(?:{_SIZE})?,({GROUP_NAME.pattern})?", re.ASCII)
_CLUSTER = "@"


@dataclass(frozen=True)
class Launch:
    """A session that was launched for a cluster.

    Parameters
    ----------
    id : str
        The platform's id.
    key : str
        The name of its Dask worker, or ``"scheduler"``.
    owner : str or None
        The id of the session with which it ends, if that is known.
    launched : int
        The time of its launch, in seconds since 1970.
    size : SessionSize, optional
        Its size, if that is known.
    started : float, optional
        The time at which its program has taken its name. None: it is queued, or ended in the queue.
    ended : int, optional
        The time of its end.
    cause : str
        Why it ended, if nobody asked for it, such as ``out of memory``.
    group : str, optional
        The worker group, if it is another one than the key says.
    """

    id: str
    key: str
    owner: str | None
    launched: int
    size: SessionSize | None = None
    started: float | None = None
    ended: int | None = None
    cause: str = ""
    group: str | None = None

    def seconds(self, now: float) -> float:
        """Return for how long it has used room, in seconds."""
        return 0.0 if self.started is None else (self.ended or now) - self.started

    def worker_group(self, cluster: str) -> str:
        """Return the worker group of a worker's session in a cluster."""
        return self.group or _group_in(self.key, cluster)


def _group_in(key: str, cluster: str) -> str:
    """Return the group that the name of a worker's session says."""
    group, _ = read_name(cluster, key) or (DEFAULT_GROUP, 0)
    return group


def file_name(launch: Launch, cluster: str) -> str:
    """Return the name of a new session's file.

    Parameters
    ----------
    launch : Launch
        The session.
    cluster : str
        The cluster's name.

    Examples
    --------
    >>> launch = Launch("abcdefgh12345678", "mine-0", "ijklmnop12345678", 1790000000, SessionSize(4, 16, 1))
    >>> file_name(launch, "mine")
    'abcdefgh12345678,@-0,ijklmnop12345678,1790000000,4x16x1,'
    """
    name = form(launch.key, cluster, launch.size, launch.group)
    return name.format(id=launch.id, owner=launch.owner or "", launched=launch.launched)


def form(key: str, cluster: str, size: SessionSize | None, group: str | None) -> str:
    """Return the name of a new session's file, without ``{id}``, ``{owner}`` and ``{launched}``."""
    other_group = group if group is not None and group != _group_in(key, cluster) else ""
    text = f"{exact(size.cpu)}x{exact(size.memory)}x{size.nvidia_gpu}" if size else ""
    rest = key.removeprefix(cluster)
    quoted = quote(rest, safe="") if rest == key else _CLUSTER + quote(rest, safe="")
    return f"{{id}},{quoted},{{owner}},{{launched}},{text},{other_group}"


@functools.lru_cache(maxsize=10_000)
def parse(name: str, cluster: str) -> Launch:
    """Return the session that a file's name describes. The inverse of :func:`file_name`.

    Raises
    ------
    ValueError
        If :func:`file_name` returns no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!a} is not the name of a session's file")
    session_id, key, owner, launched, cpu, memory, gpus, group = match.groups()
    prefix = cluster if key.startswith(_CLUSTER) else ""
    key = prefix + unquote(key.removeprefix(_CLUSTER), errors="strict")
    size = SessionSize(float(cpu), float(memory), int(gpus)) if cpu else None
    launch = Launch(session_id, key, owner, int(launched), size, group=group)
    if not key.isprintable() or "/" in key or file_name(launch, cluster) != name:
        raise ValueError(f"{name!a} does not describe a session")
    return launch
