"""The table of the options, which ``cml-schema.yaml`` contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from dask_cml import checks

#: The keywords that bound a value, with the parameters of the checks.
_BOUNDS = {"minimum": "least", "maximum": "most", "enum": "choices", "refused": "refused"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option, with its keywords in the schema. The head of ``cml-schema.yaml`` explains them.

    Parameters
    ----------
    key : str
        Its key below ``cml``, such as ``n-workers`` or ``api.threads``.
    bounds : mapping
        What bounds its value, by the parameters of its check.
    """

    key: str
    heading: str
    title: str = ""
    description: str
    default: Any
    type: str | Sequence[str] = "string"
    enum: Sequence[str] = ()
    bounds: Mapping[str, Any]
    check: str = ""
    needs: Sequence[str] = ()
    elsewhere: Sequence[str] = ()
    grouped: bool = False
    recorded: bool = True
    secret: bool = False
    unattended: bool = True

    @property
    def argument(self) -> str:
        """The name of the argument of CMLCluster."""
        return self.key.replace("-", "_")

    @property
    def kind(self) -> str:
        """The JSON type of a value as a user types it, such as ``string`` or ``integer``."""
        kinds = [self.type] if isinstance(self.type, str) else self.type
        return "string" if "string" in kinds else kinds[0]

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
        check = getattr(checks, self.check or self.kind)
        return check(name, value, **self.bounds, **{needed: values[needed] for needed in self.needs})


def _read(properties: Mapping[str, Any], section: str = "", heading: str = "") -> Iterator[Option]:
    known = {field.name for field in fields(Option)}
    for name, about in properties.items():
        heading = about.get("heading", heading)
        if "properties" in about:
            yield from _read(about["properties"], f"{name}.", heading)
        else:
            keywords = {keyword: value for keyword, value in about.items() if keyword in known}
            bounds = {_BOUNDS[keyword]: value for keyword, value in about.items() if keyword in _BOUNDS}
            yield Option(**{**keywords, "key": f"{section}{name}", "heading": heading, "bounds": bounds})


def _load() -> dict[str, Option]:
    text = Path(__file__).parents[1].joinpath("cml-schema.yaml").read_text()
    schema = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the first is ten times as fast
    return {option.key: option for option in _read(schema["properties"]["cml"]["properties"])}


#: All options by their keys below ``cml``.
OPTIONS = _load()
#: Maximum number of worker sessions.
MOST_SESSIONS: int = OPTIONS["n-workers"].bounds["most"]
