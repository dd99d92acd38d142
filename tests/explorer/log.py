"""What is logged in an episode."""

import asyncio
import contextlib
import logging
import re
import time
import traceback
from collections.abc import Iterator

from simulated.faults import UnexpectedError
from simulated.process import Killed, current

#: Functions of dask-cml that Dask calls instead of its own, to which they lead.
_PASS_ON = ("read_handshake", "_ensure_connected", "terminate")
_LOST = re.compile(r"Removing worker '(\S+)' caused the cluster to lose")
#: Tornado's error if a peer ends just after it has accepted. Dask handles only that of a closed stream.
_NOT_IDLE = "IOStream is not idle; cannot convert to SSL"
#: Dask logs it when a client closes that is not connected.
_EXPECTED = (Killed, UnexpectedError, asyncio.CancelledError)


def isolated_loggers() -> list[logging.Logger]:
    """Return the loggers that do not pass their records on, such as those that Dask configures."""
    known = [*logging.root.manager.loggerDict.values()]
    return [logger for logger in known if isinstance(logger, logging.Logger) and not logger.propagate]


class CapturedLog(logging.Handler):
    """Collects log lines, and the tracebacks that dask-cml has to answer for."""

    def __init__(self, story: list[str]) -> None:
        super().__init__(logging.INFO)
        self.tracebacks: list[str] = []
        #: The addresses of Dask workers that have left with data which no other worker has, and when.
        self.lost: list[tuple[str, float]] = []
        self._story = story

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        ours = logging.getLogger("dask_cml")
        level = ours.level
        loggers = [logging.getLogger(), *isolated_loggers()]
        for logger in loggers:
            logger.addHandler(self)
        ours.setLevel(logging.INFO)
        try:
            yield
        finally:
            ours.setLevel(level)
            for logger in loggers:
                logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        process, text = current(), record.getMessage()
        ours = "dask_cml" in record.name
        if found := _LOST.match(text):
            self.lost.append((found[1], time.time()))
        if ours or record.levelno >= logging.WARNING:
            who = process.name if process is not None else "-"
            self._story.append(f"{time.monotonic() - 1000:7.2f}     {who}: {record.levelname} {text}")
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, _EXPECTED) or str(error) == _NOT_IDLE:
            return
        if ours or _passes_through_ours(error):
            trace = "".join(traceback.format_exception(error))
            self.tracebacks.append(f"{text}\n{trace}")


def _passes_through_ours(error: BaseException | None) -> bool:
    """Return whether code of dask-cml called what raised an error, or what caused it."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.endswith("/dask_cml/compat.py") or frame.name in _PASS_ON:
                break  # Dask connects, and logs that a connection breaks without this code, too
            if "/dask_cml/" in frame.filename:
                return True
        error = error.__cause__ or error.__context__
    return False
