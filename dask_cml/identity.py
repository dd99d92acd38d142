"""What a scheduler says of itself and its workers, checked: other programs may answer at its address."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

#: The longest name or id, and the largest amount of memory, in bytes, and of threads.
_MOST_CHARACTERS, _MOST_MEMORY, _MOST_THREADS = 1000, 2**60, 2**20
#: The share of its disk above which a worker is full: what it spills next may be larger than the rest.
_FULL = 0.75


@dataclass(frozen=True)
class WorkerIdentity:
    """A Dask worker.

    Parameters
    ----------
    name : str
        Its name. Dask's names may also be empty, numbers or tuples.
    nthreads : int
        Number of its threads.
    memory_limit : int
        Its memory limit in bytes. 0: it has none.
    spilled, max_spill : int
        Bytes that it has on disk, and the most that it may have there. 0: unlimited.
    paused : bool
        Whether it starts no tasks.
    """

    name: str
    nthreads: int
    memory_limit: int
    spilled: int = 0
    max_spill: int = 0
    paused: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it starts no tasks because its memory and its disk are full."""
        return self.paused and self.spilled > _FULL * self.max_spill > 0


@dataclass(frozen=True)
class Identity:
    """A scheduler.

    Parameters
    ----------
    id : str
        Its id in Dask.
    workers : tuple of WorkerIdentity
        Its workers.
    """

    id: str
    workers: tuple[WorkerIdentity, ...]

    @classmethod
    def read(cls, answer: Any) -> Identity:
        """Check the answer of ``Scheduler.identity``.

        Raises
        ------
        ValueError
            If the answer is none. The message contains a short part of it.

        Examples
        --------
        >>> worker = {"name": 7, "nthreads": 2, "memory_limit": 1e9}
        >>> Identity.read({"id": "Scheduler-1", "workers": {"tcp://…": worker}}).workers[0].memory_limit
        1000000000
        """
        content = _mapping("identity", answer)
        return cls(_text("id", content.get("id")), read_workers(content.get("workers")))


def read_workers(answer: Any) -> tuple[WorkerIdentity, ...]:
    """Check the workers in an answer of ``Scheduler.identity``.

    Raises
    ------
    ValueError
        If they are none. The message contains a short part of the answer.
    """
    return tuple(map(_worker, _mapping("workers", answer).values()))


def _worker(answer: Any) -> WorkerIdentity:
    content = _mapping("worker", answer)
    spilled = _mapping(
        "spilled_bytes", _mapping("metrics", content.get("metrics") or {}).get("spilled_bytes") or {}
    )
    about = _mapping("cml", content.get("cml") or {})
    return WorkerIdentity(
        _text("name", content.get("name")),
        amount("nthreads", content.get("nthreads"), _MOST_THREADS),
        amount("memory_limit", content.get("memory_limit") or 0, _MOST_MEMORY),
        amount("disk", spilled.get("disk") or 0, _MOST_MEMORY),
        amount("max_spill", about.get("max_spill") or 0, _MOST_MEMORY),
        content.get("status") == "paused",
    )


def full_workers(workers: Iterable[WorkerIdentity]) -> str | None:
    """Describe the workers that start no tasks because their memory and their disk are full.

    Examples
    --------
    >>> full_workers([WorkerIdentity("lab-3", 2, 10**9, 8 * 10**9, 8 * 10**9, paused=True)])
    'worker lab-3 has spilled 8.0 of 8.0 GB and is paused: scale up, or give workers more memory'
    """
    full = [each for each in workers if each.is_full]
    if not full:
        return None
    spilled, most = sum(each.spilled for each in full) / 1e9, sum(each.max_spill for each in full) / 1e9
    who, verb = f"{len(full)} workers have", "are"
    if len(full) == 1:
        who, verb = f"worker {full[0].name} has", "is"
    words = f"spilled {spilled:.1f} of {most:.1f} GB and {verb} paused"
    return f"{who} {words}: scale up, or give workers more memory"


def _mapping(key: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        _refuse(key, value)
    return value


def _text(key: str, value: Any) -> str:
    text = str(value)
    if not isinstance(value, (str, int, float, tuple)) or len(text) > _MOST_CHARACTERS:
        _refuse(key, value)
    return text


def amount(key: str, value: Any, most: int) -> int:
    """Check a number in an answer of a scheduler, and return it as an integer.

    Raises
    ------
    ValueError
        If it is no number from 0 to `most`. The message contains a short part of the answer.
    """
    if not isinstance(value, (int, float)) or not 0 <= value <= most:  # so NaN is none
        _refuse(key, value)
    return int(value)


def _refuse(key: str, value: Any) -> NoReturn:
    raise ValueError(f"the scheduler's answer is invalid: {key}={reprlib.repr(value)}")
