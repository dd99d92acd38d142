"""What a scheduler says of itself and its workers, checked: other programs may answer at its address."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

#: The longest name or id, and the largest amount of memory, in bytes, and of threads.
_MOST_CHARACTERS, _MOST_MEMORY, _MOST_THREADS = 1000, 2**60, 2**20


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
    """

    name: str
    nthreads: int
    memory_limit: int


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
        >>> Identity.read({"id": "Scheduler-1", "workers": {"tcp://…": worker}}).workers
        (WorkerIdentity(name='7', nthreads=2, memory_limit=1000000000),)
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
    return WorkerIdentity(
        _name(content.get("name")),
        amount("nthreads", content.get("nthreads"), _MOST_THREADS),
        amount("memory_limit", content.get("memory_limit") or 0, _MOST_MEMORY),
    )


def _mapping(key: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        _refuse(key, value)
    return value


def _name(value: Any) -> str:
    text = str(value) if isinstance(value, (str, int, float, tuple)) else None
    if text is None or len(text) > _MOST_CHARACTERS:
        _refuse("name", value)
    return text


def _text(key: str, value: Any) -> str:
    text = str(value) if isinstance(value, (str, int)) else ""
    if not 0 < len(text) <= _MOST_CHARACTERS:
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
