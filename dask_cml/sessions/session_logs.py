"""The logs of a cluster's sessions. Each session writes its output to a file on the project file system."""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from dask_cml.checks import message
from dask_cml.errors import CMLError
from dask_cml.layout import LOG_SUFFIX, OWN_LOG
from dask_cml.private_files import open_regular

#: The headings of the cluster's own log and the scheduler's. The other headings are the workers' names.
CLUSTER, SCHEDULER = "Cluster", "Scheduler"
#: Number of bytes, from the end of a log, that the first reading returns, and of the longest line.
_MOST, _LONGEST = 2**20, 2**20
#: A line of Dask's logs with its level.
_LEVEL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ - \S+ - ([A-Z]+) - ")
#: A line that the program of a session has added, such as ``[dask worker exited with status 1]``.
_NOTE, _GOOD_END = re.compile(r"\[.*\]$"), re.compile(r"\[.* exited with status 0\]$")
#: What the name of one of several Dask workers adds to the name of their session.
_PROCESS = re.compile(r"-[0-9]{1,9}\Z", re.ASCII)
_NUMBER = re.compile(r"([0-9]+)", re.ASCII)
_WARNINGS = ("WARNING", "ERROR", "CRITICAL")
#: Bytes of a part of a log.
_PART = 2**16


def _in_words(name: str) -> list[str | int]:
    """Return the parts of a name, by which ``mine-2`` comes before ``mine-10``."""
    return [int(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(name))]


class Warnings:
    """Picks the warnings and errors of a log, with the lines that belong to them.

    Examples
    --------
    >>> is_warning = Warnings()
    >>> is_warning("2026-11-20 10:00:00,000 - distributed.worker - INFO - Start")
    False
    >>> is_warning("[memory: 1990000000 of 2000000000 bytes]")
    True
    """

    def __init__(self) -> None:
        self._in_warning = False

    def __call__(self, line: str) -> bool:
        """Return whether the next line is a warning, or belongs to one."""
        match = _LEVEL.match(line)
        if match is not None:
            self._in_warning = match[1] in _WARNINGS
        elif _NOTE.match(line):
            return _GOOD_END.match(line) is None
        return self._in_warning


def _open(log: Path) -> BinaryIO:
    """Open a log. Tasks could have put something else in its place."""
    try:
        return open_regular(log)
    except ValueError as error:
        raise CMLError(f"cannot read the log {log}: {error}") from None


class SessionLogs:
    """Reads the logs of a cluster's sessions, also of ended ones. Each reading continues the last one.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    folder : Path
        The folder of its logs, see :func:`dask_cml.layout.log_folder`.
    """

    def __init__(self, cluster: str, folder: Path) -> None:
        self._folder = folder
        self._headings = {OWN_LOG: CLUSTER, f"{cluster}-scheduler": SCHEDULER}
        self._read: dict[str, tuple[int, int]] = {}
        self._refused: set[str] = set()

    def paths(self) -> dict[str, Path]:
        """Return the paths of the logs: the cluster's own, the scheduler's, the workers' as launched."""
        try:
            files = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this path
            files = []
        # A subclass may name workers as it likes, but nothing else writes logs into this folder.
        logs = {file.removesuffix(LOG_SUFFIX) for file in files if file.endswith(LOG_SUFFIX)}
        first = [log for log in self._headings if log in logs]
        workers = sorted(logs - self._headings.keys(), key=_in_words)
        return {self._headings.get(log, log): self._folder / (log + LOG_SUFFIX) for log in first + workers}

    def choose(self, workers: Iterable[str], launched: Iterable[str] = ()) -> list[str]:
        """Return the names of the sessions in which these workers run or ran, and whose logs they share.

        Parameters
        ----------
        workers : iterable of str
            Names of sessions or of Dask workers, ``"Cluster"`` or ``"Scheduler"``.
        launched : iterable of str
            Names of sessions that may have no log yet.

        Raises
        ------
        ValueError
            If a worker does not exist. The message lists the existing ones.
        """
        known = dict.fromkeys([CLUSTER, SCHEDULER, *self.paths(), *launched])
        chosen: dict[str, None] = {}
        for worker in workers:
            names = (worker, worker.capitalize(), _PROCESS.sub("", worker))
            session = next((name for name in names if name in known), None)
            if session is None:
                raise ValueError(message("workers", worker, f"one of {', '.join(known)}"))
            chosen[session] = None
        return [*chosen]

    def read(
        self, cluster: bool, scheduler: bool, workers: bool | list[str], launched: list[str]
    ) -> dict[str, list[str]]:
        """Return the lines of the cluster's log, of the scheduler's and of the workers', by session."""
        chosen = [name for name, is_chosen in ((CLUSTER, cluster), (SCHEDULER, scheduler)) if is_chosen]
        if workers is True:
            chosen += [session for session in self.paths() if session not in (CLUSTER, SCHEDULER)]
        elif workers is not False:
            chosen += self.choose(workers, launched)
        logs: dict[str, list[str]] = {session: [] for session in chosen}
        for session, line in self.lines(logs):
            logs[session].append(line)
        return logs

    def lines(
        self, sessions: Iterable[str] | None = None, *, whole: bool = True
    ) -> Iterator[tuple[str, str]]:
        """Read the lines that are new since the last reading.

        The first reading returns the lines in the last MiB of a log. So does the first reading of a log that
        has become shorter, or that another file has replaced.

        Parameters
        ----------
        sessions : iterable of str, optional
            Names of sessions, from :meth:`choose`. Default: all.
        whole : bool
            Whether to return a last line without a line end. The session may still be writing it.

        Yields
        ------
        (str, str)
            The name of the session and a line of its log, without the line end, the oldest first.
        """
        paths = self.paths()
        for session in self._read.keys() - paths.keys():
            del self._read[session]
        wanted = paths.keys() if sessions is None else set(sessions)
        for session, path in paths.items():
            if session in wanted:
                for line in self._new_lines(session, path, whole):
                    yield session, line.decode(errors="replace").removesuffix("\n")

    def _new_lines(self, session: str, path: Path, whole: bool) -> Iterator[bytes]:
        try:
            with _open(path) as file:
                status = os.fstat(file.fileno())
                inode, begin = self._read.get(session, (status.st_ino, -1))
                if inode != status.st_ino or not 0 <= begin <= status.st_size:
                    begin = max(0, status.st_size - _MOST)
                    if begin:
                        yield b"[%d earlier bytes are in %s]" % (begin, os.fsencode(path))
                file.seek(begin)
                # A task may print faster than this reads, so read up to the present end only.
                while line := file.readline(min(_LONGEST, status.st_size - begin)):
                    if not (whole or line.endswith(b"\n") or len(line) == _LONGEST):
                        break
                    begin += len(line)
                    yield line
                self._read[session] = status.st_ino, begin
        except CMLError as error:
            if session not in self._refused:
                yield os.fsencode(f"[{error}]")
            self._refused.add(session)
        except OSError as error:  # a cluster that shuts down removes it
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise

    def part(self, session: str, begin: int | None = None) -> tuple[str, int]:
        """Return a part of a log, and the position of the next part.

        Parameters
        ----------
        session : str
            Name of the session, a key of :meth:`paths`.
        begin : int, optional
            Position of the part, in bytes. Default, and if the log is shorter: near the end of the log.

        Raises
        ------
        ValueError
            If the log does not exist. The message lists the existing ones.
        CMLError
            If it is not a regular file of this user.
        """
        paths = self.paths()
        if session not in paths:
            raise ValueError(f"invalid session {session!r}: expected one of {', '.join(paths)}")
        with _open(paths[session]) as file:
            size = os.fstat(file.fileno()).st_size
            if begin is None or begin > size:
                begin = max(0, size - _PART)
            file.seek(begin)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            text = decoder.decode(file.read(_PART))
            rest, _ = decoder.getstate()  # a letter's first bytes, whose others come later
            return text, file.tell() - len(rest)
