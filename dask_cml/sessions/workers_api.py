"""The Workers API of the platform, asynchronous, with an account of every session that must be stopped.

Only this module calls ``cml.workers_v1``, ``cdsw`` or the local platform.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from dask_cml.checks import is_session_id, message
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.sessions import answers, labels
from dask_cml.sessions.answers import CallFailed, NoAnswer, NotAllStopped, SessionInfo, has_ended, may_pass
from dask_cml.sessions.calls import Calls, start
from dask_cml.sessions.here import load_platform
from dask_cml.sessions.plan import SessionPlan

__all__ = ["SessionInfo", "WorkersAPI", "has_ended", "load_platform"]

logger = get_logger(__name__)

#: Seconds within which stopped sessions usually end.
_STOPPED_WITHIN = 30.0
#: Number of sessions that one call stops within its time limit. The platform stops ten at once.
_IN_TIME = 1000
#: The sessions that this process has stopped on every platform, and that may not have ended.
_stopping: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class WorkersAPI:
    """Launch, list and stop sessions without blocking the event loop.

    Calls run in threads, at most :attr:`threads` of one function at once, with a time limit of
    ``cml.api.timeout`` seconds. A call that takes longer is abandoned in its thread and repeated in another.
    If an abandoned call still launches a session, its cluster uses that session or stops it. A session whose
    id was in no answer enters itself into the cluster's record when it runs, see :mod:`dask_cml.wrapper`.

    Parameters
    ----------
    module : module
        The platform's module, from :func:`load_platform`.

    Attributes
    ----------
    live : dict of str to str
        The names of all sessions that were launched or adopted here and not stopped, by their ids. A session
        is in it from the moment of the platform's answer, in any thread. :meth:`end` stops these sessions,
        without an event loop.
    stopped : set of str
        The ids of the sessions that were stopped here, and whose end is not in the record yet.
    launched : set of str
        The ids of all sessions that were launched or adopted here.
    threads : int
        Maximum number of concurrent calls of one function.
    failures : dict of str to str
        The current failures of operations by their verbs: ``"launch"``, ``"list"``, ``"stop"``.

    Raises
    ------
    TypeError, ValueError
        If a value of ``cml.api`` in Dask's configuration is invalid.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dask_cml.options import SessionSize
    >>> async def hello():
    ...     api = WorkersAPI(load_platform("local"))
    ...     size = SessionSize(1, 1)
    ...     plan = SessionPlan("hello", "hello", size, "print('hello')", {}, Path("hello.log"))
    ...     session = await api.launch(plan)
    ...     await api.stop(session["id"])
    ...     await api.close()
    >>> asyncio.run(hello())
    """

    def __init__(self, module: Any) -> None:
        functions = ("launch_workers", "list_workers", "stop_workers")
        modules = {getattr(getattr(module, name, None), "__module__", "") for name in functions}
        self.module = module
        self.threads: int = setting("api.threads")
        self.live: dict[str, str] = {}
        self.stopped: set[str] = set()
        self.launched: set[str] = set()
        self._calls = Calls(self.threads, setting("api.timeout"), setting("api.retries"), modules)
        self.failures = self._calls.failures
        self._interval = setting("api.poll-interval")
        self._listing: asyncio.Task[dict[str, SessionInfo]] | None = None
        #: A listing that nobody has waited for until its end.
        self._late: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next_listing = 0.0
        self._stopping = _stopping.setdefault(module, set())
        self._ended = self._left = False
        #: Guards what threads share.
        self._lock = threading.Lock()

    @property
    def problem(self) -> str | None:
        """The platform's current failure, as a sentence. None if its last calls succeeded."""
        return next(iter([*self.failures.values()]), None)

    def settle(self, verb: str) -> None:
        """Forget the failure of an operation, because nothing is left to launch or to stop."""
        self.failures.pop(verb, None)

    @property
    def key_refused(self) -> bool:
        """Whether the platform refuses this session's key, so that no call succeeds."""
        return self._calls.key_refused

    @property
    def shares_host_network(self) -> bool:
        """Whether sessions share this machine's ports, as on the local platform."""
        return bool(getattr(self.module, "shares_host_network", bool)())

    def check_options(self, names: Iterable[str], argument: str = "launch_options") -> None:
        """Refuse parameters that the installed ``launch_workers`` does not support.

        Raises
        ------
        ValueError
            If a parameter is unknown. The message lists the supported parameters.
        """
        parameters = inspect.signature(self.module.launch_workers).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        known = labels.PARAMETERS
        if unknown := sorted(name for name in names if known.get(name, name) not in parameters):
            raise ValueError(
                f"invalid {argument} {', '.join(map(repr, unknown))}: expected parameters of the installed "
                f"launch_workers: {', '.join(parameters)}"
            )

    async def find_labels(self, options: Mapping[str, Any], argument: str = "launch_options") -> None:
        """Find the GPUs and networks that launch options name, before anything is launched with them.

        Raises
        ------
        ValueError
            If an option is invalid, or the site has no such label. The message lists the labels.
        CMLError
            If the platform does not say the labels.
        """
        if not labels.PARAMETERS.keys().isdisjoint(options):
            await self._calls.do("list", lambda: "labels", lambda: labels.resolved(options, argument))

    # -- launch

    async def launch(self, plan: SessionPlan) -> SessionInfo:
        """Launch one session.

        Raises
        ------
        LaunchRefused
            If the platform refuses the launch, for example because a quota is exhausted.
        CMLError
            If all calls fail.
        ValueError
            If ``launch_workers`` does not support one of the options.
        """
        self.check_options(plan.launch_options)
        stopping = self._stopping.copy()
        try:
            return await self._launch(plan)
        except LaunchRefused:
            # Stopped sessions count against the quota until they have ended.
            stopping |= self._stopping
            if not stopping or not await self._have_ended(stopping):
                raise
            return await self._launch(plan)

    async def _launch(self, plan: SessionPlan) -> SessionInfo:
        launched: list[SessionInfo] = []
        launch = functools.partial(self._launch_now, plan, launched)
        return await self._calls.do("launch", lambda: plan.name, launch, made=(plan.name, plan.code))

    def _launch_now(self, plan: SessionPlan, launched: list[SessionInfo]) -> SessionInfo:
        """Launch a session by a blocking call, unless an abandoned call has launched it meanwhile.

        A session that comes too late, or second, stays in :attr:`live`, and its cluster stops what it does
        not use: a scheduler may run in it.
        """
        try:
            if not launched and not self._ended:
                launched.append(self._ask_for(plan))
        finally:
            if self._ended and not self._left:  # perhaps end() did not wait for this call
                start(self.end)
        if self._ended:
            raise CMLError(f"{plan.name} not launched: the cluster has shut down")
        return launched[0]

    def _ask_for(self, plan: SessionPlan) -> SessionInfo:
        """Return the session that the platform launched, or raise the reason why it launched none."""
        options = {**asdict(plan.size), **labels.resolved(plan.launch_options)}
        # Not every release documents it, or has it.
        if "name" in inspect.signature(self.module.launch_workers).parameters:
            options["name"] = plan.title
        session = answers.launched(
            self.module.launch_workers(n=1, code=plan.code, env=dict(plan.env), **options)
        )
        if session.get("id"):
            self.adopt(session["id"], plan.name)
            return session
        # A refused launch may leave an engine behind, which counts against the quota like a session.
        engine = session.get("engineId")
        if is_session_id(engine):
            self.adopt(engine, plan.name)
            with contextlib.suppress(Exception):  # of the platform: end() tries again
                self._stop_now([engine])
            self._stopping.discard(engine)  # its end makes no room for another try
        raise LaunchRefused(plan.name, answers.reason_of(session) or "no reason given")

    def adopt(self, session_id: str, name: str) -> None:
        """Take over a session, also one that another process launched.

        Raises
        ------
        ValueError
            If the id is invalid.
        """
        if not is_session_id(session_id):
            raise ValueError(message("session id", session_id, "letters and digits"))
        with self._lock:
            self.live[session_id] = name
            self.launched.add(session_id)

    def forget(self, *ids: str) -> None:
        """Leave sessions to other processes."""
        with self._lock:
            for session_id in ids:
                self.live.pop(session_id, None)

    # -- list

    async def sessions(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, from the next call of ``list_workers``.

        All coroutines that wait share one call. Without any, the platform is not called.

        Raises
        ------
        CMLError
            If all calls fail, or :meth:`close` is called meanwhile.
        """
        task = self._begin_listing()
        await asyncio.wait([task])
        return _result(task)

    async def sessions_within(self, seconds: float) -> dict[str, SessionInfo] | None:
        """Return the sessions as :meth:`sessions` does, or None if the platform needs longer.

        The next call returns the late answer, or raises its error.

        Raises
        ------
        CMLError
            If all calls fail, or :meth:`close` is called meanwhile.
        """
        task = self._late = self._late or self._begin_listing()
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        if self._late is task:
            self._late = None
        return _result(task)

    def _begin_listing(self) -> asyncio.Task[dict[str, SessionInfo]]:
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
            # If nobody waits any more, nobody retrieves its error.
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._listing

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next_listing - time.monotonic())
        self._next_listing = time.monotonic() + self._interval
        return await self._calls.do("list", lambda: "sessions", self._list_now)

    def _list_now(self) -> dict[str, SessionInfo]:
        sessions = {session["id"]: session for session in answers.listed(self.module.list_workers())}
        for session in self._stopping.copy():
            if session not in sessions or has_ended(sessions[session]):
                self._stopping.discard(session)
        return sessions

    async def _have_ended(self, ids: set[str]) -> bool:
        """Wait until the platform lists stopped sessions as ended, and return whether it does so in time."""
        deadline = time.monotonic() + _STOPPED_WITHIN
        with contextlib.suppress(CallFailed):
            while await self.sessions_within(deadline - time.monotonic()) is not None:
                if self._stopping.isdisjoint(ids):
                    return True
        return False

    # -- stop

    async def stop(self, *ids: str) -> None:
        """Stop sessions of :attr:`live`, in one call. If it stops only some of them, stop them one by one.

        Raises
        ------
        CMLError
            If the platform does not stop some of them. The message names one of these, and their number.
        """

        def left() -> list[str]:
            return [session_id for session_id in ids if session_id in self.live]

        def what() -> str:
            first, *others = left() or ids
            return f"{first} and {len(others)} more" if others else first

        try:
            await self._calls.do("stop", what, lambda: self._stop_now(left()), self._time_to_stop(ids))
        except CallFailed:
            if left():
                raise
            self.settle("stop")  # an abandoned call has stopped them meanwhile

    def _stop_now(self, ids: Collection[str]) -> None:
        """Stop sessions by one blocking call or, if it stops only some, one by one. Without ids, do nothing.

        Raises
        ------
        Exception
            An error from the platform, or WrongAnswer if it does not stop the sessions.
        """
        if not ids:  # the platform would stop all sessions of the user, including other work
            return
        try:
            answers.check_stopped(ids, self.module.stop_workers(*ids))
        except NotAllStopped:
            if len(ids) == 1:
                raise
            self._stop_one_by_one(ids)
            return
        self.forget(*ids)
        self._stopping.update(ids)
        with self._lock:
            self.stopped.update(ids)

    def _stop_one_by_one(self, ids: Collection[str]) -> None:
        """Stop sessions one by one, to know the sessions that the platform does not stop."""
        errors = []
        for session_id in ids:
            try:
                self._stop_now([session_id])
            except Exception as error:  # of the platform: the other sessions are stopped nevertheless
                errors.append(error)
        if errors:
            raise next(filter(may_pass, errors), errors[-1])

    def _time_to_stop(self, ids: Collection[str]) -> float:
        """Return the time limit of one call that stops these sessions, in seconds."""
        return self._calls.limit * (1 + len(ids) // _IN_TIME)

    # -- the end

    def leave(self) -> None:
        """Launch nothing more, and leave all sessions to other processes, also what is launched late."""
        with self._lock:
            self._ended = self._left = True
        self.forget(*self.live)
        if self._listing is not None:
            self._listing.cancel()

    async def close(self, end: Callable[[], None] | None = None) -> None:
        """Call :meth:`end`, or `end`, without blocking the event loop."""
        if self._listing is not None:
            self._listing.cancel()
        await asyncio.wrap_future(start(end or self.end))

    def end(self) -> None:
        """Launch nothing more, and stop all sessions in :attr:`live`, by blocking calls.

        If the platform hangs, this takes at most ``cml.api.timeout``. A launch that hangs longer stops its
        session when the answer comes, if the process still runs. Repeated calls are allowed.

        Raises
        ------
        CMLError
            If sessions remain. The message names them.
        """
        with self._lock:
            self._ended = True
        deadline = time.monotonic() + self._calls.limit
        errors = self._stop_live(self._time_to_stop(self.live) / 2)
        # A launch that is answered from now on stops its session.
        self._calls.wait_for("launch", deadline - self._calls.limit / 2 - time.monotonic())
        hangs = False
        # Calls have failed for long already if the key is refused.
        for pause in [*([] if self.key_refused else self._calls.pauses()), None]:
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            limit = self._time_to_stop(self.live) / 2
            if hangs:
                limit = max(deadline - time.monotonic(), self._calls.limit / 4)
            errors = self._stop_live(limit, one_by_one=hangs)
            is_late = hangs and time.monotonic() > deadline
            if pause is None or is_late or not any(map(may_pass, errors)):
                break
            time.sleep(pause)
        if errors:
            left, why = ", ".join(sorted(self.live)), answers.in_words(errors[-1])
            raise CallFailed(f"CML did not stop {left}, which may still run: {why}") from errors[-1]

    def _stop_live(self, limit: float, *, one_by_one: bool = False) -> list[BaseException]:
        """Stop all live sessions by one call, or one by one, so that a call that hangs delays no other."""
        with self._lock:
            ids = sorted(self.live)
        groups = [[session] for session in ids] if one_by_one else [ids]
        stops = [lambda group=group: self._stop_now(group) for group in groups]
        errors = self._calls.run_all(stops, limit)
        return errors if self.live else []  # a call that hung may have succeeded meanwhile


def _result(listing: asyncio.Task[dict[str, SessionInfo]]) -> dict[str, SessionInfo]:
    if listing.cancelled():  # by close(); the waiting task is not cancelled
        raise CMLError("sessions not listed: the cluster has shut down")
    return listing.result()
