"""The Workers API without processes: its answers and its traps, for any number of sessions."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .faults import Luck, Mishap, PlannedFaults, Response
from .session import ENDED, STAGES, SimulatedSession

#: So many requests of one call are under way at once.
_AT_ONCE = 10
#: Seconds for which lists are kept that are answered late.
_HISTORY = 10.0


@dataclass
class Call:
    function: str
    arguments: Any
    thread: str
    at: float = field(default_factory=time.monotonic)


class SimulatedPlatform(PlannedFaults):
    """Stands in for ``cml.workers_v1``. It is thread-safe.

    If it is `named`, ``launch_workers`` has the parameters of newer releases. If it `advances`, sessions get
    one step further at each ``list_workers``, until they run and then have an address; otherwise they stay
    in ``scheduling`` until :meth:`set` says more. `ends` gets the code of one that advances, and returns
    the status that it ends with, or None. Each request takes `latency` seconds, launches ten at a time.
    """

    #: Of queued sessions there is no end; otherwise what exceeds the quota is refused.
    waits_for_room = False

    def __init__(
        self,
        *,
        named: bool = True,
        advances: bool = True,
        latency: float = 0.0,
        ends: Callable[[str], str | None] = lambda code: None,
        luck: Luck | None = None,
    ) -> None:
        super().__init__()
        self.advances, self.latency, self.ends, self.luck = advances, latency, ends, luck
        #: Lets sessions get on, see :class:`.running.RunningSessions`. Threads call its methods.
        self.runner: Any = None
        self.calls: list[Call] = []
        #: How many requests of which function were made: one a session that is launched or stopped.
        self.requests: Counter[str] = Counter()
        self.under_way = self.most_at_once = 0
        self.all: dict[str, SimulatedSession] = {}
        self.quota: dict[str, float] = {}
        #: Whether a session may launch others, by its id.
        self.may_launch: Callable[[str], bool] = lambda caller: True
        self.first_status = "scheduling"
        self.launch_workers = self._newer_launch if named else self._older_launch
        self._lists: dict[str, deque[tuple[float, list[str]]]] = {}
        self._lock = threading.RLock()

    # -- what tests set and ask

    def caller(self) -> str:
        """Return the session from which a function is called."""
        return os.environ.get("CDSW_ENGINE_ID", "")

    def carried_out(self) -> None:
        """React to a call that is carried out and not answered yet."""

    def shares_host_network(self) -> bool:
        """Say for dask-cml whether sessions share this machine's ports."""
        return self.runner is not None

    def set(self, session_id: str, status: str | None = None, **values: Any) -> None:
        """Set a session's status, its ``ip_address``, whether it is ``listed``, or what else is reported."""
        with self._lock:
            session = self.all[session_id]
            session.change(**values)
            if status is not None:
                session.reach(status)

    def configure(self, quota: dict[str, float] | None = None, waits_for_room: bool = False) -> None:
        """Bound the sum of ``cpu``, ``memory``, ``nvidia_gpu`` or ``sessions``.

        Over it, launches are refused, or sessions wait as ``scheduling``.
        """
        self.quota, self.waits_for_room = quota or {}, waits_for_room

    def evict(self, session_id: str, status: str = "failed") -> None:
        """End a session, as the platform does that needs its room."""
        with self._lock:
            session = self.all[session_id]
            if not session.live:
                return
            session.reach(status)
        if self.runner is not None:
            self.runner.evicted(session)

    def end_session(self, master: str) -> None:
        """End all sessions that a session has launched, as the platform does when that one ends."""
        for session in self.live_sessions:
            if session.master == master:
                session.change(stop_requested=True)
                self.evict(session.id, "stopped")

    @property
    def live_sessions(self) -> list[SimulatedSession]:
        """The sessions that have not ended, half-made ones too."""
        with self._lock:
            return [session for session in self.all.values() if session.live]

    @property
    def running(self) -> dict[str, str]:
        """The sessions that run and are not being stopped: their names in their clusters, and their ids."""
        found = [
            session
            for session in self.live_sessions
            if session.status == "running" and not session.stop_requested
        ]
        titles = {session.launched_with["name"]: session.id for session in found}
        # Without a record, the name is all of the title.
        return {title.rpartition(" ")[0] or title: session for title, session in titles.items()}

    @property
    def live(self) -> list[str]:
        return [session.id for session in self.live_sessions]

    def count(self, function: str) -> int:
        with self._lock:
            return sum(call.function == function for call in self.calls)

    def arguments(self, function: str) -> list[Any]:
        with self._lock:
            return [call.arguments for call in self.calls if call.function == function]

    @contextmanager
    def installed(self) -> Iterator[SimulatedPlatform]:
        """Be the platform that ``platform="auto"`` finds."""
        package, module = types.ModuleType("cml"), types.ModuleType("cml.workers_v1")
        functions = ("launch_workers", "list_workers", "stop_workers", "await_workers", "shares_host_network")
        module.__dict__.update({name: getattr(self, name) for name in functions})
        package.workers_v1 = module  # type: ignore[attr-defined]
        sys.modules.update({"cml": package, "cml.workers_v1": module})
        try:
            yield self
        finally:
            if self.live:
                self.stop_workers(*self.live)
            del sys.modules["cml"], sys.modules["cml.workers_v1"]

    # -- the API

    def list_workers(self) -> Any:
        return self._call("list_workers", None, self._list)

    def stop_workers(self, *ids: Any) -> Any:
        ids = tuple(session["id"] if isinstance(session, dict) else session for session in ids)
        return self._call("stop_workers", ids, lambda _: self._stop_all(ids))

    def await_workers(
        self, ids: Iterable[Any], wait_for_completion: bool = True, timeout_seconds: float = 60
    ) -> dict[str, list[dict[str, Any]]]:
        wanted = {session["id"] if isinstance(session, dict) else session for session in ids}
        deadline = time.monotonic() + timeout_seconds
        good = ("succeeded",) if wait_for_completion else ("running",)
        while True:
            found = [session for session in self._list() if session["id"] in wanted]
            settled = [
                session
                for session in found
                if session["status"] in ENDED
                or (session["status"] in good and session["ip_address"] != "unknown")
            ]
            if len(settled) == len(wanted) or time.monotonic() >= deadline:
                workers = [session for session in settled if session["status"] in good and timeout_seconds]
                return {
                    "workers": workers,
                    "failures": [session for session in found if session not in workers],
                }
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
        rdma_network_selections=None,
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

    def _call(self, function: str, arguments: Any, action: Callable[[Mishap], Any], key: str = "") -> Any:
        with self._lock:
            self.calls.append(Call(function, arguments, threading.current_thread().name))
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            mishaps = self.planned(function)
        luck = Mishap() if self.luck is None else self.luck.mishap(function, self.caller(), key)

        def carry_out() -> Any:
            result = action(luck)
            self.carried_out()
            return result

        perform = carry_out
        for mishap in (luck, *reversed(mishaps)):
            perform = _performing(mishap, perform)
        try:
            return perform()
        finally:
            with self._lock:
                self.under_way -= 1

    def _request(self, function: str, n: int = 1) -> None:
        with self._lock:
            self.requests[function] += n
        if self.latency:
            time.sleep(self.latency)

    def _launch(self, n: int, options: dict[str, Any]) -> Any:
        def launch(_: Mishap) -> list[dict[str, Any]]:
            answers = []
            for begin in range(0, n, _AT_ONCE):
                at_once = min(_AT_ONCE, n - begin)
                self._request("launch_workers", at_once)
                answers += [self._launch_one(options) for _ in range(at_once)]
            return answers

        key = SimulatedSession("", "", options).key if self.luck else ""
        answers = self._call("launch_workers", {"n": n, **options}, launch, key)
        for answer in answers if isinstance(answers, list) else ():
            session = self.all.get(answer.get("id") or answer.get("engineId"))
            if session is not None:
                session.answered = True
        return answers

    def _launch_one(self, options: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            session = SimulatedSession(
                id=f"stub{len(self.all):012d}",
                master=self.caller(),
                launched_with=options,
                status=self.first_status,
            )
            refusal = self._refusal(session)
            session.half_made = refusal is not None
            if refusal is None or "engineId" in refusal:
                self.all[session.id] = session
        if refusal is not None:
            return {**refusal, **({"engineId": session.id} if "engineId" in refusal else {})}
        if self.runner is not None:
            self.runner.launched(session)
        described: dict[str, Any] = json.loads(session.text)
        return described

    def _refusal(self, session: SimulatedSession) -> dict[str, str] | None:
        """Return the answer if a launch is refused. A half-made session is stopped by its ``engineId``."""
        if self._refusals:
            return self._refusals.popleft()
        if not self.may_launch(self.caller()):
            return {"message": "not allowed", "k8sMessage": "", "engineId": ""}
        if not self.waits_for_room and (resource := self.exceeded(session)):
            words = f"exceeded quota: {resource}, limited: {self.quota[resource]:g}"
            return {"message": "failed to launch", "k8sMessage": words, "engineId": ""}
        return self.luck.refusal(session.key) if self.luck else None

    def exceeded(self, session: SimulatedSession) -> str | None:
        """Return the resource of which there is not enough for a session, in addition to those before it."""
        with self._lock:
            others = self.live_sessions if self.quota else []
            before = [
                other.launched_with for other in others if not other.half_made and other.id < session.id
            ]
            for resource, most in self.quota.items():
                if sum(arguments.get(resource, 1) for arguments in [*before, session.launched_with]) > most:
                    return resource
        return None

    def _list(self, mishap: Mishap | None = None) -> list[dict[str, Any]]:
        self._request("list_workers")
        with self._lock:
            caller = self.caller()
            sessions = [
                session for session in self.all.values() if session.master == caller and session.listed
            ]
            if self.advances and self.runner is None:
                for session in sessions:
                    self._advance(session)
            texts = [session.text for session in sessions]
            if self.luck is not None:
                texts = self._as_of(caller, texts, mishap.stale if mishap else 0.0)
        answer: list[dict[str, Any]] = json.loads(f"[{','.join(texts)}]")
        return answer

    def _as_of(self, caller: str, texts: list[str], age: float) -> list[str]:
        """Return what the caller got some seconds ago, if it has asked then."""
        now, lists = time.monotonic(), self._lists.setdefault(caller, deque())
        lists.append((now, texts))
        while lists[0][0] < now - _HISTORY:
            lists.popleft()
        return next((texts for at, texts in reversed(lists) if at <= now - age), texts)

    def _advance(self, session: SimulatedSession) -> None:
        if session.half_made or not session.live:
            return
        if session.status != "running":
            session.reach(STAGES[STAGES.index(session.status) + 1])
        elif session.ip_address is None:
            n = int(session.id[4:])
            session.change(ip_address=f"10.0.{n // 250}.{n % 250 + 1}")
        elif status := self.ends(session.code):
            session.reach(status)

    def _stop_all(self, ids: Sequence[str]) -> list[Response]:
        if not ids:  # it means all of the caller's
            ids = [session.id for session in self.live_sessions if session.master == self.caller()]
        hang = [session_id for session_id in ids if session_id in self.never_stops]
        rest, responses = [session_id for session_id in ids if session_id not in hang], []
        for begin in range(0, len(rest), _AT_ONCE):
            self._request("stop_workers", len(rest[begin : begin + _AT_ONCE]))
            responses += [self._stop(session_id) for session_id in rest[begin : begin + _AT_ONCE]]
        while self.never_stops & {*hang}:
            time.sleep(0.01)
        return responses + [self._stop(session_id) for session_id in hang]

    def _stop(self, session_id: str) -> Response:
        with self._lock:
            session = self.all.get(session_id)
            code = 204 if session else 404
            if self._stop_codes:
                code = self._stop_codes.popleft()
            elif session_id in self.denied:
                code = self.denied[session_id]
            elif session and self.luck:
                code = self.luck.stop_code(session_id)
            if session is None or code >= 400 or session.stop_requested or not session.live:
                return Response(code)
            session.change(stop_requested=True)
            if self.runner is None or session.half_made:
                session.reach("stopped")
        if self.runner is not None and session.live:
            self.runner.stopped(session)
        return Response(code)


def _performing(mishap: Mishap, action: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: mishap.perform(action)
