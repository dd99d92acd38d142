"""A CML session that is launched, watched and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from dask_cml.checks import is_session_id, web_link
from dask_cml.errors import CMLError
from dask_cml.options import Options, SessionSize
from dask_cml.output import get_logger
from dask_cml.private_files import append, read_file
from dask_cml.sessions.answers import UNLISTED, SessionInfo, has_ended, is_pending, reason_of, time_of
from dask_cml.sessions.causes import Loss
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.here import this_owner
from dask_cml.sessions.plan import SessionPlan
from dask_cml.sessions.session_logs import LOST, last_lines
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.timing import timing

logger = get_logger(__name__)

_LOG_LINES = 15
#: Seconds in `scheduling` after which a session counts as queued.
WAITS_AFTER = 10.0


class Phase(enum.Enum):
    """How far a session is."""

    #: It is not launched.
    PLANNED = "planned"
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


@dataclass(frozen=True)
class Session:
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
    waits_for : float or None
        Time for which it has been queued, in seconds. None if it is not queued.
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
    waits_for: float | None = None
    group: str | None = None

    @property
    def age(self) -> float:
        """Time since its launch, in seconds."""
        return _seconds_since(self.since)

    @property
    def link(self) -> str | None:
        """Its URL, if that is a link for a browser."""
        return web_link(self.app_url)

    @cached_property
    def as_json(self) -> dict[str, Any]:
        """The session for a message."""
        content = {**vars(self), "size": {**vars(self.size)}, "since": self.since.timestamp()}
        # A session waits since its launch. The time of its wait would change with every report.
        content["waits"] = content.pop("waits_for") is not None
        return content


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
        #: The last description of the session, and the state that it describes.
        self._last_session: tuple[tuple[Any, ...], Session] | None = None
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
        self.owner = this_owner()
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
        runs_for: float | None = 0.0,
        waits: bool = False,
    ) -> None:
        """Take over a session whose launch was not answered here. The platform may not list it here.

        Parameters
        ----------
        session_id : str or None
            The session's id. None: it is not known.
        launch : Launch or None
            Its launch. None if it is not in the record.
        app_url : str, optional
            Its URL.
        runs_for : float or None
            For how long its program has run, in seconds. None: it has not started yet.
        waits : bool
            Whether it is known to be queued, unless its program runs.
        """
        if session_id is not None:
            self.api.adopt(session_id, self.plan.name)
        status = "running" if runs_for is not None else "scheduling" if waits else "starting"
        self.info = {"id": session_id, "status": status, "app_url": app_url}
        self.is_listed, self._missing_since = False, None
        self.adopted = True
        if launch is not None:
            self.owner, self.since = launch.owner, datetime.fromtimestamp(launch.launched, timezone.utc)
            self.plan = replace(self.plan, size=launch.size or self.plan.size)
        self.launched_at = time.monotonic() - _seconds_since(self.since)
        if runs_for is not None:
            self._begun_at = time.monotonic() - runs_for
        elif not waits:  # unless its keeper had no time to record it, and the platform does not list it here
            self._begun_at = self.launched_at + self.options.pending_timeout
        self.status = Status.running

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
        if self.info.get("id") is None:
            return None
        # A keeper of thousands of sessions asks for all of them in every look, and few have changed.
        state = (self.info, self.status, self.since, self.owner, self.waits_for)
        if self._last_session is None or self._last_session[0] != state:
            self._last_session = (state, self._describe())
        return self._last_session[1]

    def _describe(self) -> Session:
        status = "stopped" if self.status == Status.closed else self.info.get("status", "launched")
        return Session(
            id=str(self.session_id),
            role=self.role,
            name=self.name,
            status=status,
            address=self.ip_address,
            app_url=self.info.get("app_url"),
            since=self.since,
            size=self.plan.size,
            owner=self.owner,
            waits_for=self.waits_for,
            group=self.group,
        )

    @property
    def reported(self) -> str:
        """What the platform says of the session: its reason in one line or, without one, the status."""
        return self.reason or " ".join(str(self.info.get("status") or "unknown").split())

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
        """How far the session is, by the platform's last list."""
        if self.info.get("id") is None:
            return Phase.PLANNED
        if self.has_ended or self.status == Status.closed:
            return Phase.ENDED
        if self.info.get("status") == UNLISTED:
            return Phase.MISSING
        if self.waits_for is not None:
            return Phase.QUEUED
        # The platform may not list an adopted session to this process.
        runs = self.adopted or (self.info.get("status") == "running" and self.ip_address is not None)
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
        listed = {**listing.get(self.session_id or "", {})}
        has_run = self.info.get("status") not in (None, UNLISTED) and not is_pending(self.info)
        if has_run and is_pending(listed):  # an older list
            del listed["status"]
        if listed or not self.is_listed:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        elif time.monotonic() - self._missing_since > timing.unlisted and not has_ended(self.info):
            self.info = {**self.info, "status": UNLISTED}
        if not listed.items() <= self.info.items():
            self.info = {**self.info, **listed}
        created = time_of(listed, "created_at")
        if self.adopted and not self.is_listed and created is not None:
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
            session = (await asyncio.to_thread(read_file, self.plan.started)).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, CMLError) as error:
            logger.info("Session of %s not read: %r", self.name, error)
            return None
        return session if is_session_id(session) else ""

    async def last_lines(self) -> list[str]:
        """Return the last lines of the session's output."""
        return (await asyncio.to_thread(last_lines, self.plan.log, _LOG_LINES)).splitlines()

    async def note_loss(self, loss: Loss) -> None:
        """Note why the session was lost, also in its log, if possible."""
        self.loss = loss.cause.value
        with contextlib.suppress(OSError, ValueError):
            await asyncio.to_thread(append, self.plan.log, f"{LOST}{loss.words}]\n".encode())

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
