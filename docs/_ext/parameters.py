"""Show the parameters of ``CMLCluster`` below the headings of its options, with links to them."""

import re
from typing import Any

from sphinx.application import Sphinx

from dask_cml.options.table import ARGUMENTS

_CLASS = "dask_cml.CMLCluster"
#: Classes whose attributes are state of the process that manages the cluster, and are not shown.
_PARTS = ("dask_cml.CMLScheduler", "dask_cml.CMLWorker")
_OTHERS = "This object"


def group_parameters(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Split the section of parameters into one for each heading."""
    if name in _PARTS and "Attributes" in lines:
        del lines[lines.index("Attributes") :]
    if name != _CLASS:
        return
    start = lines.index("Parameters")
    end = lines.index("Raises")
    sections: dict[str, list[str]] = {}
    for entry in re.findall(r"^\w+ : .*(?:\n +.*)*", "\n".join(lines[start + 2 : end]), re.MULTILINE):
        argument = ARGUMENTS.get(entry.partition(" ")[0])
        section = sections.setdefault(argument.heading if argument else _OTHERS, [])
        section.extend(entry.splitlines())
        if argument:
            section.append(f"    :confval:`cml.{argument.key}`")
    lines[start:end] = [
        line for heading, section in sections.items() for line in (heading, "-" * len(heading), *section, "")
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    headings = [*dict.fromkeys(argument.heading for argument in ARGUMENTS.values()), _OTHERS]
    app.config.napoleon_custom_sections = [(heading, "params_style") for heading in headings]
    app.connect("autodoc-process-docstring", group_parameters, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
