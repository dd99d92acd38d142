"""The scheduler's file in the cluster's folder: how to reach the scheduler, and what is wanted.

Workers and other processes find the scheduler by it. Another scheduler begins with it if this one is lost.
Its time is the scheduler's sign of life for processes that cannot reach the scheduler. The program of its
session dates it, too: a large graph keeps the event loop busy for minutes. This program also ends a scheduler
whose cluster is deleted or has another scheduler, see :mod:`dask_cml.wrapper`.
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
from dask_cml.private_files import read_file, write_file
from dask_cml.timing import timing

logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Seconds between two changes of the file.
_REST = 1.0
#: Seconds for which a scheduler that starts waits for a file system whose handles are stale.
_STALE_FOR = 30.0

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

    async def run(self, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the file when something changes, and regularly.

        Parameters
        ----------
        content : callable
            Returns the content, for JSON.
        """
        while True:
            await asyncio.sleep(_REST)
            await wait_until_set(self._changed, timing.sign_of_life)
            await self.save(content())

    async def save(self, content: Mapping[str, Any]) -> None:
        """Write the file. Log errors: :meth:`run` tries again."""
        self._changed.clear()
        try:
            # A cancellation waits: the scheduler's last state must not be written before this state.
            await to_the_end(self.write, content)
        except OSError as error:
            self._changed.set()
            logger.warning("State of the cluster not written: %s", error)

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the file atomically. Blocks.

        Raises
        ------
        OSError
            If it cannot be written, or the folder is another cluster's.
        """
        os.listdir(self.folder)  # NFS may cache the file of a cluster that was deleted
        if self._begun is not None and read_file(self._board) != self._begun:
            raise FileExistsError("another cluster has its name")
        write_file(self._file, json.dumps(content).encode())


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
