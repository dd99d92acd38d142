"""The answered wishes: each is carried out once, and none after a younger one of another manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Maximum number of wishes whose results are kept.
_MOST = 10_000
#: Seconds for which messages of managers are on their way: of wishes within them, the last to come counts.
_ON_ITS_WAY = 1.0


class AnsweredWishes:
    """The results of the last wishes, and when they were made."""

    def __init__(self) -> None:
        #: By managers and the numbers of their wishes, the oldest first.
        self._results: dict[tuple[str, int], Any] = {}
        #: The manager of the last wish for each group, and when it was made.
        self._made: dict[str, tuple[str, float]] = {}

    def once(self, manager: str, wish: int, carry_out: Callable[[], Any]) -> Any:
        """Return the result of a wish. Carry it out unless it was before: its answer may have been lost."""
        if (manager, wish) not in self._results:
            self._results[manager, wish] = carry_out()
        if len(self._results) > _MOST:
            del self._results[next(iter(self._results))]
        return self._results[manager, wish]

    def is_last(self, manager: str, group: str, made: float) -> bool:
        """Return whether no other manager has made a younger wish for a group. Note the last wish."""
        by, last = self._made.get(group, (manager, made))
        if by != manager and made < last - _ON_ITS_WAY:
            return False
        self._made[group] = (manager, made)
        return True
