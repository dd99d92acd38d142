"""The ``cml-options`` directive: all options with their types and defaults, from the package's own table."""

import json
from collections.abc import Iterator
from itertools import groupby

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dask_cml.options import table
from dask_cml.options.option import Argument, Option

#: The types of options, by their checks or JSON types.
_TYPES = {
    "array": "list of str",
    "boolean": "bool",
    "gibibytes": "GiB as a number, or a str with a unit",
    "gibibytes_or_none": "GiB as a number, or a str with a unit",
    "integer": "int",
    "memory_reserve": "GiB as a number, or a str with a unit",
    "number": "float",
    "object": "dict",
    "resources": "dict of str to float",
    "seconds": "seconds as a number, or a str with a unit",
    "seconds_or_none": "seconds as a number, or a str with a unit",
    "string": "str",
}


class Options(SphinxDirective):
    """Insert all options."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(table.__file__))
        return self.parse_text_to_nodes("\n".join(lines()), allow_section_headings=True)


def lines() -> Iterator[str]:
    """Yield the lines of a heading for each group of options, and of a directive for each option."""
    for heading, options in groupby(table.OPTIONS.values(), key=lambda option: option.heading):
        yield from (f"### {heading}", "")
        for option in options:
            yield from described(option)


def described(option: Option) -> Iterator[str]:
    """Yield the lines that describe an option."""
    yield f"```{{confval}} cml.{option.key}"
    yield f":type: {type_name(option)}"
    if option.default not in (None, [], {}):
        yield f":default: `{json.dumps(option.default)}`"
    yield ""
    configuration_only = "" if isinstance(option, Argument) else " *Configuration only.*"
    yield f"{option.description}{configuration_only}"
    yield from ("```", "")


def type_name(option: Option) -> str:
    """Return what an option may be, in words."""
    if option.choices:
        return " or ".join(f"`{json.dumps(value)}`" for value in option.choices)
    return _TYPES.get(option.check.__name__) or _TYPES[option.kind]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cml-options", Options)
    return {"parallel_read_safe": True}
