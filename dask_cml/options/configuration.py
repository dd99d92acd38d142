"""Dask's configuration: the options below ``cml``, the origin of a value, and what sessions inherit of it."""

from __future__ import annotations

import json
import os
import re
import warnings
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
#: Mappings below this depth are inherited as a whole, or not at all.
_MOST_LEVELS = 20
#: Keys that sessions do not inherit: those of this process only, and of other cluster managers. Dask reads
#: variables such as DASK_CML_LOCAL_DIRECTORY as keys, too.
_OWN = re.compile(
    r"""(callbacks|cloudprovider|cml|coiled|gateway|get|internal-inherit-config|jobqueue|kubernetes
    |labextension|num-workers|pool|scheduler|scheduler-address
    |distributed\.(client\.security-loader|comm\.require-encryption|dashboard\.link))(\.|$)|cml-""",
    re.VERBOSE,
)
#: Names of secrets, and of files with this process's keys.
_SECRET = re.compile(r"\btls\b|token(?!iz)|passw|secret|credential|(access|api|private)-?key", re.IGNORECASE)
#: Values that contain secrets: keys, and URLs with a password.
_SECRET_VALUE = re.compile(r"-----BEGIN|://[^/\s@]*:[^/\s@]*@")

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
    """Refuse keys below ``cml`` that are not options. Warn of environment variables that have no effect.

    Raises
    ------
    TypeError, ValueError
        If a key is unknown. The message contains the key, its origin, and the nearest option.
    """
    for key in OPTIONS:
        words = key.replace(".", "__").replace("-", "_").upper()
        if f"DASK_CML_{words}" in os.environ:
            text = f"the environment variable DASK_CML_{words} has no effect: expected DASK_CML__{words}"
            warnings.warn(text, stacklevel=2)
    options = [f"cml.{key}" for key in OPTIONS]
    found = [("cml", dask.config.get("cml", {}))]
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
    files = dask.config.collect_yaml(dask.config.paths, return_paths=True)
    variables = {f"the environment variable {name}": {name: text} for name, text in os.environ.items()}
    places = {place: dask.config.collect_env(variable) for place, variable in variables.items()}
    places |= {f"the file {path}": content for path, content in reversed([*files])}
    places["the defaults"] = DEFAULTS
    value = repr(dask.config.get(key, None))
    same = (each for each in places if repr(dask.config.get(key, ..., config=places[each])) == value)
    return next(same, "Dask's configuration")


def inherited(state_directory: Path) -> dict[str, str]:
    """Return the environment variables by which sessions inherit this process's configuration.

    Sessions inherit the values that differ from Dask's defaults, except secrets and this process's own. They
    do not inherit a list with a secret in it at all, because it would be another list without the secret.
    """
    variables: dict[str, str] = {}
    changed = _changed(dask.config.config, dask.config.merge(*reversed(dask.config.defaults)))
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
        if isinstance(value, Mapping) and key.count(".") < _MOST_LEVELS:
            if below := _changed(value, default if isinstance(default, Mapping) else {}, f"{key}."):
                changed[name] = below
        elif _json(value) not in (None, _json(default)):
            changed[name] = value
    return changed


def _is_shared(key: str) -> bool:
    return not _SECRET.search(key) and not _OWN.match(key)


def _json(value: Any) -> str | None:
    """Return a value as JSON. Return None if JSON cannot represent it, or if it contains a secret."""
    try:
        text = json.dumps(value)
        json.loads(text, object_pairs_hook=_refuse_secrets)
    except (TypeError, ValueError, RecursionError):
        return None
    return None if _SECRET_VALUE.search(text) else text


def _refuse_secrets(pairs: list[tuple[str, Any]]) -> None:
    if any(_SECRET.search(name.replace("_", "-")) for name, _ in pairs):
        raise ValueError
