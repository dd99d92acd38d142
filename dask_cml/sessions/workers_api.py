"""The Workers API of the platform, asynchronous, with an account of every session that must be stopped.

Only this module imports and calls ``cml.workers_v1``, ``cdsw`` or the local platform, and knows what their
answers and errors mean. A call may never return. The platform's functions ignore the HTTP status: they return
a server error like a result.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread as executors
import contextlib
import functools
import importlib
import inspect
import random
import re
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import datetime
from importlib.machinery import PathFinder
from typing import Any
from weakref import WeakKeyDictionary

from dask_cml import compat
from dask_cml.cancellation import no_answer, start_call
from dask_cml.checks import is_session_id, message, web_link
from dask_cml.errors import CallFailed, CMLError, LaunchRefused, NoAnswer, NotOnCML
from dask_cml.options import setting
from dask_cml.output import get_logger
from dask_cml.sessions.api_v2 import PARAMETERS, resolved
from dask_cml.sessions.here import this_owner
from dask_cml.sessions.plan import SessionPlan
from dask_cml.words import printable, printable_lines, shortened

logger = get_logger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
#: Maximum number of hanging calls with one verb, in addition to those that are made at once. At this number,
#: new calls with this verb fail until one returns.
_MOST_HANGING = 64
#: Maximum number of calls under way that make one thing, such as the session of a worker: all of them may
#: still come true, long after their time limit. After so many seconds, a call is lost.
_MOST_FOR_ONE, _LOST_AFTER = 2, 3600.0
#: Seconds within which stopped sessions usually end.
_STOPPED_WITHIN = 30.0
#: The sessions that this process has stopped on every platform, and that may not have ended.
_stopping: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

#: The platform's information on a session.
SessionInfo = Mapping[str, Any]
#: Errors of a program, which a second try cannot fix. Any other error without an HTTP status counts as a
#: broken connection, because the HTTP library of the Workers API may change.
_OUR_FAULT = (TypeError, ValueError, LookupError, AttributeError, NameError, ImportError, CMLError)
_PENDING = frozenset({"scheduling", "starting"})
#: The status of a session that the platform has listed before. It may run: old sessions are archived.
UNLISTED = "no longer listed"
_ENDED = frozenset({"succeeded", "failed", "stopped", "timedout", "skipped"})
_REFUSAL = re.compile(r"quota|limit|exceeded|forbidden", re.IGNORECASE)
#: Words of errors that match, too, but that a later try may not meet.
_NO_REFUSAL = re.compile(r"rate.?limit|time.?limit|deadline", re.IGNORECASE)
#: Kubernetes counts sessions as pods. It also begins each refusal with the name of the pod.
_PODS, _SUBJECT = re.compile(r"\bpods\b", re.IGNORECASE), re.compile(r'\bpods "[^"]*"')
_FEWER = (
    "CML limits the number of your sessions: use fewer, larger workers, or raise the project variable "
    "OVERRIDE_PODQUOTA"
)
_UNAUTHORIZED = re.compile(r"\bunauthori[sz]ed\b", re.IGNORECASE)
_KEY = "CDSW_API_KEY"
_LONGEST = 200
#: The folder from which a workbench adds its packages to the images.
_ADDON = re.compile(r"/cmladdon-([^/]+)/")


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
        The keys of all sessions that were launched or adopted here and not stopped, by their ids: the names
        of workers, or ``"scheduler"``. A session is in it from the moment of the platform's answer, in any
        thread. :meth:`end` stops these sessions, without an event loop.
    stopped : set of str
        The ids of the sessions that were stopped here, and whose end is not in the record yet.
    launched : set of str
        The ids of all sessions that were launched or adopted here. Threads share these three without a lock,
        which a signal's handler could wait for: each change is one step.
    threads : int
        Maximum number of concurrent calls of one function.
    failures : dict of str to str
        The current failures of operations by their verbs: ``"launch"``, ``"list"``, ``"stop"``.
    key_refused : bool
        Whether the platform has refused this session's key in all tries of the last operation.

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
    ...     plan = SessionPlan("hello", "hello", "hello", size, "print('hello')", {}, Path("hello.log"))
    ...     session = await api.launch(plan)
    ...     await api.stop(session["id"])
    ...     await api.close()
    >>> asyncio.run(hello())
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.threads: int = setting("api.threads")
        self.live: dict[str, str] = {}
        self.stopped: set[str] = set()
        self.launched: set[str] = set()
        self.failures: dict[str, str] = {}
        self.key_refused = False
        self._limit: float = setting("api.timeout")
        self._retries: int = setting("api.retries")
        self._interval: float = setting("api.poll-interval")
        #: The calls that have not returned, including abandoned ones: their verb, what they make, and when
        #: they began.
        self._under_way: dict[Future[Any], tuple[str, Hashable, float]] = {}
        #: What launches that failed have launched by now, or will: the next one uses it while it lives.
        self._late = defaultdict[Hashable, list[SessionInfo]](list)
        #: By verbs, so that launches that hang delay no stop.
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(self.threads))
        #: The listing that runs, or that nobody has waited for until its end.
        self._listing: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next_listing = 0.0
        self._stopping = _stopping.setdefault(module, set())
        self._ended = False
        #: What the end does with :attr:`live`, again after each launch that is answered later.
        self._end: Callable[[], object] = self.end

    @property
    def problem(self) -> str | None:
        """The platform's current failure, as a sentence. None if its last calls succeeded."""
        return next(iter([*self.failures.values()]), None)

    def settle(self, verb: str) -> None:
        """Forget the failure of an operation, because nothing is left to launch or to stop."""
        self.failures.pop(verb, None)

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
        if unknown := sorted(name for name in names if PARAMETERS.get(name, name) not in parameters):
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
        if not PARAMETERS.keys().isdisjoint(options):
            await self._do("list", "labels", lambda: resolved(options, argument))

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
        stopping, made = self._stopping.copy(), (plan.name, plan.code)
        call = functools.partial(self._launch_now, plan, self._late[made])
        launch = functools.partial(self._do, "launch", plan.name, call, made)
        try:
            session = await launch()
        except LaunchRefused:
            # Stopped sessions count against the quota until they have ended.
            stopping |= self._stopping
            if not stopping or not await self._have_ended(stopping):
                raise
            session = await launch()
        self._late.pop(made, None)
        return session

    def _launch_now(self, plan: SessionPlan, launched: list[SessionInfo]) -> SessionInfo:
        """Launch a session by a blocking call, unless an abandoned call has launched it meanwhile.

        A session that comes too late, or second, stays in :attr:`live`, and its cluster stops what it does
        not use: a scheduler may run in it.
        """
        session = next((late for late in [*launched] if late["id"] in self.live), None)
        try:
            if session is None and not self._ended:
                session = self._ask_for(plan)
                launched.append(session)
        finally:
            if self._ended:  # perhaps the end did not wait for this call
                start_call(self._end)
        if session is None or self._ended:
            raise CMLError(f"{plan.name} not launched: the cluster has shut down")
        return session

    def _ask_for(self, plan: SessionPlan) -> SessionInfo:
        """Return the session that the platform launched, or raise the reason why it launched none."""
        options = {**asdict(plan.size), **plan.launch_options}
        if not PARAMETERS.keys().isdisjoint(options):  # it names a kind of GPU or a network
            options = resolved(options)
        # Not every release documents it, or has it.
        if "name" in inspect.signature(self.module.launch_workers).parameters:
            options["name"] = plan.title
        session = _launched(self.module.launch_workers(n=1, code=plan.code, env=dict(plan.env), **options))
        if session.get("id"):
            self.adopt(session["id"], plan.key)
            return session
        # A refused launch may leave an engine behind, which counts against the quota like a session.
        engine = session.get("engineId")
        if is_session_id(engine):
            self.adopt(engine, plan.key)
            with contextlib.suppress(Exception):  # of the platform: end() tries again
                self._stop_now(engine)
            self._stopping.discard(engine)  # its end makes no room for another try
        raise LaunchRefused(plan.name, reason_of(session) or "no reason given")

    def adopt(self, session_id: str, key: str) -> None:
        """Take over a session, also one that another process launched.

        Raises
        ------
        ValueError
            If the id is invalid.
        """
        if not is_session_id(session_id):
            raise ValueError(message("session id", session_id, "letters and digits"))
        self.live[session_id] = key
        self.launched.add(session_id)

    def forget(self, *ids: str) -> None:
        """Leave sessions to other processes."""
        for session_id in ids:
            self.live.pop(session_id, None)

    # -- list

    async def sessions(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, as :meth:`sessions_within` does, however long the platform needs."""
        return await self.sessions_within(None) or {}

    async def sessions_within(self, seconds: float | None) -> dict[str, SessionInfo] | None:
        """Return the sessions by id, from the next call of ``list_workers``. None: it needs longer.

        All coroutines that wait share one call. Without any, the platform is not called. If nobody has waited
        for the answer until it came, the next call returns it, or raises its error.

        Raises
        ------
        CMLError
            If all calls fail, or :meth:`close` is called meanwhile.
        """
        if self._listing is None:
            self._listing = asyncio.create_task(self._list())
            # If nobody waits any more, nobody retrieves its error.
            self._listing.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._listing
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            return None
        if self._listing is task:
            self._listing = None
        if task.cancelled():  # by close(); the waiting task is not cancelled
            raise CMLError("sessions not listed: the cluster has shut down")
        return task.result()

    async def _list(self) -> dict[str, SessionInfo]:
        await asyncio.sleep(self._next_listing - time.monotonic())
        self._next_listing = time.monotonic() + self._interval
        return await self._do("list", "sessions", self._list_now)

    def _list_now(self) -> dict[str, SessionInfo]:
        sessions = {session["id"]: session for session in listed(self.module.list_workers())}
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
        """Stop sessions of :attr:`live`, each by a call of its own.

        Raises
        ------
        CMLError
            If the platform does not stop some of them. The message names one of these.
        """

        async def stop(session_id: str) -> None:
            self._late.clear()  # no launch uses a session that is being stopped
            try:
                await self._do("stop", session_id, functools.partial(self._stop_now, session_id))
            except CallFailed:
                if session_id in self.live:
                    raise
                self.settle("stop")  # an abandoned call has stopped it meanwhile

        outcomes = await asyncio.gather(*map(stop, ids), return_exceptions=True)
        for error in filter(None, outcomes):
            raise error

    def _stop_now(self, session_id: str) -> None:
        """Stop a session of :attr:`live` by a blocking call.

        Without its id, the platform would stop all sessions of the user, including other work.
        """
        if session_id in self.live:
            _check_stopped(self.module.stop_workers(session_id))
            self.forget(session_id)
            self._stopping.add(session_id)
            self.stopped.add(session_id)

    # -- the end

    async def leave(self, leave: Callable[[], object]) -> None:
        """Launch nothing more, and call `leave` for :attr:`live`, again for what is launched late."""
        self._end, self._ended = leave, True  # in this order: a thread that sees the end calls it
        await self.close(leave)

    async def close(self, end: Callable[[], object] | None = None) -> None:
        """Call :meth:`end`, or `end`, without blocking the event loop."""
        if self._listing is not None:
            self._listing.cancel()
        await asyncio.wrap_future(start_call(end or self.end))

    def end(self) -> None:
        """Launch nothing more, and stop all sessions in :attr:`live`, by blocking calls.

        If the platform hangs, this takes at most ``cml.api.timeout``. A launch that hangs longer stops its
        session when the answer comes, if the process still runs. Repeated calls are allowed.

        Raises
        ------
        CMLError
            If sessions remain. The message names them.
        """
        self._end, self._ended = self.end, True  # a process that has left may still shut the cluster down
        deadline = time.monotonic() + self._limit
        errors = self._stop_live(self._limit / 2, self.threads)
        # A launch that is answered from now on stops its session.
        launches = [future for future, call in self._under_way.copy().items() if call[0] == "launch"]
        wait(launches, timeout=max(0.0, deadline - self._limit / 2 - time.monotonic()))
        self._leave_behind()
        hangs = False
        # Calls have failed for long already if the key is refused.
        for pause in [*([] if self.key_refused else self._pauses()), None]:
            hangs = hangs or any(isinstance(error, NoAnswer) for error in errors)
            limit = max(deadline - time.monotonic(), self._limit / 4) if hangs else self._limit / 2
            # A call that hangs delays no other.
            errors = self._stop_live(limit, len(self.live) if hangs else self.threads)
            is_late = hangs and time.monotonic() > deadline
            if pause is None or is_late or not any(map(_may_pass, errors)):
                break
            time.sleep(pause)
        if errors:
            left, why = ", ".join(sorted(self.live)), in_words(errors[-1])
            raise CallFailed(f"CML did not stop {left}, which may still run: {why}") from errors[-1]

    def _stop_live(self, limit: float, n_threads: int) -> list[BaseException]:
        """Stop all live sessions in some threads, each of them one after the other. Return the errors."""
        ids, errors = iter(sorted(self.live)), list[BaseException]()

        def stop() -> None:
            for session_id in ids:
                try:
                    self._stop_now(session_id)
                except Exception as error:  # of the platform: the other sessions are stopped nevertheless
                    errors.append(error)

        futures = [start_call(stop) for _ in range(min(n_threads, len(self.live)))]
        wait(futures, timeout=max(0.0, limit))
        if not all(future.done() for future in futures):
            self._leave_behind()
            errors.append(no_answer(limit))
        return [*errors] if self.live else []  # a call that hung may have succeeded meanwhile

    # -- calls

    async def _do(self, verb: str, what: str, function: Callable[[], Any], made: Hashable = None) -> Any:
        """Call a function without blocking the event loop. Retry while the error is temporary.

        If too many calls that make one thing hang, a retry makes no call, but waits for these.

        Parameters
        ----------
        verb : str
            The operation for messages, such as ``"list"``.
        what : str
            The object of the operation for messages, such as ``"sessions"``.
        function : callable
            The function, which may block.
        made : hashable, optional
            What the function makes. Default: nothing.

        Raises
        ------
        CallFailed
            If all tries fail because of the platform. Other errors are raised unchanged.
        """
        # By hand: tenacity would be no shorter, and only one of CML's images has it.
        begin, pauses = time.monotonic(), self._pauses()
        while True:
            try:
                result = await self._run(verb, made, function)
            except Exception as error:  # of the function, which is the platform's
                if not _is_of_the_platform(error):
                    self.failures.pop(verb, None)
                    raise
                words = in_words(error)
                if pauses and _may_pass(error):
                    logger.info("CML did not %s %s, next try in %.1f s: %s", verb, what, pauses[0], words)
                    await asyncio.sleep(pauses.pop(0))
                    continue
                failure = f"CML did not {verb} {what}"
                if not pauses:
                    n = self._retries + 1
                    noun = "try" if n == 1 else "tries"
                    failure += f" in {n} {noun}, {time.monotonic() - begin:.0f} s"
                self.failures[verb] = f"{failure}: {words}"
                self.key_refused = _refuses_key(error)
                raise CallFailed(self.failures[verb]) from error
            self.failures.pop(verb, None)
            self.key_refused = False
            return result

    def _pauses(self) -> list[float]:
        """Return the pauses between tries, in seconds."""
        steps = [min(_FIRST_PAUSE * 2**i, _LONGEST_PAUSE) for i in range(self._retries)]
        return [step * random.uniform(0.8, 1.2) for step in steps]

    async def _run(self, verb: str, made: Hashable, function: Callable[[], Any]) -> Any:
        under_way, since = self._under_way, time.monotonic() - _LOST_AFTER
        hanging = [future for future, call in under_way.copy().items() if call[1] == made and call[2] > since]
        if made is not None and len(hanging) >= _MOST_FOR_ONE:
            return await self._first_answer(hanging)
        async with self._slots[verb]:
            n_under_way = [call[0] for call in under_way.copy().values()].count(verb)
            if n_under_way >= self.threads - 1 + _MOST_HANGING:
                raise NoAnswer(f"{n_under_way} earlier calls have not returned")
            future = start_call(function)
            under_way[future] = verb, made, time.monotonic()
            future.add_done_callback(under_way.pop)
            return await self._first_answer([future])

    async def _first_answer(self, futures: Collection[Future[Any]]) -> Any:
        # Not wait_for: if the waiting task is cancelled, the threads go on, and nobody may see their errors.
        waiting = [asyncio.wrap_future(future) for future in futures]
        for wrapped in waiting:
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        answered, _ = await asyncio.wait(waiting, timeout=self._limit, return_when=asyncio.FIRST_COMPLETED)
        if answered:
            return answered.pop().result()
        self._leave_behind()
        raise no_answer(self._limit)

    def _leave_behind(self) -> None:
        """Let the interpreter exit without waiting for the platform's own thread pools, if they hang."""
        functions = ("launch_workers", "list_workers", "stop_workers")
        of_platform = {getattr(getattr(self.module, name, None), "__module__", "") for name in functions}
        frames = sys._current_frames()
        for thread in [*executors._threads_queues]:  # concurrent/futures/thread.py:17
            frame = frames.get(thread.ident or 0)
            stack = traceback.walk_stack(frame) if frame else ()
            modules = {caller.f_globals.get("__name__") for caller, _ in stack}
            if thread.daemon and modules & of_platform:
                compat.leave_pool_thread(thread)


# -- the platform's module


def origin(path: object) -> str:
    """Return the path of the platform's module, with the release of the workbench that has added it.

    Examples
    --------
    >>> origin("/runtime-addons/cmladdon-2.0.49-b279/lib/cml/workers_v1.py")
    '/runtime-addons/cmladdon-2.0.49-b279/lib/cml/workers_v1.py (workbench 2.0.49-b279)'
    """
    release = _ADDON.search(str(path))
    return f"{path} (workbench {release[1]})" if release else str(path)


def load_platform(platform: str = "auto") -> Any:
    """Import the platform's module, with ``launch_workers``, ``list_workers`` and ``stop_workers``.

    Parameters
    ----------
    platform : {"auto", "local"}
        ``"auto"`` is CML: ``cml.workers_v1`` or, if that is missing, ``cdsw``.

    Raises
    ------
    NotOnCML
        If neither module can be imported.
    """
    if platform == "local":
        return importlib.import_module("dask_cml.local")
    broken: ImportError | None = None
    for name in ("cml.workers_v1", "cdsw"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name in ("cml", name)
            if not is_missing:
                broken = broken or error
            continue
        if hasattr(module, "launch_workers"):
            return module
    if broken is not None:
        specs = [spec for spec in map(PathFinder.find_spec, ("cml", "cdsw")) if spec is not None]
        paths = ", ".join(origin(spec.origin) for spec in specs)
        raise NotOnCML(f"cannot import the Workers API from {paths}: {broken!r}") from broken
    raise NotOnCML(
        "not in a CML session: cannot import cml.workers_v1 or cdsw. To run on this machine, use "
        'platform="local" or set the environment variable DASK_CML__PLATFORM=local'
    )


# -- sessions and answers


def has_ended(session: SessionInfo) -> bool:
    """Return whether a session has ended, in any way. ``stopping`` and ``unknown`` do not count."""
    return session.get("status") in _ENDED


def is_pending(session: SessionInfo) -> bool:
    """Return whether a session has not started to run: it is queued, or starts."""
    return session.get("status") in _PENDING


def _read(session: SessionInfo) -> SessionInfo:
    """Return a session with the documented status, and with no URL that is no link.

    Newer releases also write ``ENGINE_RUNNING``.
    """
    read = dict(session)
    if "status" in session:
        read["status"] = printable(str(session["status"]).lower().removeprefix("engine_"))
    if "app_url" in session:
        read["app_url"] = web_link(session["app_url"])
    return read


def time_of(session: SessionInfo, field: str) -> datetime | None:
    """Return the time in a session's field, such as ``created_at``. Return None if it is unknown."""
    try:
        found = datetime.fromisoformat(str(session.get(field)).replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else None


def listed(answer: Any) -> list[SessionInfo]:
    """Return the sessions in the answer of ``list_workers``.

    Raises
    ------
    WrongAnswer
        If the answer is not a list of sessions.
    """
    if not isinstance(answer, list) or not all(isinstance(session, Mapping) for session in answer):
        raise _wrong(answer)
    return [_read(session) for session in answer if is_session_id(session.get("id"))]


def _launched(answer: Any) -> SessionInfo:
    """Return the session in the answer of ``launch_workers(1, …)``: with an id, or a refusal.

    Raises
    ------
    WrongAnswer
        If the answer is neither.
    """
    session = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(session, Mapping) or not (session.get("id") or _is_refusal(session)):
        raise _wrong(session)
    return _read(session)


def reason_of(session: SessionInfo) -> str:
    """Return why a session is refused, waits or has ended, in the platform's words. Empty if it gives none.

    Where the number of sessions is the reason, advice follows.
    """
    reason = _words_of(session)
    if _PODS.search(_SUBJECT.sub("", reason)):
        reason += f" ({_FEWER})"
    return reason


def _is_refusal(answer: SessionInfo) -> bool:
    if answer.get("engineId") or answer.get("k8sMessage"):
        return True
    words = str(answer.get("message") or "")
    return bool(_REFUSAL.search(words)) and not _NO_REFUSAL.search(words)


def _check_stopped(answer: Any) -> None:
    """Check the answer of ``stop_workers`` with one id.

    Raises
    ------
    WrongAnswer
        If the answer does not confirm that the session is stopped.
    """
    response = next(iter(answer), None) if isinstance(answer, list) else answer
    code = getattr(response, "status_code", None)
    if not isinstance(code, int):
        raise _wrong(response)
    if code >= 400 and code != 404:  # 404: it has ended already
        raise WrongAnswer(f"CML answered {code}", code)


def _wrong(answer: Any) -> WrongAnswer:
    words = _words_of(answer) if isinstance(answer, Mapping) else ""
    code = 401 if _UNAUTHORIZED.search(words) else None
    return WrongAnswer(words or f"CML answered with a {type(answer).__name__} instead of a session", code)


def _words_of(answer: SessionInfo) -> str:
    words = [str(answer.get(key) or "") for key in ("message", "k8sMessage")]
    return printable_lines(". ".join(filter(None, words)))


# -- errors


class WrongAnswer(CMLError):
    """An answer in the wrong form, most often a server error. A later try may succeed.

    Parameters
    ----------
    words : str
        The platform's error message.
    code : int, optional
        The HTTP status, if it is known.
    """

    def __init__(self, words: str, code: int | None = None) -> None:
        super().__init__(words)
        self.code = code


def _may_pass(error: BaseException) -> bool:
    """Return whether a later try may succeed after this error."""
    status = _http_status(error)
    if status is not None:
        return status >= 500 or status in (401, 408, 429)
    if isinstance(error, (WrongAnswer, NoAnswer)) or _is_no_json(error):
        return True
    # An OSError always comes from outside this program.
    return not _is_missing_key(error) and (isinstance(error, OSError) or not isinstance(error, _OUR_FAULT))


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None


def _refuses_key(error: BaseException) -> bool:
    """Return whether the platform does not accept this session's key, as after its rotation."""
    return _http_status(error) == 401


def _is_of_the_platform(error: BaseException) -> bool:
    """Return whether the platform caused the error, and not its caller."""
    return _may_pass(error) or _is_missing_key(error) or isinstance(error, (OSError, WrongAnswer))


def _is_missing_key(error: BaseException) -> bool:
    """Return whether the platform's functions cannot work in this process."""
    return isinstance(error, RuntimeError) and not isinstance(error, CMLError) and _KEY in str(error)


def _is_no_json(error: BaseException) -> bool:
    # The error of json, simplejson or newer releases of `requests`, for example for a gateway's HTML page.
    return type(error).__name__ == "JSONDecodeError"


def in_words(error: BaseException) -> str:
    """Return an error as one short line."""
    if _is_missing_key(error):
        return f"{_KEY} is not set: restart the kernel, or start a new session"
    if _is_no_json(error):
        return "the answer is not JSON; CML's gateway may not reach its server"
    line = next(iter(str(error).splitlines()), "")
    if not isinstance(error, CMLError):
        line = f"{type(error).__name__}: {line}".removesuffix(": ")
    words = printable(shortened(line, _LONGEST))
    if _refuses_key(error):
        session = f"session {this_owner()}" if this_owner() else "this session"
        words = (
            f"CML refuses this session's {_KEY} ({words}); if it was rotated, restart {session}, with which "
            "its worker sessions end"
        )
    return words
