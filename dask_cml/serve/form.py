"""Describe the form of a new cluster, and read its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask_cml.options.table import Option
from dask_cml.options.unattended import offered_options, typed

#: The keys of the options that most clusters need.
_USUAL = ("name", "n-workers", "cpu", "memory", "nvidia-gpu", "idle-timeout")
_YES = "on"


def sections() -> dict[str, list[Option]]:
    """Return the options by heading. The usual options come first, below ``""``."""
    options = {option.key: option for option in offered_options()}
    found = {"": [options.pop(key) for key in _USUAL]}
    for option in options.values():
        found.setdefault(option.heading, []).append(option)
    return found


def arguments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of CMLCluster in a completed form, without empty fields.

    Parameters
    ----------
    texts : mapping of str to str
        The texts of the fields by the names of the arguments. Unchecked checkboxes are missing.

    Raises
    ------
    ValueError
        If a text is invalid. The message omits texts that may be secrets. CMLCluster checks the values.
    """
    known = {option.argument: option for option in offered_options()}
    if unknown := sorted(texts.keys() - known.keys()):
        raise ValueError(f"invalid option {unknown[0]!r}: expected one of {', '.join(known)}")
    given: dict[str, Any] = {}
    for name, option in known.items():
        text = texts.get(name, "").strip()
        if option.kind == "boolean":
            given[name] = text == _YES
        elif text:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            given[name] = lines if option.kind == "object" else text
    return typed(given)
