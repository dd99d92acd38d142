"""Texts about sessions that wait for room, and about time spans."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timezone


def span(seconds: float) -> str:
    """Return a time span in words, such as ``3 min``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a time since 1970 in words, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(form)


def waiting(seconds: float) -> str:
    """Return the text for a session that has waited for room for so many seconds."""
    return f"waiting for room, {span(seconds)}"


def waiting_workers(waits: Collection[float]) -> str:
    """Return the text for worker sessions that wait for room.

    Parameters
    ----------
    waits : collection of float
        How long each has waited, in seconds.

    Returns
    -------
    str
        Their number and the longest wait. Empty if no session waits.
    """
    return f"{len(waits)} {waiting(max(waits))}" if waits else ""
