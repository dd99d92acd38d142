"""Tasks that no worker of the cluster can run, now or later."""

from __future__ import annotations

from dask_cml.manager.fleet import Fleet
from dask_cml.manager.policy import Snapshot, unrunnable
from dask_cml.manager.state import ClusterState
from dask_cml.naming import dask_names

#: Seconds between two questions for the scheduler's tasks.
_INTERVAL = 3.0


async def find_unrunnable(state: ClusterState) -> dict[str, str]:
    """Return descriptions of the tasks that need more than any worker offers, by their reasons.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not answer.
    """
    answer = await state.client.demand(max_age=_INTERVAL)
    expected = _expected(state.fleet) if answer["restricted"] else ()
    return unrunnable(Snapshot.of(answer, state.fleet.states), expected)


def _expected(fleet: Fleet) -> set[str]:
    """Return the names, addresses and hosts of Dask workers that are connected or wanted."""
    known = fleet.workers_info
    names = [(name, group.options.processes) for group in fleet.states for name in group.names]
    return {
        *(each for name, processes in names for each in (name, *dask_names(name, processes))),
        *known,
        *(str(worker.get(each)) for worker in known.values() for each in ("name", "host")),
    }
