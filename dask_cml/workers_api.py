"""The Workers API of the platform, asynchronous, and careful about every session that it launches.

This is the only module that calls ``cml.workers_v1``, ``cdsw`` or the local platform.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dask_cml.checks import integer, seconds
from dask_cml.errors import CMLError, LaunchRefused, NotOnCML
from dask_cml.options import SessionSize, setting

logger = logging.getLogger(__name__)

#: What the platform says of a session.
SessionInfo = Mapping[str, Any]

_ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
#: Errors of a program, which no second try mends. Whatever else a call raises without an HTTP status
#: is taken for a broken connection, because nothing is promised of the HTTP library under the API.
_OUR_FAULT = (TypeError, ValueError, LookupError, AttributeError, NameError, ImportError, CMLError)


def has_ended(session: SessionInfo) -> bool:
    """Whether a session is over, in whichever way."""
    return session.get("status") in _ENDED


def ip_address(session: SessionInfo) -> str | None:
    """Return a session's IP address, once the platform tells it."""
    ip = session.get("ip_address")
    return ip if ip and ip != "unknown" else None


def load_platform(platform: str = "auto") -> Any:
    """Import the module that offers ``launch_workers`` and its three companions.

    Parameters
    ----------
    platform : {"auto", "local"}
        ``"auto"`` is CML: ``cml.workers_v1``, else the older ``cdsw``.

    Raises
    ------
    NotOnCML
        If it is not there.
    """
    if platform == "local":
        return importlib.import_module("dask_cml.local")
    for name in ("cml.workers_v1", "cdsw"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "launch_workers"):
            return module
    raise NotOnCML(
        "this is not a CML session: neither cml.workers_v1 nor cdsw can be imported. To run on this "
        'machine, give platform="local" or set the environment variable DASK_CML__PLATFORM=local'
    )


class WorkersAPI:
    """Launch, watch and stop sessions without blocking the event loop.

    Every session that it launched and did not stop is in :attr:`live`, from the moment at which the
    platform's answer came, in whichever thread that was; :meth:`end` stops them, also when no event
    loop is left. :attr:`names` is what each was launched as; :attr:`on_change` is called in the event loop
    when a session was launched or stopped. No more than :attr:`threads` calls are under way at once.

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
        self._unanswered: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None
        self.threads: int = setting("api.threads", integer, 1)
        self._threads = concurrent.futures.ThreadPoolExecutor(self.threads, thread_name_prefix="cml-api")
        self._interval = setting("api.poll-interval", seconds)
        self._retries = setting("api.retries", integer, 0)
        self._patience = setting("api.timeout", seconds)
        self._lock = threading.Lock()
        self._ended = False
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._listing: asyncio.Task[dict[str, SessionInfo]] | None = None
        self._next_listing = 0.0

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
            If the platform answers without an id, as it does over quota.
        ValueError
            If ``launch_workers`` does not have one of the options.
        """
        options = dict(options or {})
        self.check_options(options)
        if self._takes("name"):
            options["name"] = name

        def launch() -> SessionInfo:
            if self._ended:
                raise CMLError(f"{name} is not launched: the cluster has ended")
            found = self._find_unanswered({name}) if name in self._unanswered else []
            try:
                answer = found or self.module.launch_workers(
                    n=1,
                    cpu=size.cpu,
                    memory=size.memory,
                    nvidia_gpu=size.nvidia_gpu,
                    code=code,
                    env=dict(env or {}),
                    **options,
                )
            except Exception as error:
                if may_pass(error) and "name" in options:
                    self._unanswered.add(name)
                raise
            session = answer[0] if answer else {}
            # A refused launch may have made half a session, which counts and costs as a whole one does.
            half_made = None if session.get("id") else session.get("engineId")
            with self._lock:
                for session_id in filter(None, [session.get("id"), half_made]):
                    self.live.add(session_id)
                    self.names[session_id] = name
                too_late = self._ended
            if half_made or (too_late and session.get("id")):
                self._try_to_stop(half_made or session["id"])
            if not session.get("id"):
                words = [session.get("message"), session.get("k8sMessage")]
                raise LaunchRefused(name, ". ".join(w for w in words if w) or f"it answers {answer!r}")
            return session

        session: SessionInfo = await self._call(launch)
        self.on_change()
        return session

    def _find_unanswered(self, names: Collection[str]) -> list[SessionInfo]:
        """Find sessions of launches that raised an error, which does not say that there is no session."""
        return [
            session
            for session in self.module.list_workers()
            if session.get("name") in names
            and session.get("id")
            and session["id"] not in self.names
            and not has_ended(session)
        ]

    async def sessions(self) -> dict[str, SessionInfo]:
        """Return the sessions by id, as the platform lists them next.

        One call of ``list_workers`` serves all who wait, and there is none when nobody does.

        Raises
        ------
        CMLError
            If :meth:`close` is called meanwhile.
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
        sessions = await self._call(self.module.list_workers)
        return {session["id"]: session for session in sessions if session.get("id")}

    async def stop(self, *ids: str) -> None:
        """Stop sessions, all in one call.

        Raises
        ------
        ValueError
            If there is no id: to the platform that means every session of the user's.
        CMLError
            If the platform does not stop them.
        """
        if not ids or not all(ids):
            raise ValueError(f"stop() needs the ids of sessions, it got {ids!r}")
        await self._call(lambda: self._stop_now(ids))
        self.on_change()

    def _stop_now(self, ids: Iterable[str]) -> None:
        ids = [*ids]
        if not ids:  # would stop all sessions of the user's, those of other work too
            return
        responses = self.module.stop_workers(*ids)
        codes = [getattr(response, "status_code", 200) for response in responses or ()]
        # 404: the session is gone already. Nothing promises that answers come in the order of the ids.
        bad = sorted({code for code in codes if code >= 400 and code != 404})
        if bad:
            raise StopFailed(f"CML answered {bad} when asked to stop {', '.join(ids)}", max(bad))
        with self._lock:
            self.live.difference_update(ids)

    def _try_to_stop(self, session_id: str) -> None:
        """Stop a session that nobody waits for. What fails here is left to :meth:`end`."""
        try:
            self._stop_now([session_id])
        except Exception as error:
            logger.warning("The session %s is not stopped yet: %r", session_id, error)

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Call in the thread pool; try again while what is wrong may pass."""
        for pause in [*self._pauses(), None]:
            try:
                return await self._in_thread(function)
            except Exception as error:
                if not may_pass(error):
                    raise
                if pause is None:
                    raise CMLError(f"the Workers API fails again and again: {error!r}") from error
                logger.info("The Workers API failed, next try in %.1f s: %r", pause, error)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _pauses(self) -> list[float]:
        steps = [min(_FIRST_PAUSE * 2**i, _LONGEST_PAUSE) for i in range(self._retries)]
        return [step * random.uniform(0.8, 1.2) for step in steps]

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        # Not run_in_executor: when the awaiting task is cancelled the thread goes on, and end() must know it.
        try:
            future = self._threads.submit(function)
        except RuntimeError as error:  # the pool is shut down, or the interpreter ends
            raise CMLError(f"the Workers API is not called any more: {error}") from error
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Do what :meth:`end` does, without blocking the event loop."""
        if self._listing is not None:
            self._listing.cancel()
        # A thread of its own, because those of the pool may all wait for an API that does not answer.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="cml-api-end")
        try:
            await asyncio.wrap_future(thread.submit(self.end))
        finally:
            thread.shutdown(wait=False)

    def end(self) -> None:
        """Launch nothing more, and stop every session in :attr:`live`, by plain calls.

        A launch that is under way stops its session itself when the answer comes; this waits for that,
        for ``cml.api.timeout`` at most. It may be called more than once.

        Raises
        ------
        CMLError
            If sessions are left. It names them.
        """
        with self._lock:
            self._ended = True
        # Once only, because what fails here is tried again below, for as long as it takes.
        with contextlib.suppress(Exception):
            self._stop_now(self.named_sessions())
        try:
            concurrent.futures.wait(tuple(self._under_way), timeout=self._patience)
            self._adopt_unanswered()
            self._stop_all()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _adopt_unanswered(self) -> None:
        if not self._unanswered:
            return
        names = sorted(self._unanswered)
        try:
            for session in self._find_unanswered(names):
                self.adopt(session["id"], session["name"])
            self._unanswered.difference_update(names)
        except Exception as error:
            logger.warning("There may be sessions of the names %s: the last listing fails: %r", names, error)

    def adopt(self, session_id: str, name: str) -> None:
        """Take a session over that was launched elsewhere."""
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

    def _stop_all(self) -> None:
        for pause in [*self._pauses(), None]:
            with self._lock:
                ids = sorted(self.live)
            try:
                return self._stop_now(ids)
            except Exception as error:
                if pause is None or not may_pass(error):
                    raise CMLError(f"these sessions may still run, stop them by hand: {ids}") from error
            time.sleep(pause)


class StopFailed(CMLError):
    """The platform did not accept that sessions are stopped."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.code = status


def may_pass(error: Exception) -> bool:
    """Whether an error of the Workers API is one that a later try may not meet."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 429)
    # An OSError comes from outside whatever else it is: the one of `requests` for an answer that is no JSON,
    # such as the page of a gateway, is a ValueError, too.
    return isinstance(error, OSError) or not isinstance(error, _OUR_FAULT)
