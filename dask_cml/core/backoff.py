"""The pauses of a keeper after failures and refusals of one worker group."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: More doublings of a pause change nothing, and a float has room for a thousand.
_MOST_DOUBLINGS = 10
#: Seconds for which a connection has to hold, so that earlier failures do not count any more, and so that the
#: pauses begin anew. Connections that break every minute are to be repaired by pauses, not by full speed.
_SETTLED, _LASTING = 30.0, 600.0


class Backoff:
    """Counts failures in a row of one worker group, and keeps how many sessions the platform launched for it.

    When a user scales the group, a new Backoff replaces this one.

    Parameters
    ----------
    limit : int
        Number of failures in a row after which no workers are launched (``cml.failure-limit``).
    quota_pause : float
        Pause after a refused launch, in seconds (``cml.quota-retry``).

    Attributes
    ----------
    is_limited : bool
        Whether the user knows that the site's limits allow fewer sessions than adaptive scaling wants.

    Examples
    --------
    >>> backoff = Backoff(limit=5, quota_pause=60.0)
    >>> backoff.failed("the worker's session 1 ended", 2)
    False
    >>> backoff.words
    "the worker's session 1 ended (and 1 more)"
    >>> backoff.arrived(0.0)
    >>> backoff.words
    """

    def __init__(self, limit: int, quota_pause: float) -> None:
        self._limit, self._quota_pause = limit, quota_pause
        self._failures, self._pauses, self._not_before = 0, 0, 0.0
        self._arrived: float | None = None
        #: When a launch or a worker failed last.
        self._failed_at = -math.inf
        #: How many sessions the platform launched when it refused one last, and when.
        self._ceiling: tuple[int, float] | None = None
        self._failure: str | None = None
        self._shortage: str | None = None
        #: Whether more sessions are wanted than the platform launched when it refused one last.
        self._is_short = False
        self.is_limited = False

    @property
    def words(self) -> str | None:
        """The problem: failures until a worker connects, or a refusal until more sessions are launched."""
        return self._failure or self.shortage

    @property
    def shortage(self) -> str | None:
        """Why the platform has launched only some of the wanted sessions. None: it has launched all."""
        return self._shortage if self._is_short else None

    # -- failures

    @property
    def failures(self) -> int:
        """The number of failures in a row. It is 0 if none has followed the last connection for a while."""
        return 0 if self._settled_for > _SETTLED else self._failures

    @property
    def gave_up(self) -> bool:
        """Whether no workers are launched until the group is scaled, after too many failures."""
        return self.failures >= self._limit

    @property
    def pause(self) -> float:
        """Seconds until the next launch. Infinite after too many failures."""
        return math.inf if self.gave_up else max(0.0, self._not_before - time.monotonic())

    @property
    def _settled_for(self) -> float:
        """Seconds since the last connection, if no failure has followed it."""
        return 0.0 if self._arrived is None else time.monotonic() - self._arrived

    def begin_after(self, failures: int, why_gave_up: str | None) -> None:
        """Begin after the failures in a row that another process has counted."""
        self._failures = self._pauses = failures
        if why_gave_up is not None:  # by its limit
            self._failures, self._failure = max(failures, self._limit), why_gave_up
        self._pause()

    def arrived(self, now: float) -> None:
        """Record that a worker connected."""
        self._failure = None
        self._arrived = now

    def failed(
        self, reason: str, n: int, began: float = math.inf, *, lasted: float = 0.0, counts: bool = True
    ) -> bool:
        """Record that `n` launches or workers failed together, which counts as one failure.

        Workers that were launched before others failed do not count again, as when the nodes of a cluster are
        drained one by one.

        Parameters
        ----------
        reason : str
            Why the first of them failed.
        n : int
            Their number.
        began : float
            When the last of them was launched.
        lasted : float
            For how long the first of them was connected, in seconds.
        counts : bool
            Whether too many such failures stop further launches. Those of tasks make the next launches wait,
            but never stop them: the scheduler gives a task up that ends several workers.

        Returns
        -------
        bool
            Whether this was the last failure, after which no workers are launched.
        """
        if began < self._failed_at:
            return False
        lasted = max(lasted, self._settled_for)
        if lasted > _SETTLED:
            self._failures = 0
        if lasted > _LASTING:
            self._pauses = 0
        self._failures += counts
        self._pauses += 1
        self._arrived, self._failed_at = None, time.monotonic()
        self._pause()
        self._failure = f"{reason} (and {n - 1} more)" if n > 1 else reason
        gives_up = counts and self.gave_up
        if gives_up:
            self._failure = f"no new workers after {self._failures} failures in a row: {reason}"
        return gives_up

    def _pause(self) -> None:
        doublings = min(self._pauses - 1, _MOST_DOUBLINGS)
        pause = min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE)
        self._not_before = time.monotonic() + (pause if self._pauses > 1 else 0)

    # -- refusals

    def refused(self, granted: int, shortage: str) -> bool:
        """Record that the platform launched only `granted` sessions. Return whether that is new."""
        is_new = self._ceiling is None or self._ceiling[0] != granted
        self._ceiling = (granted, time.monotonic())
        self._is_short, self._shortage = True, shortage
        if not self.gave_up:  # the last word counts
            self._failure = None
        return is_new

    def granted(self, n: int) -> None:
        """Record that the platform has launched `n` sessions in total."""
        if self._ceiling is None or n > self._ceiling[0]:
            self._shortage = self._ceiling = None

    @property
    def ceiling(self) -> float:
        """How many sessions to have at most: as many as the platform launched when it refused one last.

        After ``cml.quota-retry``, it is one more. Infinite if the platform has not refused any since.
        """
        if self._ceiling is None:
            return math.inf
        granted, since = self._ceiling
        return granted + 1 if time.monotonic() - since > self._quota_pause else granted

    def affordable(self, n: int, wanted: int, waits: Collection[float]) -> int:
        """Return how many of `n` sessions to ask for: no more than :attr:`ceiling`.

        If sessions have been queued for longer than ``cml.quota-retry``, ask for no more than exist.

        Parameters
        ----------
        n : int
            Number of sessions to launch.
        wanted : int
            Number of sessions that are wanted already.
        waits : collection of float
            How long queued sessions have waited, in seconds.
        """
        if any(waited > self._quota_pause for waited in waits):
            n = min(n, wanted)
        self._is_short = self._ceiling is not None and n > self._ceiling[0]
        return int(min(n, self.ceiling))
