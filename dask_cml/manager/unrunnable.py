"""Tasks that no worker of the cluster can run, now or later."""

from __future__ import annotations

from dask_cml.manager.policy import Snapshot, unrunnable
from dask_cml.manager.state import ClusterState
from dask_cml.naming import dask_names

#: Seconds between two questions for the scheduler's tasks.
_INTERVAL = 3.0


class UnrunnableTasks:
    """Finds tasks that need more than any worker offers, and logs why they wait.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._told: set[str] = set()

    async def look(self) -> None:
        """Look, if this manager leads.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        """
        found: dict[str, str] = {}
        if self._state.client.leads:
            answer = await self._state.client.demand(max_age=_INTERVAL)
            expected = self._expected if answer["restricted"] else ()
            found = unrunnable(Snapshot.of(answer, self._state.fleet.states), expected)
        self._state.unrunnable = "; ".join(found.values()) or None
        # The numbers of tasks change often: log each reason once.
        for reason in found.keys() - self._told:
            self._state.log(f"Cluster {self._state.fleet.name} cannot run all tasks: {found[reason]}")
        self._told = {*found}

    @property
    def _expected(self) -> set[str]:
        """The names, addresses and hosts of Dask workers that are connected or wanted."""
        known = self._state.fleet.workers_info
        names = [
            (name, group.options.processes)
            for group in self._state.fleet.states
            for name in group.wanted.names
        ]
        return {
            *(each for name, processes in names for each in (name, *dask_names(name, processes))),
            *known,
            *(str(worker.get(each)) for worker in known.values() for each in ("name", "host")),
        }
