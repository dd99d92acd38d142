"""What a process of a cluster tells its user, and what is wrong with the cluster."""

from __future__ import annotations

from typing import Any

from dask_cml.core.workers import Workers
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.protocol import View
from dask_cml.words import command

logger = get_logger(__name__)


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
    told : set of str
        The subjects of lines that are told, here or by the last keeper, and still true.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._processes: Workers = cluster.processes
        self.failure: str | None = None
        self.outage: str | None = None
        self.unrunnable: str | None = None
        self._key_refused = False
        self.told: set[str] = set()

    @property
    def view(self) -> View:
        """What the process knows that launches and stops the sessions."""
        processes, retirements, api = self._processes, self._cluster.retirements, self._cluster.api
        problems = self.failure, self.outage, processes.problem, retirements.words, self.unrunnable
        backoffs = processes.backoffs.items()
        return View(
            problem=next(filter(None, problems), None),
            gave_up={group: backoff.words or "" for group, backoff in backoffs if backoff.gave_up},
            shortages={group: backoff.shortage for group, backoff in backoffs if backoff.shortage},
            staying=retirements.staying,
            not_stopped=api.failures.get("stop"),
        )

    def tell(self) -> None:
        """Tell lines about the cluster when they become true."""
        cluster, found = self._cluster, self._cluster.demand.unrunnable
        lines = {**self._queued(), **cluster.sharing.keeper.news}
        if found is not None:
            self.unrunnable = "; ".join(found.values()) or None
            # The numbers of tasks change often, so a reason is logged once.
            lines |= {reason: f" cannot run all tasks: {tasks}" for reason, tasks in found.items()}
        for subject, line in lines.items():
            if subject not in self.told:
                cluster._tell(f"Cluster {cluster.options.name}{line}")
        # Until tasks are known, it is not known which lines of the last keeper are still true.
        self.told = self.told | lines.keys() if found is None else {*lines}

    def _queued(self) -> dict[str, str]:
        waiting = self._processes.queued()
        if not waiting:
            return {}
        n_wanted = len(self._cluster.groups.workers())
        reason = next(filter(None, (worker.reason for worker in waiting)), "")
        line = f": {len(waiting)} of {n_wanted} worker sessions queued"
        # The platform may tell the reason later, and in words that change.
        return {"queued, with a reason": f"{line}: {reason}"} if reason else {"queued": line}

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
            f"continue.{they_end} The scheduler can tell their programs to exit. To end them now, run "
            f"{command('delete', self._cluster.options.name)}"
        )


def check_that_workers_may_come(cluster: Any, what: str) -> None:
    """Refuse to wait for workers after too many failures, when no other worker is to connect.

    Raises
    ------
    CMLError
        If no worker of any group is to connect until a user scales a group that failed.
    """
    gave_up, groups = cluster.sharing.role.view.gave_up, cluster.groups
    for group in groups.names:
        arrived = cluster.processes.arrived(group)
        wanted = groups.target(group) - len(arrived)
        may_launch = group not in gave_up and (wanted > 0 or groups.limits(group) is not None)
        if may_launch or {*cluster.processes.known(group)} - arrived:
            return
    for group, why in gave_up.items():
        scale = command("scale", cluster.options.name, groups.target(group), group=group)
        raise CMLError(f"{what}: {why}. To try again, run {scale}")
