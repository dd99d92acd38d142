"""What has changed since a revision, so that a look costs what is new."""

from __future__ import annotations

from itertools import takewhile

#: What has changed: its kind, and its name.
Key = tuple[str, str]

#: Maximum number of keys to remember in addition to twice the existing ones.
_MOST_FORGOTTEN = 10_000


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
        """Record a change of this key."""
        self.revision += 1
        self._changed.pop(key, None)
        self._changed[key] = self.revision

    def since(self, revision: int) -> list[Key] | None:
        """Return the keys that have changed since a revision. None: not known, so look at everything."""
        if not self._forgotten <= revision <= self.revision:
            return None
        return [*takewhile(lambda key: self._changed[key] > revision, reversed(self._changed))]

    def forget(self, existing: int) -> None:
        """Forget the oldest changes if they are many more than the existing keys."""
        while len(self._changed) > 2 * existing + _MOST_FORGOTTEN:
            oldest = next(iter(self._changed))
            self._forgotten = self._changed.pop(oldest)
