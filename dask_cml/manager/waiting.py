"""Sessions that wait for room, in words."""

from __future__ import annotations

from collections.abc import Collection


def span(seconds: float) -> str:
    """Return a span of time for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def waiting(seconds: float) -> str:
    """Return that a session has waited for room for so many seconds."""
    return f"waiting for room, {span(seconds)}"


def waiting_workers(waits: Collection[float]) -> str:
    """Return how many worker sessions wait for room, and how long the first one has; empty if none does."""
    return f"{len(waits)} {waiting(max(waits))}" if waits else ""


def pending(n: int, waits: Collection[float]) -> str:
    """Return how many of `n` worker sessions are on their way, and how many wait for room."""
    n -= len(waits)
    return ", ".join(filter(None, [f"{n} pending" if n > 0 else "", waiting_workers(waits)]))
