"""The answered wishes: each is carried out once, and none after a younger one of another manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        if len(self._results) > _MOST:
            del self._results[next(iter(self._results))]
        return self._results[manager, wish]
