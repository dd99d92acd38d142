"""The form of a new cluster: its fields, and the options in a filled form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import dask.config

from dask_cml.cluster import CMLCluster
from dask_cml.described import (
    UNATTENDED_IDLE_TIMEOUT,
    DescribedOption,
    described_options,
    pairs,
    unattended_text,
    words,
)
from dask_cml.options import Options

#: The keys of the options that most clusters need.
_USUAL = ("name", "n-workers", "cpu", "memory", "nvidia-gpu", "idle-timeout")
#: The options whose values may be secrets.
_HIDDEN = frozenset(option.name for option in fields(Options) if not option.repr)
_YES = "on"


@dataclass(frozen=True)
class Field:
    """A field of the form.

    Parameters
    ----------
    option : DescribedOption
        The option.
    text : str
        The description of the option.
    default : str
        The value if the field stays empty. Empty if there is none, or it may be a secret.
    checked : bool
        Whether the checkbox of a flag is checked at first.
    """

    option: DescribedOption
    text: str
    default: str
    checked: bool


@functools.cache
def _options() -> list[DescribedOption]:
    return described_options(inspect.signature(CMLCluster).parameters)


def sections() -> dict[str, list[Field]]:
    """Return the fields by the headings of ``cml.yaml``. The first heading, ``""``, has the usual ones."""
    options = {option.key: option for option in _options()}
    found = {"": [_field(options[key]) for key in _USUAL]}
    for key, option in options.items():
        if key not in _USUAL:
            found.setdefault(option.group, []).append(_field(option))
    return found


def _field(option: DescribedOption) -> Field:
    value = dask.config.get(f"cml.{option.key}", None)
    if value is None and option.key == "idle-timeout":
        value = UNATTENDED_IDLE_TIMEOUT
    shown = value is not None and option.argument not in _HIDDEN and not isinstance(value, (dict, bool))
    return Field(option, unattended_text(option), f"{value}" if shown else "", value is True)


def arguments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of CMLCluster in a filled form. Empty fields are left out.

    Parameters
    ----------
    texts : mapping of str to str
        The texts of the fields by the names of the arguments. Unchecked checkboxes are missing.

    Raises
    ------
    ValueError
        If a text cannot be read. The message contains no text that may be a secret. CMLCluster checks the
        values.
    """
    known = {option.argument: option for option in _options()}
    if unknown := sorted(texts.keys() - known.keys()):
        raise ValueError(f"invalid option {unknown[0]!r}: expected one of {', '.join(known)}")
    found = {name: texts.get(name) == _YES for name, option in known.items() if option.kind == "flag"}
    for name, text in texts.items():
        if text.strip() and known[name].kind != "flag":
            try:
                found[name] = _value(known[name], text.strip())
            except ValueError as error:
                raise ValueError(f"invalid {name}: {error}") from None
    return found


def _value(option: DescribedOption, text: str) -> Any:
    if option.kind == "words":
        return words(text)
    if option.kind == "pairs":
        return pairs(option.argument, [line.strip() for line in text.splitlines() if line.strip()])
    if option.kind in ("integer", "number"):
        try:
            return int(text) if option.kind == "integer" else float(text)
        except ValueError:
            return text  # CMLCluster's error says what it expects
    return text
