"""The options of a cluster for users: their descriptions from ``cml.yaml`` and ``cml-schema.yaml``."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Kind = Literal["flag", "words", "pairs", "choice", "integer", "number", "text"]

#: Options for a process that creates a cluster and stays, which do not apply to unattended clusters.
OF_STAYING_MAKERS = ("create-mode", "shutdown-on-close", "orphan-timeout", "forward-dashboard")
#: The word for None in the shell and the form, where the configuration may contain another default.
NEVER = "never"
#: Default idle time after which an unattended cluster shuts down.
UNATTENDED_IDLE_TIMEOUT = "1 hour"
_GROUP_OR_KEY = re.compile(r"^  (?:# (.+)|([\w-]+):.*)$", re.MULTILINE)


@dataclass(frozen=True)
class DescribedOption:
    """An option with its description.

    Parameters
    ----------
    key : str
        Its key below ``cml``, such as ``n-workers``.
    title : str
        Its title in a form, a noun phrase.
    text : str
        Its description, in sentences. Backquotes enclose code.
    kind : str
        The kind of its value: ``words`` for a command line, ``pairs`` for lines ``NAME=VALUE``.
    choices : tuple of str
        The valid values of a ``choice``.
    group : str
        Its heading in ``cml.yaml``.
    """

    key: str
    title: str
    text: str
    kind: Kind
    choices: tuple[str, ...]
    group: str

    @property
    def argument(self) -> str:
        """The name of the argument of CMLCluster."""
        return self.key.replace("-", "_")


@functools.cache
def _all() -> tuple[DescribedOption, ...]:
    folder = Path(__file__).parent
    schema = yaml.safe_load(folder.joinpath("cml-schema.yaml").read_text())["properties"]["cml"]
    groups, group = {}, ""
    for heading, key in _GROUP_OR_KEY.findall(folder.joinpath("cml.yaml").read_text()):
        group = heading or group
        groups[key] = group
    return tuple(
        DescribedOption(
            key=key,
            title=about.get("title", key),
            text=" ".join(about["description"].split()),
            kind=_kind(about),
            choices=tuple(about.get("enum", ())),
            group=groups[key],
        )
        for key, about in schema["properties"].items()
        if key != "api"  # options of its own
    )


def _kind(about: dict[str, Any]) -> Kind:
    types = about.get("type", "string")
    types = [types] if isinstance(types, str) else types
    if "boolean" in types:
        return "flag"
    if "array" in types:
        return "words"
    if "object" in types:
        return "pairs"
    if "enum" in about:
        return "choice"
    if "string" in types:
        return "text"
    return "integer" if "integer" in types else "number"


def described_options(arguments: Collection[str]) -> list[DescribedOption]:
    """Return the options that are arguments of a method, in the schema's order.

    Parameters
    ----------
    arguments : collection of str
        The names of the arguments. The result omits those of :data:`OF_STAYING_MAKERS`.
    """
    return [each for each in _all() if each.argument in arguments and each.key not in OF_STAYING_MAKERS]


def unattended_text(option: DescribedOption) -> str:
    """Return the description of an option for an unattended cluster, see `options.unattended`."""
    if option.key != "idle-timeout":
        return option.text
    ours = f'By default {UNATTENDED_IDLE_TIMEOUT}; "{NEVER}" is allowed.'
    return option.text.replace("By default never.", ours)


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


def pairs(argument: str, lines: Iterable[str]) -> dict[str, Any]:
    """Parse texts ``NAME=VALUE``: values are JSON if possible, else text. Values of ``env`` are text.

    Raises
    ------
    ValueError
        If a text lacks ``=``. The message does not contain the text, which may be secret.
    """
    lines = [*lines]
    if any("=" not in line for line in lines):
        raise ValueError("expected NAME=VALUE, got text without '='")
    found = dict(line.split("=", 1) for line in lines)
    return found if argument == "env" else {name: _json_or_text(value) for name, value in found.items()}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
