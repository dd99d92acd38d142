"""The values of options as users type them, in the shell and in the form."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from dask_cml.options.table import OPTIONS


def typed(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a cluster that a user typed. CMLCluster checks their values.

    Parameters
    ----------
    texts : mapping
        By argument: a text, a boolean, or for a mapping its texts ``NAME=VALUE``. The values of a mapping are
        JSON if possible, else text. Those of ``env`` are text.

    Raises
    ------
    ValueError
        If a text cannot be read. The message omits the text, which may be secret.
    """
    arguments: dict[str, Any] = {}
    for name, text in texts.items():
        kind = OPTIONS[name.replace("_", "-")].kind
        if kind == "array":
            try:
                arguments[name] = shlex.split(text)
            except ValueError as error:
                raise ValueError(f"invalid {name}: expected a command line: {error}") from None
        elif kind == "object":
            if any("=" not in pair for pair in text):
                raise ValueError(f"invalid {name}: expected NAME=VALUE, got text without '='")
            read = str if name == "env" else _json_or_text
            arguments[name] = {key: read(value) for key, _, value in (pair.partition("=") for pair in text)}
        else:
            arguments[name] = _json_or_text(text) if kind in ("integer", "number") else text
    return arguments


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
