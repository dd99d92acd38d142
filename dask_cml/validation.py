"""Data of other processes, such as messages and records: the types of fields say which values are valid."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LONGEST_ERROR = 200
#: Two threads that both are the first to read a type would crash the interpreter (msgspec 0.22).
_reading = threading.RLock()


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
    try:
        with _reading:
            return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:  # in some releases no ValueError
        raise ValueError(f"invalid {what}: {str(error)[:_LONGEST_ERROR]}") from None
