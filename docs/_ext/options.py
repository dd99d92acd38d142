"""The ``cml-options`` directive: every option of dask-cml, read from the package's own files.

``cml.yaml`` has the defaults and the groups, ``cml-schema.yaml`` has what each may be and what it means. The
arguments of ``CMLCluster`` tell which options can be given there.
"""

import inspect
import json
import re
from collections.abc import Iterator
from importlib.resources import files

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dask_cml import CMLCluster

FILES = files("dask_cml") / "cml.yaml", files("dask_cml") / "cml-schema.yaml"
ARGUMENTS = {name.replace("_", "-") for name in inspect.signature(CMLCluster).parameters}


class Options(SphinxDirective):
    """Insert tables of all options; what only one of the two files has is an error."""

    def run(self) -> list[nodes.Node]:
        for file in FILES:
            self.env.note_dependency(str(file))
        return self.parse_text_to_nodes("\n".join(lines()), allow_section_headings=True)


def lines() -> Iterator[str]:
    """Yield the lines of a heading and a Markdown table for each group of options."""
    text = FILES[0].read_text()
    defaults, schema = yaml.safe_load(text)["cml"], yaml.safe_load(FILES[1].read_text())
    schema = schema["properties"]["cml"]
    check(defaults, schema, "cml")
    for part in re.split(r"^  # ", text, flags=re.MULTILINE)[1:]:
        yield from (f"### {part.splitlines()[0]}", "", "| option | default | meaning |", "|---|---|---|")
        for name in re.findall(r"^  ([\w-]+):", part, flags=re.MULTILINE):
            yield from rows(f"cml.{name}", defaults[name], schema["properties"][name])
        yield ""


def rows(key: str, default: object, schema: dict) -> Iterator[str]:
    """Yield the table row of an option, or those of the options in it."""
    if "properties" in schema:
        check(default, schema, key)
        for name, value in default.items():
            yield from rows(f"{key}.{name}", value, schema["properties"][name])
        return
    where = "" if key.removeprefix("cml.") in ARGUMENTS else "*Configuration only.* "
    meaning = f"{where}{' '.join(schema['description'].split())} *({type_name(schema)})*"
    cells = f"`{key}`", f"`{json.dumps(default)}`", meaning
    yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def check(defaults: dict, schema: dict, key: str) -> None:
    """Check that both files have the same options below a key."""
    if schema["properties"].keys() != defaults.keys():
        differing = sorted(schema["properties"].keys() ^ defaults.keys())
        raise ValueError(f"cml.yaml and its schema differ in {differing} of {key!r}")


def type_name(schema: dict) -> str:
    """Return what an option may be, in words."""
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "type" not in schema:
        return " or ".join(type_name(one) for one in schema["anyOf"])
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return " or ".join(names)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cml-options", Options)
    return {"parallel_read_safe": True}
