"""Tasks that no worker of the cluster can run, now or later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dask_cml.manager.fleet import Fleet
from dask_cml.manager.policy import Snapshot, unrunnable
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.naming import dask_names

logger = logging.getLogger(__name__)


class UnrunnableTasks:
    """Looks regularly for tasks that need more than any worker offers, and logs why they wait.

    Parameters
    ----------
    fleet : Fleet
        The worker groups with their resources.
    client : SchedulerClient
        Asks the scheduler for its tasks.
    log : callable
        Gets each line for the user.
    interval : float
        Seconds between two looks.

    Attributes
    ----------
    words : str or None
        Which tasks wait, and why.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: SchedulerClient,
        log: Callable[[str], None],
        interval: float = 3.0,
    ) -> None:
        self.words: str | None = None
        self._fleet = fleet
        self._client = client
        self._log = log
        self._interval = interval
        self._told: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self.look()
            except (OSError, asyncio.TimeoutError) as error:
                logger.info("Tasks of cluster %s not checked: %r", self._fleet.name, error)
            except Exception:
                logger.exception("Tasks of cluster %s not checked", self._fleet.name)

    async def look(self) -> None:
        """Look once.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        found: dict[str, str] = {}
        if self._client.leads:
            answer = await self._client.demand(max_age=self._interval / 2)
            found = unrunnable(Snapshot.of(answer, self._fleet.states), self._expected)
        self.words = "; ".join(found.values()) or None
        # The numbers of tasks change often: log each reason once.
        for reason in found.keys() - self._told:
            self._log(f"Cluster {self._fleet.name} cannot run all tasks: {found[reason]}")
        self._told = {*found}

    @property
    def _expected(self) -> set[str]:
        """The names, addresses and hosts of Dask workers that are connected or wanted."""
        known = self._fleet.workers_info
        names = [(name, group.options.processes) for group in self._fleet.states for name in group.names]
        return {
            *(each for name, processes in names for each in (name, *dask_names(name, processes))),
            *known,
            *(str(worker.get(each)) for worker in known.values() for each in ("name", "host")),
        }
