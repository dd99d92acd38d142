"""What has changed since a revision, so that a look costs what is new."""

from __future__ import annotations

from itertools import takewhile

#: What has changed: its kind, and its name.
Key = tuple[str, str]

#: Maximum number of keys to remember, far more than a cluster has sessions and Dask workers.
_MOST = 50_000


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
        if len(self._changed) > _MOST:
            self._forgotten = self._changed.pop(next(iter(self._changed)))

    def since(self, revision: int) -> list[Key] | None:
        """Return the keys that have changed since a revision. None: not known, so look at everything."""
        if not self._forgotten <= revision <= self.revision:
            return None
        return [*takewhile(lambda key: self._changed[key] > revision, reversed(self._changed))]
