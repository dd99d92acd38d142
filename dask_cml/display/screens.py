"""Screens that show how a cluster starts: a terminal, a notebook, or one line in a file or pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from dask_cml.display.html import render
from dask_cml.printable import printable, table

#: The cells of a session's row: its name, its id, its status, and its time so far or until it ran.
Row = tuple[str, str, str, str]

_NO_WIDTH = 80
#: Only one cluster at a time shows a table: two would overwrite each other.
_terminal = threading.Lock()


def open_screen() -> Line | Notebook:
    """Return the screen of this process. A terminal is taken until :meth:`Terminal.end`."""
    if _is_notebook():
        return Notebook()
    out = sys.stderr
    is_terminal = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"
    if not (is_terminal and _terminal.acquire(blocking=False)):
        return Line(out)
    return Terminal(out)


def as_lines(title: str, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table. No text in it steers a terminal."""
    lines = table([[*map(printable, row)] for row in rows])
    return [printable(title), *(f"  {line}" for line in lines)]


class Line:
    """A file or pipe, which gets only the last line.

    Parameters
    ----------
    out : text file or None
        The file. None: a process without standard error.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Do nothing."""

    def end(self, line: str) -> None:
        """Write a line, unless it is empty."""
        if line and self._out is not None:
            self._out.write(f"{printable(line)}\n")
            self._out.flush()


class Terminal(Line):
    """A terminal.

    Parameters
    ----------
    out : text file
        The terminal.
    """

    _out: TextIO

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._shown: list[str] = []
        self._taken = contextlib.ExitStack()
        self._taken.callback(_terminal.release)

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Replace the table."""
        try:
            width = os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            width = _NO_WIDTH
        # A line that wraps would count as two when the cursor moves up.
        self._draw([line[: width - 1] for line in as_lines(title, rows)])

    def end(self, line: str) -> None:
        """Replace the table by a line."""
        self._draw([])
        super().end(line)
        self._taken.close()

    def _draw(self, lines: list[str]) -> None:
        if lines != self._shown:
            up = f"\x1b[{len(self._shown)}A" if self._shown else ""
            self._out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
            self._out.flush()
        self._shown = lines


class Notebook:
    """One output of a notebook's cell. It is updated in place, so the notebook stores only its last state."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Replace the table."""
        html = render("cml_start.html.j2", title=title, rows=rows)
        self._display("\n".join(as_lines(title, rows)), html)

    def end(self, line: str) -> None:
        """Replace the table by a line."""
        if line or self._handle is not None:
            self._display(printable(line), render("cml_start.html.j2", title=line, rows=[]) if line else None)

    def _display(self, text: str, html: str | None = None) -> None:
        from IPython.display import display

        bundle = {"text/plain": text} | ({} if html is None else {"text/html": html})
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        elif text != self._shown:
            self._handle.update(bundle, raw=True)
        self._shown = text


def _is_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None
