"""What the sessions of a cluster have done so far, for its history."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Seconds between two samples at first, and the maximum number of samples. Beyond it, every second sample is
#: dropped.
_INTERVAL, _MOST_SAMPLES = 5.0, 240


@dataclass(frozen=True)
class Work:
    """What a scheduler knows of the work now.

    Parameters
    ----------
    wanted, connected, busy : int
        Numbers of worker sessions: requested, connected, and with tasks.
    threads : int
        Number of threads of the connected sessions.
    computed : float
        Sum of the times that tasks have taken so far, in seconds.
    tasks_done, tasks_failed : int
        Numbers of tasks that it has completed, and that have failed.
    """

    wanted: int = 0
    connected: int = 0
    busy: int = 0
    threads: int = 0
    computed: float = 0.0
    tasks_done: int = 0
    tasks_failed: int = 0


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
        Number of completed tasks, failed tasks among them.
    tasks_failed : int
        Number of failed tasks.
    failures : list of str
        The last failed tasks, with their errors.
    samples : list of list of int
        A sample is a time, and three numbers of sessions: requested, connected, and with tasks.
    interval : float
        Time between two samples, in seconds.

    Examples
    --------
    >>> activity = Activity()
    >>> for second in range(0, 60, 5):
    ...     activity.note(1790000000.0 + second, Work(wanted=4, connected=4, busy=1))
    >>> activity.session_seconds, activity.busy_seconds
    (220.0, 55.0)
    """

    session_seconds: float = 0.0
    busy_seconds: float = 0.0
    most_workers: int = 0
    tasks_done: int = 0
    tasks_failed: int = 0
    failures: list[str] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    interval: float = _INTERVAL

    def __post_init__(self) -> None:
        self._done_before, self._failed_before = self.tasks_done, self.tasks_failed
        self._last_time: float | None = None
        self._last = Work()

    def note(self, now: float, work: Work) -> None:
        """Add what is true now.

        Parameters
        ----------
        now : float
            The time in seconds since 1970.
        work : Work
            What the scheduler knows of the work.
        """
        passed = 0.0 if self._last_time is None else max(0.0, now - self._last_time)
        # Short tasks come and go between two looks.
        computed = max(0.0, work.computed - self._last.computed)
        in_sessions = computed * work.connected / work.threads if work.threads else 0.0
        self._last_time, self._last = now, work
        self.session_seconds += passed * work.connected
        self.busy_seconds += min(passed * work.connected, max(passed * work.busy, in_sessions))
        self.most_workers = max(self.most_workers, work.connected)
        self.tasks_done = self._done_before + work.tasks_done
        self.tasks_failed = self._failed_before + work.tasks_failed
        if not self.samples or now - self.samples[-1][0] >= self.interval:
            self.samples.append([int(now), work.wanted, work.connected, work.busy])
        if len(self.samples) > _MOST_SAMPLES:
            self.samples, self.interval = self.samples[::2], 2 * self.interval
