"""The scheduler's file in the cluster's folder: how to reach the scheduler, and what is wanted.

Workers and other processes find the scheduler by it. Another scheduler begins with it if this one is lost.
Its time is the scheduler's sign of life for processes that cannot reach the scheduler. The program of its
session dates it, too: a large graph keeps the event loop busy for minutes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dask_cml.cancellation import to_the_end, wait_until_set
from dask_cml.layout import board_file, scheduler_file
from dask_cml.private_files import is_gone, read_file, write_file
from dask_cml.timing import timing

logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Seconds between two changes of the file, and for which the folder must be gone before the cluster is
#: deleted.
_REST, _GONE_FOR = 1.0, 30.0
#: Seconds for which a scheduler that starts waits for a file system whose handles are stale.
_STALE_FOR = 30.0
#: Why a scheduler closes while its cluster goes on.
REPLACED = "another scheduler replaces it"

T = TypeVar("T")


class StateFile:
    """Keeps the scheduler's file up to date.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    number : int
        The number of this scheduler in its cluster.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self._board, self._file = folder / board_file(number), folder / scheduler_file(number)
        self._changed = asyncio.Event()
        self._gone_since: float | None = None
        #: The file with which the scheduler began. Another cluster of this name has another file.
        self._begun: bytes | None = None

    def begin(self) -> Mapping[str, Any]:
        """Return what the process that launched this scheduler has written for it. Blocks.

        Raises
        ------
        OSError, ValueError
            If the file cannot be read.
        """
        self._begun = read_file(self._board)
        content: Mapping[str, Any] = json.loads(self._begun)
        return content

    def changed(self) -> None:
        """Write the file soon."""
        self._changed.set()

    async def run(self, content: Callable[[], Mapping[str, Any]]) -> str:
        """Write the file when something changes, and regularly. Return why the scheduler must close.

        Parameters
        ----------
        content : callable
            Returns the content, for JSON.
        """
        why = None
        while why is None:
            await asyncio.sleep(_REST)
            await wait_until_set(self._changed, timing.sign_of_life)
            why = await self.save(content())
        return why

    async def save(self, content: Mapping[str, Any]) -> str | None:
        """Write the file. Return why the scheduler must close, or None. Log errors: :meth:`run` tries again.

        It must close if the cluster's folder is removed, another scheduler replaces this one, or another
        cluster has its name.
        """
        self._changed.clear()
        try:
            # A cancellation waits: the scheduler's last state must not be written before this state.
            why = await to_the_end(self.write, content)
            self._gone_since = None
            return why
        except (FileNotFoundError, NotADirectoryError):
            self._changed.set()
            if not await asyncio.to_thread(is_gone, self._board):
                self._gone_since = None
            elif self._gone_since is None:
                self._gone_since = time.monotonic()
            elif time.monotonic() - self._gone_since > _GONE_FOR:
                return "its folder was removed"
        except (OSError, RuntimeError) as error:  # RuntimeError: not private
            self._changed.set()
            logger.warning("State of the cluster not written: %s", error)
        return None

    def write(self, content: Mapping[str, Any]) -> str | None:
        """Replace the file atomically. Return why the scheduler must close, or None. Blocks."""
        names = os.listdir(self.folder)
        if self._begun is not None and read_file(self._board) != self._begun:
            return "another cluster has its name"
        write_file(self._file, json.dumps(content).encode())
        return REPLACED if board_file(self.number + 1) in names else None


async def unless_stale(action: Callable[[], T]) -> T:
    """Run a blocking action. Repeat it while the file system answers that a handle is stale."""
    deadline = time.monotonic() + _STALE_FOR
    while True:
        try:
            return await asyncio.to_thread(action)
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_REST / 2)
