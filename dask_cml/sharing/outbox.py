"""What users of this process have asked for, until the board has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.rpc import NO_ANSWER
from dask_cml.sharing.link import Link

logger = get_logger(__name__)


@dataclass(eq=False)
class Change:
    """A change of the cluster that a user of this process has asked for.

    Parameters
    ----------
    number : int
        Counts the changes of this process.
    content : mapping
        The change, see :meth:`dask_cml.scheduler.plugin.CMLSchedulerPlugin.set`.
    is_awaited : bool
        Whether somebody waits for the answer, and gets the error if the board refuses the change.
    refusal : CMLError or None
        Why the board has refused it.
    """

    number: int
    content: Mapping[str, Any]
    is_awaited: bool
    refusal: CMLError | None = None


class Outbox:
    """Writes the changes of this process on the board, in their order, and repeats them until it answers.

    The board knows a change by the process and the number, so a repeated change changes nothing. Users add
    changes from any thread.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    link : Link
        Talks to the scheduler.

    Attributes
    ----------
    task : asyncio.Task or None
        Writes the changes for which nobody waits.
    """

    def __init__(self, cluster: str, link: Link) -> None:
        self._cluster, self._link = cluster, link
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._last = 0
        self._sending = asyncio.Lock()
        self._waits: set[asyncio.Task[None]] = set()
        self.task: asyncio.Task[None] | None = None

    @property
    def changes(self) -> list[Change]:
        """The changes that the board has not answered yet."""
        with self._lock:
            return [*self._changes]

    def add(self, *, is_awaited: bool = False, **content: Any) -> Change:
        """Add a change, which :meth:`send` writes on the board."""
        with self._lock:
            self._last += 1
            change = Change(self._last, content, is_awaited)
            self._changes.append(change)
            return change

    def has(self, number: int) -> bool:
        """Return whether the board has not answered a change yet."""
        return any(change.number == number for change in self.changes)

    def clear(self) -> None:
        """Forget all changes, because what they ask for is written otherwise."""
        self.drop(self._last)

    def drop(self, last: int) -> None:
        """Forget the changes up to a number, because the board has them."""
        with self._lock:
            self._changes = [change for change in self._changes if change.number > last]

    async def send(self) -> None:
        """Write the changes on the board that it has not answered yet.

        Raises
        ------
        CMLError
            If the scheduler does not answer. The changes stay.
        """
        async with self._sending:
            while changes := self.changes:
                await self._send(changes[0])

    async def _send(self, change: Change) -> None:
        try:
            await self._link.change(change.number, **change.content)
        except NO_ANSWER as error:
            raise self._link.no_answer(error) from error
        except CMLError as error:
            change.refusal = error
            if not change.is_awaited:
                logger.warning("Cluster %s not changed: %s", self._cluster, error)
        self._remove(change)

    async def write(self, **content: Any) -> None:
        """Add a change, and wait until the board has it, see :meth:`wait`."""
        await self.wait(self.add(is_awaited=True, **content))

    async def wait(self, change: Change) -> None:
        """Wait until the board has a change and the earlier ones. If that fails, forget the change.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or the board refuses the change.
        """
        try:
            await self.send()
        finally:
            self._remove(change)
        if change.refusal is not None:
            raise change.refusal

    # -- in tasks

    def send_soon(self) -> None:
        """Write on the board what it does not have yet, in a task. Whoever follows the board tries again."""
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._try_to_send())

    async def _try_to_send(self) -> None:
        try:
            await self.send()
        except CMLError as error:
            logger.info("Board of cluster %s not written yet: %s", self._cluster, error)

    def wait_in_task(self, change: Change) -> asyncio.Task[None]:
        """Return a task that waits as :meth:`wait` does. It goes on if nobody awaits it."""
        task = asyncio.ensure_future(self.wait(change))
        self._waits.add(task)
        task.add_done_callback(self._waited)
        return task

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._waits.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # perhaps nobody awaits it
            logger.warning("Cluster %s not changed: %s", self._cluster, error)

    async def flush(self) -> None:
        """Wait until the board has all changes.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        await asyncio.gather(*self._waits)
        await self.send()

    def _remove(self, change: Change) -> None:
        with self._lock:
            if change in self._changes:
                self._changes.remove(change)
