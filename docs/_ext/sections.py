"""Write the words of all sections for the search: ``scorer.js`` finds the best section of a page."""

import json
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_FILE = "sections.js"


def _sections(doctree: nodes.document) -> Iterator[tuple[str, str, str]]:
    """Yield the anchor, the heading and the words of each section of a page, without the sections in it."""
    for section in doctree.findall(nodes.section):
        text = " ".join(
            child.astext()
            for child in section.children
            if not isinstance(child, (nodes.section, nodes.title))
        )
        is_page = isinstance(section.parent, nodes.document)
        words = " ".join(sorted({*re.findall(r"\w+", text.lower())}))
        yield "" if is_page else section["ids"][0], section[0].astext(), words


def write_sections(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Write the file, and let the search page load it."""
    if page != "search":
        return
    found = {name: [*_sections(app.env.get_doctree(name))] for name in sorted(app.env.found_docs)}
    (app.outdir / "_static" / _FILE).write_text(f"var sections = {json.dumps(found)};\n")
    app.add_js_file(_FILE)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", write_sections)
    return {"parallel_read_safe": True}
