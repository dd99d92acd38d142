"""Where the start of a cluster is shown: a terminal, a notebook, or one line where nobody watches."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from dask_cml.manager.display import render

#: The cells of a session: its name, its id, its status, and how long it took or has taken.
Row = tuple[str, str, str, str]

_NO_WIDTH = 80
#: Two tables that move the cursor would overwrite each other.
_terminal = threading.Lock()


class Screen(Protocol):
    """Shows one table in place, and one line at the end of it."""

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Show a table in the place of the one before."""

    def end(self, line: str) -> None:
        """Show a line in the place of the table; nothing, if it is empty."""


def open_screen() -> Screen:
    """Return the screen of this process. A terminal is free for others when its table has ended."""
    if _is_notebook():
        return Notebook()
    out = sys.stderr
    is_terminal = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"
    if not (is_terminal and _terminal.acquire(blocking=False)):
        return Line(out)
    try:
        return RichTerminal(out)
    except ImportError:  # CML's images lack rich
        return Terminal(out)


def as_lines(title: str, rows: Sequence[Row]) -> list[str]:
    """Return a table as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [title, *("  ".join(["", *row]).rstrip() for row in cells)]


class Line:
    """Only the last line, for what is a file or a pipe.

    Parameters
    ----------
    out : text file or None
        Where it goes.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out = out

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Show nothing."""

    def end(self, line: str) -> None:
        """Print a line, if it is not empty."""
        if line and self._out is not None:
            self._out.write(f"{line}\n")
            self._out.flush()


class Terminal(Line):
    """A terminal, without rich.

    Parameters
    ----------
    out : text file
        The terminal.
    """

    _out: TextIO

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._shown: list[str] = []
        self._is_free = False

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Show a table in the place of the one before."""
        try:
            width = os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            width = _NO_WIDTH
        # A line that wraps would count as two when the cursor moves up.
        self._draw([line[: width - 1] for line in as_lines(title, rows)])

    def end(self, line: str) -> None:
        """Show a line in the place of the table."""
        self._draw([])
        super().end(line)
        if not self._is_free:
            self._is_free = True
            _terminal.release()

    def _draw(self, lines: list[str]) -> None:
        if lines != self._shown:
            up = f"\x1b[{len(self._shown)}A" if self._shown else ""
            self._out.write(f"{up}\r\x1b[J" + "".join(f"{line}\n" for line in lines))
            self._out.flush()
        self._shown = lines


class RichTerminal(Terminal):
    """A terminal, with rich.

    Parameters
    ----------
    out : text file
        The terminal.

    Raises
    ------
    ImportError
        If rich is not installed.
    """

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        super().__init__(out)
        self._spinner = Spinner("dots")
        # What the user's program prints stays with its own streams.
        self._live = Live(
            console=Console(file=out),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Show a table in the place of the one before."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        for name, session, status, took in rows:
            style = "green" if status == "running" else "yellow"
            table.add_row(Text(f"  {name}"), Text(session, "dim"), Text(status, style), Text(took))
        self._spinner.update(text=Text(title, "bold"))
        self._live.start()
        self._live.update(Group(self._spinner, table), refresh=True)

    def end(self, line: str) -> None:
        """Show a line in the place of the table."""
        self._live.stop()
        super().end(line)


class Notebook:
    """One output of a notebook's cell, which is updated in place, so that it is stored once."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Show a table in the place of the one before."""
        # Not by rich, which needs ipywidgets here, and leaves an output that needs them.
        html = render("cml_start.html.j2", title=title, rows=rows)
        self._display("\n".join(as_lines(title, rows)), html)

    def end(self, line: str) -> None:
        """Show a line in the place of the table."""
        if line or self._handle is not None:
            self._display(line, render("cml_start.html.j2", title=line, rows=[]) if line else None)

    def _display(self, text: str, html: str | None = None) -> None:
        from IPython.display import display

        bundle = {"text/plain": text} | ({} if html is None else {"text/html": html})
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        elif text != self._shown:
            self._handle.update(bundle, raw=True)
        self._shown = text


def _is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None
