"""What has changed since a revision, so that a look costs what is new."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Maximum number of keys to remember in addition to twice the existing ones.
_MOST_FORGOTTEN = 10_000


class ChangeLog(Generic[K]):
    """The keys that have changed, the last one at the end.

    Examples
    --------
    >>> log = ChangeLog()
    >>> log.touch("a"), log.touch("b"), log.touch("a")
    (None, None, None)
    >>> log.since(0), log.since(2), log.since(3)
    (['a', 'b'], ['a'], [])
    """

    def __init__(self) -> None:
        self.revision = 0
        self._changed: dict[K, int] = {}
        #: Changes up to this revision are forgotten.
        self._forgotten = 0

    def touch(self, key: K) -> None:
        """Record a change of this key."""
        self.revision += 1
        self._changed.pop(key, None)
        self._changed[key] = self.revision

    def since(self, revision: int) -> list[K] | None:
        """Return the keys that have changed since a revision. None: not known, so look at everything."""
        if not self._forgotten <= revision <= self.revision:
            return None
        found = []
        for key in reversed(self._changed):
            if self._changed[key] <= revision:
                break
            found.append(key)
        return found

    def forget(self, existing: int) -> None:
        """Forget the oldest changes if they are many more than the existing keys."""
        while len(self._changed) > 2 * existing + _MOST_FORGOTTEN:
            oldest = next(iter(self._changed))
            self._forgotten = self._changed.pop(oldest)
