"""Stack tables that are wider than a phone: there, a row is a list of its cells with their headings."""

import re
from html import escape, unescape
from typing import Any

from sphinx.application import Sphinx

_TABLE = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
_ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
#: Characters that fit in a line on a phone, with 2 for the borders of each column.
_MOST = 46
#: Characters of the longest cells of three or more columns that together have no more than a few lines there.
_LONGEST = 150
#: Characters of a heading that needs a broad column.
_BROAD = 12


def _texts(row: str, tag: str) -> list[str]:
    """Return the texts of a row's cells."""
    cells = re.findall(rf"<{tag}\b.*?</{tag}>", row, re.DOTALL)
    return [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in cells]


def _is_wide(rows: list[list[str]]) -> bool:
    """Return whether the columns' longest words do not fit in a line, or cells have many lines."""
    longest = [
        max(len(word) for cell in column for word in cell.split() or [""])
        for column in zip(*rows, strict=True)
    ]
    if sum(longest) + 2 * len(longest) > _MOST:
        return True
    cells = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return len(cells) > 2 and sum(cells) > _LONGEST


def _stacked(match: re.Match[str]) -> str:
    table = match[0]
    head, *rows = _ROW.findall(table)
    headings = _texts(head, "th")
    if not headings or not _is_wide([headings, *(_texts(row, "td") for row in rows)]):
        return table
    for row in rows:
        names = iter(headings)
        named = re.sub(r"<td\b", lambda _, names=names: f'<td data-heading="{escape(next(names))}"', row)
        table = table.replace(row, named, 1)
    classes = "broad stacks" if max(map(len, headings[1:]), default=0) > _BROAD else "stacks"
    return table.replace('class="docutils', f'class="{classes} docutils', 1)


def stack_tables(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mark the wide tables of a page, and give their cells the headings, which ``style.css`` shows."""
    if "body" in context:
        context["body"] = _TABLE.sub(_stacked, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", stack_tables)
    return {"parallel_read_safe": True}
