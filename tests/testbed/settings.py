"""The settings of the platform, for all processes that use its state directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dask_cml import local
from dask_cml.local import state


@dataclasses.dataclass(frozen=True)
class Settings:
    """How sessions run. Sessions keep the settings of their launch, except for the quota.

    Parameters
    ----------
    quota, over_quota
        See :func:`dask_cml.local.configure`.
    start_delay : float
        Seconds from a launch until the session runs.
    latency : float
        Seconds that each request takes: each launch of one session, each listing, each stop of one.
    stop_grace : float
        Seconds from the notice to SIGKILL when a session is stopped or evicted.
    memory_limit : bool
        Whether the kernel limits the memory of sessions, by cgroups.
    over_memory : {"session", "process"}
        What dies if the processes of a session together exceed its memory: all at once, as on nodes of
        Kubernetes 1.28 and later, or only the largest one, as on older nodes. The session ends as ``failed``
        if its main process dies.
    scratch : int, optional
        Scratch space of each session: the most bytes in its ``TMPDIR``. The platform looks every second, and
        evicts a session over the limit, with notice. None: no limit.
    variables : mapping of str to str
        The project's environment variables, which all sessions inherit.
    networks : bool
        Whether each session has a network of its own.
    """

    quota: Mapping[str, float] | None = None
    over_quota: str = "refuse"
    start_delay: float = 0.0
    latency: float = 0.0
    stop_grace: float = 2.0
    memory_limit: bool = False
    over_memory: str = "session"
    scratch: int | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    networks: bool = False


def settings() -> Settings:
    return Settings(**(state.read_json(state.directory() / "testbed.json") or {}))


def configure(**changes: Any) -> Settings:
    """Change settings, and return all. Other settings keep their values."""
    new = dataclasses.replace(settings(), **changes)
    local.configure(new.quota, new.over_quota)
    with state.locked() as path:
        state.write_json(path / "testbed.json", dataclasses.asdict(new))
    return new
