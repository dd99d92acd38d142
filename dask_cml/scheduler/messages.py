"""Checks of messages from managers to the scheduler.

The scheduler's port takes messages from all programs that reach it, including faulty and hostile ones. The
checks refuse an invalid message as a whole, before anything changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dask_cml.checks import is_session_id
from dask_cml.naming import DEFAULT_GROUP, GROUP_NAME
from dask_cml.options.table import MOST_SESSIONS as _MOST

_MOST_GROUPS = 1_000
_LONGEST_TEXT = 300
_LONGEST_TIME = 10 * 365 * 24 * 3600.0
_MOST_INFO = 20


def check_manager(value: object) -> None:
    """Refuse a value that is not the id of a manager.

    Raises
    ------
    ValueError
        If the value is invalid. All functions of this module raise this error.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,64}", value):
        raise _invalid("manager", value, "1 to 64 letters and digits")


def check_info(value: object) -> None:
    """Refuse a value that is not a short description of a manager."""
    allowed = f"a mapping of at most {_MOST_INFO} names to text or numbers"
    if not isinstance(value, Mapping) or len(value) > _MOST_INFO:
        raise _invalid("info", value, allowed)
    for name, each in value.items():
        if not _is_text(name) or not (each is None or _is_text(each) or isinstance(each, (bool, int, float))):
            raise _invalid("info", value, allowed)


def check_seconds(name: str, value: object) -> None:
    """Refuse a value that is not a duration."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LONGEST_TIME:
        raise _invalid(name, value, "seconds as a number above 0")


def check_orphan_timeout(value: object) -> None:
    """Refuse a value that is neither a duration nor None."""
    if value is not None:
        check_seconds("orphan_timeout", value)


def check_wanted(value: object) -> None:
    """Refuse a value that is not a mapping of worker groups to numbers of worker sessions, or None."""
    allowed = f"a mapping of worker groups to whole numbers from 0 to {_MOST}, or None"
    if not isinstance(value, Mapping) or len(value) > _MOST_GROUPS:
        raise _invalid("wanted", value, allowed)
    for group, n in value.items():
        is_number = isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MOST
        if not _is_group(group) or not (is_number or (n is None and group != DEFAULT_GROUP)):
            raise _invalid("wanted", {group: n}, allowed)


def check_adapts(value: object) -> None:
    """Refuse a value that is not a mapping of worker groups to limits of adaptive scaling."""
    allowed = "a mapping of worker groups to a minimum of at least 0 and a maximum of at least the minimum"
    if not isinstance(value, Mapping) or len(value) > _MOST_GROUPS:
        raise _invalid("adapts", value, allowed)
    for group, limits in value.items():
        if not _is_group(group) or not isinstance(limits, Mapping) or limits.keys() != {"minimum", "maximum"}:
            raise _invalid("adapts", {group: limits}, allowed)
        least, most = limits["minimum"], limits["maximum"]
        numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in (least, most))
        if not numbers or not 0 <= least <= most:
            raise _invalid("adapts", {group: limits}, allowed)


def check_launched(value: object) -> None:
    """Refuse a value that is not a mapping of workers' names to session ids."""
    allowed = "a mapping of workers' names to sessions' ids"
    if not isinstance(value, Mapping) or len(value) > _MOST:
        raise _invalid("launched", value, allowed)
    for name, session_id in value.items():
        if not _is_text(name) or not is_session_id(session_id):
            raise _invalid("launched", {name: session_id}, allowed)


def check_owners(value: object) -> None:
    """Refuse a value that is not a mapping of workers' names to owners."""
    allowed = "a mapping of workers' names to the ids of their sessions' owners"
    if not isinstance(value, Mapping) or len(value) > _MOST:
        raise _invalid("owners", value, allowed)
    for name, owner in value.items():
        if not _is_text(name) or not _is_text(owner):
            raise _invalid("owners", {name: owner}, allowed)


def check_cluster(value: object) -> None:
    """Refuse a value that is not the name of a cluster."""
    if not _is_text(value):
        raise _invalid("cluster", value, "a cluster's name")


def check_names(name: str, value: object) -> None:
    """Refuse a value that is not a list of workers' names."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST or not all(map(_is_text, value)):
        raise _invalid(name, value, "a list of workers' names")


def _is_group(value: object) -> bool:
    return _is_text(value) and GROUP_NAME.fullmatch(str(value)) is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT


def _invalid(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"invalid {name}={repr(value)[:100]}: expected {allowed}")
