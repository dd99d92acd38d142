"""What the sessions of a cluster have done so far, for its history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Seconds between two samples at first, and the maximum number of samples. Of more, every second one stays.
_INTERVAL, _MOST_SAMPLES = 5.0, 240


class Activity:
    """Sums and samples over a cluster's life, of a size that does not grow with it.

    Parameters
    ----------
    before : mapping
        The result of :meth:`to_json` of the scheduler before this one. Empty for the first one.

    Examples
    --------
    >>> activity = Activity({})
    >>> for second in range(0, 60, 5):
    ...     activity.look(1790000000.0 + second, wanted=4, connected=4, busy=1, tasks_done=second)
    >>> activity.to_json()["session_seconds"], activity.to_json()["busy_seconds"]
    (220.0, 55.0)
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._before = int(before.get("tasks_done", 0))
        self._sums = {name: before.get(name, 0) for name in ("session_seconds", "busy_seconds")}
        self._most = int(before.get("most_workers", 0))
        self._tasks_done = self._before
        self._samples: list[list[int]] = [*before.get("samples", ())]
        self._interval = float(before.get("interval", _INTERVAL))
        self._looked: float | None = None

    def look(self, now: float, wanted: int, connected: int, busy: int, tasks_done: int) -> None:
        """Add what is true now.

        Parameters
        ----------
        now : float
            The time in seconds since 1970.
        wanted, connected, busy : int
            Numbers of worker sessions: requested, connected, and with tasks.
        tasks_done : int
            Number of tasks that this scheduler has completed.
        """
        passed = 0.0 if self._looked is None else max(0.0, now - self._looked)
        self._looked = now
        self._sums["session_seconds"] += passed * connected
        self._sums["busy_seconds"] += passed * busy
        self._most = max(self._most, connected)
        self._tasks_done = self._before + tasks_done
        if not self._samples or now - self._samples[-1][0] >= self._interval:
            self._samples.append([int(now), wanted, connected, busy])
        if len(self._samples) > _MOST_SAMPLES:
            self._samples, self._interval = self._samples[::2], 2 * self._interval

    def to_json(self) -> dict[str, Any]:
        """Return the sums and samples for JSON: each sample is a time, and three numbers of sessions."""
        return {
            **self._sums,
            "tasks_done": self._tasks_done,
            "most_workers": self._most,
            "samples": self._samples,
            "interval": self._interval,
        }
