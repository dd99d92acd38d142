"""The quota: what sessions may use together, and which of those that wait has room first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dask_cml.local import records, state


def excess(plan: Mapping[str, Any], live: Iterable[records.Record], quota: Mapping[str, float]) -> str | None:
    """Return in words what one more session would exceed, if anything.

    Parameters
    ----------
    plan : mapping
        What the session needs: ``cpu``, ``memory`` and ``nvidia_gpu``.
    live : iterable of Record
        The live sessions. Those that wait use nothing.
    quota : mapping of str to float
        What all may use together.
    """
    present = [record for record in live if not record.waits]
    for resource, limit in quota.items():
        if resource == "sessions":
            wanted, used = 1.0, float(len(present))
        else:
            wanted = float(plan[resource])
            used = sum(float(record.plan[resource]) for record in present)
        if wanted and used + wanted > limit:
            unit = "Gi" if resource == "memory" else ""
            return ", ".join(
                f"{verb}: {resource}={amount:g}{unit}"
                for verb, amount in (("requested", wanted), ("used", used), ("limited", limit))
            )
    return None


def live_sessions() -> list[records.Record]:
    """Return what counts for the quota, and what waits, oldest first."""
    return [record for record in records.read_all() if record.live and not record.half_made]


def has_room(session_id: str) -> bool:
    """Return whether a session that waits has room now; first come, first served.

    To be called while the state is locked, and until the session is admitted.
    """
    live = live_sessions()
    waiting = [record for record in live if record.waits]
    if not waiting or waiting[0].id != session_id:
        return False
    settings = state.read_json(state.directory() / "settings.json") or {}
    return excess(waiting[0].plan, live, settings.get("quota") or {}) is None
