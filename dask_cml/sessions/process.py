"""A scheduler and a worker in CML sessions of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Set
from typing import Any

from distributed.utils import import_term

from dask_cml.cancellation import first_of
from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, SchedulerTimeout, SessionFailed
from dask_cml.layout import scheduler_file
from dask_cml.naming import DEFAULT_GROUP, dask_names
from dask_cml.options import Options
from dask_cml.output import get_logger
from dask_cml.private_files import read_file
from dask_cml.protocol import HELLO
from dask_cml.sessions import mesh, tls
from dask_cml.sessions.answers import CallFailed, is_pending
from dask_cml.sessions.plan import Place, plan_scheduler, plan_worker
from dask_cml.sessions.session import CMLProcess, Phase
from dask_cml.sessions.workers_api import WorkersAPI

logger = get_logger(__name__)

#: Dask's default port, which is free in a CML session.
_SCHEDULER_PORT = 8786
_POLL_INTERVAL = 0.2
_ANSWER_TIMEOUT = 5


def class_of(spec: Mapping[str, Any]) -> Any:
    """Return the class of a worker or a scheduler, which SpecCluster allows to be a name."""
    cls = spec["cls"]
    return import_term(cls) if isinstance(cls, str) else cls


class CMLScheduler(CMLProcess):
    """The scheduler, in a session of its own.

    Parameters
    ----------
    api : WorkersAPI
        Launches and stops the session.
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder, the number of this scheduler, and the cluster's record and keys.
    dashboard_port : int, optional
        Port of the dashboard on the session's loopback. Default: the port that the platform forwards.
    """

    role = "scheduler"
    #: Time from the launch to the scheduler's first answer, in seconds.
    start_time: float | None = None

    def __init__(
        self, api: WorkersAPI, options: Options, place: Place, dashboard_port: int | None = None
    ) -> None:
        self.place = place
        # On a laptop all sessions share one network. So the scheduler takes a free port when it listens, on
        # the loopback only.
        shared = api.shares_host_network
        self.port = 0 if shared else _SCHEDULER_PORT
        host = "127.0.0.1" if shared else "0.0.0.0"
        plan = plan_scheduler(options, place, host, self.port, dashboard_port)
        super().__init__(api, options, plan)

    async def start(self) -> None:
        """Launch the session and wait until the scheduler answers.

        Raises
        ------
        LaunchRefused
            If the platform refuses the launch.
        SessionFailed
            If the session ends first, with any status.
        SchedulerTimeout
            If the session does not run within ``pending_timeout``, or the scheduler does not answer within
            ``scheduler_timeout`` after that.
        """
        if self.launched_at is None:
            await self.launch()
        self.address = await first_of(self._wait_for_answer(), self._watch_session())
        self.info = {**self.info, "status": "running"}  # the platform's last list may be older
        self.start_time = self.launched_for
        await super().start()

    async def _watch_session(self) -> None:
        while True:
            try:
                listing = await self.api.sessions()
            except CallFailed:  # which proves nothing; the start has its own time limits
                continue
            if not self.update(listing):
                continue
            ended = self.session_id
            if await self._take_started() and self.session_id == ended:
                raise SessionFailed(await self.failure("ended before its scheduler answered"))

    async def _take_started(self) -> bool:
        """Take the session that has taken the scheduler's name. Return False if it cannot be read now."""
        started = await self.read_started()  # it is read again until the answer is late
        self._take(started)
        return started is not None

    def _take(self, session: object) -> None:
        """Take the session in which the scheduler runs, perhaps that of a launch whose answer was lost."""
        if not is_session_id(session) or session == self.session_id:
            return
        logger.info("Session %s of the scheduler used instead of %s", session, self.session_id)
        self.api.adopt(session, self.plan.name)
        self.info, self.is_listed = {"id": session, "status": "starting"}, False

    async def _wait_for_answer(self) -> str:
        while True:
            # Before the question: a process that was stopped for long asks once more.
            failure = self.late("answer", self.options.scheduler_timeout)
            for address in await asyncio.to_thread(self._read_address), self._guess():
                if address and await self._answers(address):
                    return address
            if failure is not None:
                raise SchedulerTimeout(await self.failure(failure) + await self._why_silent())
            await asyncio.sleep(_POLL_INTERVAL)

    async def _why_silent(self) -> str:
        """Return why Dask may not answer although its session runs, as more lines of an error."""
        if self.api.problem:
            return f"\n{self.api.problem}"
        if is_pending(self.info) or self.options.platform == "local":  # its sessions connect by the loopback
            return ""
        if not await asyncio.to_thread(mesh.has_sidecar):
            return ""
        return f"\n{mesh.EFFECT} An administrator can change the mode:\n{mesh.PERMIT}"

    def _read_address(self) -> str | None:
        """Read the scheduler's file, if it exists and is complete."""
        file = self.place.folder / scheduler_file(self.place.number)
        try:
            # NFS may cache that a file does not exist. Listing the folder refreshes the cache.
            if file not in self.place.folder.iterdir():
                return None
            address = json.loads(read_file(file)).get("address")
            return address if isinstance(address, str) else None
        except (OSError, ValueError, AttributeError, RecursionError, CMLError):
            return None

    def _guess(self) -> str | None:
        """Return the scheduler's likely address, because NFS may show the scheduler's file late."""
        protocol = "tcp" if self.place.security is None else "tls"
        return f"{protocol}://{self.ip_address}:{self.port}" if self.ip_address and self.port else None

    async def _answers(self, address: str) -> bool:
        """Return whether this cluster's scheduler answers at an address."""
        record = self.place.record
        try:
            op = "identity" if record is None else HELLO
            answer = await tls.ask(address, self.place.security, op, _ANSWER_TIMEOUT)
        except Exception as error:  # of Dask: the program there may speak another protocol
            logger.debug("Scheduler at %s did not answer: %r", address, error)
            return False
        if record is None:
            await self._take_started()
            return True
        if not isinstance(answer, dict):
            return False
        if (answer.get("record"), answer.get("number")) != (record, self.place.number):
            return False
        self._take(answer.get("session"))
        return True


class CMLWorker(CMLProcess):
    """A Dask worker, or several in one session.

    Parameters
    ----------
    scheduler : str or None
        The scheduler's address. None: it is unknown yet, and the worker reads it from the scheduler's file.
    name : str
        The name of the session, and of its Dask worker.
    api : WorkersAPI
        Launches and stops the session.
    options : Options
        The options of the worker's group.
    place : Place
        The cluster's folder and keys, and the number of its scheduler.
    worker_group : str
        The name of that group.
    **own
        Options that differ from the group's options, such as ``memory="16 GiB"``.

    Attributes
    ----------
    dask_names : list of str
        The names of the Dask workers in the session.
    seen : set of str
        The names of its Dask workers that have been connected.
    arrived_at : float or None
        When all its Dask workers were connected at once, for the first time.
    told : Phase or None
        How far it is as far as other processes know.
    retiring_since : float or None
        Since when it moves its data to others. None: it does not.
    is_retired : bool
        Whether it has moved its data, so that its session can be stopped.
    cannot_move_to : set of str or None
        If it must stay: the other Dask workers, none of which could take its data.
    """

    role = "worker"

    def __init__(
        self,
        scheduler: str | None,
        name: str,
        *,
        api: WorkersAPI,
        options: Options,
        place: Place,
        worker_group: str = DEFAULT_GROUP,
        **own: Any,
    ) -> None:
        usual = options.per_session
        if own := {name: value for name, value in own.items() if value != usual.get(name)}:
            options = options.of_group(own)
        super().__init__(api, options, plan_worker(options, place, name, scheduler, worker_group))
        self.group = worker_group
        self.dask_names = dask_names(name, options.processes)
        self.seen: set[str] = set()
        self.arrived_at: float | None = None
        self.told: Phase | None = None
        self._gone_since: float | None = None
        self.retiring_since: float | None = None
        self.is_retired = False
        self.cannot_move_to: set[str] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all its Dask workers are connected."""
        return self.arrived_at is not None and self._gone_since is None

    @property
    def gone_for(self) -> float | None:
        """Seconds for which a Dask worker has been missing, after all were connected. None: none is."""
        return None if self._gone_since is None else time.monotonic() - self._gone_since

    @property
    def connected_for(self) -> float:
        """Seconds since all its Dask workers were connected at once, for the first time."""
        return 0.0 if self.arrived_at is None else time.monotonic() - self.arrived_at

    def note_connected(self, connected: Set[str]) -> None:
        """Note which of its Dask workers are connected now.

        Parameters
        ----------
        connected : set of str
            The names of all connected Dask workers.
        """
        present = connected & {*self.dask_names}
        self.seen |= present
        if present and is_pending(self.info):  # the platform does not list it here, or its list is older
            self.info = {**self.info, "status": "running"}
        if len(present) == len(self.dask_names):
            self.arrived_at = self.arrived_at or time.monotonic()
        is_gone = len(present) < len(self.dask_names) == len(self.seen)
        self._gone_since = (self._gone_since or time.monotonic()) if is_gone else None

    def take_over(self, connected: Set[str], gone_for: Mapping[str, float]) -> None:
        """Note what has become of its Dask workers before this process managed them.

        Parameters
        ----------
        connected : set of str
            The names of all connected Dask workers.
        gone_for : mapping of str to float
            For how long Dask workers have been gone that were connected before, by their names, in seconds.
        """
        gone = [gone_for[name] for name in self.dask_names if name in gone_for and name not in connected]
        self.seen.update(name for name in self.dask_names if name in gone_for)
        self.note_connected(connected)
        if self._gone_since is not None and gone:
            self._gone_since = time.monotonic() - max(gone)
