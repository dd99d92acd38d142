"""Lines of other processes, such as logs and names, as a terminal can show them."""

from __future__ import annotations

import re

#: Control characters except the tab, characters that change the direction of text, and what stands for bytes
#: of file names that are no text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a line in which backslashes and codes replace what could steer a terminal.

    Examples
    --------
    >>> print(printable("\x1b]0;title\x07 50%"))
    \x1b]0;title\x07 50%
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as :func:`printable` returns it."""
    return "\n".join(map(printable, text.splitlines()))
