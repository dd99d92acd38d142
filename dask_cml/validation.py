"""Data of other processes, such as messages and records: the types of fields say which values are valid."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_LONGEST_ERROR = 200
_preparing = threading.RLock()


def validate(value: Any, kind: type[T], what: str) -> T:
    """Return data of another process as a value of a type.

    No value is converted to another type, except whole numbers to floats. Unknown fields are ignored, unless
    the type forbids them.

    Parameters
    ----------
    value : object
        The data, as JSON or msgpack is read.
    kind : type
        The type, such as a dataclass. ``Annotated`` types of its fields have the bounds.
    what : str
        What the data is, for the message.

    Raises
    ------
    ValueError
        If the data is invalid. The message names the field.

    Examples
    --------
    >>> validate({"n": "2"}, dict[str, int], "number of workers")
    Traceback (most recent call last):
        ...
    ValueError: invalid number of workers: Expected `int`, got `str` - at `$[...]`
    """
    _prepare(cast(Hashable, kind))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:  # in some releases no ValueError
        raise ValueError(f"invalid {what}: {str(error)[:_LONGEST_ERROR]}") from None


@cache
def _prepare(kind: Hashable) -> None:
    """Let msgspec read a type. Two threads that both were the first would crash the interpreter."""
    with _preparing:
        msgspec.msgpack.Decoder(kind)
