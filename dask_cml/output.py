"""The one way out for words to users: it never raises, and never blocks the event loop.

A standard output may be closed, or a terminal may accept nothing after Ctrl-S. A log handler of the program
may raise or wait. So a thread of its own writes what was said, as long as there is something to write.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from dask_cml.words import printable_lines

#: Maximum number of lines that are not written yet. Of more, the oldest are dropped.
_MOST_WAITING = 1000

_lock = threading.Lock()
_waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
_idle = threading.Event()
_idle.set()


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a text, soon. Nothing in it steers a terminal."""
    out = sys.stderr if to_stderr else sys.stdout
    write(lambda: print(printable_lines(text), file=out, flush=True))


def flush(timeout: float = 1.0) -> bool:
    """Wait until everything is written, and return whether it is. Blocks."""
    return _idle.wait(timeout)


def write(function: Callable[[], None]) -> None:
    """Call a function that writes words, soon, after all words before. Drop its errors."""
    context = contextvars.copy_context()
    with _lock:
        _waiting.append(lambda: context.run(function))
        if not _idle.is_set():
            return
        _idle.clear()
    try:
        threading.Thread(target=_write_all, name="cml-output", daemon=True).start()
    except RuntimeError:  # the interpreter exits, so nothing else is to be blocked
        _write_all()


def _write_all() -> None:
    while True:
        with _lock:
            if not _waiting:
                _idle.set()
                return
            function = _waiting.popleft()
        with contextlib.suppress(BaseException):  # SystemExit of a log handler would end the thread
            function()


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
