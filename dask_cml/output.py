"""The one way out for words to users: it never raises, and never blocks the event loop.

A standard output may be closed, or a terminal may accept nothing after Ctrl-S. A log handler of the program
may raise or wait. So a thread of its own writes what was said.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from shutil import get_terminal_size
from typing import Any

from dask_cml.words import printable, printable_lines

#: What is not written yet. A signal's handler may put words, too, wherever it interrupts the program.
_waiting: SimpleQueue[tuple[Context, Callable[[], None]]]
#: Who takes its only element starts the thread.
_unstarted: list[None]

#: The subjects of which this process has warned.
_warned: set[str] = set()
#: IPython's shell in a notebook. None elsewhere, and before :func:`follow_cells`.
_shell: Any = None
#: The request of a notebook that runs its last cell.
_last_cell: Any = None


def _begin() -> None:
    """Have nothing to write, and no thread yet, as the child of a fork."""
    global _waiting, _unstarted
    _waiting, _unstarted = SimpleQueue(), [None]


_begin()
os.register_at_fork(after_in_child=_begin)


def write(function: Callable[[], None]) -> None:
    """Call a function that writes words, soon, after all words before. Drop its errors."""
    _waiting.put((copy_context(), function))
    # It has started, or cannot any more, because the interpreter exits.
    with contextlib.suppress(IndexError, RuntimeError):
        _unstarted.pop()
        threading.Thread(target=_write_all, args=(_waiting,), daemon=True).start()


def _write_all(waiting: SimpleQueue[tuple[Context, Callable[[], None]]]) -> None:
    while True:
        context, function = waiting.get()
        with contextlib.suppress(BaseException):  # SystemExit of a log handler would end the thread
            context.run(_write_below_last_cell)
            context.run(function)


def flush(timeout: float = 1.0) -> bool:
    """Wait until everything is written, and return whether it is. Blocks."""
    if _unstarted:
        return True
    written = threading.Lock()
    written.acquire()
    write(written.release)
    return written.acquire(timeout=timeout)


atexit.register(flush)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a text, soon. Nothing in it steers a terminal."""
    out = sys.stderr if to_stderr else sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    encodable = printable_lines(text).encode(encoding, "backslashreplace").decode(encoding)
    write(lambda: print(encodable, file=out, flush=True))


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose handlers run in the thread that writes. Its messages steer no terminal."""
    logger = logging.getLogger(name)
    logger.addFilter(_queue)
    return logger


def warn_once(logger: logging.Logger, subject: str, text: str) -> None:
    """Log a warning, unless this process has warned of the subject before."""
    if subject not in _warned:
        _warned.add(subject)
        logger.warning("%s", text)


def _queue(record: logging.LogRecord) -> bool:
    """Let the thread pass a record to the handlers. Its arguments have their present text."""
    with contextlib.suppress(Exception):  # of an argument: handlers report it
        record.msg, record.args = printable_lines(record.getMessage()), None
        if record.exc_info:
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    write(lambda: logging.getLogger(record.name).callHandlers(record))
    return False


def is_terminal(out: Any) -> bool:
    """Return whether a standard stream is a terminal with lines that can be overwritten."""
    try:
        return bool(out.isatty()) and os.environ.get("TERM") != "dumb"
    except Exception:  # it is None or closed, or of the program's own class that can only write and flush
        return False


def overwriting(line: str) -> str:
    """Return what replaces a terminal's last line. It must not wrap, so that the next one can replace it."""
    return f"\r\x1b[2K{printable(line)[: get_terminal_size().columns - 1]}"


def follow_cells() -> None:
    """In a notebook, write below the cell that runs, or ran last, from now on.

    ipykernel writes below the cell in which a task began. The tasks of a cluster begin in the cell that
    creates it.
    """
    global _shell
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if _shell is None and hasattr(shell, "parent_header"):
        _shell = shell
        _note_cell()
        shell.events.register("pre_run_cell", _note_cell)


def _note_cell(_: Any = None) -> None:
    """Note the request that runs the present cell. Later ones may complete a name, and have no output."""
    global _last_cell
    _last_cell = _shell.parent_header


def _write_below_last_cell() -> None:
    if _last_cell is None:
        return
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "set_thread_parent"):  # of ipykernel 7
            out.set_thread_parent(_last_cell)
        elif hasattr(out, "set_parent"):
            out.set_parent(_last_cell)
