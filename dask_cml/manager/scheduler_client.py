"""A manager's requests to the scheduler.

Only this module reads the state that Dask keeps of the scheduler, and waits for the scheduler's answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.core import rpc
from distributed.objects import SchedulerInfo
from distributed.protocol import pickle

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

T = TypeVar("T")

#: Seconds for an answer: normally, and after the connection for changes has ended.
_ANSWER_TIMEOUT, _GONE_TIMEOUT = 10.0, 1.0


@dataclass(frozen=True)
class _Answer:
    time: float
    content: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class SchedulerClient:
    """A manager's connection to the scheduler, with a time limit for every answer.

    Attributes
    ----------
    info : mapping
        The last information of the scheduler on itself and its workers, from ``Scheduler.identity``.
    comm : distributed.core.rpc or None
        The connection. None before :meth:`connect`.
    connection_args : dict
        Arguments of connections to the scheduler, such as its keys.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"workers": {}}
        self.comm: Any = None
        self.connection_args: dict[str, Any] = {}
        self._changes: asyncio.Future[None] | None = None
        self._asking = asyncio.Lock()
        self._demand: _Answer | None = None

    def connect(self, address: str, connection_args: Mapping[str, Any]) -> None:
        """Use the scheduler at this address from now on."""
        self.connection_args = dict(connection_args)
        self.comm = rpc(address, connection_args=self.connection_args)

    def listen(self, changes: asyncio.Future[None]) -> None:
        """Notice the scheduler's end by the task that receives changes of its workers and ends with it.

        Parameters
        ----------
        changes : asyncio.Future
            ``Cluster._watch_worker_status_task``.
        """
        self._changes = changes

    @property
    def connected(self) -> bool:
        """Whether the scheduler sends changes of its workers."""
        return self._changes is not None and not self._changes.done()

    @property
    def observed(self) -> set[str]:
        """The names of the Dask workers that the scheduler knows."""
        return {worker["name"] for worker in self.info["workers"].values()}

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer of the scheduler. Wait only briefly if the scheduler has probably ended.

        Parameters
        ----------
        call : coroutine
            The call of the scheduler.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        asking: asyncio.Future[Any] = asyncio.ensure_future(call)
        try:
            if self.connected and self._changes is not None:
                await asyncio.wait(
                    {asking, self._changes}, timeout=_ANSWER_TIMEOUT, return_when=asyncio.FIRST_COMPLETED
                )
            return await asyncio.wait_for(asking, _GONE_TIMEOUT)
        finally:
            asking.cancel()

    async def refresh(self) -> bool:
        """Update the scheduler's workers. Return whether the scheduler answers.

        Dask's worker-status plugin sends changes at once, but only to one manager. Another one that connects
        replaces it silently.
        """
        try:
            ncores = await self.ask(self.comm.ncores())
            if ncores.keys() != self.info["workers"].keys():
                self.info = SchedulerInfo(await self.ask(self.comm.identity()))
        except (OSError, asyncio.TimeoutError):
            return False
        return True

    async def sync(self, **message: Any) -> dict[str, Any]:
        """Send changes, and return the state that all managers share; see ``CMLSchedulerPlugin``.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        ValueError
            If the scheduler does not know this manager.
        """
        return await self.ask(self.comm.cml_sync(**message))

    async def demand(self, cluster: str, max_age: float = 0.0) -> dict[str, Any]:
        """Return the work that the scheduler knows, and the cluster's sessions; see ``known_demand``.

        Concurrent callers share one answer, or its error.

        Parameters
        ----------
        cluster : str
            The cluster's name.
        max_age : float
            Maximum age of an answer to use again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        now = time.monotonic()
        async with self._asking:
            oldest = now if self._demand is None or self._demand.error else now - max_age
            if self._demand is None or self._demand.time < oldest:
                try:
                    content = await self.ask(self.comm.cml_demand(cluster=cluster))
                    self._demand = _Answer(time.monotonic(), content)
                except (OSError, asyncio.TimeoutError) as error:
                    self._demand = _Answer(time.monotonic(), error=error)
            if self._demand.error is not None:
                raise self._demand.error
            return self._demand.content

    async def cheapest(
        self, n: int, key: Callable[[WorkerState], Hashable] | None = None, **more: Any
    ) -> list[str]:
        """Return the names of `n` Dask workers that cost least to close. Return none without an answer.

        Parameters
        ----------
        n : int
            Number of Dask workers.
        key : callable, optional
            Groups workers that are closed together or not at all.
        **more
            Arguments of ``Scheduler.workers_to_close``.
        """
        pickled = pickle.dumps(key) if key else None
        try:
            names = await self.ask(self.comm.workers_to_close(n=n, key=pickled, attribute="name", **more))
        except (OSError, asyncio.TimeoutError):
            return []
        return list(names)

    async def retire(self, names: Collection[str]) -> set[str]:
        """Move the data of Dask workers to others and close them, without a time limit.

        Returns
        -------
        set of str
            The names of the closed workers.
        """
        # SpecCluster passes names instead of addresses (`retire_workers(workers=...)`), so its workers are
        # closed with their data.
        retired = await self.comm.retire_workers(names=sorted(names))
        return {info["name"] for info in retired.values()}

    async def drop(self, names: Collection[str]) -> None:
        """Make the scheduler count Dask workers as lost, so that their tasks run elsewhere.

        Parameters
        ----------
        names : collection of str
            The names of the workers.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        workers = [*self.info["workers"].items()]
        for address in [address for address, worker in workers if worker["name"] in names]:
            stimulus = f"cml-drop-{time.time()}"
            await self.ask(self.comm.unregister(address=address, stimulus_id=stimulus))

    async def last_heard(self, names: Collection[str]) -> dict[str, float]:
        """Return when the scheduler last heard of Dask workers, by its own clock, by their names.

        The result is empty if the scheduler does not answer.
        """
        try:
            scheduler = await self.ask(self.comm.identity())
        except (OSError, asyncio.TimeoutError):
            return {}
        workers = scheduler["workers"].values()
        return {each["name"]: each["last_seen"] for each in workers if each["name"] in names}
