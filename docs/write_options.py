"""Write ``cml.yaml``, the defaults for users to read, and ``cml-schema.yaml`` from the table of options."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import dask_cml
from dask_cml.options.table import OPTIONS, SECTIONS
from dask_cml.options.unattended import summary

HEAD = """\
# Defaults of dask-cml. Set an option with dask.config.set({"cml.n-workers": 2}), in a file in ~/.config/dask,
# or by an environment variable such as DASK_CML__N_WORKERS=2. The page Options of the documentation has more.
# docs/write_options.py writes this file from the table in options/table.py.
cml:
"""
SCHEMA_HEAD = """\
# JSON Schema of the options. docs/write_options.py writes this file from the table in options/table.py.
"""


def defaults() -> str:
    """Return the content of ``cml.yaml``."""
    return HEAD + "".join(f"{line}\n" for line in lines())


def lines() -> Iterator[str]:
    heading = section = ""
    for option in OPTIONS.values():
        if option.heading != heading:
            heading = option.heading
            yield from ("", f"  # -- {heading}", "")
        *sections, name = option.key.split(".")
        indent = "  " * (1 + len(sections))
        if sections and sections[0] != section:
            section = sections[0]
            yield f"  {section}:"
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        comment = textwrap.wrap(summary(option), 107 - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in comment)
        yield f"{indent}{name}: {default}"


def schema() -> str:
    """Return the content of ``cml-schema.yaml``."""
    properties: dict[str, Any] = {}
    for option in OPTIONS.values():
        *sections, name = option.key.split(".")
        below = properties
        for section in sections:
            about = {"description": SECTIONS[section], **mapping({})}
            below = properties.setdefault(section, about)["properties"]
        below[name] = option.schema()
    whole = {"properties": {"cml": mapping(properties)}}
    return SCHEMA_HEAD + yaml.dump(whole, Dumper=Plain, sort_keys=False, allow_unicode=True, width=110)


def mapping(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


class Plain(yaml.SafeDumper):
    """Writes a value wherever it is, and lists of words in one line."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


Plain.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)


if __name__ == "__main__":
    package = Path(dask_cml.__file__).parent
    package.joinpath("cml.yaml").write_text(defaults())
    package.joinpath("cml-schema.yaml").write_text(schema())
