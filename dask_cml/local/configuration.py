"""The settings of the local platform: delays, quotas and limits, the project's variables, the network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dask_cml import checks
from dask_cml.local import network, state

RESOURCES = ("cpu", "memory", "nvidia_gpu", "sessions")
#: The settings with a fixed set of values.
CHOICES = {
    "network": ("shared", "namespaces"),
    "over_quota": ("refuse", "wait"),
    "memory_limit": ("auto", "watch", "off"),
    "over_memory": ("session", "process"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the local platform, see :func:`configure`."""

    start_delay: float = 0.0
    latency: float = 0.0
    quota: Mapping[str, float] | None = None
    over_quota: str = "refuse"
    stop_grace: float = 2.0
    lifetime: float | None = None
    memory_limit: str = "auto"
    over_memory: str = "session"
    scratch: float | str | None = "10 GB"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    network: str = "shared"
    needs_api_key: bool = False


_NAMES = [field.name for field in dataclasses.fields(Settings)]


def settings() -> Settings:
    """Return the current settings.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.settings().network
    'shared'
    """
    written = state.read_json(state.directory() / "settings.json") or {}
    return Settings(**{name: value for name, value in written.items() if name in _NAMES})


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
    memory_limit : {"auto", "watch", "off"}
        How the memory of a session limits all its processes together. "auto": a cgroup, so that the kernel
        enforces the limit exactly. This requires Linux and, in most cases, root. Elsewhere, as with "watch",
        the platform looks ten times a second, and kills what exceeds the limit. "off": no limit.
    over_memory : {"session", "process"}
        What is killed if a session exceeds its memory: all its processes at once, as on nodes of Kubernetes
        1.28 and later, or only the largest one, as on older nodes. The session ends as ``failed`` if its main
        process is killed.
    scratch : float or str, optional
        Scratch space of each session: the maximum size of its ``TMPDIR``, in GiB, or as a string such as
        "10 GB". The platform looks every second, and evicts a session over the limit, with notice. None: no
        limit.
    variables : mapping of str to str
        The project's environment variables, which all sessions inherit.
    network : {"shared", "namespaces"}
        Whether sessions share this machine's network, or each session has a loopback and an address of its
        own, as on CML. Namespaces require Linux and root.
    needs_api_key : bool
        Whether the functions raise a RuntimeError in a process without the environment variable
        ``CDSW_API_KEY``, as on CML. All sessions have it.

    Returns
    -------
    Settings
        The new settings.

    Raises
    ------
    ValueError, TypeError
        If a setting is unknown, or a value is invalid. No setting is changed then.
    RuntimeError
        If this machine does not support namespaces.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.configure(start_delay=0.5, quota={"sessions": 10}).start_delay
    0.5
    """
    if unknown := changes.keys() - _NAMES:
        raise TypeError(f"unknown setting {min(unknown)}: expected {checks.nearest(min(unknown), _NAMES)}")
    for name, value in changes.items():
        _check(name, value)
    with state.locked() as path:
        new = dataclasses.replace(settings(), **changes)
        state.write_json(path / "settings.json", dataclasses.asdict(new))
    return new


def shares_host_network() -> bool:
    """Return whether sessions share this machine's loopback and ports: all do without namespaces.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.shares_host_network()
    True
    """
    return settings().network == "shared"


def _check(name: str, value: Any) -> None:
    if value is None and name in ("quota", "lifetime", "scratch"):
        return
    if name in CHOICES:
        checks.choice(name, value, CHOICES[name])
        if value == "namespaces":
            network.check()
    elif name == "needs_api_key":
        checks.boolean(name, value)
    elif name == "scratch":
        checks.gibibytes(name, value)
    elif name == "variables":
        checks.environment(name, value)
    elif name != "quota":
        _check_number(name, value)
    elif not isinstance(value, Mapping):
        raise TypeError(checks.of_type(name, value, "a mapping of resources to numbers"))
    else:
        for resource, limit in value.items():
            checks.choice(name, resource, RESOURCES)
            _check_number(f"quota[{resource!r}]", limit)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(checks.message(name, value, "a number"))
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(checks.message(name, value, "a finite number of at least 0"))
