"""What the scheduler knew last of a Dask worker that has left."""

from __future__ import annotations

from typing import Any

from distributed.scheduler import Scheduler, WorkerState

#: Maximum number of tasks to name, and of characters of a name.
_MOST_TASKS, _LONGEST = 3, 100


def last_state(scheduler: Scheduler, worker: WorkerState) -> dict[str, Any]:
    """Describe a Dask worker that has just left.

    Returns
    -------
    dict
        ``memory`` and ``limit`` of its process, ``spilled`` bytes and the most that it may spill, the
        ``tasks`` that it ran, and whether its end was ``expected``.
    """
    events = [event for _, event in scheduler.get_events(worker.address)]
    removal: dict[str, Any] = next(
        (each for each in reversed(events) if each.get("action") == "remove-worker"), {}
    )
    about = worker.extra.get("cml") or {}
    return {
        "memory": worker.memory.process,
        "limit": worker.memory_limit,
        "spilled": worker.memory.spilled,
        "max_spill": about.get("max_spill"),
        "tasks": [str(key)[:_LONGEST] for key in [*removal.get("processing-tasks", ())][:_MOST_TASKS]],
        "expected": bool(removal.get("expected")),
    }
