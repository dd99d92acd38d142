"""Which session is a worker's: the session that took the worker's name, whoever launched it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dask_cml.checks import is_session_id
from dask_cml.core.interface import Cluster
from dask_cml.core.launches import Launches
from dask_cml.core.processes import Processes, said_by
from dask_cml.core.view import View
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.output import Logger
from dask_cml.sessions.answers import SessionInfo, has_ended
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.process import CMLWorker

logger = Logger(__name__)


class Adoption:
    """Lets the workers of a cluster be the sessions that took their names.

    Parameters
    ----------
    cluster : Cluster
        The cluster.
    processes, launches, view
        Its parts.
    """

    def __init__(self, cluster: Cluster, processes: Processes, launches: Launches, view: View) -> None:
        self._cluster, self._processes, self._launches, self._view = cluster, processes, launches, view

    async def find_sessions(self) -> None:
        """Let every wanted worker be the session that took its name, also if its launch was not answered."""
        connected = self.take_connected()
        for name, session in connected.items():
            spec = self._cluster.worker_spec.get(name)
            if (
                spec is not None
                and name not in self._cluster.workers
                and name not in self._launches.under_way
            ):
                await self.adopt(self._cluster.make_worker(name, spec), session)
        for session, name in self._view.unused.items():
            spec = self._cluster.worker_spec.get(name)
            if spec is not None and name not in connected:
                worker = self._cluster.workers.get(name) or self._cluster.make_worker(name, spec)
                if isinstance(worker, CMLWorker) and await worker.started_session() == session:
                    await self.adopt(worker, session)

    def take_connected(self) -> dict[str, str]:
        """Let every wanted worker be the session in which its Dask worker runs. Return the sessions by name.

        If the answer to a launch is lost, the launch is repeated. The first session may take the name, and
        the worker be that of the second answer.
        """
        sessions: dict[str, str] = {}
        for info in [*self._cluster.scheduler_info["workers"].values()]:
            said = said_by(info)
            if is_session_id(said.get("session")) and said.get("name") in self._cluster.worker_spec:
                sessions[said["name"]] = said["session"]
        for worker in self._processes.wanted():
            session = sessions.get(worker.name)
            if session is not None and session != worker.session_id:
                logger.info("Session %s of %s used instead of %s", session, worker.name, worker.session_id)
                worker.adopt(session, None)
        return sessions

    async def take_started(self, workers: Iterable[CMLWorker], listing: Mapping[str, SessionInfo]) -> None:
        """Let workers whose sessions have exited be the sessions that took their names, if these run."""
        for worker in workers:
            if worker.has_ended and not worker.seen:
                session = await worker.started_session()
                if session is None or session == worker.session_id:
                    continue
                if session in listing and not has_ended(listing[session]):
                    await self.adopt(worker, session)

    async def adopt(self, worker: Any, session: str, launch: Launch | None = None) -> None:
        """Let a wanted worker be a session that was launched before."""
        if self._cluster.workers.get(worker.name, worker) is worker and isinstance(worker, CMLWorker):
            logger.info("Session %s used as %s", session, worker.name)
            worker.adopt(session, launch)
            await self._cluster.attach(worker.name, worker)

    def adopt_unwanted(self, session: str, name: str, group: str, launch: Launch | None) -> None:
        """Let the next step retire a worker that nobody wants, and then stop its session."""
        worker: CMLWorker = self._cluster.make_worker(
            name, self._cluster.groups.spec(DEFAULT_GROUP)
        )  # its options are unknown
        infos = [*self._cluster.scheduler_info["workers"].values()]
        worker.dask_names = [str(info["name"]) for info in infos if said_by(info).get("session") == session]
        worker.group = group
        worker.adopt(session, launch)
        self._cluster.workers[name] = worker
