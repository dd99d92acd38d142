"""What the answers and errors of the platform's functions mean, and calls of functions that may never return.

The platform's functions ignore the HTTP status: they return a server error like a result.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import datetime
from typing import Any, TypeVar

from dask_cml.checks import is_session_id, web_link
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.sessions.here import this_owner
from dask_cml.words import printable, printable_lines, shortened

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


logger = get_logger(__name__)
T = TypeVar("T")


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


class NoAnswer(CMLError, TimeoutError):
    """A call did not return within its time limit. A later try may succeed."""


class CallFailed(CMLError):
    """All tries of a call failed, or its error is permanent. The message contains the platform's error."""


def may_pass(error: BaseException) -> bool:
    """Return whether a later try may succeed after this error."""
    status = _http_status(error)
    if status is not None:
        return status >= 500 or status in (401, 408, 429)
    if isinstance(error, (WrongAnswer, NoAnswer)) or _is_no_json(error):
        return True
    # An OSError always comes from outside this program.
    return not is_missing_key(error) and (isinstance(error, OSError) or not isinstance(error, _OUR_FAULT))


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None


def refuses_key(error: BaseException) -> bool:
    """Return whether the platform does not accept this session's key, as after its rotation."""
    return _http_status(error) == 401


def is_of_the_platform(error: BaseException) -> bool:
    """Return whether the platform caused the error, and not its caller."""
    return may_pass(error) or is_missing_key(error) or isinstance(error, (OSError, WrongAnswer))


def is_missing_key(error: BaseException) -> bool:
    """Return whether the platform's functions cannot work in this process."""
    return isinstance(error, RuntimeError) and not isinstance(error, CMLError) and _KEY in str(error)


def _is_no_json(error: BaseException) -> bool:
    # The error of json, simplejson or newer releases of `requests`, for example for a gateway's HTML page.
    return type(error).__name__ == "JSONDecodeError"


def in_words(error: BaseException) -> str:
    """Return an error as one short line."""
    if is_missing_key(error):
        return f"{_KEY} is not set: restart the kernel, or start a new session"
    if _is_no_json(error):
        return "the answer is not JSON; CML's gateway may not reach its server"
    line = next(iter(str(error).splitlines()), "")
    if not isinstance(error, CMLError):
        line = f"{type(error).__name__}: {line}".removesuffix(": ")
    words = printable(shortened(line, _LONGEST))
    if refuses_key(error):
        session = f"session {this_owner()}" if this_owner() else "this session"
        words = (
            f"CML refuses this session's {_KEY} ({words}); if it was rotated, restart {session}, with which "
            "its worker sessions end"
        )
    return words


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
        time = datetime.fromisoformat(str(session.get(field)).replace("Z", "+00:00"))
    except ValueError:
        return None
    return time if time.tzinfo else None


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


def launched(answer: Any) -> SessionInfo:
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


def check_stopped(answer: Any) -> None:
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


def start(function: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, for which the interpreter does not wait when it exits.

    Raises
    ------
    CMLError
        If the interpreter is shutting down.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # of the function
            future.set_exception(error)

    try:
        # Threads of the platform's own pools inherit that they are daemons.
        threading.Thread(target=call, name="cml-api", daemon=True).start()
    except RuntimeError as error:
        raise CMLError(f"Workers API not called: {error}") from error
    return future


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may hang, and block until it returns, for some seconds at most.

    Raises
    ------
    NoAnswer
        If it takes longer. Its thread is left behind.
    """
    future = start(functools.partial(function, *arguments))
    wait([future], timeout=seconds)
    if not future.done():
        raise no_answer(seconds)
    return future.result()


def no_answer(seconds: float) -> NoAnswer:
    """Return the error of a call that did not return in time."""
    return NoAnswer(f"no answer within {seconds:g} s")
