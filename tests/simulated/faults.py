"""What goes wrong on the simulated platform: planned by name in tests, or decided by a seed."""

import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_NO_ANSWER = object()


@dataclass
class Response:
    """As much of an HTTP response as anybody reads."""

    status_code: int = 204


class HTTPError(OSError):
    """An answer of 4xx or 5xx, as the `requests` package raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Error")
        self.response = Response(status)


class ProtocolError(Exception):
    """What an HTTP library may raise that is no OSError."""


class UnexpectedError(KeyError):
    """What the platform's own library raises for an answer that it does not expect."""


class JSONDecodeError(OSError, ValueError):
    """As `requests` raises it for the HTML page of a gateway."""

    response = None


@dataclass
class Mishap:
    """What goes wrong with one call. By default, nothing."""

    #: What it raises, or returns instead of its answer.
    error: Exception | None = None
    answer: Any = _NO_ANSWER
    #: Whether the platform does all the same what it was asked for.
    carried_out: bool = True
    #: How long it takes before and after it is carried out, in seconds, or until when.
    before: float | threading.Event = 0.0
    after: float | threading.Event = 0.0
    #: How old the answer of ``list_workers`` is, in seconds.
    stale: float = 0.0

    def perform(self, action: Callable[[], Any]) -> Any:
        """Carry out a call, or not, and answer it."""
        _wait(self.before)
        result = action() if self.carried_out else None
        _wait(self.after)
        if self.error is not None:
            raise self.error
        return result if self.answer is _NO_ANSWER else self.answer


def _wait(what: float | threading.Event) -> None:
    if isinstance(what, threading.Event):
        pause = 0.001
        while not what.is_set():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    elif what:
        time.sleep(what)


class PlannedFaults:
    """Faults by their names, for the next calls of a function."""

    def __init__(self) -> None:
        self._planned: dict[str, deque[Mishap]] = {}
        self._hanging: dict[str, list[tuple[deque[None], Mishap]]] = {}
        self._gates: dict[str, threading.Event] = {}
        self._refusals: deque[dict[str, str]] = deque()
        self._stop_codes: deque[int] = deque()
        self._fates: deque[tuple[str, str]] = deque()
        #: Sessions whose stop hangs while they are in it.
        self.never_stops: set[str] = set()
        #: Sessions that are not stopped while they are in it: the HTTP status with which that is answered.
        self.denied: dict[str, int] = {}

    def plan(self, function: str, *mishaps: Mishap) -> None:
        """Let the next calls of a function go wrong, one mishap in each."""
        self._planned.setdefault(function, deque()).extend(mishaps)

    def fail(self, function: str, *errors: Exception) -> None:
        self.plan(function, *[Mishap(error=error, carried_out=False) for error in errors])

    def lose(self, function: str, *errors: Exception) -> None:
        """Raise these errors in the next calls of a function, one in each, after they are carried out."""
        self.plan(function, *[Mishap(error=error) for error in errors])

    def say(self, function: str, *answers: Any) -> None:
        """Return these from the next calls of a function, one from each, and do nothing."""
        self.plan(function, *[Mishap(answer=answer, carried_out=False) for answer in answers])

    def refuse(
        self,
        times: int = 1,
        message: str = "failed to launch",
        k8s_message: str = "exceeded quota: pods",
        half_made: bool = True,
    ) -> None:
        """Refuse the next sessions, with an ``engineId`` or without."""
        refusal = {"message": message, "k8sMessage": k8s_message}
        self._refusals.extend({**refusal, **({"engineId": ""} if half_made else {})} for _ in range(times))

    def answer_stop(self, *codes: int) -> None:
        """Answer the next requests to stop a session with these codes, one each; below 400 it is stopped."""
        self._stop_codes.extend(codes)

    def doom(self, fate: str, times: int = 1, key: str = "") -> None:
        """Decide what becomes of the next sessions with such a name or end of it, by one of :data:`FATES`."""
        self._fates.extend([(key, fate)] * times)

    def doom_of(self, key: str) -> str | None:
        """Return what is to become of a session that is launched as this, if that is planned."""
        for planned in self._fates:
            if key.endswith(planned[0]):
                self._fates.remove(planned)
                return planned[1]
        return None

    def heal(self) -> None:
        """Fail, refuse and hang no more."""
        for planned in (*self._planned.values(), self._refusals, self._stop_codes, self._fates):
            planned.clear()
        self.never_stops.clear()
        self.denied.clear()

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
        over = threading.Event()
        hanging = (deque([None] * times), Mishap(after=over) if after else Mishap(before=over))
        self._hanging.setdefault(function, []).append(hanging)
        try:
            yield over.set
        finally:
            self._hanging[function].remove(hanging)
            over.set()

    def planned(self, function: str) -> list[Mishap]:
        """Return what is to go wrong with a call that begins now, outermost first."""
        found = [hanging for left, hanging in self._hanging.get(function, ()) if left and not left.pop()]
        if gate := self._gates.get(function):
            found.append(Mishap(before=gate))
        if self._planned.get(function):
            found.append(self._planned[function].popleft())
        return found


@dataclass(frozen=True)
class Weather:
    """How often which fault occurs, as shares of all calls or sessions."""

    #: Of all calls: an error before they are carried out, or after; an error as an answer; an error of the
    #: platform's own library; an answer after many seconds.
    error: float = 0.0
    lost: float = 0.0
    wrong: float = 0.0
    unexpected: float = 0.0
    late: float = 0.0
    #: Refused launches, lists that are some seconds old, and stops that are answered with 4xx or 5xx.
    refused: float = 0.0
    stale: float = 0.0
    denied: float = 0.0
    #: What becomes of the sessions that are launched.
    fates: Mapping[str, float] = field(default_factory=dict)


CALM = Weather()
#: Of sessions: it runs but its program fails at once, or ends well at once; it runs and nothing is heard of
#: it; it is queued; it is listed late; its address is known late; it dies some time after it connected.
FATES = {
    "fails": 0.05,
    "succeeds": 0.04,
    "silent": 0.03,
    "waits": 0.04,
    "hidden": 0.05,
    "unknown": 0.04,
    "dies": 0.05,
}
ROUGH = Weather(
    error=0.05, lost=0.04, wrong=0.02, late=0.03, refused=0.03, stale=0.05, denied=0.03, fates=FATES
)
STORM = Weather(0.15, 0.1, 0.05, 0.02, 0.06, 0.08, 0.1, 0.1, {**FATES, "fails": 0.15, "dies": 0.12})
OUTAGE = Weather(error=0.8, wrong=0.15, late=0.05)


class Luck:
    """Decides by a seed what goes wrong, whatever the order in which threads ask."""

    def __init__(self, seed: object) -> None:
        self.weather = CALM
        self._seed = seed
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def chance(self, *about: str) -> random.Random:
        """Return a source of chance for the next question of this name."""
        name = "/".join(about)
        with self._lock:
            self._asked[name] += 1
            return random.Random(f"{self._seed}/{name}/{self._asked[name]}")

    def mishap(self, function: str, caller: str, key: str) -> Mishap:
        chance, weather = self.chance(function, caller, key), self.weather
        mishap = Mishap(before=chance.uniform(0.02, 0.15), after=chance.uniform(0.02, 0.15))
        if function == "list_workers" and chance.random() < weather.stale:
            mishap.stale = chance.uniform(0.5, 6.0)
        if chance.random() < weather.late:
            late = chance.choice([3.0, 20.0, 70.0])
            mishap.before, mishap.after = chance.choice([(late, 0.1), (0.1, late)])
        kinds = ("error", "lost", "wrong", "unexpected")
        rates = [getattr(weather, kind) for kind in kinds]
        [kind] = chance.choices((*kinds, "none"), [*rates, 1 - sum(rates)])
        if kind in ("error", "lost"):
            errors = [
                HTTPError(503),
                HTTPError(401),
                ConnectionError("lost"),
                ProtocolError("incomplete read"),
            ]
            errors += [JSONDecodeError("no JSON"), json.JSONDecodeError("no JSON", "<html>", 0)]
            mishap.error, mishap.carried_out = chance.choice(errors), kind == "lost"
        elif kind == "unexpected":
            mishap.error, mishap.carried_out = UnexpectedError("engineId"), chance.random() < 0.5
        elif kind == "wrong":
            message = {
                "message": chance.choice(["Internal Server Error", "Unauthorized", "Rate limit exceeded"])
            }
            as_list = function == "launch_workers" and chance.random() < 0.5
            mishap.answer = [message] if as_list else message
            mishap.carried_out = chance.random() < 0.3
        return mishap

    def refusal(self, key: str) -> dict[str, str] | None:
        chance = self.chance("refusal", key)
        if chance.random() >= self.weather.refused:
            return None
        refusal = {"message": "failed to launch", "k8sMessage": "exceeded quota: pods"}
        return {**refusal, **({"engineId": ""} if chance.random() < 0.5 else {})}

    def stop_code(self, session_id: str) -> int:
        chance = self.chance("stop", session_id)
        return chance.choice([500, 503, 403, 429]) if chance.random() < self.weather.denied else 204

    def fate(self, key: str) -> str:
        chance, fates = self.chance("fate", key), dict(self.weather.fates)
        [fate] = chance.choices([*fates, "runs"], [*fates.values(), 1 - sum(fates.values())])
        return fate
