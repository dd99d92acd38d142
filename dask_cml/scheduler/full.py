"""Dask workers that start no tasks because their memory and their disk are full."""

from __future__ import annotations

from collections.abc import Iterable

from distributed.core import Status
from distributed.scheduler import WorkerState

#: The share of its disk above which a worker is full: what it spills next may be larger than the rest.
_FULL = 0.75


def is_full(worker: WorkerState) -> bool:
    """Return whether a Dask worker starts no tasks because its memory and its disk are full."""
    if worker.status != Status.paused:
        return False
    spilled, most = _spilled(worker)
    return spilled > _FULL * most > 0


def _spilled(worker: WorkerState) -> tuple[float, float]:
    """Return the bytes that a worker has on disk, and the most that it may have there. 0: unlimited."""
    try:
        spilled = worker.metrics["spilled_bytes"]["disk"]
        most = (worker.extra.get("cml") or {}).get("max_spill")
        return float(spilled or 0), float(most or 0)
    except (AttributeError, KeyError, TypeError, ValueError):  # a worker of another kind
        return 0.0, 0.0


def full_words(workers: Iterable[WorkerState]) -> str | None:
    """Describe which workers are full. Return None if no worker is full."""
    full = [worker for worker in workers if is_full(worker)]
    if not full:
        return None
    amounts = [_spilled(worker) for worker in full]
    spilled, most = sum(amount for amount, _ in amounts) / 1e9, sum(most for _, most in amounts) / 1e9
    subject, verb = f"{len(full)} workers have", "are"
    if len(full) == 1:
        subject, verb = f"worker {full[0].name} has", "is"
    state = f"spilled {spilled:.1f} of {most:.1f} GB and {verb} paused"
    return f"{subject} {state}: scale up, or give workers more memory"
