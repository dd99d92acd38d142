"""The Workers API of the platform, asynchronous, and careful about every session that it launches.

This is the only module that calls ``cml.workers_v1``, ``cdsw`` or the local platform.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dask_cml.checks import integer, is_session_id, message, seconds
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.options import SessionSize, setting
from dask_cml.sessions import answers
from dask_cml.sessions.answers import CallFailed, NoAnswer, SessionInfo, has_ended, ip_address, may_pass
from dask_cml.sessions.calls import Calls
from dask_cml.sessions.loading import load_platform

__all__ = ["SessionInfo", "WorkersAPI", "has_ended", "ip_address", "load_platform"]

logger = logging.getLogger(__name__)

#: A call that stops more sessions than this has as many times the time. The platform stops ten at once.
_IN_TIME = 1000
#: So many calls stop what is left when one call for all of them hangs.
_GROUPS = 64
#: Sessions that are stopped usually end within so many seconds.
_STOPPED_WITHIN = 30.0
#: What this process has stopped on each platform, of whichever cluster.
_stopped: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


@dataclass
class _Launch:
    """One launch, whatever number of calls it takes. The first session that is heard of is its session."""

    name: str
    arguments: Mapping[str, Any]
    session: SessionInfo | None = None
    #: Nobody waits for it any more.
    over: bool = False


class WorkersAPI:
    """Launch, watch and stop sessions without blocking the event loop.

    Every session that it launched and did not stop is in :attr:`live`, from the moment at which the
    platform's answer came, in whichever thread that was; :meth:`end` stops them, also when no event
    loop is left. :attr:`names` is what each was launched as; :attr:`on_change` is called in the event loop
    when a session was launched or stopped. No more than :attr:`threads` calls are under way at once.

    Each call has ``cml.api.timeout`` seconds. One that takes longer is left behind in its thread and tried
    again in another; if it launches a session after all, that session is taken, or stopped at once.

    Parameters
    ----------
    module : module
        Has ``launch_workers``, ``list_workers`` and ``stop_workers``, as :func:`load_platform` gives it.

    Raises
    ------
    TypeError, ValueError
        For a value of ``cml.api`` in Dask's configuration that is not allowed.

    Examples
    --------
    >>> async def hello():
    ...     api = WorkersAPI(load_platform("local"))
    ...     session = await api.launch("hello", SessionSize(1, 1), code="print('hello')")
    ...     await api.stop(session["id"])
    ...     await api.close()
    >>> asyncio.run(hello())
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.live: set[str] = set()
        self.names: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.threads: int = setting("api.threads", integer, 1)
        self._interval = setting("api.poll-interval", seconds)
        self._limit = setting("api.timeout", seconds)
        functions = ("launch_workers", "list_workers", "stop_workers")
        modules = {getattr(getattr(module, name, None), "__module__", "") for name in functions}
        self._calls = Calls(self.threads, self._limit, setting("api.retries", integer, 0), modules)
        self._listing: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next_listing = 0.0
        # What follows is shared by threads, and so is `live` and `names`: it changes under the lock.
        self._lock = threading.Lock()
        self._ended = False
        #: How many calls to launch a name have not been answered, nor failed for good.
        self._unanswered: Counter[str] = Counter()
        self._launching: set[Future[Any]] = set()
        self._half_made: set[str] = set()

    @property
    def trouble(self) -> str | None:
        """What the platform does not do, in words, until it does it again."""
        return next(iter([*self._calls.troubles.values()]), None)

    @property
    def shares_host_network(self) -> bool:
        """Whether sessions share this machine's ports, as they do on the local platform."""
        return bool(getattr(self.module, "shares_host_network", bool)())

    def check_options(self, names: Iterable[str], argument: str = "launch_options") -> None:
        """Refuse parameters that the installed ``launch_workers`` does not have.

        Raises
        ------
        ValueError
            That names them, and those there are.
        """
        unknown = sorted(name for name in names if not self._takes(name))
        if unknown:
            known = ", ".join(inspect.signature(self.module.launch_workers).parameters)
            raise ValueError(
                f"invalid {argument}: the installed launch_workers has no parameter {', '.join(unknown)}; "
                f"it has {known}"
            )

    def _takes(self, parameter: str) -> bool:
        parameters = inspect.signature(self.module.launch_workers).parameters
        return parameter in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    async def launch(
        self,
        name: str,
        size: SessionSize,
        code: str,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """Launch one session.

        Parameters
        ----------
        name : str
            A name to show, where the platform has such. No other launch should have it: if an answer is
            lost, this is how the session that was launched nevertheless is found, and taken.
        size : SessionSize
            Its virtual CPUs, memory in GiB, and GPUs.
        code : str
            What it runs.
        env : mapping of str to str, optional
            Its environment variables.
        options : mapping, optional
            More parameters of ``launch_workers``.

        Raises
        ------
        LaunchRefused
            If the platform says that it does not launch it, as it does over quota.
        CMLError
            If the platform fails at every try.
        ValueError
            If ``launch_workers`` does not have one of the options.
        """
        options = dict(options or {})
        self.check_options(options)
        if self._takes("name"):
            options["name"] = name
        arguments = {
            "n": 1,
            "cpu": size.cpu,
            "memory": size.memory,
            "nvidia_gpu": size.nvidia_gpu,
            "code": code,
            "env": dict(env or {}),
            **options,
        }
        try:
            session = await self._launch(_Launch(name, arguments))
        except LaunchRefused:
            # Sessions that were just stopped fill the quota until they have ended.
            if not (stopped := _stopped.get(self.module)) or not await self.wait_until_ended(stopped):
                raise
            session = await self._launch(_Launch(name, arguments))
        self.on_change()
        return session

    async def _launch(self, launch: _Launch) -> SessionInfo:
        try:
            return await self._calls.do(f"launch {launch.name}", lambda: self._launch_now(launch))
        finally:
            with self._lock:
                launch.over = True

    def _launch_now(self, launch: _Launch) -> SessionInfo:
        """Launch a session by a plain call, unless an earlier call has done so after all."""
        under_way: Future[Any] = Future()
        with self._lock:
            if self._ended:
                raise CMLError(f"{launch.name} is not launched: the cluster has ended")
            if launch.session is not None:
                return launch.session
            self._launching.add(under_way)
        try:
            if self._unanswered[launch.name] and (found := self._find_unanswered({launch.name})):
                return self._take(launch, found[0])
            return self._take(launch, self._ask_for(launch))
        finally:
            with self._lock:
                self._launching.discard(under_way)
            under_way.set_result(None)

    def _ask_for(self, launch: _Launch) -> SessionInfo:
        """Return what the platform launched, or raise what says why it did not."""
        named = "name" in launch.arguments
        with self._lock:
            self._unanswered[launch.name] += named
        try:
            session = answers.launched(self.module.launch_workers(**launch.arguments))
        except Exception as error:
            # There may be a session nevertheless, which may_pass does not exclude.
            with self._lock:
                self._unanswered[launch.name] -= named and not may_pass(error)
            raise
        with self._lock:
            self._unanswered[launch.name] -= named
        if session.get("id"):
            return session
        # It may have made half a session, which counts and costs as a whole one does.
        if is_session_id(half_made := session.get("engineId")):
            self._half_made.add(half_made)
            self.adopt(half_made, launch.name)
            self._try_to_stop(half_made)
        raise answers.refusal(launch.name, session)

    def _take(self, launch: _Launch, session: SessionInfo) -> SessionInfo:
        """Give a launch its session. What comes too late, or twice, is stopped."""
        session_id = session["id"]
        with self._lock:
            is_new = session_id not in self.names
            if is_new:
                self.live.add(session_id)
                self.names[session_id] = launch.name
                if launch.session is None and not launch.over and not self._ended:
                    launch.session = session
            taken = launch.session
        if is_new and taken is not session:
            logger.info("The session %s came too late for %s", session_id, launch.name)
            self._try_to_stop(session_id)
        if taken is None:
            raise CMLError(f"the session {session_id} came too late for {launch.name}")
        return taken

    def _find_unanswered(self, names: Collection[str]) -> list[SessionInfo]:
        """Find sessions of launches without a good answer, which does not say that there is no session."""
        return [
            session
            for session in answers.listed(self.module.list_workers())
            if session.get("name") in names and session["id"] not in self.names and not has_ended(session)
        ]

    async def sessions(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, as the platform lists them next.

        One call of ``list_workers`` serves all who wait, and there is none when nobody does.

        Raises
        ------
        CMLError
            If the platform fails at every try, or :meth:`close` is called meanwhile.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
            # All who wait may be cancelled, and then nobody asks for its error.
            self._listing.add_done_callback(lambda listing: listing.cancelled() or listing.exception())
        listing = self._listing
        await asyncio.wait([listing])
        if listing.cancelled():  # by close(), while this task itself is not cancelled
            raise CMLError("the sessions are not listed any more: the cluster has ended")
        return listing.result()

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next_listing - time.monotonic())
        self._next_listing = time.monotonic() + self._interval
        sessions = await self._calls.do("list sessions", lambda: answers.listed(self.module.list_workers()))
        return {session["id"]: session for session in sessions}

    async def stop(self, *ids: str) -> None:
        """Stop sessions, all in one call.

        Raises
        ------
        ValueError
            If there is no id, which to the platform means every session of the user's, or one that is none.
        CMLError
            If the platform does not stop them.
        """
        if not ids:
            raise ValueError("invalid ids=(): expected the ids of sessions")
        for each in ids:
            _check_id(each)
        await self._calls.do(f"stop {_some(ids)}", lambda: self._stop_now(ids), self._limit_to_stop(ids))
        self.on_change()

    def _limit_to_stop(self, ids: Collection[str]) -> float:
        return self._limit * (1 + len(ids) // _IN_TIME)

    def _stop_now(self, ids: Iterable[str]) -> None:
        ids = [*ids]
        if not ids:  # would stop all sessions of the user's, those of other work too
            return
        answers.check_stopped(ids, self.module.stop_workers(*ids))
        with self._lock:
            _stopped.setdefault(self.module, set()).update(set(ids) - self._half_made)
            self.live.difference_update(ids)

    def _try_to_stop(self, session_id: str) -> None:
        """Stop a session that nobody waits for. What fails here is left to :meth:`end`."""
        for pause in [*self._calls.pauses(), None]:
            try:
                return self._stop_now([session_id])
            except Exception as error:
                if pause is None or not self._ended or not may_pass(error):
                    why = answers.in_words(error)
                    return logger.warning("The session %s is not stopped yet: %s", session_id, why)
            time.sleep(pause)

    async def close(self) -> None:
        """Do what :meth:`end` does, without blocking the event loop."""
        if self._listing is not None:
            self._listing.cancel()
        await asyncio.wrap_future(self._calls.start(self.end))

    async def wait_until_ended(self, ids: Collection[str], timeout: float = _STOPPED_WITHIN) -> bool:
        """Wait until the platform lists stopped sessions as ended; until then they fill the quota.

        Parameters
        ----------
        ids : collection of str
            The sessions.
        timeout : float
            Seconds to wait at most.

        Returns
        -------
        bool
            Whether there were such sessions, and all have ended. False, too, if the platform fails.
        """
        deadline = time.monotonic() + timeout
        waited = False
        try:
            while (left := deadline - time.monotonic()) > 0:
                # Not sessions(), which lists no more after close().
                listing = asyncio.wrap_future(self._calls.start(self.module.list_workers))
                listed = answers.listed(await asyncio.wait_for(listing, left))
                if all(has_ended(session) for session in listed if session["id"] in ids):
                    return waited
                waited = True
                await asyncio.sleep(self._interval)
        except Exception as error:  # whatever the platform raises
            logger.info("Sessions that end were not waited for: %s", answers.in_words(error))
        return False

    def end(self) -> None:
        """Launch nothing more, and stop every session in :attr:`live`, by plain calls.

        It takes ``cml.api.timeout`` at most if the platform hangs. A launch that hangs longer stops its
        session itself when the answer comes, as long as the process lives. It may be called more than once.

        Raises
        ------
        CMLError
            If sessions are left. It names them.
        """
        with self._lock:
            self._ended = True
        begin = time.monotonic()
        # Once only, because what fails here is tried again below, for as long as it takes.
        ids = [*self.named_sessions()]
        errors = self._calls.run_all([lambda: self._stop_now(ids)], self._limit_to_stop(ids) / 2)
        hangs = any(isinstance(error, NoAnswer) for error in errors)
        with self._lock:
            launching = [*self._launching]
        wait(launching, timeout=max(0.0, begin + self._limit / 2 - time.monotonic()))
        self._adopt_unanswered()
        self._stop_all(hangs, begin + self._limit)

    def _adopt_unanswered(self) -> None:
        with self._lock:
            names = sorted(+self._unanswered)
        if not names:
            return

        def look() -> None:
            for session in self._find_unanswered(names):
                self.adopt(session["id"], session["name"])

        if errors := self._calls.run_all([look], self._limit / 4):
            why = answers.in_words(errors[0])
            return logger.warning("Sessions named %s may run: CML did not list them: %s", names, why)
        with self._lock:
            for name in names:
                del self._unanswered[name]

    def adopt(self, session_id: str, name: str) -> None:
        """Take a session over that was launched elsewhere.

        Raises
        ------
        ValueError
            If the id is none.
        """
        _check_id(session_id)
        with self._lock:
            self.live.add(session_id)
            self.names[session_id] = name

    def named_sessions(self) -> dict[str, str]:
        """Return what each session in :attr:`live` was launched as, by its id."""
        with self._lock:
            return {session_id: self.names[session_id] for session_id in self.live}

    def forget(self, *ids: str) -> None:
        """Leave sessions to others: :meth:`end` does not stop them."""
        with self._lock:
            self.live.difference_update(ids)

    def _stop_all(self, hangs: bool, deadline: float) -> None:
        """Stop what is live: by one call, or if that hangs by many, so that one session delays no other."""
        for pause in [*self._calls.pauses(), None]:
            ids = sorted(self.named_sessions())
            if not ids:
                return
            groups = [ids[i::_GROUPS] for i in range(min(_GROUPS, len(ids)))] if hangs else [ids]
            stops = [lambda group=group: self._stop_now(group) for group in groups]
            left = max(deadline - time.monotonic(), self._limit / 4)
            errors = self._calls.run_all(stops, left if hangs else self._limit_to_stop(ids) / 2)
            if not errors or not self.named_sessions():  # what hung may have been done meanwhile
                return
            late = hangs and time.monotonic() > deadline
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            if pause is None or late or not all(map(may_pass, errors)):
                named, why = ", ".join(sorted(self.named_sessions())), answers.in_words(errors[-1])
                raise CallFailed(f"CML did not stop {named}, which may still run: {why}") from errors[-1]
            time.sleep(pause)


def _check_id(session_id: object) -> None:
    if not is_session_id(session_id):
        raise ValueError(message("session id", session_id, "letters and digits"))


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
