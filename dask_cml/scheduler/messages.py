"""Checks of messages from managers to the scheduler.

The scheduler's port takes messages from all programs that reach it, including faulty and hostile ones. The
checks refuse an invalid message or operation, before anything of it changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from dask_cml.naming import GROUP_NAME
from dask_cml.options.table import MOST_SESSIONS

_MOST_BYTES = 100_000
_LONGEST_TEXT, _LONGEST_URL = 300, 2000
_LONGEST_TIME = 10 * 365 * 24 * 3600.0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT


def _is_manager(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]{1,64}", value, re.ASCII) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SESSIONS


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def _is_seconds(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < _LONGEST_TIME  # type: ignore[operator]


def _is_group(value: object) -> bool:
    return _is_text(value) and GROUP_NAME.fullmatch(str(value)) is not None


def _is_url(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_URL and value.startswith(("https://", "http://"))


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= MOST_SESSIONS and all(map(_is_text, value))


def _is_options(value: object) -> bool:
    try:
        return isinstance(value, Mapping) and len(json.dumps(value, allow_nan=False)) <= _MOST_BYTES
    except (TypeError, ValueError, RecursionError):
        return False


def _is_wishes(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_group, value)) and all(map(_is_number, value.values()))


def _is_texts(value: object) -> bool:
    return isinstance(value, Mapping) and _is_names([*value]) and _is_names([*value.values()])


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


_EXPECTED: dict[Callable[[object], bool], str] = {
    _is_text: "text",
    _is_manager: "1 to 64 letters and digits",
    _is_count: f"a whole number from 0 to {MOST_SESSIONS}",
    _is_number: "a whole number",
    _is_seconds: "seconds as a number above 0",
    _is_url: "an https or http URL",
    _is_group: "the name of a worker group",
    _is_names: "a list of sessions' names",
    _is_options: f"options for JSON of at most {_MOST_BYTES} bytes",
    _is_texts: "a mapping of sessions' names to texts",
    _is_wishes: "a mapping of worker groups to whole numbers",
}

#: The operations of :class:`dask_cml.scheduler.wanted.Wanted` that managers may send, and their arguments.
OPERATIONS: dict[str, dict[str, Callable[[object], bool]]] = {
    "scale": {"group": _is_group, "n": _is_count},
    "adapt": {
        "group": _is_group,
        "minimum": _is_count,
        "maximum": _or_none(_is_count),
        "key": _is_text,
        "options": _is_options,
    },
    "stop_adapting": {"group": _is_group, "key": _or_none(_is_text)},
    "remove": {"names": _is_names},
    "add_group": {"group": _is_group, "options": _is_options, "n": _is_count},
    "delete_group": {"group": _is_group},
    "resize": {"group": _is_group, "n": _is_count, "key": _is_text},
    "shrink": {"group": _is_group, "names": _is_names, "key": _is_text},
    "trim": {"group": _is_group, "names": _is_names},
    "replace": {"names": _is_names, "causes": _is_texts},
    "refuse": {"group": _is_group, "names": _is_names, "wishes": _is_number},
    "keep": {"names": _is_names, "wishes": _is_wishes},
    "launched": {"names": _is_names},
    "found": {"states": _is_texts},
    "stopped": {"names": _is_names},
}

_WATCH = {"manager": _is_manager, "lease": _is_seconds, "since": _is_number, "wait": _is_seconds}


def check_watch(observes: object, **values: object) -> None:
    """Refuse an invalid message of a manager that announces itself.

    Raises
    ------
    ValueError
        If a value is invalid. All functions of this module raise this error.
    """
    _check("a manager's message", values, _WATCH)
    if not isinstance(observes, bool):
        raise ValueError(f"invalid observes={str(observes)[:100]!r}: expected true or false")


def check_operation(operation: object) -> None:
    """Refuse an invalid operation."""
    op = operation.get("op") if isinstance(operation, Mapping) else None
    if not isinstance(operation, Mapping) or not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(
            f"invalid operation {str(operation)[:100]!r}: expected one of {', '.join(OPERATIONS)}"
        )
    values = {name: value for name, value in operation.items() if name not in ("op", "wish")}
    _check(f"operation {operation['op']}", values, OPERATIONS[operation["op"]])
    if not _or_none(_is_number)(operation.get("wish")):
        raise ValueError(f"invalid wish={str(operation['wish'])[:100]!r}: expected a whole number")


def check_manager(value: object) -> None:
    """Refuse a value that is not the id of a manager."""
    _check("a manager's message", {"manager": value}, {"manager": _is_manager})


def check_values(values: Mapping[str, object]) -> None:
    """Refuse invalid values that the scheduler is to keep."""
    checks = {"orphan_timeout": _or_none(_is_seconds), "app_url": _is_url}
    _check("values", values, {name: check for name, check in checks.items() if name in values})


def check_names(value: object) -> None:
    """Refuse a value that is not a list of names."""
    _check("a manager's message", {"names": value}, {"names": _is_names})


def _check(what: str, values: Mapping[Any, object], checks: Mapping[str, Callable[[object], bool]]) -> None:
    if values.keys() != checks.keys():
        raise ValueError(f"invalid {what}: expected {', '.join(checks)}, got {', '.join(map(str, values))}")
    for name, check in checks.items():
        if not check(values[name]):
            expected = _EXPECTED.get(check, "another value")
            raise ValueError(f"invalid {name}={str(values[name])[:100]!r}: expected {expected}")
