"""The one way out for words to users: it never raises, and never blocks the event loop.

A standard output may be closed, or a terminal may accept nothing after Ctrl-S. A log handler of the program
may raise or wait. So a thread of its own writes what was said.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from dask_cml.words import printable_lines

#: Maximum number of lines that are not written yet. Of more, the oldest are dropped.
_MOST_WAITING = 1000

#: IPython's shell in a notebook. None elsewhere, and before :func:`follow_cells`.
_shell: Any = None
#: The request of a notebook that runs its last cell.
_last_cell: Any = None


class _Writer:
    """Writes words in a thread of its own.

    A signal's handler may write while its thread writes. So nothing here waits for a lock that its thread may
    have: what a SimpleQueue and a list do at once, no handler interrupts.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Have nothing to write, and no thread yet, as the child of a fork."""
        self._waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
        #: Who takes its only element starts the thread.
        self._unstarted = [True]
        self._writes = False

    @property
    def is_idle(self) -> bool:
        """Whether everything is written, but perhaps for words that the thread takes at this moment."""
        return self._waiting.empty() and not self._writes

    def write(self, function: Callable[[], None]) -> None:
        """Call a function that writes words, soon, after all words before."""
        self._waiting.put(function)
        if self._waiting.qsize() > _MOST_WAITING:
            with contextlib.suppress(Empty):
                self._waiting.get_nowait()
        try:
            self._unstarted.pop()
            thread = threading.Thread(target=self._write_all, args=(self._waiting,), daemon=True)
            thread.start()
        except IndexError:  # it has started
            pass
        except RuntimeError:  # the interpreter exits, so nothing else is to be blocked
            self._unstarted.append(True)
            with contextlib.suppress(Empty):
                while True:
                    self._write(self._waiting.get_nowait())

    def _write_all(self, waiting: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            self._write(waiting.get())

    def _write(self, function: Callable[[], None]) -> None:
        self._writes = True
        with contextlib.suppress(BaseException):  # SystemExit of a log handler would end the thread
            function()
        self._writes = False


_writer = _Writer()
os.register_at_fork(after_in_child=_writer.begin)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a text, soon. Nothing in it steers a terminal."""
    out = sys.stderr if to_stderr else sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    encodable = printable_lines(text).encode(encoding, "backslashreplace").decode(encoding)
    write(lambda: print(encodable, file=out, flush=True))


def is_terminal(out: Any) -> bool:
    """Return whether a standard stream is a terminal. One of the program's own class may be unable to say."""
    try:
        return bool(out.isatty())
    except Exception:  # it is None or closed, or can only write and flush
        return False


def flush(timeout: float = 1.0) -> bool:
    """Wait until everything is written, and return whether it is. Blocks, unless the timeout is 0."""
    if timeout == 0:
        return _writer.is_idle
    written = threading.Lock()
    written.acquire()
    _writer.write(written.release)
    return written.acquire(timeout=timeout)


def write(function: Callable[[], None]) -> None:
    """Call a function that writes words, soon, after all words before. Drop its errors."""
    context = contextvars.copy_context()

    def write_in_context() -> None:
        _write_below_last_cell()
        function()

    _writer.write(lambda: context.run(write_in_context))


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


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose messages and exceptions steer no terminal, in whatever text they contain."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_printable)
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    with contextlib.suppress(Exception):  # of an argument: handlers report it
        record.msg, record.args = printable_lines(record.getMessage()), None
        if record.exc_info:
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True


class Logger:
    """A logger whose handlers run in a thread of their own, with the methods of ``logging.Logger``.

    Parameters
    ----------
    name : str
        The name of the logger.
    """

    def __init__(self, name: str) -> None:
        self._logger = get_logger(name)

    def debug(self, message: str, *args: object, **options: Any) -> None:
        """Log a message at the level ``DEBUG``."""
        self._log(logging.DEBUG, message, *args, **options)

    def info(self, message: str, *args: object, **options: Any) -> None:
        """Log a message at the level ``INFO``."""
        self._log(logging.INFO, message, *args, **options)

    def warning(self, message: str, *args: object, **options: Any) -> None:
        """Log a message at the level ``WARNING``."""
        self._log(logging.WARNING, message, *args, **options)

    def error(self, message: str, *args: object, **options: Any) -> None:
        """Log a message at the level ``ERROR``."""
        self._log(logging.ERROR, message, *args, **options)

    def exception(self, message: str, *args: object) -> None:
        """Log a message with the present exception, at the level ``ERROR``."""
        self._log(logging.ERROR, message, *args, exc_info=True)

    def _log(self, level: int, message: str, *args: object, exc_info: Any = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        error = sys.exc_info() if exc_info is True else exc_info
        with contextlib.suppress(Exception):  # an argument may have no text
            text = message % args if args else message
            write(lambda: self._logger.log(level, "%s", text, exc_info=error))
