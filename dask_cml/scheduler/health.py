"""What is known of Dask workers: some are paused, were restarted by their nanny, lack GPUs, or have left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable
from typing import Any

from distributed.core import Status
from distributed.scheduler import Scheduler, WorkerState

from dask_cml import protocol
from dask_cml.cancellation import within
from dask_cml.protocol import EXITED, NO_ANSWER
from dask_cml.sessions.causes import GB, GIB, Cause, find_cause
from dask_cml.timing import timing

#: The topic under which a nanny says that it ends a worker over its memory (worker_memory.py:422).
_MEMORY_TOPIC = "worker-restart-memory"
#: Maximum number of Dask workers that have left, of which the last state is kept, and of restarts.
_MOST_LAST, _MOST_RESTARTS = 1000, 20
#: The share of its disk above which a worker is full: what it spills next may be larger than the rest.
_FULL = 0.75
_ENDED = "its process ended; it crashed, or the memory of its session was full"
_EXITED = "its process exited with status 0"
#: What helps against full memory.
_ADVICE = "give workers more memory (memory=) or fewer threads (nthreads=), or work on smaller chunks"
_GPU_ADVICE = "tasks run there nevertheless; start from an image with CUDA, or ask your CML administrator"
#: How the stimuli of removals begin that somebody asks for. Releases such as 2024.5 say nothing else of it.
_ASKED = ("client-restart", "retire-workers", "worker-close-gracefully")
#: The reasons of a worker that somebody closes.
_CLOSED = ("worker-close", "scheduler-close-worker")
#: Maximum number of tasks to name, and of characters of a name.
_MOST_TASKS, _LONGEST = 3, 100


class Health:
    """Watches the Dask workers of one scheduler.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler.

    Attributes
    ----------
    problem : str or None
        The present problem, as a clause.
    restarts : dict of str to str
        The last restarts of workers by their nannies, the oldest first: a subject, and why and what helps.
    news : dict of str to str
        What the keeper tells users once, as clauses by subjects: which workers are paused for long, or lack
        GPUs, and the restarts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.problem: str | None = None
        self.restarts: dict[str, str] = {}
        self._n_restarts = 0
        self.news: dict[str, str] = {}
        self._last: dict[str, dict[str, Any]] = {}
        #: What nannies have said of the ends of workers, by their addresses: the memory (``rss``) over which
        #: one ends its worker, the exit ``status`` of the process, which is None if it was lost, and whether
        #: somebody has ``asked`` for its end.
        self._said: dict[str, dict[str, Any]] = {}
        self._paused_since: dict[str, float] = {}
        self._restarted_at = 0.0

    @property
    def handlers(self) -> dict[str, Any]:
        """What answers the keeper's questions about Dask workers."""
        return {protocol.HELD: self.held, protocol.LAST: self.last, protocol.ABANDONED: self.abandoned}

    def note_event(self, topic: str, content: Any) -> None:
        """Note what a nanny says of its worker."""
        if topic in (_MEMORY_TOPIC, EXITED):
            self._said.setdefault(content["worker"], {}).update(content)
            bound(self._said)

    def note_left(self, name: str, address: str, last: dict[str, Any]) -> None:
        """Note a Dask worker that has left, and what was known of it, see ``last_state``."""
        self._last[name] = {**last, "address": address, "left": time.monotonic()}
        bound(self._last)

    def _last_of(self, name: str) -> dict[str, Any] | None:
        """Return what was known last of a Dask worker that has left."""
        last = self._last.get(name)
        if last is None:
            return None
        # The worker's own last message may be older than its nanny's look at its memory.
        memory = max(last["memory"], self._said.get(last["address"], {}).get("rss", 0))
        return {**last, "memory": memory, "gone_for": time.monotonic() - last["left"]}

    def note_connected(self, name: str, now: float) -> None:
        """Note a Dask worker that has connected. If it was here before, its nanny has started it again.

        Users are told of a crash. A restart that somebody asked for, as by ``Client.restart``, is none.
        """
        last = self._last_of(name)
        if last is None:
            return
        del self._last[name]
        said = {"status": 0, "asked": True, **self._said.pop(last["address"], {})}
        was_full = "rss" in said
        # A worker that closes by itself runs no task then, but a task may end its process by sys.exit().
        ended_unasked = not said["asked"] and (said["status"] != 0 or last["tasks"])
        if last["expected"] or last["noticed"] or not (was_full or ended_unasked):
            return
        gone = _ENDED if was_full or said["status"] != 0 else _EXITED
        loss = find_cause(last, [], said="", gone=gone, status=said["status"])
        words = loss.words
        if loss.cause not in (Cause.BUS_ERROR, Cause.PROGRAM_FAILED) and gone == _ENDED:
            words += f"; {_ADVICE}"
        self._n_restarts += 1
        self.restarts[f"restart {self._n_restarts}"] = f"worker {name} was restarted: {words}"
        bound(self.restarts, _MOST_RESTARTS)
        self._restarted_at = now

    def look(self, workers: Iterable[WorkerState], now: float) -> None:
        """Find the present problems.

        Parameters
        ----------
        workers : iterable of WorkerState
            The connected Dask workers.
        now : float
            The monotonic time.
        """
        workers = [*workers]
        paused = [worker for worker in workers if worker.status == Status.paused]
        self._paused_since = {
            worker.address: self._paused_since.get(worker.address, now) for worker in paused
        }
        # While a worker spills, Dask pauses it for moments.
        paused = [worker for worker in paused if now - self._paused_since[worker.address] >= timing.pause]
        restart = None
        if self.restarts and now - self._restarted_at < timing.restart:
            restart = [*self.restarts.values()][-1]
        memory, gpus = _paused_words(paused), _gpu_words(workers)
        self.problem = memory or restart or gpus
        present = {"memory": memory, "gpus": gpus, **self.restarts}
        self.news = {subject: words for subject, words in present.items() if words}

    # -- what the keeper asks

    def held(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return when the scheduler heard of Dask workers, and the bytes they hold, by their names."""
        workers, addresses = self._scheduler.workers, self._scheduler.aliases
        connected = {name: workers[addresses[name]] for name in names if name in addresses}
        return {
            name: {"last_seen": worker.last_seen, "nbytes": worker.nbytes}
            for name, worker in connected.items()
        }

    def last(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return what was known last of Dask workers that have left, by their names; see ``last_state``."""
        known = {name: self._last_of(name) for name in names}
        return {name: last for name, last in known.items() if last is not None}

    async def abandoned(self, names: Collection[str]) -> list[str]:
        """Return the Dask workers that are not connected, and that no nanny is about to start again."""
        aliases = self._scheduler.aliases  # of the connected workers
        absent = [name for name in names if name not in aliases]
        have_nannies = await asyncio.gather(*map(self._has_nanny, absent))
        return [name for name, has in zip(absent, have_nannies, strict=True) if not (has or name in aliases)]

    async def _has_nanny(self, name: str) -> bool:
        """Return whether the nanny of a Dask worker that has left answers."""
        nanny = (self._last_of(name) or {}).get("nanny")
        if nanny is None:
            return False
        try:
            await within(timing.answer / 2, self._scheduler.rpc(nanny).identity())
        except NO_ANSWER:
            return False
        return True


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


def bound(noted: dict[str, Any], most: int = _MOST_LAST) -> None:
    """Forget what was noted first, beyond `most`: many sessions and processes never connect again."""
    if len(noted) > most:
        del noted[next(iter(noted))]


def is_full(worker: WorkerState) -> bool:
    """Return whether a Dask worker starts no tasks because its memory and its disk are full."""
    if worker.status != Status.paused:
        return False
    spilled, most = _disk(worker)
    return spilled > _FULL * most > 0


def _disk(worker: WorkerState) -> tuple[int, int]:
    """Return the bytes that a worker has on disk, and the most that it may have there. 0: unlimited."""
    most = (worker.extra.get("cml") or {}).get("max_spill") or 0
    return worker.metrics.get("spilled_bytes", {}).get("disk", 0), most


def _paused_words(paused: list[WorkerState]) -> str | None:
    """Describe workers that start no tasks because their memory is full. Return None if there are none."""
    if not paused:
        return None
    full = [worker for worker in paused if is_full(worker)]
    first, *others = full or paused
    more = f", like {len(others)} more" if others else ""
    if full:
        spilled, most = _disk(first)
        state = f"has spilled {spilled / GB:.1f} of {most / GB:.1f} GB and is paused{more}"
        return f"worker {first.name} {state}: scale up, or give workers more memory"
    used = f"{first.memory.process / GIB:.2f} of {first.memory_limit / GIB:.2f} GiB memory are used"
    return f"worker {first.name} is paused and starts no tasks{more}: {used}; {_ADVICE}"


def _gpu_words(workers: list[WorkerState]) -> str | None:
    """Describe workers whose sessions have too few GPUs. Return None if there are none."""
    found = [(worker.name, (worker.extra.get("cml") or {}).get("found_gpus")) for worker in workers]
    lacking = [f"{name} found {numbers} GPUs" for name, numbers in found if numbers]
    if not lacking:
        return None
    more = f", and so did {len(lacking) - 1} more" if lacking[1:] else ""
    return f"worker {lacking[0]} in its session{more}; {_GPU_ADVICE}"
