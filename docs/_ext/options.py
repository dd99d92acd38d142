"""The ``cml-options`` directive: tables of all options, from the package's own table."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import dask_cml
from dask_cml.options import OPTION_NAMES
from dask_cml.options.table import OPTIONS, Option


class Options(SphinxDirective):
    """Insert tables of all options."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(Path(dask_cml.__file__).with_name("cml-schema.yaml")))
        return self.parse_text_to_nodes("\n".join(lines()), allow_section_headings=True)


def lines() -> Iterator[str]:
    """Yield the lines of a heading and a Markdown table for each group of options."""
    for heading, options in groupby(OPTIONS.values(), key=lambda option: option.heading):
        yield from (f"### {heading}", "", "| option | default | meaning |", "|---|---|---|")
        yield from map(row, options)
        yield ""


def row(option: Option) -> str:
    """Return the table row of an option."""
    where = "" if option.argument in OPTION_NAMES else "*Configuration only.* "
    meaning = f"{where}{option.description} *({type_name(option)})*"
    cells = f"`cml.{option.key}`", f"`{json.dumps(option.default)}`", meaning
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def type_name(option: Option) -> str:
    """Return what an option may be, in words."""
    if option.enum:
        return " or ".join(f"`{json.dumps(value)}`" for value in option.enum)
    return option.type if isinstance(option.type, str) else " or ".join(option.type)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cml-options", Options)
    return {"parallel_read_safe": True}
