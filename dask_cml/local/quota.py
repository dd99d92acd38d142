"""The quota: the maximum that sessions may use together, and the order in which waiting sessions start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dask_cml.local import state
from dask_cml.local.state import SessionState


def excess(plan: Mapping[str, Any], live: Iterable[SessionState], quota: Mapping[str, float]) -> str | None:
    """Return the message if one more session would exceed the quota, else None.

    Parameters
    ----------
    plan : mapping
        The needs of the session: ``cpu``, ``memory``, ``nvidia_gpu`` and ``sessions``.
    live : iterable of SessionState
        The running and waiting sessions. Waiting sessions use nothing.
    quota : mapping of str to float
        The maximum of each resource.
    """
    present = [session for session in live if not session.waits]
    for resource, limit in quota.items():
        wanted, used = plan[resource], sum(session.plan[resource] for session in present)
        if wanted and used + wanted > limit:
            unit = "Gi" if resource == "memory" else ""
            return ", ".join(
                f"{verb}: {resource}={amount:g}{unit}"
                for verb, amount in (("requested", wanted), ("used", used), ("limited", limit))
            )
    return None


def live_sessions() -> list[SessionState]:
    """Return the sessions that have not ended, the oldest first."""
    return [session for session in state.read_sessions() if session.live and not session.half_made]


def has_room(session_id: str) -> bool:
    """Return whether a waiting session has room now. The oldest waiting session comes first.

    Call this while the state is locked, and keep it locked until the session is admitted.
    """
    live = live_sessions()
    waiting = [session for session in live if session.waits]
    if not waiting or waiting[0].id != session_id:
        return False
    settings = state.read_json(state.directory() / "settings.json") or {}
    return excess(waiting[0].plan, live, settings.get("quota") or {}) is None
