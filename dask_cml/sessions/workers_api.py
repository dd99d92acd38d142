"""The Workers API of the platform, asynchronous, and careful about every session that it launches.

With the two modules that it shares the platform's module with, :mod:`~dask_cml.sessions.listing` and
:mod:`~dask_cml.sessions.live`, it alone calls ``cml.workers_v1``, ``cdsw`` or the local platform.
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
from dataclasses import dataclass, field
from typing import Any

from dask_cml.checks import integer, is_session_id, seconds
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.options import SessionSize, setting
from dask_cml.sessions import answers
from dask_cml.sessions.answers import NoAnswer, SessionInfo, has_ended, ip_address, may_pass
from dask_cml.sessions.calls import Calls
from dask_cml.sessions.listing import Listing
from dask_cml.sessions.live import LiveSessions, check_id
from dask_cml.sessions.loading import load_platform

__all__ = ["SessionInfo", "WorkersAPI", "has_ended", "ip_address", "load_platform"]

logger = logging.getLogger(__name__)

#: Sessions that are stopped usually end within so many seconds.
_STOPPED_WITHIN = 30.0


@dataclass
class _Launch:
    """One launch, whatever number of calls it takes. The first session that is heard of is its session."""

    name: str
    size: SessionSize
    arguments: Mapping[str, Any] = field(repr=False)
    session: SessionInfo | None = None
    #: Nobody waits for it any more.
    over: bool = False


class WorkersAPI:
    """Launch, watch and stop sessions without blocking the event loop.

    Every session that it launched and did not stop is in :attr:`live`, from the moment at which the
    platform's answer came, in whichever thread that was; :meth:`end` stops them, also when no event
    loop is left. :attr:`names` is what each was launched as, :attr:`sizes` how large; :attr:`on_change` is
    called in the event loop when a session was launched or stopped. No more than :attr:`threads` calls are
    under way at once.

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
        self.on_change: Callable[[], None] = lambda: None
        self.threads: int = setting("api.threads", integer, 1)
        self._limit = setting("api.timeout", seconds)
        functions = ("launch_workers", "list_workers", "stop_workers")
        modules = {getattr(getattr(module, name, None), "__module__", "") for name in functions}
        self._calls = Calls(self.threads, self._limit, setting("api.retries", integer, 0), modules)
        self._listing = Listing(module, self._calls, setting("api.poll-interval", seconds))
        self._live = LiveSessions(module, self._calls)
        self.live = self._live.ids
        self.names = self._live.names
        self.sizes = self._live.sizes
        # What follows is shared by threads: it changes under the lock.
        self._lock = threading.Lock()
        self._ended = False
        #: How many calls to launch a name have not been answered, nor failed for good.
        self._unanswered: Counter[str] = Counter()
        self._launching: set[Future[Any]] = set()

    @property
    def problem(self) -> str | None:
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
            session = await self._launch(_Launch(name, size, arguments))
        except LaunchRefused:
            # Sessions that were just stopped fill the quota until they have ended.
            if not (stopped := self._live.stopped_before()) or not await self.wait_until_ended(stopped):
                raise
            session = await self._launch(_Launch(name, size, arguments))
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
            self._live.add(half_made, launch.name, launch.size, half_made=True)
            self._try_to_stop(half_made)
        raise answers.refusal(launch.name, session)

    def _take(self, launch: _Launch, session: SessionInfo) -> SessionInfo:
        """Give a launch its session. What comes too late, or twice, is stopped."""
        session_id = session["id"]
        with self._lock:
            is_new = self._live.add_new(session_id, launch.name, launch.size)
            if is_new and launch.session is None and not launch.over and not self._ended:
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
            for session in self._listing.now()
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
        return await self._listing.next()

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
            check_id(each)
        await self._calls.do(f"stop {_some(ids)}", lambda: self._live.stop(ids), self._live.time_to_stop(ids))
        self.on_change()

    def _try_to_stop(self, session_id: str) -> None:
        """Stop a session that nobody waits for. What fails here is left to :meth:`end`."""
        for pause in [*self._calls.pauses(), None]:
            try:
                return self._live.stop([session_id])
            except Exception as error:
                if pause is None or not self._ended or not may_pass(error):
                    why = answers.in_words(error)
                    return logger.warning("The session %s is not stopped yet: %s", session_id, why)
            time.sleep(pause)

    async def close(self, end: Callable[[], None] | None = None) -> None:
        """Call :meth:`end`, or what calls it, without blocking the event loop."""
        self._listing.cancel()
        await asyncio.wrap_future(self._calls.start(end or self.end))

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
        return await self._listing.wait_until_ended(ids, timeout)

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
        errors = self._calls.run_all([lambda: self._live.stop(ids)], self._live.time_to_stop(ids) / 2)
        hangs = any(isinstance(error, NoAnswer) for error in errors)
        with self._lock:
            launching = [*self._launching]
        wait(launching, timeout=max(0.0, begin + self._limit / 2 - time.monotonic()))
        self._adopt_unanswered()
        self._live.stop_all(hangs, begin + self._limit)

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
        self._live.add(session_id, name)

    def named_sessions(self) -> dict[str, str]:
        """Return what each session in :attr:`live` was launched as, by its id."""
        return self._live.named()

    def forget(self, *ids: str) -> None:
        """Leave sessions to others: :meth:`end` does not stop them."""
        self._live.forget(ids)


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first
