"""Dask's configuration: which keys of it are ours, where a value is from, and what of it sessions get."""

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

#: The environment variable from which Dask reads the configuration of the process that started this one.
_INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"
_MOST_BYTES = 32 * 1024  # an environment variable may have 128 KiB on Linux
#: What is this process's own, or that of other cluster managers.
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
#: Names of secrets, and of the files of this process's keys.
_SECRET = re.compile(r"\btls\b|token(?!iz)|passw|secret|credential|(access|api|private)-?key", re.IGNORECASE)
#: Values with secrets in them: keys, and URLs with a password.
_SECRET_VALUE = re.compile(r"-----BEGIN|://[^/\s@]*:[^/\s@]*@")


def check_keys() -> None:
    """Refuse keys below ``cml`` that are no options.

    Raises
    ------
    TypeError, ValueError
        With the key, where it is from, and the nearest option.
    """
    options = [key for key, _ in _leaves("cml", _DEFAULTS["cml"])]
    for key, value in _leaves("cml", dask.config.get("cml"), options):
        if key in options:
            continue
        if any(option.startswith(f"{key}.") for option in options):
            raise TypeError(f"{of_type(key, value, 'a mapping')}; it is from {origin(key)}")
        near = difflib.get_close_matches(key, options, n=1)
        expected = near[0] if near else f"one of {', '.join(options)}"
        raise ValueError(f"invalid key {key} from {origin(key)}: expected {expected}")


def _leaves(path: str, value: Any, options: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the keys below a path with their values; an option may be a mapping itself."""
    if isinstance(value, Mapping) and value and path not in (options or ()):
        for name, each in value.items():
            yield from _leaves(f"{path}.{str(name).replace('_', '-')}", each, options)
    elif not isinstance(value, Mapping) or value or options is None or path in options:
        yield path, value


def origin(key: str) -> str:
    """Say where the value of a key is from: an environment variable, a file, the defaults, or the program."""
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
    """Return the environment variables by which sessions get the configuration of this process.

    It is what differs from Dask's defaults, without secrets and without what is this process's own.
    """
    variables: dict[str, str] = {}
    changed = _changed(dask.config.config, dask.config.merge(*reversed(dask.config.defaults)))
    if changed:
        text = dask.config.serialize(changed)
        if len(text) <= _MOST_BYTES:
            variables[_INHERITED] = text
        else:
            logger.warning(
                "Dask's configuration not passed on to the sessions: it has %s bytes, the limit is %s",
                len(text),
                _MOST_BYTES,
            )
    # A session prefers its variables to what it inherits, and those of the project are here and there.
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
    """Return what differs from the defaults and may be passed on."""
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
    if parts[0].startswith("cml-"):  # Dask takes DASK_CML_LOCAL_DIRECTORY and its like for configuration
        return False
    return not _SECRET.search(key) and not any(".".join(parts[: i + 1]) in _OWN for i in range(len(parts)))


def _json(value: Any) -> str | None:
    """Return a value as JSON; None if JSON cannot hold it, or it has a secret in it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return None if _SECRET_VALUE.search(text) else text
