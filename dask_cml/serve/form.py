"""The form of a new cluster: its fields, and what the texts in them ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_cml.options.table import Option
from dask_cml.options.texts import pairs, words
from dask_cml.options.unattended import offered_options

#: The keys of those options that most clusters are given.
_USUAL = ("name", "n-workers", "cpu", "memory", "nvidia-gpu", "idle-timeout")
_YES = "on"


def sections() -> dict[str, list[Option]]:
    """Return the options by their headings; those that are usual stand first, below ``""``."""
    options = {option.key: option for option in offered_options()}
    found = {"": [options.pop(key) for key in _USUAL]}
    for option in options.values():
        found.setdefault(option.heading, []).append(option)
    return found


def arguments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of CMLCluster that a filled form asks for; empty fields are none.

    Parameters
    ----------
    texts : mapping of str to str
        The texts of the fields by the names of the arguments. A box that is not checked has none.

    Raises
    ------
    ValueError
        For a text that cannot be read; its words repeat none that may be a secret. What a text may say is
        checked by CMLCluster.
    """
    known = {option.argument: option for option in offered_options()}
    if unknown := sorted(texts.keys() - known.keys()):
        raise ValueError(f"invalid option {unknown[0]!r}: expected one of {', '.join(known)}")
    found = {name: texts.get(name) == _YES for name, option in known.items() if option.kind == "boolean"}
    for name, text in texts.items():
        if text.strip() and known[name].kind != "boolean":
            try:
                found[name] = _value(known[name], text.strip())
            except ValueError as error:
                raise ValueError(f"invalid {name}: {error}") from None
    return found


def _value(option: Option, text: str) -> Any:
    if option.kind == "array":
        return words(text)
    if option.kind == "object":
        return pairs(option.argument, [line.strip() for line in text.splitlines() if line.strip()])
    try:
        return {"integer": int, "number": float}.get(option.kind, str)(text)
    except ValueError:
        return text  # CMLCluster says what is expected
