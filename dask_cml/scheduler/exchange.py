"""What the scheduler remembers for managers that ask again: the changes, and the answered wishes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

#: What has changed: its kind, and its name.
Key = tuple[str, str]

#: Maximum number of keys to remember, far more than a cluster has sessions and Dask workers.
_MOST_CHANGES = 50_000
#: Maximum number of wishes whose results are kept.
_MOST_RESULTS = 10_000
#: Seconds for which messages of managers are on their way: of wishes within them, the last to come counts.
_ON_ITS_WAY = 1.0


class ChangeLog:
    """The keys that have changed, the last one at the end.

    Examples
    --------
    >>> log = ChangeLog()
    >>> for name in "a", "b", "a":
    ...     log.touch(("session", name))
    >>> log.since(0), log.since(2), log.since(3)
    ([('session', 'a'), ('session', 'b')], [('session', 'a')], [])
    """

    def __init__(self) -> None:
        self.revision = 0
        self._changed: dict[Key, int] = {}
        #: Changes up to this revision are forgotten.
        self._forgotten = 0

    def touch(self, key: Key) -> None:
        """Record a change of this key. Of too many, forget the oldest."""
        self.revision += 1
        self._changed.pop(key, None)
        self._changed[key] = self.revision
        if len(self._changed) > _MOST_CHANGES:
            self._forgotten = self._changed.pop(next(iter(self._changed)))

    def since(self, revision: int) -> list[Key] | None:
        """Return the keys that have changed since a revision. None: not known, so look at everything."""
        if not self._forgotten <= revision <= self.revision:
            return None
        return [*takewhile(lambda key: self._changed[key] > revision, reversed(self._changed))]


class AnsweredWishes:
    """The answered wishes: each is carried out once, and none after a younger one of another manager."""

    def __init__(self) -> None:
        #: By managers and the numbers of their wishes, the oldest first.
        self._results: dict[tuple[str, int], Any] = {}
        #: The manager of the last wish for each group, and when it was made.
        self._made: dict[str, tuple[str, float]] = {}

    def once(
        self, manager: str, wish: int, carry_out: Callable[[], Any], groups: Iterable[str], made: float
    ) -> Any:
        """Return the result of a wish. Carry it out unless it was before: its answer may have been lost.

        Raises
        ------
        ValueError
            If another manager has made a younger wish for one of the groups.
        """
        if (manager, wish) not in self._results:
            for group in groups:
                by, last = self._made.get(group, (manager, made))
                if by != manager and made < last - _ON_ITS_WAY:
                    raise ValueError(f"another manager has changed worker group {group!r} since this request")
                self._made[group] = (manager, made)
            self._results[manager, wish] = carry_out()
        if len(self._results) > _MOST_RESULTS:
            del self._results[next(iter(self._results))]
        return self._results[manager, wish]
