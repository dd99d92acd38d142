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
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dask_cml.layout import board_file, scheduler_file
from dask_cml.private_files import read_file, write_file

#: Seconds for which a scheduler that starts waits for a file system whose handles are stale.
_STALE_FOR = 30.0

T = TypeVar("T")


class StateFile:
    """The file in which a scheduler says how to reach it, and the one with which it begins.

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
        await asyncio.sleep(0.5)
