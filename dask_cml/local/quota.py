"""The quota of all sessions together, and the queued sessions in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_cml import checks
from dask_cml.local import state
from dask_cml.local.state import Session

_RESOURCES = ("cpu", "memory", "nvidia_gpu", "sessions")
_REFUSE, _WAIT = "refuse", "wait"


def configure(quota: Mapping[str, float] | None = None, over_quota: str = _REFUSE) -> None:
    """Set the quota of the local platform, for all processes of this user.

    Parameters
    ----------
    quota : mapping of str to float, optional
        The most that all running sessions may use together, of "cpu", "memory" (GiB), "nvidia_gpu" and
        "sessions". None: no limit.
    over_quota : {"refuse", "wait"}
        Whether a launch over quota is refused, or its session stays ``scheduling`` until other sessions
        end or the quota grows. The oldest session comes first. Releases of CML differ in this.

    Raises
    ------
    ValueError, TypeError
        If a value is invalid.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.configure({"sessions": 10}, over_quota="wait")
    >>> local.configure()
    """
    limits = {} if quota is None else quota
    if not isinstance(limits, Mapping):
        raise TypeError(checks.of_type("quota", quota, "a mapping of resources to numbers"))
    for resource, limit in limits.items():
        checks.choice("quota", resource, _RESOURCES)
        if limit != 0:
            checks.positive(f"quota[{resource!r}]", limit)
    checks.choice("over_quota", over_quota, (_REFUSE, _WAIT))
    with state.locked() as path:
        state.write_json(path / "quota.json", {"quota": {**limits}, "over_quota": over_quota})


def admission(request: Mapping[str, Any], live: Sequence[Session]) -> dict[str, Any]:
    """Return whether a new session waits for room, and the words of its refusal if it is refused.

    Call this while the state is locked.
    """
    quota, over_quota = _configured()
    excess = _excess(request, live, quota)
    if over_quota == _WAIT:
        return {"waits": excess is not None or any(session["waits"] for session in live), "refused": None}
    return {"waits": False, "refused": excess}


def present(sessions: Sequence[Session]) -> list[Session]:
    """Return the sessions that use the quota or wait for it."""
    return [session for session in sessions if state.is_live(session) and not session["refused"]]


def has_room(session_id: str) -> bool:
    """Return whether a waiting session has room now. The oldest waiting session comes first.

    Call this while the state is locked, and keep it locked until the session is admitted.
    """
    live = present(state.read_sessions())
    first = next(session for session in live if session["waits"])
    return first["id"] == session_id and _excess(first, live, _configured()[0]) is None


def _configured() -> tuple[dict[str, float], str]:
    configured = state.read_json(state.directory() / "quota.json")
    return (configured["quota"], configured["over_quota"]) if configured else ({}, _REFUSE)


def _excess(request: Mapping[str, Any], live: Sequence[Session], quota: Mapping[str, float]) -> str | None:
    """Return the platform's words if one more session would exceed the quota. Waiting ones use nothing."""
    for resource, limit in quota.items():
        requested = request[resource]
        used = sum(session[resource] for session in live if not session["waits"])
        if requested and used + requested > limit:
            unit = "Gi" if resource == "memory" else ""
            amounts = {"requested": requested, "used": used, "limited": limit}
            return ", ".join(f"{verb}: {resource}={amount:g}{unit}" for verb, amount in amounts.items())
    return None
