"""The Workers API in memory: its answers and its traps, without a process behind any session."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

ENDED = ("succeeded", "failed", "stopped", "timedout")
_STAGES = ("scheduling", "starting", "running")


@dataclass
class Response:
    """As much of an HTTP response as anybody reads."""

    status_code: int = 204


class HTTPError(OSError):
    """An answer of 4xx or 5xx, as the `requests` package raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Error")
        self.response = Response(status)


@dataclass
class Hanging:
    """Calls of a function that do not return."""

    times: int
    after: bool
    over: threading.Event = field(default_factory=threading.Event)


@dataclass
class Call:
    """One call of a function of the API."""

    function: str
    arguments: Any
    thread: str
    at: float = field(default_factory=time.monotonic)


@dataclass
class StubSession:
    """A session, with what a test may set of it."""

    id: str
    master: str
    launched_with: dict[str, Any]
    half_made: bool = False
    status: str = "scheduling"
    ip_address: str | None = None
    listed: bool = True
    created_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    running_at: datetime | None = None
    finished_at: datetime | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        return self.status not in ENDED

    def reach(self, status: str) -> None:
        if not self.live:
            return
        now = datetime.now(timezone.utc) + timedelta(microseconds=1)
        if status == "running":
            self.running_at = now
        if status in ENDED:
            self.finished_at = max(now, (self.running_at or now) + timedelta(microseconds=1))
        self.status = status

    def described(self) -> dict[str, Any]:
        begin, end = self.running_at, self.finished_at
        return {
            "id": self.id,
            "status": self.status,
            "created_at": self.created_at.isoformat(),
            "running_at": begin and begin.isoformat(),
            "finished_at": end and end.isoformat(),
            "duration": (end - begin).total_seconds() if begin and end else None,
            "ip_address": self.ip_address or "unknown",
            "app_url": f"https://{self.id}.cml.example.com/",
            **({"name": self.launched_with["name"]} if "name" in self.launched_with else {}),
            **self.more,
        }


class Stub:
    """Stands in for ``cml.workers_v1``. It is thread-safe.

    Parameters
    ----------
    newer : bool
        Whether ``launch_workers`` has the parameters of newer releases, ``name`` among them.
    advances : bool
        Whether at each ``list_workers`` the sessions get one step further, until they run and then have
        an address. Otherwise they stay in ``scheduling`` until :meth:`set` says more.
    latency : float
        Seconds that each request takes. ``launch_workers(n)`` does n of them, ten at a time.
    ends : callable, optional
        Gets the code of a session and returns the status that it ends with, or None: it runs on.
    """

    def __init__(
        self,
        newer: bool = True,
        advances: bool = True,
        latency: float = 0.0,
        ends: Callable[[str], str | None] = lambda code: None,
    ) -> None:
        self.advances, self.latency, self.ends = advances, latency, ends
        self.calls: list[Call] = []
        self.under_way = self.most_at_once = 0
        self.all: dict[str, StubSession] = {}
        self.quota: dict[str, float] = {}
        self.first_status = "scheduling"
        self.launch_workers = self._newer_launch if newer else self._older_launch
        self._lock = threading.RLock()
        #: Sessions whose stop hangs while they are in it.
        self.never_stops: set[str] = set()
        self._errors: dict[str, deque[Exception]] = {}
        self._answers: dict[str, deque[Any]] = {}
        self._hanging: dict[str, Hanging] = {}
        self._refusals: deque[dict[str, str]] = deque()
        self._stop_codes: deque[int] = deque()
        self._gates: dict[str, threading.Event] = {}

    # -- what tests set and ask

    def set(self, session_id: str, status: str | None = None, **more: Any) -> None:
        """Set a session's status, its ``ip_address``, whether it is ``listed``, or any more that is told."""
        with self._lock:
            session = self.all[session_id]
            for name, value in more.items():
                if name in ("ip_address", "listed"):
                    setattr(session, name, value)
                else:
                    session.more[name] = value
            if status is not None:
                session.reach(status)

    def configure(self, quota: dict[str, float] | None = None) -> None:
        """Bound the sum of ``cpu``, ``memory``, ``nvidia_gpu`` or ``sessions``."""
        self.quota = quota or {}

    def refuse(
        self, times: int = 1, message: str = "failed to launch", k8s_message: str = "exceeded quota: pods"
    ) -> None:
        """Refuse the next sessions."""
        self._refusals.extend({"message": message, "k8sMessage": k8s_message} for _ in range(times))

    def fail(self, function: str, *errors: Exception) -> None:
        """Raise these errors in the next calls of a function, one in each."""
        self._errors.setdefault(function, deque()).extend(errors)

    def say(self, function: str, *answers: Any) -> None:
        """Return these from the next calls of a function, one from each, and do nothing."""
        self._answers.setdefault(function, deque()).extend(answers)

    def answer_stop(self, *codes: int) -> None:
        """Answer the next requests to stop a session with these codes, one each; below 400 it is stopped."""
        self._stop_codes.extend(codes)

    def heal(self) -> None:
        """Fail, refuse and hang no more."""
        for planned in (*self._errors.values(), *self._answers.values(), self._refusals, self._stop_codes):
            planned.clear()
        self.never_stops.clear()

    @contextmanager
    def held(self, function: str) -> Iterator[Callable[[], None]]:
        """Let calls of a function wait, before they do anything, for the block's end or its value's call."""
        gate = self._gates[function] = threading.Event()
        try:
            yield gate.set
        finally:
            del self._gates[function]
            gate.set()

    @contextmanager
    def hangs(self, function: str, times: int = 1, after: bool = False) -> Iterator[Callable[[], None]]:
        """Let the next calls hang, before or after they are done, for the block or until its value's call."""
        hanging = self._hanging[function] = Hanging(times, after)
        try:
            yield hanging.over.set
        finally:
            del self._hanging[function]
            hanging.over.set()

    @property
    def live(self) -> list[str]:
        """The sessions that have not ended, half-made ones too."""
        with self._lock:
            return [each.id for each in self.all.values() if each.live]

    def count(self, function: str) -> int:
        """How often a function was called."""
        with self._lock:
            return sum(call.function == function for call in self.calls)

    def arguments(self, function: str) -> list[Any]:
        """What a function was called with, call by call."""
        with self._lock:
            return [call.arguments for call in self.calls if call.function == function]

    # -- the API

    def list_workers(self) -> Any:
        with self._call("list_workers", None):
            if self._answers.get("list_workers"):
                return self._answers["list_workers"].popleft()
            return self._listing()

    def stop_workers(self, *ids: Any) -> Any:
        ids = tuple(each["id"] if isinstance(each, dict) else each for each in ids)
        with self._call("stop_workers", ids):
            if self._answers.get("stop_workers"):
                return self._answers["stop_workers"].popleft()
            with self._lock:
                if not ids:  # it means all of the caller's
                    ids = tuple(each.id for each in self._of_caller() if each.live)
                hang = [each for each in ids if each in self.never_stops]
                responses = [self._stop(each) for each in ids if each not in hang]
            while self.never_stops & {*ids}:
                time.sleep(0.01)
            return responses + [self._stop(each) for each in hang]

    def await_workers(
        self, ids: Iterable[Any], wait_for_completion: bool = True, timeout_seconds: float = 60
    ) -> dict[str, list[dict[str, Any]]]:
        wanted = {each["id"] if isinstance(each, dict) else each for each in ids}
        deadline = time.monotonic() + timeout_seconds
        good = ("succeeded",) if wait_for_completion else ("running",)
        while True:
            found = [each for each in self._listing() if each["id"] in wanted]
            settled = [
                each
                for each in found
                if each["status"] in ENDED or (each["status"] in good and each["ip_address"] != "unknown")
            ]
            if len(settled) == len(wanted) or time.monotonic() >= deadline:
                workers = [each for each in settled if each["status"] in good and timeout_seconds]
                return {"workers": workers, "failures": [each for each in found if each not in workers]}
            time.sleep(5)

    def _newer_launch(
        self,
        n,
        cpu,
        memory,
        nvidia_gpu=0,
        kernel="python3",
        script="",
        code="",
        env={},  # noqa: B006  # as the platform has it
        name="",
        accelerator_label_id=None,
        resource_profile_id=None,
        resource_group_id=None,
    ):
        return self._launch(n, {k: v for k, v in locals().items() if k not in ("self", "n")})

    def _older_launch(
        self,
        n,
        cpu,
        memory,
        nvidia_gpu=0,
        kernel="python3",
        script="",
        code="",
        env={},  # noqa: B006  # as the platform has it
    ):
        return self._launch(n, {k: v for k, v in locals().items() if k not in ("self", "n")})

    # -- behind it

    @contextmanager
    def _call(self, function: str, arguments: Any) -> Iterator[None]:
        with self._lock:
            self.calls.append(Call(function, arguments, threading.current_thread().name))
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            errors = self._errors.get(function)
            error = errors.popleft() if errors else None
            hanging = self._hanging.get(function)
            if hanging is not None and hanging.times:
                hanging.times -= 1
            else:
                hanging = None
        try:
            if hanging and not hanging.after:
                hanging.over.wait()
            if gate := self._gates.get(function):
                gate.wait()
            if function != "launch_workers":
                self._request()
            if error is not None:
                raise error
            yield
            if hanging and hanging.after:
                hanging.over.wait()
        finally:
            with self._lock:
                self.under_way -= 1

    def _request(self) -> None:
        if self.latency:
            time.sleep(self.latency)

    def _launch(self, n: int, options: dict[str, Any]) -> Any:
        with self._call("launch_workers", {"n": n, **options}):
            if self._answers.get("launch_workers"):
                return self._answers["launch_workers"].popleft()
            if n == 1:
                return [self._launch_one(options)]
            with ThreadPoolExecutor(10) as threads:
                return [*threads.map(self._launch_one, [options] * n)]

    def _launch_one(self, options: dict[str, Any]) -> dict[str, Any]:
        self._request()
        with self._lock:
            refusal = self._refusals.popleft() if self._refusals else self._over_quota(options)
            session = StubSession(
                id=f"stub{len(self.all):012d}",
                master=os.environ.get("CDSW_ENGINE_ID", ""),
                launched_with=options,
                half_made=refusal is not None,
                status=self.first_status,
            )
            self.all[session.id] = session
            if refusal is not None:
                return {**refusal, "engineId": session.id}
            return session.described()

    def _over_quota(self, options: dict[str, Any]) -> dict[str, str] | None:
        if not self.quota:
            return None
        live = [each.launched_with for each in self.all.values() if each.live and not each.half_made]
        for resource, most in self.quota.items():
            used = sum(each.get(resource, 1) for each in [*live, options])
            if used > most:
                words = f"exceeded quota: {resource}, used: {used:g}, limited: {most:g}"
                return {"message": "failed to launch", "k8sMessage": words}
        return None

    def _listing(self) -> list[dict[str, Any]]:
        with self._lock:
            sessions = [each for each in self._of_caller() if each.listed]
            if self.advances:
                for each in sessions:
                    self._advance(each)
            return [each.described() for each in sessions]

    def _advance(self, session: StubSession) -> None:
        if session.half_made or not session.live:
            return
        if session.status != "running":
            session.reach(_STAGES[_STAGES.index(session.status) + 1])
        elif session.ip_address is None:
            session.ip_address = f"10.0.{int(session.id[4:]) // 250}.{int(session.id[4:]) % 250 + 1}"
        elif status := self.ends(session.launched_with["code"]):
            session.reach(status)

    def _of_caller(self) -> list[StubSession]:
        caller = os.environ.get("CDSW_ENGINE_ID", "")
        return [each for each in self.all.values() if each.master == caller]

    def _stop(self, session_id: str) -> Response:
        session = self.all.get(session_id)
        code = self._stop_codes.popleft() if self._stop_codes else 204 if session else 404
        if session and code < 400:
            session.reach("stopped")
        return Response(code)


async def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until a condition holds, and let the event loop go on meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)
