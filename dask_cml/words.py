"""Words for people: times and waits, tables, and lines of other processes as a terminal can show them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone

#: Control characters except the tab, characters that end lines, change the direction of text or are not
#: seen, and surrogates, which stand for bytes of file names that are no text. Emojis and some scripts need
#: the joiners U+200C and U+200D.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Return a line in which backslashes and codes replace what could steer a terminal.

    Examples
    --------
    >>> print(printable("\x1b]0;title\x07 50%"))
    \x1b]0;title\x07 50%
    """
    if text.isprintable():  # which is far faster
        return text
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def table(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return the lines of a table. The first column is aligned to the left.

    Parameters
    ----------
    rows : sequence of sequences of str
        The cells of the rows.
    align : callable
        Aligns a cell of another column to a width, such as ``str.rjust``.
    """
    # By hand: rich takes a quarter of a second to import, and cuts names to the terminal's width.
    width, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(width), *map(align, cells, widths)]).rstrip() for name, *cells in rows]


def shortened(line: str, most: int) -> str:
    """Return a line of at most so many characters. An ellipsis stands for what is left out."""
    return line if len(line) <= most else f"{line[: most - 1]}…"


def first_line(text: str) -> str:
    r"""Return the first line of a text, without the announcement of a session's output.

    Examples
    --------
    >>> first_line("its session ended; the last lines of its output:\nKilled")
    'its session ended'
    """
    return text.partition("\n")[0].removesuffix("the last lines of its output:").rstrip(":; ")


def printable_lines(text: str) -> str:
    """Return a text of several lines as :func:`printable` returns single lines."""
    return "\n".join(map(printable, text.splitlines()))


def command(verb: str, cluster: str, *arguments: object, group: str | None = None) -> str:
    """Return a command on a cluster, in quotes. It works in a shell and, after ``!``, in a notebook.

    Examples
    --------
    >>> command("scale", "my lab", 1, group="gpu")
    "`dask cml scale 'my lab' 1 --group gpu`"
    """
    # Not above: a session runs this file by its path, where another Python may not find dask-cml.
    from dask_cml.naming import DEFAULT_GROUP

    words = ["dask", "cml", verb, cluster, *map(str, arguments)]
    if group not in (None, DEFAULT_GROUP):
        words += ["--group", group]
    return f"`{shlex.join(words)}`"


def counted(n: object, noun: str) -> str:
    """Return a number with its noun, which gets an ``s`` in the plural.

    Examples
    --------
    >>> counted(1, "session"), counted(2, "session")
    ('1 session', '2 sessions')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def format_duration(seconds: float) -> str:
    """Return a time span in words, such as ``2.9 h``.

    Examples
    --------
    >>> format_duration(10_500), format_duration(7_200), format_duration(45_000)
    ('2.9 h', '2 h', '12 h')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            step = length if seconds >= 10 * length else length / 10
            return f"{round(seconds) // step * step / length:g} {unit}"
    return f"{seconds:.0f} s"


def format_time(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return a time since 1970 in words, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(form)


def adapts(minimum: int, maximum: int) -> str:
    """Return the text for the bounds of adaptive scaling."""
    return f"adapts between {minimum} and {maximum}"


def adapting(bounds: Mapping[str, Sequence[int]], groups: Collection[str]) -> str:
    """Return the text for the bounds of the worker groups that adapt. Their names are for one of several.

    Examples
    --------
    >>> adapting({"default": (0, 2), "gpu": (1, 4)}, ["default", "gpu"])
    'default adapts between 0 and 2, gpu adapts between 1 and 4'
    """
    names = {group: f"{group} " if len(groups) > 1 else "" for group in bounds}
    return ", ".join(names[group] + adapts(*found) for group, found in bounds.items())


def idle(seconds: float | None, least: float = 0.0) -> str:
    """Return the text for a cluster that has had no tasks for so many seconds. Empty if they are fewer."""
    return "" if seconds is None or seconds < least else f"idle for {format_duration(max(0.0, seconds))}"


def waiting(seconds: float) -> str:
    """Return the text for a session that has been queued for so many seconds."""
    return f"queued for {format_duration(seconds)}"


def scheduler_words(waits_for: float | None, restarted: float | None) -> str:
    """Return the text for a scheduler that is queued, or has replaced a lost one, for so many seconds."""
    if waits_for is not None:
        return f"scheduler {waiting(waits_for)}"
    return f"scheduler restarted {format_duration(restarted)} ago" if restarted else ""


def pending(waits: Collection[float], n_absent: int = 0) -> str:
    """Return the text for worker sessions that are not connected.

    Parameters
    ----------
    waits : collection of float
        How long the queued sessions have waited, in seconds.
    n_absent : int
        Number of all.

    Returns
    -------
    str
        How many start, how many are queued, and the longest wait. Empty if all are connected.
    """
    others = f"{n_absent - len(waits)} pending" if n_absent > len(waits) else ""
    queued = f"{len(waits)} {waiting(max(waits))}" if waits else ""
    return ", ".join(filter(None, [others, queued]))
