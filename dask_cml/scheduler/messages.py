"""Checks of messages from managers to the scheduler, by the types of the methods that take them.

The scheduler's port takes messages from all programs that reach it, including faulty and hostile ones. The
checks refuse an invalid message or operation, before anything of it changes.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_type_hints

import msgspec

from dask_cml.scheduler.arguments import Age, Number
from dask_cml.scheduler.wanted import Wanted
from dask_cml.validation import validate

_MOST_BYTES = 100_000
_to_json = json.JSONEncoder(allow_nan=False).encode

Handler = TypeVar("Handler", bound=Callable[..., Any])


def _message(method: Callable[..., Any], besides: set[str], **settings: Any) -> type[msgspec.Struct]:
    """Return the form of a message: its fields are the arguments of a method, besides some."""
    types = get_type_hints(method, include_extras=True)
    fields = [
        (name, types[name], msgspec.NODEFAULT if each.default is each.empty else each.default)
        for name, each in inspect.signature(method).parameters.items()
        if name not in besides
    ]
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True, kw_only=True, **settings)


def checked(handler: Handler) -> Handler:
    """Check the values of a message by the types of its handler, before the handler gets them.

    Raises
    ------
    ValueError
        If a value is invalid.
    """
    form = _message(handler, {"self", "comm"})

    @functools.wraps(handler)
    def call(*own: Any, **values: Any) -> Any:
        message = validate(values, form, "message of a manager")
        return handler(*own, **msgspec.structs.asdict(message))

    return call  # type: ignore[return-value]


class _Operation(msgspec.Struct, tag_field="op", kw_only=True):
    wish: Number | None = None
    age: Age = 0.0


#: The operations that managers may send: the methods that take the id of the manager that sends them.
OPERATIONS = [each for each in vars(Wanted).values() if "manager" in getattr(each, "__annotations__", ())]
_FORMS = [_message(each, {"self", "manager"}, bases=(_Operation,), tag=each.__name__) for each in OPERATIONS]
_Sent = msgspec.defstruct("_Sent", [("operation", Union[tuple(_FORMS)])])  # noqa: UP007, of a tuple


def check_operation(operation: Any) -> None:
    """Refuse an invalid operation.

    Raises
    ------
    ValueError
        If it is invalid.
    """
    validate({"operation": operation}, _Sent, "operation")
    for name, value in operation.items():
        try:  # msgspec takes a set for a list, and any options
            size = len(_to_json(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"invalid {name}: {error}") from None
        if name == "options" and size > _MOST_BYTES:
            raise ValueError(f"invalid {name}: expected at most {_MOST_BYTES} bytes of JSON, got {size}")
