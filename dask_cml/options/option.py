"""What an option is: its words, its check, its default, and where users find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_cml import checks

_TEXTS = {"type": "array", "items": {"type": "string"}}
_SIZE = {"type": ["number", "string"]}
_ABOVE_0 = {"type": "number", "exclusiveMinimum": 0}
_MAPPING = {"type": "object"}

#: What users may write for a value that a check reads, as JSON Schema says it.
_JSON: dict[Callable[..., Any], Mapping[str, Any]] = {
    checks.boolean: {"type": "boolean"},
    checks.choice: {},
    checks.cluster_name: {"type": "string"},
    checks.environment: {**_MAPPING, "additionalProperties": {"type": "string"}},
    checks.folder: {"type": "string"},
    checks.gibibytes: _SIZE,
    checks.gibibytes_or_none: {"type": ["number", "string", "null"]},
    checks.integer: {"type": "integer"},
    checks.launch_parameters: _MAPPING,
    checks.memory_reserve: _SIZE,
    checks.names: _TEXTS,
    checks.positive: _ABOVE_0,
    checks.processes: {"type": "integer"},
    checks.resources: {**_MAPPING, "additionalProperties": {"type": "number"}},
    checks.scheduler_args: _TEXTS,
    checks.seconds: {"type": ["string", "number"]},
    checks.seconds_or_none: {"type": ["string", "number", "null"]},
    checks.sections: _TEXTS,
    checks.security: {"type": "boolean"},
    checks.text: {"type": "string"},
    checks.threads: {"type": "integer"},
    checks.worker_args: _TEXTS,
    checks.worker_command: _TEXTS,
    checks.worker_groups: {**_MAPPING, "additionalProperties": _MAPPING},
}


@dataclass(frozen=True)
class Option:
    """An option that only Dask's configuration sets.

    Parameters
    ----------
    key : str
        Its key below ``cml``, such as ``n-workers`` or ``api.threads``.
    title : str
        Its name for the form of a new cluster.
    check : callable
        The function of :mod:`dask_cml.checks` that checks a value, and returns it as the code uses it.
    default : object
        The default, as users write it. None needs no check, unless the check needs other options: then the
        check derives the value from them.
    description : str
        What it is, in sentences. Backticks mark code. The first sentence suffices for lists of options.
    least, most : int, optional
        Bounds of a number. A string with a unit may exceed them.
    choices : tuple of str
        All valid values.
    refused : mapping of str to tuple of str
        Arguments of a program or function that a value must not contain, by the reason.
    needs : tuple of str
        The arguments whose values the check also needs.
    has_flag : bool
        Whether ``dask cml create`` can set it, because it applies to a cluster and not to a process.
    heading : str
        The heading above it, which :mod:`dask_cml.options.table` fills in.
    """

    key: str
    title: str
    check: Callable[..., Any]
    default: Any
    description: str
    least: int | None = None
    most: int | None = None
    choices: Sequence[str] = ()
    refused: Mapping[str, Sequence[str]] | None = None
    needs: Sequence[str] = ()
    has_flag: bool = False
    heading: str = ""

    @property
    def name(self) -> str:
        """Its name in Python: that of the argument, if it is one."""
        return self.key.replace("-", "_").replace(".", "_")

    @property
    def kind(self) -> str:
        """The JSON type of a value as a user types it, such as ``string`` or ``integer``."""
        kinds = _JSON[self.check].get("type", "string")
        if isinstance(kinds, str):
            return kinds
        return "string" if "string" in kinds else str(kinds[0])

    def schema(self) -> dict[str, Any]:
        """Return what JSON Schema says about the option."""
        about = dict(_JSON[self.check])
        if self.default is None and "null" not in about["type"]:
            kinds = about["type"]
            about["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
        for keyword, value in (("minimum", self.least), ("maximum", self.most)):
            if value is not None:
                about[keyword] = value
        if self.choices:
            about["enum"] = [*self.choices]
        title = {"title": self.title} if self.title else {}
        return {**title, **about, "default": self.default, "description": self.description}

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
        bounds: dict[str, Any] = {}
        if self.least is not None:
            bounds["least"] = self.least
        if self.most is not None:
            bounds["most"] = self.most
        if self.choices:
            bounds["choices"] = self.choices
        if self.refused is not None:
            bounds["refused"] = self.refused
        return self.check(name, value, **bounds, **{needed: values[needed] for needed in self.needs})


@dataclass(frozen=True)
class Argument(Option):
    """An option that is also an argument of CMLCluster.

    Parameters
    ----------
    elsewhere : tuple of str
        The names of other cluster managers for it.
    is_grouped : bool
        Whether a worker group can have its own value.
    is_recorded : bool
        Whether the cluster's record contains the option, so that other processes know it.
    is_secret : bool
        Whether values may contain secrets, which no text may show.
    has_flag : bool
        Whether it is an option of ``dask cml create`` and a field of the web UI.
    """

    has_flag: bool = True

    elsewhere: Sequence[str] = ()
    is_grouped: bool = False
    is_recorded: bool = True
    is_secret: bool = False
