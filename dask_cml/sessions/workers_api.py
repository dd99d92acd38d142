"""The Workers API of the platform, asynchronous, with an account of every session that it launches.

Only this module and :mod:`~dask_cml.sessions.live` call ``cml.workers_v1``, ``cdsw`` or the local platform.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import Any

from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.sessions import answers
from dask_cml.sessions.answers import CallFailed, NoAnswer, SessionInfo, has_ended, may_pass
from dask_cml.sessions.calls import start
from dask_cml.sessions.here import load_platform
from dask_cml.sessions.live import LiveSessions, check_id
from dask_cml.sessions.plan import SessionPlan

__all__ = ["SessionInfo", "WorkersAPI", "has_ended", "load_platform"]

logger = logging.getLogger(__name__)

#: Number of calls that stop the remaining sessions after one call for all of them hung.
_GROUPS = 64


@dataclass
class _Launch:
    """One launch, which may take several calls. The first session that a call returns is its session."""

    plan: SessionPlan
    #: The name on the platform, if it has names, which identifies a session of a lost answer.
    title: str | None
    session: SessionInfo | None = None
    #: Whether nobody waits for the launch any more.
    over: bool = False


class WorkersAPI(LiveSessions):
    """Launch, watch and stop sessions without blocking the event loop.

    Calls run in threads, at most :attr:`threads` at once, each with a time limit of ``cml.api.timeout``
    seconds. A call that takes longer is abandoned in its thread and repeated in another. If an abandoned
    call still launches a session, the launch uses that session or stops it.

    Parameters
    ----------
    module : module
        The platform's module, from :func:`load_platform`.

    Attributes
    ----------
    live : set of str
        The ids of all sessions that were launched or adopted here and not stopped. A session is in it from
        the moment of the platform's answer, in any thread. :meth:`end` stops these sessions, without an
        event loop.
    names : dict of str to str
        The name of each session, by its id.
    stopped : set of str
        The ids of the sessions that were stopped here, and whose end is not in the record yet.
    on_change : callable
        Called in the event loop after a session was launched or stopped.
    threads : int
        Maximum number of concurrent calls.

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
        super().__init__(module)
        self.on_change: Callable[[], None] = lambda: None
        self._ended = False
        #: Number of launch calls per name and title whose session may exist, and is not known: calls without
        #: an answer, or with an error that does not exclude it.
        self._unanswered: Counter[tuple[str, str | None]] = Counter()

    @property
    def problem(self) -> str | None:
        """The platform's current failure, as a sentence. None if its last calls succeeded."""
        return next(iter([*self._calls.troubles.values()]), None)

    @property
    def shares_host_network(self) -> bool:
        """Whether sessions share this machine's ports, as on the local platform."""
        return bool(getattr(self.module, "shares_host_network", bool)())

    def check_options(self, names: Iterable[str], argument: str = "launch_options") -> None:
        """Refuse parameters that the installed ``launch_workers`` does not support.

        Raises
        ------
        ValueError
            If a parameter is unknown. The message lists the supported ones.
        """
        if unknown := sorted(name for name in names if not self._takes(name)):
            raise ValueError(
                f"invalid {argument} {', '.join(map(repr, unknown))}: expected parameters of the installed "
                f"launch_workers: {', '.join(inspect.signature(self.module.launch_workers).parameters)}"
            )

    def _takes(self, parameter: str) -> bool:
        parameters = inspect.signature(self.module.launch_workers).parameters
        return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def launch(self, plan: SessionPlan) -> SessionInfo:
        """Launch one session.

        If an answer is lost, the plan's title identifies the session that the lost call launched, if the
        platform has names.

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
        title = plan.title if self._takes("name") else None
        stopped = {*self._stopping}
        try:
            session = await self._launch(_Launch(plan, title))
        except LaunchRefused:
            # Stopped sessions count against the quota until they have ended.
            stopped |= self._stopping
            if not stopped or not await self.wait_until_ended(stopped):
                raise
            self._stopping.difference_update(stopped)
            session = await self._launch(_Launch(plan, title))
        self.on_change()
        return session

    async def _launch(self, launch: _Launch) -> SessionInfo:
        try:
            return await self._calls.do(f"launch {launch.plan.name}", lambda: self._launch_now(launch))
        finally:
            with self._lock:
                launch.over = True

    def _launch_now(self, launch: _Launch) -> SessionInfo:
        """Launch a session by a blocking call, unless an abandoned call has launched it meanwhile."""
        with self._lock:
            if self._ended:
                raise CMLError(f"{launch.plan.name} not launched: the cluster has shut down")
            if launch.session is not None:
                return launch.session
        try:
            if launch.title and self._unanswered[launch.plan.name, launch.title]:
                for found in self._find([launch.title], self.list_now()):
                    return self._take(launch, found)
            return self._take(launch, self._ask_for(launch))
        finally:
            if self._ended:  # perhaps it did not wait for this call
                start(self.end)

    def _ask_for(self, launch: _Launch) -> SessionInfo:
        """Return the session that the platform launched, or raise the reason why it launched none."""
        plan, named = launch.plan, {"name": launch.title} if launch.title else {}
        options = {**asdict(plan.size), **plan.launch_options, **named}
        with self._lock:
            self._unanswered[plan.name, launch.title] += 1
        may_exist = False
        try:
            answer = self.module.launch_workers(n=1, code=plan.code, env=dict(plan.env), **options)
            session = answers.launched(answer)
            may_exist = bool(session.get("id"))  # _take() makes it known
        except Exception as error:
            # The platform's own functions may fail when the session is there, with any error.
            may_exist = may_pass(error) or not answers.is_of_the_platform(error)
            raise
        finally:
            with self._lock:
                self._unanswered[plan.name, launch.title] -= not may_exist
        if may_exist:
            return session
        # A refused launch may leave an engine behind, which counts against the quota like a session.
        if is_session_id(half_made := session.get("engineId")):
            self.adopt(half_made, launch.plan.name)
            self._try_to_stop(half_made)
            self._stopping.discard(half_made)  # its end makes no room for another try
        raise answers.refusal(launch.plan.name, session)

    def _take(self, launch: _Launch, session: SessionInfo) -> SessionInfo:
        """Assign a session to its launch. Stop a session that comes too late, or second."""
        session_id = session["id"]
        with self._lock:
            is_new = session_id not in self.names
            if is_new:
                self.live.add(session_id)
                self.names[session_id] = launch.plan.name
                self._unanswered[launch.plan.name, launch.title] -= 1
            if is_new and launch.session is None and not launch.over and not self._ended:
                launch.session = session
            taken = launch.session
        if is_new and taken is not session:
            logger.info("Session %s not used: launched too late for %s", session_id, launch.plan.name)
            self._try_to_stop(session_id)
        if taken is None:
            raise CMLError(f"session {session_id} was launched too late for {launch.plan.name}")
        return taken

    def _find(self, titles: Collection[str], listed: Iterable[SessionInfo]) -> list[SessionInfo]:
        """Return sessions with these names on the platform that no call has taken."""
        return [
            session
            for session in listed
            if session.get("name") in titles and session["id"] not in self.names and not has_ended(session)
        ]

    async def stop(self, *ids: str) -> None:
        """Stop sessions, in one call.

        Raises
        ------
        ValueError
            If `ids` is empty, by which the platform means all sessions of the user, or if an id is invalid.
        CMLError
            If the platform does not stop them.
        """
        if not ids:
            raise ValueError("invalid ids=(): expected the ids of sessions")
        for each in ids:
            check_id(each)
        await self._calls.do(f"stop {_some(ids)}", lambda: self.stop_now(ids), self.time_to_stop(ids))
        self.on_change()

    def _try_to_stop(self, session_id: str) -> None:
        """Stop a session that nobody needs. If this fails, :meth:`end` tries again."""
        try:
            self.stop_now([session_id])
        except Exception as error:
            logger.warning("Session %s not stopped yet: %s", session_id, answers.in_words(error))

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
        errors = self._stop_live(False, deadline)
        under_way = self._calls.under_way.copy()
        launching = [future for future, what in under_way.items() if what.startswith("launch ")]
        wait(launching, timeout=max(0.0, deadline - self._calls.limit / 2 - time.monotonic()))
        self._calls.leave_behind()
        hangs = NoAnswer in map(type, errors)
        for pause in [*self._calls.pauses(), None]:
            unlisted, unstopped = self._adopt_lost(), self._stop_live(hangs, deadline)
            errors = [*unlisted, *unstopped]
            late = hangs and time.monotonic() > deadline
            if pause is None or late or not any(map(may_pass, errors)):
                break
            hangs = hangs or NoAnswer in map(type, errors)
            time.sleep(pause)
        for error in unlisted:
            titles, why = sorted(self._names_unanswered()), answers.in_words(error)
            logger.warning("Sessions named %s may still run: CML did not list them: %s", titles, why)
        for error in unstopped[-1:]:
            named, why = ", ".join(sorted(self.named_sessions())), answers.in_words(error)
            raise CallFailed(f"CML did not stop {named}, which may still run: {why}") from error

    def _stop_live(self, hangs: bool, deadline: float) -> list[Exception]:
        """Stop all live sessions: by one call or, if that hangs, by many, so that one delays no other."""
        ids = sorted(self.named_sessions())
        groups = [ids[i::_GROUPS] for i in range(min(_GROUPS, len(ids)))] if hangs else [ids]
        stops = [lambda group=group: self.stop_now(group) for group in groups]
        left = max(deadline - time.monotonic(), self._calls.limit / 4)
        errors = self._calls.run_all(stops, left if hangs else self.time_to_stop(ids) / 2)
        return errors if self.named_sessions() else []  # a call that hung may have succeeded meanwhile

    def _adopt_lost(self) -> list[Exception]:
        """Adopt the sessions of launches without an answer, as :meth:`adopt_unanswered` does."""
        names = self._names_unanswered()
        searches = [lambda: self._adopt(names, self.list_now())] if names else []
        return self._calls.run_all(searches, self._calls.limit / 4)

    async def adopt_unanswered(self, awaited: Collection[str] = ()) -> list[str]:
        """Adopt the sessions of launches without an answer, to stop them. Return their ids.

        Parameters
        ----------
        awaited : collection of str
            The names of sessions that are still to be launched: these use what is there.

        Raises
        ------
        CMLError
            If the platform does not list its sessions.
        """
        names = self._names_unanswered(awaited)
        return self._adopt(names, (await self.sessions()).values()) if names else []

    def _names_unanswered(self, awaited: Collection[str] = ()) -> dict[str, str]:
        """Return the names of sessions whose launch was not answered, by their titles."""
        with self._lock:
            return {title: name for name, title in +self._unanswered if title and name not in awaited}

    def _adopt(self, names: Mapping[str, str], listed: Iterable[SessionInfo]) -> list[str]:
        found = self._find(names, listed)
        for session in found:
            title = session["name"]
            self.adopt(session["id"], names[title])
            with self._lock:
                self._unanswered[names[title], title] -= 1
        return [session["id"] for session in found]


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
