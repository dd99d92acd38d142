"""The table of all options, ``cml-schema.yaml``, and the checks of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from dask_cml import checks

#: The file with the table. It explains its keys.
SCHEMA = Path(__file__).parent.parent / "cml-schema.yaml"
#: The checks of options by their units or JSON types, unless the schema names another one.
_CHECKS: dict[str, Callable[..., Any]] = {
    "GiB": checks.gibibytes,
    "array": checks.names,
    "boolean": checks.boolean,
    "integer": checks.integer,
    "number": checks.positive,
    "s": checks.seconds,
    "string": checks.text,
}
#: The arguments of checks, by the keys of the schema.
_BOUNDS = {"minimum": "least", "maximum": "most", "enum": "choices", "x-refused": "refused"}


@dataclass(frozen=True)
class Option:
    """An option, as its entry in the schema describes it.

    Parameters
    ----------
    key : str
        Its key below ``cml``, such as ``n-workers`` or ``api.threads``.
    heading : str
        The heading above it.
    is_argument : bool
        Whether it is an argument of CMLCluster. Only the configuration sets other options.
    has_flag : bool
        Whether ``dask cml create`` can set it, because it applies to a cluster and not to a process.
    kind : str
        The JSON type of a value as a user types it, such as ``string`` or ``integer``.
    check : callable
        The function of :mod:`dask_cml.checks` that checks a value, and returns it as the code uses it.
    bounds : mapping
        What the check needs of the schema.
    needs : sequence of str
        The arguments of CMLCluster whose values the check also needs.
    default : object
        The default, as users write it. None needs no check, unless the check needs other options: then the
        check derives the value from them.
    description : str
        What it is, in sentences. Backticks mark code. The first sentence suffices for lists of options.
    title : str
        Its name for the form of a new cluster.
    choices : sequence of str
        All valid values, if they are a few words.
    unit : str, optional
        The unit of a number without one: ``GiB`` or ``s``.
    elsewhere : sequence of str
        What other cluster managers call it.
    is_grouped : bool
        Whether a worker group can have its own value.
    is_recorded : bool
        Whether the cluster's record contains the argument, so that other processes know it.
    is_secret : bool
        Whether values may contain secrets, which no text may show.
    """

    key: str
    heading: str
    is_argument: bool
    has_flag: bool
    kind: str
    check: Callable[..., Any]
    bounds: Mapping[str, Any]
    needs: Sequence[str]
    default: Any
    description: str
    title: str = ""
    choices: Sequence[str] = ()
    unit: str | None = None
    elsewhere: Sequence[str] = ()
    is_grouped: bool = False
    is_recorded: bool = True
    is_secret: bool = False

    @property
    def name(self) -> str:
        """Its name in Python: that of the argument, if it is one."""
        return self.key.replace("-", "_").replace(".", "_")

    def checked(self, name: str, value: Any, values: Mapping[str, Any]) -> Any:
        """Check a value, and return it as the code uses it.

        Parameters
        ----------
        name : str
            The name for messages: the argument or the key.
        value : object
            The value.
        values : mapping
            Checked values of the options in `needs`, by argument.

        Raises
        ------
        TypeError, ValueError
            If the value is invalid.
        """
        if value is None and self.default is None and not self.needs:
            return None
        return self.check(name, value, **self.bounds, **{needed: values[needed] for needed in self.needs})


def _option(key: str, heading: str, about: Mapping[str, Any]) -> Option:
    """Return an option by its entry in the schema."""
    # The first of several types is that of a value as a user types it.
    kind = about["type"] if isinstance(about["type"], str) else about["type"][0]
    named = about.get("x-check")
    check = getattr(checks, named) if named else _CHECKS[about.get("x-unit", kind)]
    is_argument = about.get("x-is-argument", "." not in key)
    entry = {"key": key, "heading": heading, "is_argument": is_argument, "has_flag": is_argument}
    entry |= {keyword.removeprefix("x-").replace("-", "_"): value for keyword, value in about.items()}
    entry |= {"kind": kind, "check": check, "choices": about.get("enum", ())}
    entry["bounds"] = {name: about[keyword] for keyword, name in _BOUNDS.items() if keyword in about}
    parameters = inspect.signature(check).parameters
    entry["needs"] = [name for name in parameters if name.replace("_", "-") in _CML["properties"]]
    return Option(**{field.name: entry[field.name] for field in fields(Option) if field.name in entry})


def _options() -> Iterator[Option]:
    """Yield all options in the order of the schema."""
    heading = ""
    for name, about in _CML["properties"].items():
        heading = about.get("x-heading", heading)
        if "properties" not in about:
            yield _option(name, heading, about)
        for below, entry in about.get("properties", {}).items():
            yield _option(f"{name}.{below}", heading, entry)


# The loader in C, if there is one, is ten times as fast.
_CML = yaml.load(SCHEMA.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["properties"]["cml"]
#: All options by their keys below ``cml``.
OPTIONS = {option.key: option for option in _options()}
#: The options that are arguments of CMLCluster, by name, in the order of its signature.
ARGUMENTS = {option.name: option for option in OPTIONS.values() if option.is_argument}
#: The names of the options that a worker group can set.
GROUP_OPTIONS = tuple(name for name, argument in ARGUMENTS.items() if argument.is_grouped)
#: Maximum number of worker sessions.
MOST_SESSIONS: int = ARGUMENTS["n_workers"].bounds["most"]
#: What other cluster managers call arguments of methods, by the arguments.
METHODS: dict[str, list[str]] = _CML["x-methods"]
#: Arguments of other cluster managers that a cluster does not need, and why.
NEEDLESS: dict[str, str] = {name: about["why"] for about in _CML["x-needless"] for name in about["names"]}
