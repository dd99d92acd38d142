"""Messages to the scheduler: the types of their values, and checks by these types.

The checks refuse an invalid message before anything of it changes. The types of the methods that take a
message say which values are valid.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from dask_cml.naming import GROUP_NAME
from dask_cml.options.table import MOST_SESSIONS
from dask_cml.validation import validate

Text = Annotated[str, Meta(min_length=1, max_length=300)]
Group = Annotated[str, Meta(max_length=300, pattern=rf"\A{GROUP_NAME.pattern}\Z")]
Watcher = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,64}\Z")]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=MOST_SESSIONS)]
#: Less than ten years.
Seconds = Annotated[float, Meta(gt=0, lt=10 * 365 * 24 * 3600)]
Names = Annotated[Collection[Text], Meta(max_length=MOST_SESSIONS)]
#: Maximum number of characters of a line that the keeper tells its user.
LONGEST_LINE = 2000
Line = Annotated[str, Meta(min_length=1, max_length=LONGEST_LINE)]
Events = Annotated[Sequence[Mapping[Text, Line]], Meta(max_length=MOST_SESSIONS)]
#: Options for JSON.
Options = Mapping[Any, Any]

Handler = TypeVar("Handler", bound=Callable[..., Any])


def _message(method: Callable[..., Any], omitted: set[str]) -> type[msgspec.Struct]:
    """Return the form of a message. Its fields are the arguments of a method, except the omitted ones."""
    types = get_type_hints(method, include_extras=True)
    fields = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name not in omitted:
            has_default = parameter.default is not parameter.empty
            fields.append((name, types[name], parameter.default if has_default else msgspec.NODEFAULT))
    return msgspec.defstruct(method.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def checked(handler: Handler) -> Handler:
    """Check the values of a message by the types of its handler, before the handler gets them.

    The answer to a message with an invalid value is ``{"refused": why}``: Dask would log an exception with
    its traceback, and send it as a pickle.
    """
    form = _message(handler, {"self", "comm"})

    @functools.wraps(handler)
    def call(*own: Any, **values: Any) -> Any:
        try:
            message = validate(values, form, "message to the scheduler")
            return handler(*own, **msgspec.structs.asdict(message))
        except ValueError as error:
            return {"refused": str(error)}

    return call  # type: ignore[return-value]
