"""Write ``dask_cml/cml.yaml``, the defaults for users to read, from the table in ``cml-schema.yaml``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import dask_cml
from dask_cml.options.table import OPTIONS

HEAD = """\
# Defaults of dask-cml. Set an option with dask.config.set({"cml.n-workers": 2}), in a file in ~/.config/dask,
# or by an environment variable such as DASK_CML__N_WORKERS=2.
# docs/write_defaults.py writes this file from cml-schema.yaml.
cml:
"""


def text() -> str:
    """Return the content of the file."""
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
        comment = textwrap.wrap(option.description, 107 - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in comment)
        yield f"{indent}{name}: {default}"


if __name__ == "__main__":
    Path(dask_cml.__file__).with_name("cml.yaml").write_text(text())
