"""How Sphinx builds the documentation: python -m sphinx -W -b html docs docs/_build/html."""

import importlib.metadata
import os
import re
import sys
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "dask-cml"
author = "dask-cml developers"
project_copyright = f"2026, {author}"
release = importlib.metadata.version(project)

extensions = [
    "commands",
    "myst_parser",
    "options",
    "parameters",
    "sections",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "tables",
    "words",
]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
smartquotes_action = "qe"  # two hyphens begin an option

autodoc_typehints = "none"  # the docstrings say them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = False
napoleon_use_rtype = False

# Other projects' pages, where the network is known to be there: without it, each would be a warning.
if os.environ.get("READTHEDOCS"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "dask": ("https://docs.dask.org/en/stable", None),
        "distributed": ("https://distributed.dask.org/en/stable", None),
    }

html_theme = "furo"
# Of furo's default, names of modules in code look like links.
pygments_dark_style = "github-dark"
html_title = f"{project} {release}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
copybutton_prompt_text = "$ "

# Of what is referred to here, all must be found. Other projects' pages may not be at hand.
nitpicky = True
# What scheduler and worker have in common is no public name.
nitpick_ignore_regex = [("py:.*", r"(?!dask_cml).*"), ("py:class", r"dask_cml\..*\.CMLProcess")]


def shorten_signature(app, what, name, documented, options, signature, returned):
    """Hide parameters with a leading underscore, keywords that exist only to be refused, and long lists."""
    if signature:
        signature = re.sub(r", (_\w+=\w+(\([^()]*\))?|\*\*kwargs)", "", signature)
        first, _, keywords = signature.partition(", *, ")
        if keywords.count("=") > 8:
            signature = f"{first}, *, ...)"
    return signature, returned


def draw_dashes(app, doctree):
    """Draw the hyphens that Sphinx puts between a parameter and its description."""
    for text in [*doctree.findall(nodes.Text)]:
        if text.startswith((" -- ", ") -- ")):
            text.parent.replace(text, nodes.Text(text.replace(" -- ", " \N{EN DASH} ", 1)))


def setup(app):
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("doctree-read", draw_dashes)
