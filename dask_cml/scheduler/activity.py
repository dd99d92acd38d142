"""What the sessions of a cluster have done so far, for its history."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Seconds between two samples at first, and the maximum number of samples. Beyond it, every second sample is
#: dropped.
_INTERVAL, _MOST_SAMPLES = 5.0, 240


@dataclass
class Activity:
    """Sums and samples over a cluster's life, of a size that does not grow with it.

    A scheduler continues the activity of the scheduler before it.

    Parameters
    ----------
    session_seconds, busy_seconds : float
        The sums of the times for which sessions were connected, and had tasks, in seconds.
    most_workers : int
        The largest number of sessions that were connected at once.
    tasks_done : int
        Number of completed tasks.
    samples : list of list of int
        A sample is a time, and three numbers of sessions: requested, connected, and with tasks.
    interval : float
        Time between two samples, in seconds.

    Examples
    --------
    >>> activity = Activity()
    >>> for second in range(0, 60, 5):
    ...     activity.note(1790000000.0 + second, wanted=4, connected=4, busy=1, tasks_done=second)
    >>> activity.session_seconds, activity.busy_seconds
    (220.0, 55.0)
    """

    session_seconds: float = 0.0
    busy_seconds: float = 0.0
    most_workers: int = 0
    tasks_done: int = 0
    samples: list[list[int]] = field(default_factory=list)
    interval: float = _INTERVAL

    def __post_init__(self) -> None:
        self._done_before = self.tasks_done
        self._last_time: float | None = None

    def note(self, now: float, wanted: int, connected: int, busy: int, tasks_done: int) -> None:
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
        passed = 0.0 if self._last_time is None else max(0.0, now - self._last_time)
        self._last_time = now
        self.session_seconds += passed * connected
        self.busy_seconds += passed * busy
        self.most_workers = max(self.most_workers, connected)
        self.tasks_done = self._done_before + tasks_done
        if not self.samples or now - self.samples[-1][0] >= self.interval:
            self.samples.append([int(now), wanted, connected, busy])
        if len(self.samples) > _MOST_SAMPLES:
            self.samples, self.interval = self.samples[::2], 2 * self.interval
