"""Messages from managers to the scheduler: the types of their values, and checks by these types.

The scheduler's port takes messages from all programs that reach it, including faulty and hostile ones. The
checks refuse an invalid message or operation, before anything of it changes. Which values are valid, the
types of the methods say that take them.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_type_hints

import msgspec
from msgspec import Meta

from dask_cml.naming import GROUP_NAME
from dask_cml.options.table import MOST_SESSIONS
from dask_cml.validation import validate

Text = Annotated[str, Meta(min_length=1, max_length=300)]
Group = Annotated[str, Meta(max_length=300, pattern=rf"\A{GROUP_NAME.pattern}\Z")]
Manager = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
URL = Annotated[str, Meta(max_length=2000, pattern=r"\Ahttps?://")]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=MOST_SESSIONS)]
#: Less than ten years.
Seconds = Annotated[float, Meta(gt=0, lt=10 * 365 * 24 * 3600)]
Age = Annotated[float, Meta(ge=0, lt=10 * 365 * 24 * 3600)]
Names = Annotated[Collection[Text], Meta(max_length=MOST_SESSIONS)]
#: Texts by the names of sessions, and numbers by the names of worker groups.
Texts = Annotated[Mapping[Text, Text], Meta(max_length=MOST_SESSIONS)]
Wishes = Mapping[Group, Number]
#: Checked one by one, so that an invalid one refuses no other.
Operations = Annotated[Sequence[Any], Meta(max_length=MOST_SESSIONS)]
Events = Annotated[Sequence[Mapping[Text, Text]], Meta(max_length=MOST_SESSIONS)]
#: Options for JSON.
Options = Mapping[Any, Any]

Handler = TypeVar("Handler", bound=Callable[..., Any])

_MOST_BYTES = 100_000
_to_json = json.JSONEncoder(allow_nan=False).encode


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


def check_of(operations: Iterable[Callable[..., Any]]) -> Callable[[Any], None]:
    """Return what raises ValueError for all but a valid call of one of these methods."""
    forms = [
        _message(each, {"self", "manager"}, bases=(_Operation,), tag=each.__name__) for each in operations
    ]
    sent = msgspec.defstruct("sent", [("operation", Union[tuple(forms)])])  # noqa: UP007, of a tuple

    def check_operation(operation: Any) -> None:
        validate({"operation": operation}, sent, "operation")
        for name, value in operation.items():
            try:  # msgspec takes a set for a list, and any options
                size = len(_to_json(value))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"invalid {name}: {error}") from None
            if name == "options" and size > _MOST_BYTES:
                raise ValueError(f"invalid {name}: expected at most {_MOST_BYTES} bytes of JSON, got {size}")

    return check_operation
