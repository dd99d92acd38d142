"""What the keeper of a cluster tells its user, when it becomes true, and the cluster's own log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dask_cml import output
from dask_cml.core.policy import unrunnable
from dask_cml.core.workers import Workers
from dask_cml.output import get_logger
from dask_cml.private_files import append
from dask_cml.sessions.session_logs import OWN, log_path
from dask_cml.timing import timing
from dask_cml.words import command

logger = get_logger(__name__)


def write_own_log(cluster: Any, text: str) -> None:
    """Write into the cluster's log, for other processes and for the time after its end, without waiting."""
    path = log_path(OWN, cluster.place.folder, cluster.options.log_directory)
    line = f"{datetime.now():%Y-%m-%d %H:%M:%S} - {text}\n"
    output.write(lambda: append(path, line.encode()))


class Messages:
    """Tells the user of a cluster what becomes true, once.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.

    Attributes
    ----------
    failure : str or None
        A programming error of the last look at the sessions, as a clause.
    outage : str or None
        Why the platform does not answer, as a clause. None if it does.
    unrunnable : str or None
        Why no worker can run some tasks, as a clause. None if workers can run all.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._processes: Workers = cluster.processes
        self.failure: str | None = None
        self.outage: str | None = None
        self.unrunnable: str | None = None
        self._key_refused = False
        #: The subjects of logged lines that are still true.
        self._logged: set[str] = set()

    async def tell(self) -> None:
        """Log lines about the cluster when they become true.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        cluster = self._cluster
        lines = {**self._queued(), **cluster.sharing.keeper.news()}
        found = await self._find_unrunnable()
        self.unrunnable = "; ".join(found.values()) or None
        # The numbers of tasks change often, so a reason is logged once.
        for reason, tasks in found.items():
            lines[reason] = f" cannot run all tasks: {tasks}"
        for subject, line in lines.items():
            if subject not in self._logged:
                cluster._tell(f"Cluster {cluster.options.name}{line}")
        self._logged = {*lines}

    def _queued(self) -> dict[str, str]:
        waiting = self._processes.queued()
        if not waiting:
            return {}
        n_wanted = len(self._cluster.groups.workers())
        reason = next(filter(None, (worker.reason for worker in waiting)), "")
        line = f": {len(waiting)} of {n_wanted} worker sessions queued"
        # The platform may tell the reason later, and in words that change.
        return {"queued, with a reason": f"{line}: {reason}"} if reason else {"queued": line}

    async def _find_unrunnable(self) -> dict[str, str]:
        """Return the tasks that no worker can run, now or later, by their reasons."""
        cluster = self._cluster
        snapshot = await self._cluster.demand.snapshot(max_age=timing.look)
        expected: set[str] = set()
        # Usually, no task is restricted, and a cluster may have thousands of workers.
        if snapshot.restricted:
            for address, info in [*cluster.scheduler_info["workers"].items()]:
                expected |= {address, str(info["name"]), str(info.get("host"))}
            for name, dask_names in cluster.groups.dask_workers().items():
                expected |= {name, *dask_names}
        return unrunnable(snapshot, expected)

    async def tell_outage(self) -> None:
        """Log once that the platform does not answer, and once that it does again."""
        cluster, name = self._cluster, self._cluster.options.name
        before, self.outage = self.outage, cluster.api.problem
        refused_before, self._key_refused = self._key_refused, cluster.api.key_refused
        if self.outage and self._key_refused:
            if not refused_before:
                cluster._tell(f"Cannot manage cluster {name}: {self.outage}. {await self._what_runs()}")
        elif self.outage and not before:
            logger.warning("Cannot manage cluster %s: %s", name, self.outage)
        elif before and not self.outage:
            logger.warning("Managing cluster %s again", name)

    async def _what_runs(self) -> str:
        """Return sentences on what runs on, and when it ends, although nothing can be launched or stopped."""
        ends = await self._cluster.sharing.ends()
        n = len([process for process in self._processes.launched if not process.has_ended])
        noun = "session" if n == 1 else "sessions"
        they_end = f" They end {', or '.join(ends)}." if ends else ""
        return (
            f"Until then, this process launches and stops no session. The cluster's {n} {noun} and its tasks "
            f"run on.{they_end} The scheduler can tell their programs to exit. To end them now, run "
            f"{command('delete', self._cluster.options.name)}"
        )
