"""Keep words whole that browsers break at a hyphen or bracket: options, and names in code that wraps."""

import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

_TAG = re.compile(r"(<[^>]+>)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
#: A longer word does not fit on a phone.
_NAME = re.compile(r"(?<!\S)(?=\S*[-\[?])\S{3,40}(?!\S)")


def _with_whole_words(body: str) -> Iterator[str]:
    pattern = _OPTION
    for part in _TAG.split(body):
        if part.startswith("<pre"):
            pattern = _NAME
        elif part.startswith("</pre"):
            pattern = _OPTION
        yield part if part.startswith("<") else pattern.sub(r'<span class="whole">\g<0></span>', part)


def keep_words(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mark the words of a page, for which ``style.css`` has a rule."""
    if "body" in context:
        context["body"] = "".join(_with_whole_words(context["body"]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", keep_words)
    return {"parallel_read_safe": True}
