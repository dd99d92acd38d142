"""The answered wishes: each is carried out once, and none after a younger one of another manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Maximum number of managers, and of wishes of each, whose results are kept.
_MOST = 100
#: Seconds for which messages of managers are on their way: of wishes within them, the last to come counts.
_ON_ITS_WAY = 1.0


class AnsweredWishes:
    """The results of the last wishes, and when they were made."""

    def __init__(self) -> None:
        #: By managers, and by the numbers of their wishes.
        self._results: dict[str, dict[int, Any]] = {}
        #: The manager of the last wish for each group, and when it was made.
        self._made: dict[str, tuple[str, float]] = {}

    def once(self, manager: str, wish: int, carry_out: Callable[[], Any]) -> Any:
        """Return the result of a wish. Carry it out unless it was before: its answer may have been lost."""
        results = self._results.get(manager, {})
        if wish in results:
            return results[wish]
        result = carry_out()
        self._results.pop(manager, None)
        self._results[manager] = _last({**results, wish: result})
        self._results = _last(self._results)
        return result

    def is_last(self, manager: str, group: str, made: float) -> bool:
        """Return whether no other manager has made a younger wish for a group. Note the last wish."""
        by, last = self._made.get(group, (manager, made))
        if by != manager and made < last - _ON_ITS_WAY:
            return False
        self._made[group] = (manager, made)
        return True


def _last(answers: dict[Any, Any]) -> dict[Any, Any]:
    return dict([*answers.items()][-_MOST:])
