"""Dask's configuration: its keys below ``cml``, the origin of a value, and what sessions inherit."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask.config
import yaml

from dask_cml.checks import of_type

logger = logging.getLogger(__name__)

_DEFAULTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cml.yaml").read_text())
dask.config.update_defaults(_DEFAULTS)

#: The environment variable with the configuration that Dask inherits from the parent process.
_INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"
_MOST_BYTES = 32 * 1024  # an environment variable may have 128 KiB on Linux
#: Keys that sessions do not inherit: those of this process only, and of other cluster managers.
_OWN = frozenset(
    {
        "callbacks",
        "cloudprovider",
        "cml",
        "coiled",
        "distributed.client.security-loader",
        "distributed.comm.require-encryption",
        "distributed.dashboard.link",
        "gateway",
        "get",
        "internal-inherit-config",
        "jobqueue",
        "kubernetes",
        "labextension",
        "num-workers",
        "pool",
        "scheduler",
        "scheduler-address",
    }
)
#: Names of secrets, and of files with this process's keys.
_SECRET = re.compile(r"\btls\b|token(?!iz)|passw|secret|credential|(access|api|private)-?key", re.IGNORECASE)
#: Values that contain secrets: keys, and URLs with a password.
_SECRET_VALUE = re.compile(r"-----BEGIN|://[^/\s@]*:[^/\s@]*@")


def check_keys() -> None:
    """Refuse keys below ``cml`` that are not options.

    Raises
    ------
    TypeError, ValueError
        If a key is unknown. The message contains the key, its origin, and the nearest option.
    """
    options = [key for key, _ in _leaves("cml", _DEFAULTS["cml"])]
    for key, value in _leaves("cml", dask.config.get("cml"), options):
        if key in options:
            continue
        if any(option.startswith(f"{key}.") for option in options):
            raise TypeError(f"{of_type(key, value, 'a mapping')}, in {origin(key)}")
        near = difflib.get_close_matches(key, options, n=1)
        expected = near[0] if near else f"one of {', '.join(options)}"
        raise ValueError(f"invalid key {key} from {origin(key)}: expected {expected}")


def _leaves(path: str, value: Any, options: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the keys below a path with their values. The value of an option may be a mapping."""
    if isinstance(value, Mapping) and value and path not in (options or ()):
        for name, each in value.items():
            yield from _leaves(f"{path}.{str(name).replace('_', '-')}", each, options)
    elif not isinstance(value, Mapping) or value or options is None or path in options:
        yield path, value


def origin(key: str) -> str:
    """Return where the value of a key comes from, such as ``the file …``, for error messages."""
    value = repr(dask.config.get(key, None))
    for name, text in os.environ.items():
        if _key(name) == key and repr(dask.config.interpret_value(text)) == value:
            return f"the environment variable {name}"
    for path, content in reversed([*dask.config.collect_yaml(dask.config.paths, return_paths=True)]):
        if repr(dask.config.get(key, None, config=content)) == value:
            return f"the file {path}"
    if repr(dask.config.get(key, None, config={"cml": _DEFAULTS["cml"]})) == value:
        return "the defaults"
    return "Dask's configuration"


def _key(variable: str) -> str | None:
    """Return the key that an environment variable sets."""
    if not variable.startswith("DASK_"):
        return None
    return variable[len("DASK_") :].lower().replace("__", ".").replace("_", "-")


def inherited(state_directory: Path) -> dict[str, str]:
    """Return the environment variables by which sessions inherit this process's configuration.

    Sessions inherit the values that differ from Dask's defaults, except secrets and this process's own.
    """
    variables: dict[str, str] = {}
    changed = _changed(dask.config.config, dask.config.merge(*reversed(dask.config.defaults)))
    if changed:
        text = dask.config.serialize(changed)
        if len(text) <= _MOST_BYTES:
            variables[_INHERITED] = text
        else:
            logger.warning(
                "Dask's configuration not passed to the sessions: its size is %s bytes, the limit is %s",
                len(text),
                _MOST_BYTES,
            )
    # A session prefers its environment variables, and the project's variables are set here and there.
    for name, text in os.environ.items():
        key = _key(name)
        if key is not None and _is_shared(key):
            value = dask.config.get(key, None)
            if value != dask.config.interpret_value(text) and _json(value) is not None:
                variables[name] = repr(value)
    if str(state_directory) != os.path.expanduser(_DEFAULTS["cml"]["state-directory"]):
        variables["DASK_CML__STATE_DIRECTORY"] = str(state_directory)
    return variables


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values that differ from the defaults and that sessions may inherit."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}{name}".replace("_", "-")
        default = defaults.get(dask.config.canonical_name(name, dict(defaults)))
        if not _is_shared(key):
            continue
        if isinstance(value, Mapping):
            below = _changed(value, default if isinstance(default, Mapping) else {}, f"{key}.")
            if below:
                changed[name] = below
        elif _json(value) not in (None, _json(default)):
            changed[name] = value
    return changed


def _is_shared(key: str) -> bool:
    parts = key.split(".")
    if parts[0].startswith("cml-"):  # Dask reads DASK_CML_LOCAL_DIRECTORY and similar as configuration
        return False
    return not _SECRET.search(key) and not any(".".join(parts[: i + 1]) in _OWN for i in range(len(parts)))


def _json(value: Any) -> str | None:
    """Return a value as JSON. Return None if JSON cannot represent it, or if it contains a secret."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return None if _SECRET_VALUE.search(text) else text
