"""The ``cml-options`` directive: all options with their types and defaults, from the package's own table."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.addnodes import desc_content
from sphinx.application import Sphinx
from sphinx.domains.std import ConfigurationValue
from sphinx.util.docutils import SphinxDirective

from dask_cml.options import table
from dask_cml.options.table import Option

#: The types of options, by their units or JSON types.
_TYPES = {
    "array": "list of str",
    "boolean": "bool",
    "GiB": "GiB as a number, or a str with a unit",
    "integer": "int",
    "number": "float",
    "object": "dict",
    "s": "seconds as a number, or a str with a unit",
    "string": "str",
}


class Options(SphinxDirective):
    """Insert all options."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(table.SCHEMA))
        return self.parse_text_to_nodes("\n".join(lines()), allow_section_headings=True)


class OptionEntry(ConfigurationValue):
    """An option: Sphinx's entry of a configuration value, which also names the argument."""

    option_spec: ClassVar = {**ConfigurationValue.option_spec, "argument": directives.unchanged_required}

    def transform_content(self, content: desc_content) -> None:
        """Insert a line with the argument, the type and the default."""
        line = nodes.paragraph(classes=["facts"])
        for fact in ("argument", "type", "default"):
            if text := self.options.get(fact):
                words, _messages = self.parse_inline(text, lineno=self.lineno)
                line += nodes.inline("", "", nodes.Text(f"{fact.capitalize()}: "), *words, classes=["fact"])
                line += nodes.Text(" ")
        content.insert(0, line)


def lines() -> Iterator[str]:
    """Yield the lines of a heading for each group of options, and of a directive for each option."""
    for heading, options in groupby(table.OPTIONS.values(), key=lambda option: option.heading):
        yield from (f"### {heading}", "")
        for option in options:
            yield from described(option)


def described(option: Option) -> Iterator[str]:
    """Yield the lines that describe an option."""
    yield f"```{{confval}} cml.{option.key}"
    if option.is_argument:
        yield f":argument: `{option.name}`"
    yield f":type: {type_name(option)}"
    yield f":default: `{'None' if option.default is None else json.dumps(option.default)}`"
    yield ""
    configuration_only = "" if option.is_argument else " *Configuration only.*"
    yield f"{option.description}{configuration_only}"
    yield from ("```", "")


def type_name(option: Option) -> str:
    """Return what an option may be, in words."""
    if option.choices:
        return " or ".join(f"`{json.dumps(value)}`" for value in option.choices)
    return "dict of str to float" if option.key == "resources" else _TYPES[option.unit or option.kind]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cml-options", Options)
    app.add_directive_to_domain("std", "confval", OptionEntry, override=True)
    return {"parallel_read_safe": True}
