"""The settings of the local platform: delays, quotas and limits, the project's variables."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask_cml import checks
from dask_cml.local import extensions, state


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the local platform, see :func:`configure`."""

    start_delay: float = 0.0
    latency: float = 0.0
    quota: Mapping[str, float] | None = None
    over_quota: str = "refuse"
    stop_grace: float = 2.0
    lifetime: float | None = None
    over_memory: str = "session"
    scratch: float | str | None = "10 GB"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extensions: Sequence[str] = ()


def settings() -> Settings:
    """Return the current settings.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.settings().over_quota
    'refuse'
    """
    written = state.read_json(state.directory() / "settings.json") or {}
    return Settings(**{name: value for name, value in written.items() if name in _CHECKS})


def configure(**changes: Any) -> Settings:
    """Change settings of the local platform, for all processes that use its state directory.

    Other settings keep their values. Existing sessions keep the settings of their launch.

    Parameters
    ----------
    start_delay : float
        Time from a launch until the session runs, in seconds.
    latency : float
        Duration of every HTTP request, in seconds: each launch of one session, each listing, each stop of
        one.
    quota : mapping of str to float, optional
        Maximum that the running sessions of all launchers may use together, of "cpu", "memory" (GiB),
        "nvidia_gpu" and "sessions". None: no limit.
    over_quota : {"refuse", "wait"}
        Whether a launch over quota is refused, or its session stays ``scheduling`` until there is room:
        other sessions end, or the quota grows. The oldest session comes first. Releases of CML differ in
        this.
    stop_grace : float
        Time from the notice to SIGKILL when a session is stopped or evicted, in seconds. The notice is a
        SIGTERM to the session's main process, the kernel that runs its code. If that process ends earlier,
        so do the others.
    lifetime : float, optional
        Time after which a running session ends as ``timedout``, in seconds. None: never.
    over_memory : {"session", "process", "nothing"}
        What is killed if the processes of a session together exceed its memory: all at once, as on nodes of
        Kubernetes 1.28 and later, only the largest one, as on older nodes, or nothing. The platform looks ten
        times a second. The session ends as ``failed`` if its main process is killed.
    scratch : float or str, optional
        Scratch space of each session: the maximum size of its ``TMPDIR``, in GiB, or as a string such as
        "10 GB". The platform looks every second, and evicts a session over the limit, with notice. None: no
        limit.
    variables : mapping of str to str
        The project's environment variables, which all sessions inherit.
    extensions : sequence of str
        Paths of Python files that change how sessions run, see ``dask_cml/local/extensions.py``.

    Returns
    -------
    Settings
        The new settings.

    Raises
    ------
    ValueError, TypeError
        If a setting is unknown, or a value is invalid. No setting is changed then.
    FileNotFoundError
        If an extension does not exist.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.configure(start_delay=0.5, quota={"sessions": 10}).start_delay
    0.5
    """
    if unknown := changes.keys() - _CHECKS:
        raise TypeError(f"unknown setting {min(unknown)}: expected {checks.nearest(min(unknown), _CHECKS)}")
    for name, value in changes.items():
        if value is not None or name not in _OPTIONAL:
            _CHECKS[name](name, value)
    with state.locked() as path:
        new = dataclasses.replace(settings(), **changes)
        state.write_json(path / "settings.json", dataclasses.asdict(new))
    return new


def shares_host_network() -> bool:
    """Return whether sessions share this machine's loopback and ports, as without extensions.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.shares_host_network()
    True
    """
    return not extensions.hooks(settings().extensions, "network")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(checks.message(name, value, "a number"))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(checks.message(name, value, "a finite number of at least 0"))


def _quota(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(checks.of_type(name, value, "a mapping of resources to numbers"))
    for resource, limit in value.items():
        checks.choice(name, resource, ("cpu", "memory", "nvidia_gpu", "sessions"))
        _number(f"quota[{resource!r}]", limit)


def _extensions(name: str, value: Any) -> None:
    extensions.hooks(checks.names(name, value), name)


_OPTIONAL = ("quota", "lifetime", "scratch")
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "start_delay": _number,
    "latency": _number,
    "quota": _quota,
    "over_quota": functools.partial(checks.choice, choices=("refuse", "wait")),
    "stop_grace": _number,
    "lifetime": _number,
    "over_memory": functools.partial(checks.choice, choices=("session", "process", "nothing")),
    "scratch": checks.gibibytes,
    "variables": checks.environment,
    "extensions": _extensions,
}
