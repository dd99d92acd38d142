"""Dask's configuration: the options below ``cml``, the origin of a value, and what sessions inherit of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.config

from dask_cml.checks import nearest, of_type
from dask_cml.options.table import OPTIONS
from dask_cml.output import get_logger

logger = get_logger(__name__)

#: The environment variable with the configuration that Dask inherits from the parent process.
_INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"
_MOST_BYTES = 32 * 1024  # an environment variable may have 128 KiB on Linux
#: The sections of Dask's configuration that sessions inherit: those of dask, whose defaults are the first, of
#: distributed, and the levels of loggers.
_SECTIONS = frozenset([*dask.config.defaults[0], "distributed", "logging"])
#: Variables that set one entry of a mapping whose names have a case, which Dask does not keep.
_ENTRY = re.compile(r"(DASK_CML__(?:WORKER_GROUPS__.+?__)?(?:ENV|RESOURCES))__(.+)")
#: Keys that are for this process only. The keys of its connections are files with secrets.
_OWN = re.compile(
    r"distributed\.(client\.security-loader|comm\.(require-encryption|tls)|dashboard\.link)(\.|$)"
)

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
    name, option = f"cml.{key}", OPTIONS[key]
    try:
        # dask.config.set({"cml": {"cpu": 2}}) leaves no other option.
        return option.checked(name, dask.config.get(name, option.default), values or {})
    except (TypeError, ValueError) as error:
        place = origin(name)
        if place == "the defaults":  # which other options make invalid
            raise error from None
        raise type(error)(f"{error}, in {place}") from None


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
        If a key is unknown. The message contains the key, its origin, and the nearest option. Or if Dask has
        read the name of an entry in lower case.
    """
    for variable in os.environ:
        entry = _ENTRY.fullmatch(variable)
        if entry is not None and entry[2] != entry[2].lower():
            read, right = entry[2].lower(), f"{entry[1]}='{{\"{entry[2]}\": …}}'"
            words = f"invalid environment variable {variable}, of which Dask makes {read}: expected {right}"
            raise ValueError(words)
    options = [f"cml.{key}" for key in OPTIONS]
    found = [("cml", dask.config.get("cml", {}))]
    while found:
        key, value = found.pop(0)
        if key in options:
            continue
        if isinstance(value, Mapping):
            found += [(f"{key}.{str(name).replace('_', '-')}", nested) for name, nested in value.items()]
        elif any(option.startswith(f"{key}.") for option in options):
            raise TypeError(f"{of_type(key, value, 'a mapping')}, in {origin(key)}")
        else:
            raise ValueError(f"invalid key {key} from {origin(key)}: expected {nearest(key, options)}")


def origin(key: str) -> str:
    """Return where the value of a key comes from, such as ``the file …``, for error messages."""
    files = dask.config.collect_yaml(dask.config.paths, return_paths=True)
    variables = {f"the environment variable {name}": {name: text} for name, text in os.environ.items()}
    places = {place: dask.config.collect_env(variable) for place, variable in variables.items()}
    places |= {f"the file {path}": content for path, content in reversed([*files])}
    places["the defaults"] = DEFAULTS
    value = repr(dask.config.get(key, None))
    for place, content in places.items():
        if repr(dask.config.get(key, ..., config=content)) == value:
            return place
    return "Dask's configuration"


def inherited(state_directory: Path) -> dict[str, str]:
    """Return the environment variables by which sessions inherit this process's configuration.

    Sessions inherit the values of Dask's own sections that differ from the defaults, and the sections that
    the user names. Others may contain secrets, by whatever name: sessions, records and tasks get none.
    They also read the files of the configuration, so they inherit what differs from these, too.
    """
    variables: dict[str, str] = {}
    defaults = dask.config.merge(*reversed(dask.config.defaults))
    read = dask.config.merge(defaults, *dask.config.collect_yaml(dask.config.paths))
    changed = dask.config.merge(_changed(dask.config.config, defaults), _changed(dask.config.config, read))
    text = dask.config.serialize(changed) if changed else ""
    if len(text) > _MOST_BYTES:
        logger.warning(
            "Dask's configuration not passed to the sessions: its size is %s bytes, the limit is %s",
            len(text),
            _MOST_BYTES,
        )
    elif text:
        variables[_INHERITED] = text
    # A session prefers its environment variables, and the project's variables are set here and there.
    for name, text in os.environ.items():
        key = name.removeprefix("DASK_").lower().replace("__", ".").replace("_", "-")
        if name.startswith("DASK_") and _is_shared(key):
            value = dask.config.get(key, None)
            if isinstance(value, Mapping):
                value = _changed(value, {}, f"{key}.")
            if _json(value) is not None and value != dask.config.interpret_value(text):
                variables[name] = repr(value)
    if str(state_directory) != os.path.expanduser(OPTIONS["state-directory"].default):
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
            if below := _changed(value, default if isinstance(default, Mapping) else {}, f"{key}."):
                changed[name] = below
        elif _json(value) not in (None, _json(default)):
            changed[name] = value
    return changed


def _is_shared(key: str) -> bool:
    section = key.split(".")[0]
    if section not in _SECTIONS and section not in (name.replace("_", "-") for name in setting("inherit")):
        return False
    return _OWN.match(key) is None


def _json(value: Any) -> str | None:
    """Return a value as JSON. Return None if JSON cannot represent it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None
