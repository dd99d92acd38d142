"""The options of a cluster as users meet them: what ``cml.yaml`` and ``cml-schema.yaml`` say of each."""

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

#: What concerns the process that creates a cluster and stays, not a cluster that is left to itself.
OF_STAYING_MAKERS = ("create-mode", "shutdown-on-close", "orphan-timeout", "forward-dashboard")
#: How the shell and the form say None where the configuration may hold another default.
NEVER = "never"
#: After which a cluster shuts down that nobody may look after, unless that is given.
UNATTENDED_IDLE_TIMEOUT = "1 hour"
_GROUP_OR_KEY = re.compile(r"^  (?:# (.+)|([\w-]+):.*)$", re.MULTILINE)


@dataclass(frozen=True)
class DescribedOption:
    """An option with its words.

    Parameters
    ----------
    key : str
        Its key below ``cml``, such as ``n-workers``.
    title : str
        A noun phrase, for a form.
    text : str
        One sentence or more; backquotes enclose code.
    kind : str
        What is asked for: ``words`` for a command line, ``pairs`` for lines ``NAME=VALUE``.
    choices : tuple of str
        What a ``choice`` may be.
    group : str
        The heading in ``cml.yaml`` that the option stands below.
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
    """Return those options that are arguments of a method, in the schema's order.

    Parameters
    ----------
    arguments : collection of str
        Their names. Those of :data:`OF_STAYING_MAKERS` are left out.
    """
    return [each for each in _all() if each.argument in arguments and each.key not in OF_STAYING_MAKERS]


def unattended_text(option: DescribedOption) -> str:
    """Return the words about an option of a cluster that nobody may look after, see `options.unattended`."""
    if option.key != "idle-timeout":
        return option.text
    ours = f'By default {UNATTENDED_IDLE_TIMEOUT}; "{NEVER}" is allowed.'
    return option.text.replace("By default never.", ours)


def words(text: str) -> list[str]:
    """Return the words of a command line, as a shell splits them.

    Raises
    ------
    ValueError
        If a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"expected words for a shell: {error}") from None


def pairs(argument: str, lines: Iterable[str]) -> dict[str, Any]:
    """Return what texts ``NAME=VALUE`` say: JSON where a value is some, else text; of ``env`` text alone.

    Raises
    ------
    ValueError
        For a text without ``=``. The words do not repeat it: it may be a secret.
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
