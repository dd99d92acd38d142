"""The settings of the platform, for all processes that use its state directory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dask_cml import local
from dask_cml.local import state


@dataclasses.dataclass(frozen=True)
class Settings:
    """How sessions run. Sessions keep the settings of their launch, except for the quota."""

    #: See :func:`dask_cml.local.configure`.
    quota: Mapping[str, float] | None = None
    over_quota: str = "refuse"
    #: Seconds from a launch until the session runs, that each request takes (each launch, listing and stop of
    #: one session), and from the notice to SIGKILL when a session is stopped or evicted.
    start_delay: float = 0.0
    latency: float = 0.0
    stop_grace: float = 2.0
    #: Whether the kernel limits the memory of sessions, by cgroups, and what dies that exceeds it: with
    #: "session" all processes, as on nodes of Kubernetes 1.28 and later, or only the largest "process".
    memory_limit: bool = False
    over_memory: str = "session"
    #: The most bytes in a session's ``TMPDIR``. The platform looks every second, and evicts one with more.
    scratch: int | None = None
    #: The project's environment variables, which all sessions inherit.
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Whether each session has a network of its own.
    networks: bool = False
    #: Where the ports of sessions begin and end that have none.
    port_range: tuple[int, int] = (20000, 32000)


def settings() -> Settings:
    return Settings(**(state.read_json(state.directory() / "testbed.json") or {}))


def configure(**changes: Any) -> Settings:
    """Change settings, and return all. Other settings keep their values."""
    new = dataclasses.replace(settings(), **changes)
    local.configure(new.quota, new.over_quota)
    with state.locked() as path:
        state.write_json(path / "testbed.json", dataclasses.asdict(new))
    return new
