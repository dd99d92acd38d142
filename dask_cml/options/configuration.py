"""Dask's configuration: the options below ``cml``, and the origin of a value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.config

from dask_cml.checks import nearest, of_type
from dask_cml.options.table import OPTIONS

#: The defaults of all options.
DEFAULTS: dict[str, Any] = {}
dask.config.set({f"cml.{key}": option.default for key, option in OPTIONS.items()}, config=DEFAULTS)
dask.config.update_defaults(DEFAULTS)


def setting(key: str, values: Mapping[str, Any] | None = None) -> Any:
    """Read an option from Dask's configuration, and check it.

    Parameters
    ----------
    key : str
        The key below ``cml``, such as ``api.timeout``.
    values : mapping, optional
        Checked values of the options that the check needs.

    Raises
    ------
    TypeError, ValueError
        If the value is invalid. The message contains the key, the value, what is expected and the origin.

    Examples
    --------
    >>> setting("api.timeout")
    30.0
    """
    name = f"cml.{key}"
    try:
        return OPTIONS[key].checked(name, dask.config.get(name), values or {})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, in {origin(name)}") from None


def state_directory() -> Path:
    """Return the folder for the records of all clusters (``cml.state-directory``).

    Raises
    ------
    TypeError, ValueError
        If the value is not the path of a folder.
    """
    return Path(setting("state-directory"))


def check_keys() -> None:
    """Refuse keys below ``cml`` that are not options.

    Raises
    ------
    TypeError, ValueError
        If a key is unknown. The message contains the key, its origin, and the nearest option.
    """
    options = [f"cml.{key}" for key in OPTIONS]
    found = [("cml", dask.config.get("cml"))]
    while found:
        key, value = found.pop(0)
        if key in options:
            continue
        if isinstance(value, Mapping):
            found += [(f"{key}.{str(name).replace('_', '-')}", each) for name, each in value.items()]
        elif any(option.startswith(f"{key}.") for option in options):
            raise TypeError(f"{of_type(key, value, 'a mapping')}, in {origin(key)}")
        else:
            raise ValueError(f"invalid key {key} from {origin(key)}: expected {nearest(key, options)}")


def origin(key: str) -> str:
    """Return where the value of a key comes from, such as ``the file …``, for error messages."""
    value = repr(dask.config.get(key, None))
    for name, text in os.environ.items():
        if key_of(name) == key and repr(dask.config.interpret_value(text)) == value:
            return f"the environment variable {name}"
    for path, content in reversed([*dask.config.collect_yaml(dask.config.paths, return_paths=True)]):
        if repr(dask.config.get(key, None, config=content)) == value:
            return f"the file {path}"
    if repr(dask.config.get(key, None, config=DEFAULTS)) == value:
        return "the defaults"
    return "Dask's configuration"


def key_of(variable: str) -> str | None:
    """Return the key that an environment variable sets."""
    if not variable.startswith("DASK_"):
        return None
    return variable[len("DASK_") :].lower().replace("__", ".").replace("_", "-")
