"""The options of clusters that the shell and the form create, their defaults, and how users type them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dask.config

from dask_cml.checks import NEVER
from dask_cml.options.table import OPTIONS, Option

#: Default idle time after which an unattended cluster shuts down.
_IDLE_TIMEOUT = "1 hour"
#: The options that every unattended cluster has at first. What ends its creator before it runs, ends it, too.
#: A port that a command forwards would close with the command.
SETTLED: dict[str, Any] = {"create_mode": "create", "shutdown_on_close": True, "forward_dashboard": False}
#: The options with a flag by name.
_OFFERED = {option.name: option for option in OPTIONS.values() if option.has_flag}


def unattended(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an unattended cluster, which shuts down after an idle time by default.

    Parameters
    ----------
    arguments : mapping
        Arguments of the cluster. An ``idle_timeout`` of ``"never"`` disables the default.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if dask.config.get("cml.idle-timeout", None) is None:
        given.setdefault("idle_timeout", _IDLE_TIMEOUT)
    return {**given, **SETTLED}


def offered_options() -> list[Option]:
    """Return the options that an unattended cluster can be given, with their configured defaults."""
    offered = []
    for option in _OFFERED.values():
        default, text = dask.config.get(f"cml.{option.key}", option.default), option.description
        if option.key == "idle-timeout":
            default = default or _IDLE_TIMEOUT
            text = text.replace("By default never.", f'By default {_IDLE_TIMEOUT}; "{NEVER}" is allowed.')
        offered.append(replace(option, default=default, description=text))
    return offered


def summary(option: Option) -> str:
    """Return the first sentence of an option's description, and its default if only a sentence says it.

    Examples
    --------
    >>> summary(OPTIONS["processes"])
    'Number of Dask worker processes in one worker session. By default one per GPU, or 1 without GPUs.'
    """
    first, *rest = re.split(r"(?<=\.) (?=\S)", option.description)
    return " ".join([first, *(sentence for sentence in rest if sentence.startswith("By default"))])


def typed(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that a user typed. CMLCluster checks those of its arguments.

    Parameters
    ----------
    texts : mapping
        By the name of the option: a text, a boolean, or for a mapping its texts ``NAME=VALUE``, or the lines
        of a JSON object. The values of a mapping are JSON if possible, else text. Those of ``env`` are text.

    Raises
    ------
    ValueError
        If a text cannot be read. The message omits the text, which may be secret.
    """
    values: dict[str, Any] = {}
    for name, text in texts.items():
        kind = _OFFERED[name].kind
        if kind == "array":
            try:
                values[name] = shlex.split(text)
            except ValueError as error:
                raise ValueError(f"invalid {name}: expected a command line: {error}") from None
        elif kind == "object" and isinstance(whole := _json_or_text("\n".join(text)), dict):
            values[name] = whole
        elif kind == "object":
            if any("=" not in pair for pair in text):
                raise ValueError(f"invalid {name}: expected NAME=VALUE, or a JSON object")
            read = str if name == "env" else _json_or_text
            values[name] = {key: read(value) for key, _, value in (pair.partition("=") for pair in text)}
        else:
            values[name] = _json_or_text(str(text)) if kind in ("integer", "number") else text
    return values


def settings(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options that are no arguments of a cluster from values, and return them as a configuration.

    Raises
    ------
    TypeError, ValueError
        If a value is invalid.
    """
    names = [name for name in values if not _OFFERED[name].is_argument]
    return {f"cml.{_OFFERED[name].key}": _OFFERED[name].checked(name, values.pop(name), {}) for name in names}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
