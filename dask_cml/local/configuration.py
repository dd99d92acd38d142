"""The settings of the local platform: delays, quotas, the project's variables and the network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from dask_cml import checks
from dask_cml.local import network, state

RESOURCES = ("cpu", "memory", "nvidia_gpu", "sessions")
NETWORKS = ("shared", "namespaces")
OVER_QUOTA = ("refuse", "wait")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the local platform, see :func:`configure`."""

    start_delay: float = 0.0
    latency: float = 0.0
    quota: Mapping[str, float] | None = None
    over_quota: str = "refuse"
    stop_grace: float = 2.0
    lifetime: float | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    network: str = "shared"
    needs_api_key: bool = False


def settings() -> Settings:
    """Return the current settings.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.settings().network
    'shared'
    """
    return Settings(**(state.read_json(state.directory() / "settings.json") or {}))


def configure(
    *,
    start_delay: float | EllipsisType = ...,
    latency: float | EllipsisType = ...,
    quota: Mapping[str, float] | EllipsisType | None = ...,
    over_quota: str | EllipsisType = ...,
    stop_grace: float | EllipsisType = ...,
    lifetime: float | EllipsisType | None = ...,
    variables: Mapping[str, str] | EllipsisType = ...,
    network: str | EllipsisType = ...,
    needs_api_key: bool | EllipsisType = ...,
) -> Settings:
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
        Time from SIGTERM to SIGKILL when a session is stopped, in seconds.
    lifetime : float, optional
        Time after which a running session ends as ``timedout``, in seconds. None: never.
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
        If a value is invalid. No setting is changed then.
    RuntimeError
        If this machine does not support namespaces.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.configure(start_delay=0.5, quota={"sessions": 10}).start_delay
    0.5
    """
    given: dict[str, Any] = {
        "start_delay": start_delay,
        "latency": latency,
        "quota": quota,
        "over_quota": over_quota,
        "stop_grace": stop_grace,
        "lifetime": lifetime,
        "variables": variables,
        "network": network,
        "needs_api_key": needs_api_key,
    }
    changes = {name: value for name, value in given.items() if value is not ...}
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
    if name in ("start_delay", "latency", "stop_grace"):
        _check_number(name, value)
    elif name == "lifetime":
        if value is not None:
            _check_number(name, value)
    elif name == "quota":
        if value is not None:
            _check_mapping(name, value)
            for resource, limit in value.items():
                if resource not in RESOURCES:
                    raise ValueError(f"invalid quota {resource!r}: expected one of {', '.join(RESOURCES)}")
                _check_number(f"quota[{resource!r}]", limit)
    elif name == "variables":
        _check_mapping(name, value)
        checks.environment(name, value)
    elif name == "needs_api_key":
        if not isinstance(value, bool):
            raise TypeError(f"invalid needs_api_key={value!r}: expected True or False")
    elif name == "over_quota":
        if value not in OVER_QUOTA:
            raise ValueError(f"invalid over_quota={value!r}: expected one of {', '.join(OVER_QUOTA)}")
    elif value not in NETWORKS:
        raise ValueError(f"invalid network={value!r}: expected one of {', '.join(NETWORKS)}")
    elif value == "namespaces":
        network.check()


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"invalid {name}={value!r}: expected a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"invalid {name}={value!r}: expected a finite number of at least 0")


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"invalid {name} of type {type(value).__name__}: expected a mapping")
