"""A CML session that is launched, watched and stopped, and a scheduler and a worker in such a session."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface
from distributed.utils import import_term

from dask_cml.cancellation import files_in_time, first_of
from dask_cml.checks import is_session_id, web_link
from dask_cml.errors import CallFailed, CMLError, SchedulerTimeout, SessionFailed
from dask_cml.layout import scheduler_file
from dask_cml.naming import DEFAULT_GROUP, dask_names
from dask_cml.options import Options, SessionSize
from dask_cml.output import get_logger
from dask_cml.private_files import append, read_file
from dask_cml.protocol import HELLO, ask_with_keys
from dask_cml.sessions import here
from dask_cml.sessions.causes import LOST, Cause, Loss, find_cause, last_lines
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.plan import Place, SessionPlan, plan_scheduler, plan_worker
from dask_cml.sessions.workers_api import (
    UNLISTED,
    SessionInfo,
    WorkersAPI,
    has_ended,
    is_pending,
    reason_of,
    time_of,
)
from dask_cml.timing import timing

logger = get_logger(__name__)

_LOG_LINES = 15
#: Seconds in `scheduling` after which a session counts as queued.
WAITS_AFTER = 10.0


#: Dask's default port, which is free in a CML session.
_SCHEDULER_PORT = 8786
_POLL_INTERVAL = 0.2
_ANSWER_TIMEOUT = 5


class Phase(enum.Enum):
    """How far a session is."""

    #: The platform has accepted its launch, and does not say yet that it runs.
    LAUNCHED = "launched"
    #: The platform has no room for it yet.
    QUEUED = "queued"
    #: The platform lists it as running, with an address.
    RUNNING = "running"
    #: It has been missing in the platform's list for a while. It may still run.
    MISSING = "missing"
    #: The platform lists it as ended, or it was stopped.
    ENDED = "ended"


class Session(NamedTuple):
    """A session of a cluster.

    Parameters
    ----------
    id : str
        The platform's id.
    role : {"scheduler", "worker"}
        Which program runs in it.
    name : str
        The name of the session. A Dask worker in it has the same name.
    status : str
        The last status from the platform, such as ``"running"``.
    address : str or None
        Its IP address. None until it is known.
    app_url : str or None
        The URL under which the platform serves the session's ``CDSW_APP_PORT``.
    since : datetime.datetime
        The time of its launch.
    size : SessionSize
        Its virtual CPUs, memory in GiB, and GPUs.
    owner : str or None
        The id of the session with which it ends. None if that is unknown, or if it ends with no other
        session.
    waits : bool
        Whether it is queued.
    group : str or None
        The worker group. None for the scheduler.
    """

    id: str
    role: str
    name: str
    status: str
    address: str | None
    app_url: str | None
    since: datetime
    size: SessionSize
    owner: str | None = None
    waits: bool = False
    group: str | None = None

    @property
    def age(self) -> float:
        """Time since its launch, in seconds."""
        return _seconds_since(self.since)

    @property
    def link(self) -> str | None:
        """Its URL, if that is a link for a browser."""
        return web_link(self.app_url)

    @property
    def waits_for(self) -> float | None:
        """Time for which it has been queued, in seconds. None if it is not queued."""
        return self.age if self.waits else None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Session:
        """Return the session in a message, see :meth:`to_json`."""
        since = datetime.fromtimestamp(content["since"], timezone.utc)
        return cls(**{**content, "since": since, "size": SessionSize(**content["size"])})

    def to_json(self) -> dict[str, Any]:
        """Return the session for a message."""
        return {**self._asdict(), "since": self.since.timestamp(), "size": vars(self.size)}


class CMLProcess(ProcessInterface):
    """A session that is launched, watched and stopped. The base of scheduler and worker."""

    role: str
    #: The worker group of a worker.
    group: str | None = None

    def __init__(self, api: WorkersAPI, options: Options, plan: SessionPlan) -> None:
        super().__init__(name=plan.name)
        self.api = api
        self.options = options
        self.plan = plan
        self.name = plan.name
        self.launched_at: float | None = None
        self.since = datetime.now(timezone.utc)
        #: The platform's last information on the session. Empty before the launch.
        self.info: SessionInfo = {}
        self.adopted = False
        self.owner: str | None = None
        #: From when it may have run: the platform has not said since then that it waits or starts.
        self._begun_at: float | None = None
        self.is_listed = False
        #: Since when it is missing in the platform's list, which has contained it before.
        self._missing_since: float | None = None
        #: The cause of the session's end, if nobody asked for it.
        self.loss: str | None = None

    async def launch(self) -> None:
        """Launch the session. Return when the platform has accepted it; it may run later.

        Raises
        ------
        LaunchRefused
            If the platform refuses the launch.
        """
        self.since = datetime.now(timezone.utc)
        self.owner = here.this_owner()
        self.info = {"status": "starting", **await self.api.launch(self.plan)}
        self.launched_at = self._begun_at = time.monotonic()

    async def start(self) -> None:
        """Launch the session, unless it is launched. See :meth:`launch`."""
        if self.launched_at is None:
            await self.launch()
        await super().start()

    def adopt(
        self,
        session_id: str | None,
        launch: Launch | None,
        app_url: str | None = None,
        waits: bool = False,
    ) -> None:
        """Take over a session whose launch was not answered here. The platform may not list it here.

        Parameters
        ----------
        session_id : str or None
            The session's id. None: it is not known.
        launch : Launch or None
            Its launch. None if it is not in the record: then its program runs.
        app_url : str, optional
            Its URL.
        waits : bool
            Whether it is known to be queued, unless its program runs.
        """
        if session_id is not None:
            self.api.adopt(session_id, self.plan.key)
        self.info = {"id": session_id, "status": "scheduling" if waits else "starting", "app_url": app_url}
        self.is_listed, self._missing_since = False, None
        self.adopted = True
        if launch is not None:
            self.owner, self.since = launch.owner, datetime.fromtimestamp(launch.launched, timezone.utc)
            self.plan = replace(self.plan, size=launch.size or self.plan.size)
        self.launched_at = time.monotonic() - _seconds_since(self.since)
        if not waits:  # unless its keeper had no time to record it, and the platform does not list it here
            self._begun_at = self.launched_at + self.options.pending_timeout
        self.begin(time.time() if launch is None else launch.started)
        self.status = Status.running

    def begin(self, started: float | None) -> None:
        """Note when the session's program has started, unless it is known that it runs. None: it has not."""
        if started is not None and is_pending(self.info):
            self.info = {**self.info, "status": "running"}
            self._begun_at = time.monotonic() - max(0.0, time.time() - started)

    async def close(self) -> None:
        """Stop the session, if it was launched. The cluster replaces a worker that it wants."""
        self.status = Status.closing
        if self.session_id is not None and self.session_id in self.api.live:
            await self.api.stop(self.session_id)
        await super().close()

    @property
    def was_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.status in (Status.closing, Status.closed)

    @property
    def launched_for(self) -> float:
        """Time since its launch in this process, in seconds. 0 before."""
        return 0.0 if self.launched_at is None else time.monotonic() - self.launched_at

    @property
    def session_id(self) -> str | None:
        """The session's id. None before the launch."""
        return self.info.get("id")

    @property
    def session(self) -> Session | None:
        """The session by its last known state. None before the launch."""
        if self.session_id is None:
            return None
        return Session(
            self.session_id,
            self.role,
            self.name,
            "stopped" if self.status == Status.closed else self.info.get("status", "launched"),
            self.ip_address,
            self.info.get("app_url"),
            self.since,
            self.plan.size,
            self.owner,
            self.waits_for is not None,
            self.group,
        )

    @property
    def reported(self) -> str:
        """What the platform says of the session: its reason in one line or, without one, the status."""
        return self.reason or self.info.get("status", "unknown")

    @property
    def reason(self) -> str:
        """Why the session waits or has ended, in one line, by the platform. Empty if it gives no reason."""
        return " ".join(reason_of(self.info).split())

    @property
    def ip_address(self) -> str | None:
        """The session's IP address. None until it is known."""
        ip = self.info.get("ip_address")
        return ip if ip and ip != "unknown" else None

    @property
    def phase(self) -> Phase:
        """How far the session is that was launched, by the platform's last list."""
        status = self.info.get("status")
        if self.has_ended or self.status == Status.closed:
            return Phase.ENDED
        if status == UNLISTED:
            return Phase.MISSING
        if status == "scheduling" and self.waits_for is not None:
            return Phase.QUEUED
        # The platform may not list an adopted session to this process.
        runs = self.adopted or (status == "running" and self.ip_address is not None)
        return Phase.RUNNING if runs else Phase.LAUNCHED

    @property
    def waits_for(self) -> float | None:
        """Time for which the session has been queued, in seconds. None if it is not queued yet."""
        is_scheduling = self.info.get("status") == "scheduling" and self.status != Status.closed
        return self.launched_for if is_scheduling and self.launched_for > WAITS_AFTER else None

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended, by the platform's last list."""
        return has_ended(self.info)

    @property
    def is_missing(self) -> bool:
        """Whether the platform's last list lacks the session, and has contained it before."""
        return self._missing_since is not None

    @property
    def runs_for(self) -> float:
        """Seconds for which the session has run, or may have run if the platform does not list it."""
        return 0.0 if self._begun_at is None else time.monotonic() - self._begun_at

    def excuse(self, since: float) -> None:
        """Do not count the time since then, in which the session could not connect to its scheduler."""
        if self._begun_at is not None:
            self._begun_at += max(0.0, time.monotonic() - max(since, self._begun_at))

    def late(self, verb: str, timeout: float) -> str | None:
        """Return the failure if the session has not done something within `timeout` seconds, else None.

        The time begins when the session runs. Until then, only ``pending_timeout`` counts.
        """
        duration = self.runs_for
        if not self.is_listed:  # it may be queued
            timeout += self.options.pending_timeout
        elif is_pending(self.info):
            verb, timeout, duration = "run", self.options.pending_timeout, self.launched_for
        return f"did not {verb} within {timeout:g} s" if duration > timeout else None

    def update(self, listing: Mapping[str, SessionInfo]) -> bool:
        """Update the session's state from the platform's list. Return whether the session has ended.

        A session that is not listed keeps its state at first: a new session may be listed late, and a list
        may be old. If it was listed before, and is missing for ``timing.unlisted`` seconds, that becomes its
        status. It is no proof of an end.
        """
        listed = listing.get(self.session_id or "", {})
        has_run = self.info.get("status") not in (None, UNLISTED) and not is_pending(self.info)
        if has_run and is_pending(listed):  # an older list
            listed = {**listed, "status": self.info["status"]}
        if listed or not self.is_listed:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        elif time.monotonic() - self._missing_since > timing.unlisted and not has_ended(self.info):
            self.info = {**self.info, "status": UNLISTED}
        self.info = {**self.info, **listed}
        if self.adopted and not self.is_listed:
            created = time_of(listed, "created_at")
            if created is not None:
                self.since, self.launched_at = created, time.monotonic() - _seconds_since(created)
        self.is_listed = self.is_listed or bool(listed)
        runs = listed.get("status") == "running"
        if not has_run and (runs or is_pending(listed)):
            begun = time_of(listed, "running_at") if self.adopted and runs else None
            self._begun_at = time.monotonic() - (0.0 if begun is None else _seconds_since(begun))
        return has_ended(self.info)

    async def read_started(self) -> str | None:
        """Return the session that has taken the name. Empty: none has. None: it cannot be read now."""
        try:
            session = (await files_in_time(read_file, self.plan.started)).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, CMLError) as error:
            logger.info("Session of %s not read: %r", self.name, error)
            return None
        return session if is_session_id(session) else ""

    async def last_lines(self) -> list[str]:
        """Return the last lines of the session's output."""
        with contextlib.suppress(CMLError):
            return await files_in_time(last_lines, self.plan.log, _LOG_LINES)
        return []

    async def note_loss(self, loss: Loss) -> None:
        """Note why the session was lost, also in its log, if possible."""
        self.loss = loss.cause.value
        with contextlib.suppress(OSError, ValueError, CMLError):
            await files_in_time(append, self.plan.log, f"{LOST}{loss.words}]\n".encode())

    async def failure(self, what: str) -> str:
        """Describe a failure: the session, its last status, and the last lines of its output.

        Parameters
        ----------
        what : str
            What failed, such as ``ended``.
        """
        status = self.info.get("status", "unknown")
        tail = "\n".join(await self.last_lines())
        reason = f" ({self.reported})" if self.reported != status else ""
        session = f"the {self.role}'s session {self.session_id} {what}, its status is {status}{reason}"
        output = f"the last lines of its output:\n{tail}" if tail else "it wrote no output"
        return f"{session}; {output}"


def _seconds_since(begin: datetime) -> float:
    return max(0.0, (datetime.now(timezone.utc) - begin).total_seconds())


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
            ended, started = self.session_id, await self.read_started()
            self._take(started)
            # If it cannot be read now, it is read again until the answer is late.
            if started is not None and self.session_id == ended:
                raise SessionFailed(await self.failure("ended before its scheduler answered"))

    def _take(self, session: object) -> None:
        """Take the session in which the scheduler runs, perhaps that of a launch whose answer was lost."""
        if not is_session_id(session) or session == self.session_id:
            return
        logger.info("Session %s of the scheduler used instead of %s", session, self.session_id)
        self.api.adopt(session, self.plan.key)
        self.info, self.is_listed = {"id": session, "status": "starting"}, False

    async def _wait_for_answer(self) -> str:
        while True:
            # Before the question: a process that was stopped for long asks once more.
            failure = self.late("answer", self.options.scheduler_timeout)
            written = None
            with contextlib.suppress(CMLError):
                written = await files_in_time(self._read_address)
            for address in written, self._guess():
                if address and await self.answers(address, _ANSWER_TIMEOUT):
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
        if not await asyncio.to_thread(here.has_sidecar):
            return ""
        return f"\n{here.MESH_EFFECT} An administrator can change the mode:\n{here.PERMIT_MESH}"

    async def why_lost(self) -> Loss:
        """Return why the scheduler was lost."""
        return find_cause(None, await self.last_lines(), said=self.reported)

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

    async def answers(self, address: str, timeout: float) -> bool:
        """Return whether this scheduler answers at an address within `timeout` seconds."""
        try:
            answer = await ask_with_keys(address, self.place.security, HELLO, timeout)
            is_ours = (answer["record"], answer["number"]) == (self.place.record, self.place.number)
        except Exception as error:  # of Dask: the program there may speak another protocol
            logger.debug("Scheduler at %s did not answer: %r", address, error)
            return False
        if is_ours:
            self._take(answer["session"])
        return is_ours


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
    def gone_for(self) -> float | None:
        """Seconds for which a Dask worker has been missing, after all were connected. None: none is."""
        return None if self._gone_since is None else time.monotonic() - self._gone_since

    @property
    def connected_for(self) -> float:
        """Seconds since all its Dask workers were connected at once, for the first time."""
        return 0.0 if self.arrived_at is None else time.monotonic() - self.arrived_at

    def note_connected(self, connected: set[str], gone_for: Mapping[str, float] | None = None) -> bool:
        """Note which of its Dask workers are connected now. Return whether all are, for the first time.

        Parameters
        ----------
        connected : set of str
            The names of all connected Dask workers.
        gone_for : mapping of str to float, optional
            For how long Dask workers have been gone that were connected before this process managed them, by
            their names, in seconds.
        """
        names, gone_for = {*self.dask_names}, gone_for or {}
        gone = names - connected
        self.seen |= (names - gone) | (gone_for.keys() & gone)
        # The platform may not list it here, or its list may be older.
        self.begin(time.time() if gone != names else None)
        has_arrived = self.arrived_at is None and not gone
        if has_arrived:
            self.arrived_at = time.monotonic()
        if not gone or len(self.seen) < len(names):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic() - max(gone_for.get(name, 0.0) for name in gone)
        return has_arrived

    async def why_lost(self, last: Mapping[str, Any], limit: float | None) -> Loss:
        """Return why the worker is lost.

        Parameters
        ----------
        last : mapping
            What the scheduler knew last of Dask workers that have left, by their names.
        limit : float or None
            If its session runs, the time limit of its Dask workers, which has passed.
        """
        if self.has_ended and not self.seen:
            started = await self.read_started()
            if started and started != self.session_id:
                return Loss(Cause.NAME_TAKEN, "not started: another session had its name")
        gone = None
        if limit is not None:
            if self.gone_for is None:
                return Loss(Cause.NEVER_CONNECTED, f"it did not connect within {limit:g} s")
            listed = "but its session runs"
            if not self.is_listed:
                listed = "and the platform does not list its session here"
            elif self.is_missing:
                listed = "and the platform no longer lists its session"
            gone = f"a Dask worker has been gone for {limit:g} s, {listed}"
        # Of several Dask workers of a session, the worker that ran tasks counts.
        states = [last[name] for name in self.dask_names if name in last]
        states.sort(key=lambda state: not state["tasks"])
        noticed = any(state["noticed"] for state in states)
        # Dask's worker ends with status 0 after `Client.retire_workers`, and after its connection broke, too.
        succeeded = bool(self.seen) and self.info.get("status") == "succeeded"
        was_asked = bool(states) and all(state["expected"] for state in states)
        if not noticed and (self.was_closed or (succeeded and was_asked)):
            return Loss(Cause.CLOSED, "closed")
        return find_cause(
            states[0] if states else None,
            await self.last_lines() if gone is None else [],
            said=self.reported if gone is None else "running",
            connected=bool(self.seen),
            noticed=noticed,
            succeeded=succeeded,
            gone=gone,
        )
