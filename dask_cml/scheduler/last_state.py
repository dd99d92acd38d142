"""What the scheduler knew last of a Dask worker that has left."""

from __future__ import annotations

from typing import Any

from distributed.scheduler import Scheduler, WorkerState

#: How the stimuli of removals begin that somebody asks for. Releases such as 2024.5 say nothing else of it.
_ASKED = ("client-restart", "retire-workers", "worker-close-gracefully")
#: The reasons of a worker that somebody closes.
_CLOSED = ("worker-close", "scheduler-close-worker")
#: Maximum number of tasks to name, and of characters of a name.
_MOST_TASKS, _LONGEST = 3, 100


def last_state(scheduler: Scheduler, worker: WorkerState) -> dict[str, Any]:
    """Describe a Dask worker that has just left.

    Returns
    -------
    dict
        ``memory`` and ``limit`` of its process, ``spilled`` bytes and the most that it may spill, the
        ``tasks`` that it ran, whether its end was ``expected`` because somebody asked for it, and the address
        of its ``nanny``, if any.
    """
    events = [event for _, event in scheduler.get_events(worker.address)]
    removals = [event for event in events if event.get("action") == "remove-worker"]
    removal: dict[str, Any] = removals[-1] if removals else {}
    closings = [event.get("reason") for event in events if event.get("action") == "closing-worker"]
    was_asked = str(removal.get("stimulus_id")).startswith(_ASKED)
    extra = worker.extra.get("cml") or {}
    return {
        "memory": worker.memory.process,
        "limit": worker.memory_limit,
        "spilled": worker.memory.spilled,
        "max_spill": extra.get("max_spill"),
        "tasks": [str(key)[:_LONGEST] for key in [*removal.get("processing-tasks", ())][:_MOST_TASKS]],
        "expected": bool(removal.get("expected") or was_asked or {*closings} & {*_CLOSED}),
        "nanny": worker.nanny,
    }
