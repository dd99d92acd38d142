"""The pauses of a keeper after failures, and their descriptions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping

from dask_cml.options.limits import describe
from dask_cml.sessions.causes import Cause, Loss

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: More doublings of a pause change nothing, and a float has room for a thousand.
_MOST_DOUBLINGS = 10
#: The causes of a session's end that are no failures.
_NO_FAILURES = (Cause.CLOSED, Cause.NAME_TAKEN)
#: Seconds for which a connection has to hold, so that earlier failures do not count any more, and so that the
#: pauses begin anew. Connections that break every minute are to be repaired by pauses, not by full speed.
_SETTLED, _LASTING = 30.0, 600.0


class Backoff:
    """Counts failures in a row of one worker group, and keeps how many sessions the platform launched for it.

    When a user scales the group, a new Backoff replaces this one.

    Parameters
    ----------
    name : str
        The group's name in the log, such as ``cluster mine``.
    scale : str
        The command by which a user tries again after too many failures.
    log : callable
        Called with every line for the user.
    limit : int
        Number of failures in a row after which no workers are launched (``cml.failure-limit``).
    quota_pause : float
        Pause after a refused launch, in seconds (``cml.quota-retry``).

    Examples
    --------
    >>> backoff = Backoff("cluster mine", "`dask cml scale mine N`", print, limit=5, quota_pause=60.0)
    >>> backoff.failed("the worker's session 1 ended", 1)
    Worker failed: the worker's session 1 ended
    >>> backoff.words
    "the worker's session 1 ended"
    >>> backoff.arrived(0.0)
    >>> backoff.words
    """

    def __init__(
        self, name: str, scale: str, log: Callable[[str], None], limit: int, quota_pause: float
    ) -> None:
        self._name = name[0].upper() + name[1:]
        self._scale, self._log = scale, log
        self._limit = limit
        self._quota_pause = quota_pause
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
        self._logged_limit = False

    @property
    def words(self) -> str | None:
        """The problem: failures until a worker connects, or a refusal until more sessions are launched."""
        return self._failure or self.shortage

    @property
    def shortage(self) -> str | None:
        """Why the platform has launched only some of the wanted sessions. None: it has launched all."""
        return self._shortage if self._is_short else None

    def begin_after(self, failures: int, why_gave_up: str | None) -> None:
        """Begin after the failures in a row that another process has counted."""
        self._failures = self._pauses = failures
        if why_gave_up is not None:  # by its limit
            self._failures, self._failure = max(failures, self._limit), why_gave_up
        self._pause()

    @property
    def failures(self) -> int:
        """The number of failures in a row."""
        return 0 if self._is_settled else self._failures

    @property
    def gave_up(self) -> bool:
        """Whether no workers are launched until the group is scaled, after too many failures."""
        return self._failures >= self._limit and not self._is_settled

    @property
    def pause(self) -> float:
        """Seconds until the next launch. Infinite after too many failures."""
        return math.inf if self.gave_up else max(0.0, self._not_before - time.monotonic())

    def arrived(self, now: float) -> None:
        """Record that a worker connected."""
        self._failure = None
        self._arrived = now

    @property
    def _is_settled(self) -> bool:
        """Whether no failure has followed the last connection for a while. Earlier failures are over then."""
        return self._settled_for > _SETTLED

    @property
    def _settled_for(self) -> float:
        """Seconds since the last connection, if no failure has followed it."""
        return 0.0 if self._arrived is None else time.monotonic() - self._arrived

    def lost(self, losses: Mapping[str, Loss], began: float = math.inf, lasted: float = 0.0) -> None:
        """Record workers that were lost together, by their names, which counts as one failure.

        A worker that was closed by a user, or whose name was taken, is no failure. A worker that ended while
        it ran a task makes the next launches wait, but never stops them: the scheduler gives a task up that
        ends several workers. Workers that were launched before others failed do not count again, as when the
        nodes of a cluster are drained one by one.

        Parameters
        ----------
        losses : mapping of str to Loss
            The losses.
        began : float
            When the last of them was launched.
        lasted : float
            For how long the first of them was connected, in seconds.
        """
        failures = {name: loss for name, loss in losses.items() if loss.cause not in _NO_FAILURES}
        counts = not all(loss.of_task for loss in failures.values())
        is_news = bool(failures) and began >= self._failed_at
        if is_news:
            self._forgive(lasted)
            name, loss = next(iter(failures.items()))
            self._fail(f"worker {name} lost: {loss.words}", len(failures), counts)
        replacement = "" if self.gave_up else "; launching a replacement"
        for name, loss in losses.items():
            verb = "" if loss.cause in (*_NO_FAILURES, Cause.EVICTED) else "lost: "
            self._log(f"Worker {name} {verb}{loss.words}{replacement}")
        if is_news and counts:
            self._log_giving_up()

    def failed(self, reason: str, n: int, began: float = math.inf) -> None:
        """Record that `n` launches failed together, which counts as one failure.

        Launches that `began` before others failed do not count again.
        """
        self._log(f"Worker failed: {reason}{_and_more(n)}")
        if began < self._failed_at:
            return
        self._fail(reason, n)
        self._log_giving_up()

    def _fail(self, reason: str, n: int, counts: bool = True) -> None:
        self._forgive(self._settled_for)
        if counts:
            self._failures += 1
        self._pauses += 1
        self._arrived, self._failed_at = None, time.monotonic()
        self._pause()
        self._failure = f"{reason}{_and_more(n)}"
        if counts and self.gave_up:
            self._failure = f"no new workers after {self._failures} failures in a row: {reason}"

    def _pause(self) -> None:
        doublings = min(self._pauses - 1, _MOST_DOUBLINGS)
        pause = min(_FIRST_PAUSE * 2**doublings, _LONGEST_PAUSE)
        self._not_before = time.monotonic() + (pause if self._pauses > 1 else 0)

    def _forgive(self, lasted: float) -> None:
        """Forget earlier failures, because a connection has lasted for some seconds."""
        if lasted > _SETTLED:
            self._failures = 0
        if lasted > _LASTING:
            self._pauses = 0

    def _log_giving_up(self) -> None:
        if self.gave_up:
            self._log(f"{self._name} launches {self._failure}. To try again, run {self._scale}")

    def refused(self, granted: int, requested: int, reason: str) -> None:
        """Record that the platform launched only `granted` of the requested sessions."""
        is_known = self._ceiling is not None and self._ceiling[0] == granted
        self._ceiling = (granted, time.monotonic())
        self._is_short = True
        self._shortage = f"{granted} of {requested} workers launched: {reason}"
        if not self.gave_up:  # the last word counts
            self._failure = None
        if not is_known:
            self._log(f"{self._name} launched {granted} of {requested} workers: {reason}")

    def granted(self, n: int) -> None:
        """Record that the platform has launched `n` sessions in total."""
        if self._ceiling is None or n > self._ceiling[0]:
            self._shortage = self._ceiling = None

    def limited(self, n: int, fit: int, limit: str) -> None:
        """Record that only `fit` of `n` sessions fit into a limit of the site."""
        if not self._logged_limit:
            self._log(f"{self._name} adapts to {fit} of {n} workers, because {describe(limit)}")
        self._logged_limit = True

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


def _and_more(n: int) -> str:
    return f" (and {n - 1} more)" if n > 1 else ""
