"""A cluster that only the process knows which creates it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.comm.core import Comm
from distributed.utils import NoOpAwaitable

from dask_cml.core.folder import fill_folder, make_keys, new_folder, remove_folder
from dask_cml.errors import CMLError
from dask_cml.options import Options
from dask_cml.output import get_logger
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.session import CMLProcess
from dask_cml.sessions.session_logs import SessionLogs, log_folder
from dask_cml.timing import timing

logger = get_logger(__name__)


class Role(enum.Enum):
    """What a process does for a cluster."""

    #: It has not started, or is closed.
    NONE = "none"
    #: It launches and stops the sessions.
    KEEPER = "keeper"
    #: It shows what another process does, and asks it for changes.
    FOLLOWER = "follower"


class How(enum.Enum):
    """How a process ends its part in a cluster."""

    #: All sessions are stopped.
    SHUT_DOWN = "shut down"
    #: The sessions run on, for other processes.
    LEAVE = "leave"


class Alone:
    """What a cluster tells the other processes that use it, and asks them: there are none.

    Its subclass :class:`dask_cml.sharing.sharing.Sharing` shares the cluster with all of the project.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster.

    Attributes
    ----------
    role : Role
        What this process does for the cluster.
    who : str
        Who uses the cluster here, for its history.
    connects : bool
        Whether another process created the cluster.
    end : str or None
        Why the cluster has ended, if this process did not ask for it.
    is_joined : bool
        Whether the scheduler in the cluster's place has answered. Another one may have just replaced it.
    record : Record or None
        The cluster's record, by which other processes find it. None before the cluster is created or found.
    new_record : Record or None
        The record of a cluster that is created here, with its id.
    lasted : float or None
        Seconds for which a closed cluster has lasted.
    """

    _ending: asyncio.Task[None]

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.role = Role.NONE
        self.who = "its creator"
        self.connects = False
        self.end: str | None = None
        self.is_joined = True
        self.lasted: float | None = None
        self.record: Any = None
        self.new_record: Any = None
        #: The folder that this object has made.
        self._made: Path | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- what is

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler answers."""
        return self.role is Role.KEEPER and self._cluster.connection.is_subscribed

    @property
    def keeps(self) -> bool:
        """Whether this process is the keeper, and no other process may have become the keeper meanwhile."""
        return self.role is Role.KEEPER

    @property
    def leaving(self) -> Sequence[str]:
        """Dask workers whose session the platform is about to stop, by its notice."""
        return ()

    @property
    def problem(self) -> str | None:
        """What is wrong besides the sessions, as a clause. None if nothing is."""
        return None

    def news(self) -> Mapping[str, str]:
        """Return lines for the user, as far as they are true now, by their subjects."""
        return {}

    async def ends(self) -> Sequence[str]:
        """Return when the sessions end in any case, as phrases."""
        return ()

    @property
    def may_keep(self) -> bool:
        """Whether this process may become the keeper."""
        return False

    # -- start

    async def open(self) -> bool:
        """Claim the cluster's name, or connect to the cluster that has it. Return whether it is claimed.

        Raises
        ------
        CMLError
            If another cluster has the name, or does not answer.
        """
        cluster = self._cluster
        if cluster.options.create_mode == "connect":
            self.connects = True
            raise CMLError(
                f"not connected to cluster {cluster.options.name!r}: {type(cluster).__name__} finds no "
                "cluster of another process"
            )
        await asyncio.to_thread(self._make_folder)
        keys = await asyncio.to_thread(make_keys, cluster.options, cluster.place)
        await asyncio.to_thread(fill_folder, cluster.options, cluster.place, keys)
        cluster.move(replace(cluster.place, security=keys.security))
        self.role = Role.KEEPER
        return True

    def _make_folder(self) -> None:
        new_folder(self._cluster.place.folder)
        self._made = self._cluster.place.folder

    async def join(self, address: str) -> None:
        """Connect to the scheduler that this process has launched.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If it does not answer.
        """
        await self._cluster.connection.connect(address)
        await self._cluster.connection.subscribe()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Connect again whenever the connection breaks, until the scheduler has ended."""
        cluster = self._cluster
        while True:
            await asyncio.sleep(timing.retry)
            if cluster.connection.is_subscribed:
                continue
            try:
                if (why := await self._why_lost()) is not None:
                    self._end_by_itself(why)
                    return
                await cluster.connection.subscribe()
            except Exception as error:  # it may answer later, and Dask's errors vary
                logger.info("Scheduler of cluster %s not reached: %r", cluster.options.name, error)

    async def _why_lost(self) -> str | None:
        """Return why the scheduler has ended, by the platform. Return None if it has not."""
        scheduler = self._cluster.scheduler
        if isinstance(scheduler, CMLScheduler) and scheduler.update(await self._cluster.api.sessions()):
            return await scheduler.failure("ended")
        return None

    def _end_by_itself(self, why: str) -> None:
        """Close, because the cluster is over: its scheduler has ended, and no other one replaces it."""
        cluster = self._cluster
        self.end = why
        cluster.end_reason = f"its scheduler was lost: {why}"
        cluster.tell(f"Cluster {cluster.options.name} shut down: {why}")
        self._ending = asyncio.create_task(cluster.ending.end_again())

    async def follow(self) -> None:
        """Follow what other processes do, from now on."""

    # -- what is done

    def asked(self, group: str, *, here: bool, **change: Any) -> Any:
        """Note what a user of this process has asked for. The caller holds the lock of the groups.

        Parameters
        ----------
        group : str
            The worker group.
        here : bool
            Whether the caller has done it. Otherwise the keeper does it.
        **change
            The change, see :class:`dask_cml.scheduler.board.GroupChange`.

        Returns
        -------
        object
            The argument of :meth:`wait`.
        """
        self._cluster.processes.begin_anew(group)
        return None

    def wait(self, asked: Any) -> Any:
        """Wait until other processes know what a user has asked for. In the event loop, return an awaitable.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        return NoOpAwaitable() if self._cluster.asynchronous else None

    async def written(self) -> None:
        """Wait until other processes know what was changed in this process.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """

    async def add_group(self, name: str, options: Options) -> None:
        """Add a worker group for all processes.

        Raises
        ------
        CMLError
            If the scheduler does not answer, or refuses it.
        """
        groups = self._cluster.groups
        groups.add(name, options)
        groups.resize(name, options.n_workers, ())

    async def delete_group(self, name: str) -> None:
        """Delete a worker group for all processes.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """
        self._cluster.groups.remove(name)
        self._cluster.processes.begin_anew(name)

    async def never_orphan(self) -> None:
        """Let the cluster run on without a user.

        Raises
        ------
        CMLError
            If the scheduler does not answer.
        """

    async def step(self) -> None:
        """Ask the keeper for what was changed by hand in ``worker_spec`` of a follower."""

    async def launched(self, process: CMLProcess) -> None:
        """Note that a session was launched."""

    async def note(self, processes: Iterable[CMLProcess]) -> None:
        """Note the state of all sessions."""

    def event(self, action: str, session: str, **fields: str) -> None:
        """Note what has become of a session."""

    def tell_clients(self, text: str) -> None:
        """Tell the clients of other processes a line that :meth:`CMLCluster.tell` tells the user here."""

    async def look(self) -> None:
        """Look for sessions of the cluster that this process does not use."""

    async def stepped(self) -> None:
        """Tell others what this process knows and wants."""

    # -- end

    @property
    def left_to_do(self) -> Sequence[str]:
        """What others have to take from this process before it leaves. It is not the keeper."""
        return ()

    @property
    def untaken(self) -> Sequence[str]:
        """The groups whose last change was asked for here, and that no other process has taken yet."""
        return ()

    @property
    def tasks(self) -> Sequence[asyncio.Task[None] | None]:
        """The tasks that follow the scheduler, and other processes."""
        return (self._watching,)

    @property
    def has_followed(self) -> bool:
        """Whether this process was connected to other processes."""
        return self.role is not Role.NONE

    @property
    def follows(self) -> bool:
        """Whether this process is connected to other processes."""
        return self.role is not Role.NONE

    async def write_last(self) -> None:
        """Tell other processes what users of this process have asked for, before it leaves."""

    async def close(self, how: How) -> None:
        """Let other processes keep the cluster, or know that it ends."""

    async def is_succeeded(self) -> bool:
        """Return whether another process keeps the cluster instead of this one, which leaves."""
        return False

    def disconnect(self) -> None:
        """Let other processes know that this process has left."""

    def forget(self) -> None:
        """Forget what other processes do, because this object is closed."""
        self.role = Role.NONE

    @property
    def is_gone(self) -> bool:
        """Whether no other process can find the sessions of this one."""
        return True

    async def has_scheduler_closed(self) -> bool:
        """Return whether the scheduler has closed, so that the programs of its workers exit."""
        return False

    def stop_and_remove(self) -> None:
        """Stop all sessions of the cluster, and remove what they have left. Blocks."""
        self._cluster.api.end()
        if self._made is not None:
            remove_folder(self._made)

    # -- what users ask for

    @property
    def view(self) -> Any:
        """What the keeper says of the sessions. None in the keeper."""
        return None

    @property
    def board(self) -> Any:
        """The board of a shared cluster, as this process knows it."""
        return None

    @property
    def age(self) -> tuple[float, float]:
        """The cluster's age and its limit, in seconds. 0: no limit."""
        return 0.0, 0.0

    @property
    def idle(self) -> float | None:
        """Time for which no task has waited or run, in seconds. None: some do, or did a moment ago."""
        return None

    @property
    def address(self) -> str | None:
        """The address by which all processes find the scheduler. None: they find no keys by it."""
        return None

    @property
    def folder(self) -> Path | None:
        """The folder by which other processes find the cluster."""
        return None

    @property
    def workers_problem(self) -> str | None:
        """What is wrong with the Dask workers, as a clause."""
        return None

    @property
    def dashboard_url(self) -> str | None:
        """The URL of the dashboard, if it differs from the URL of the scheduler's session."""
        return None

    async def open_dashboard(self) -> Comm:
        """Open a comm on which the scheduler serves its dashboard.

        Raises
        ------
        OSError
            If the scheduler does not accept the connection, or has no dashboard.
        """
        raise OSError("only the scheduler of a shared cluster serves its dashboard on a comm")

    async def forward_dashboard(self) -> None:
        """Serve the dashboard on a port of this machine."""

    async def close_dashboard(self) -> None:
        """Serve the dashboard no more."""

    def usage(self) -> Any:
        """Return what the cluster has used. Blocks."""
        return {}

    async def remember_usage(self) -> None:
        """Remember what the cluster has used, before it ends."""

    def logs(self) -> SessionLogs:
        """Return the logs of the sessions."""
        cluster = self._cluster
        folder = log_folder(cluster.place.folder, cluster.options.log_directory)
        return SessionLogs(cluster.options.name, folder)
