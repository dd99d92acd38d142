"""The values of options as users type them, in the shell and in the form."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any


def words(text: str) -> list[str]:
    """Split a command line into words, like a shell.

    Raises
    ------
    ValueError
        If a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"expected a command line: {error}") from None


def pairs(argument: str, lines: Sequence[str]) -> dict[str, Any]:
    """Parse texts ``NAME=VALUE``: values are JSON if possible, else text. Values of ``env`` are text.

    Raises
    ------
    ValueError
        If a text lacks ``=``. The message does not contain the text, which may be secret.
    """
    if any("=" not in line for line in lines):
        raise ValueError("expected NAME=VALUE, got text without '='")
    found = dict(line.split("=", 1) for line in lines)
    return found if argument == "env" else {name: _json_or_text(value) for name, value in found.items()}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
