"""Show the parameters of ``CMLCluster`` below the headings of its options, and no state of its parts."""

import re
from typing import Any

from sphinx.application import Sphinx

from dask_cml.options.table import ARGUMENTS

_CLASS = "dask_cml.CMLCluster"
#: Classes whose attributes belong to the keeper.
_PARTS = ("dask_cml.CMLScheduler", "dask_cml.CMLWorker")
_OTHERS = "This object"
_HEADINGS = {name: argument.heading for name, argument in ARGUMENTS.items()}


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
    for line in lines[start + 2 : end]:
        parameter = re.match(r"(\w+) : ", line)
        if parameter:
            section = sections.setdefault(_HEADINGS.get(parameter[1], _OTHERS), [])
        if line:
            section.append(line)
    lines[start:end] = [
        line for heading, section in sections.items() for line in (heading, "-" * len(heading), *section, "")
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    headings = [*dict.fromkeys(_HEADINGS.values()), _OTHERS]
    app.config.napoleon_custom_sections = [(heading, "params_style") for heading in headings]
    app.connect("autodoc-process-docstring", group_parameters, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
