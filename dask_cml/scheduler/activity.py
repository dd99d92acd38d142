"""What a cluster has done so far, for its history."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Activity:
    """Sums over a cluster's life. A scheduler continues the activity of the scheduler before it.

    Parameters
    ----------
    most_workers : int
        The largest number of sessions that were connected at once.
    tasks_done : int
        Number of completed tasks, failed tasks among them.
    tasks_failed : int
        Number of failed tasks.
    failures : list of str
        The last failed tasks, with their errors.

    Examples
    --------
    >>> activity = Activity(most_workers=4, tasks_done=7)
    >>> activity.note(3, tasks_done=2, tasks_failed=1)
    >>> activity
    Activity(most_workers=4, tasks_done=9, tasks_failed=1, failures=[])
    """

    most_workers: int = 0
    tasks_done: int = 0
    tasks_failed: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._done_before, self._failed_before = self.tasks_done, self.tasks_failed

    def note(self, workers: int, tasks_done: int, tasks_failed: int) -> None:
        """Add what is true now: the connected sessions, and the tasks of this scheduler so far."""
        self.most_workers = max(self.most_workers, workers)
        self.tasks_done = self._done_before + tasks_done
        self.tasks_failed = self._failed_before + tasks_failed
