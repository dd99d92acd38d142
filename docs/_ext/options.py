"""The ``cml-options`` directive: every option of dask-cml, read from the package's own files.

``cml.yaml`` has the defaults, ``cml-schema.yaml`` has what each may be and what it means.
"""

import json
from collections.abc import Iterator
from importlib.resources import files

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FILES = files("dask_cml") / "cml.yaml", files("dask_cml") / "cml-schema.yaml"


class Options(SphinxDirective):
    """Insert a table of all options; what only one of the two files has is an error."""

    def run(self) -> list[nodes.Node]:
        defaults, schema = (yaml.safe_load(file.read_text()) for file in FILES)
        for file in FILES:
            self.env.note_dependency(str(file))
        table = ["| option | default | meaning |", "|---|---|---|", *rows("", defaults, schema)]
        return self.parse_text_to_nodes("\n".join(table))


def rows(key: str, default: object, schema: dict) -> Iterator[str]:
    """Yield the Markdown table row of an option, or those of the options in it."""
    if "properties" not in schema:
        meaning = f"{' '.join(schema['description'].split())} *({type_name(schema)})*"
        cells = f"`{key}`", f"`{json.dumps(default)}`", meaning
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
        return
    if schema["properties"].keys() != default.keys():
        differing = sorted(schema["properties"].keys() ^ default.keys())
        raise ValueError(f"cml.yaml and its schema differ in {differing} of {key!r}")
    for name, value in default.items():
        yield from rows(f"{key}.{name}".lstrip("."), value, schema["properties"][name])


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
