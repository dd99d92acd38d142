"""What the platform's functions return and raise, and what it means.

They look at no HTTP status: an error of the server comes back as if it were the result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from dask_cml.checks import is_session_id
from dask_cml.errors import CMLError, LaunchRefused

#: What the platform says of a session.
SessionInfo = Mapping[str, Any]

#: Errors of a program, which no second try mends. Whatever else a call raises without an HTTP status
#: is taken for a broken connection, because nothing is promised of the HTTP library under the API.
_OUR_FAULT = (TypeError, ValueError, LookupError, AttributeError, NameError, ImportError, CMLError)
_PENDING = frozenset({"scheduling", "starting"})
_ENDED = frozenset({"succeeded", "failed", "stopped", "timedout"})
_REFUSAL = re.compile(r"quota|limit|exceeded|forbidden", re.IGNORECASE)
#: They have such words, too, and pass.
_NO_REFUSAL = re.compile(r"rate.?limit|time.?limit|deadline", re.IGNORECASE)
_KEY = "CDSW_API_KEY"
_LONGEST = 200


class WrongAnswer(CMLError):
    """An answer that is none, most often an error of the server. A later try may get a right one.

    Parameters
    ----------
    words : str
        The platform's own.
    code : int, optional
        The HTTP status, if it is known.
    """

    def __init__(self, words: str, code: int | None = None) -> None:
        super().__init__(words)
        self.code = code


class NoAnswer(CMLError, TimeoutError):
    """A call has not returned within its time. A later one may."""


class CallFailed(CMLError):
    """The platform did not do what it was asked for, at any try, or will not. It says why in its words."""


def may_pass(error: BaseException) -> bool:
    """Whether an error of the Workers API is one that a later try may not meet."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "code", None)
    if isinstance(status, int):
        return status >= 500 or status in (401, 408, 429)
    if isinstance(error, (WrongAnswer, NoAnswer)) or _is_no_json(error):
        return True
    # An OSError comes from outside whatever else it is.
    return not is_missing_key(error) and (isinstance(error, OSError) or not isinstance(error, _OUR_FAULT))


def is_of_the_platform(error: BaseException) -> bool:
    """Whether the platform has failed, and not the one who calls it."""
    return may_pass(error) or is_missing_key(error) or isinstance(error, (OSError, WrongAnswer))


def is_missing_key(error: BaseException) -> bool:
    """Whether the platform's functions cannot work in this process."""
    return isinstance(error, RuntimeError) and not isinstance(error, CMLError) and _KEY in str(error)


def _is_no_json(error: BaseException) -> bool:
    # json's, simplejson's, and in newer releases of `requests` its own: the page of a gateway is none.
    return type(error).__name__ == "JSONDecodeError"


def in_words(error: BaseException) -> str:
    """Say in one short line what an error is."""
    if is_missing_key(error):
        return f"{_KEY} is not set. Restart the kernel, or start a new session"
    if _is_no_json(error):
        return "the answer is no JSON, as the page of a gateway that reaches no server"
    line = next(iter(str(error).splitlines()), "")
    if not isinstance(error, CMLError):
        line = f"{type(error).__name__}: {line}".removesuffix(": ")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def status_of(session: SessionInfo) -> str:
    """Return a session's status in lower case, as newer releases do not write all of them."""
    return str(session.get("status", "unknown")).lower()


def has_ended(session: SessionInfo) -> bool:
    """Whether a session is over, in whichever way; ``stopping`` and ``unknown`` are no ends."""
    return status_of(session) in _ENDED


def is_pending(session: SessionInfo) -> bool:
    """Whether a session has not begun to run: it waits for room, or starts."""
    return status_of(session) in _PENDING


def ip_address(session: SessionInfo) -> str | None:
    """Return a session's IP address, once the platform tells it."""
    ip = session.get("ip_address")
    return ip if ip and ip != "unknown" else None


def moment(session: SessionInfo, what: str) -> datetime | None:
    """Return when something happened to a session, e.g. ``created_at``, if the platform tells it."""
    try:
        when = datetime.fromisoformat(str(session.get(what)).replace("Z", "+00:00"))
    except ValueError:
        return None
    return when if when.tzinfo else None


def listed(answer: Any) -> list[SessionInfo]:
    """Return the sessions that ``list_workers`` tells.

    Raises
    ------
    WrongAnswer
        If it is no list of sessions.
    """
    if not isinstance(answer, list) or not all(isinstance(each, Mapping) for each in answer):
        raise _wrong(answer)
    return [each for each in answer if is_session_id(each.get("id"))]


def launched(answer: Any) -> SessionInfo:
    """Return what ``launch_workers(1, …)`` tells of its session: that has an id, or it is a refusal.

    Raises
    ------
    WrongAnswer
        If it is neither.
    """
    session = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(session, Mapping) or not (session.get("id") or _is_refusal(session)):
        raise _wrong(session)
    return session


def refusal(name: str, answer: SessionInfo) -> LaunchRefused:
    """Return the error for a launch that was refused, in the platform's words."""
    return LaunchRefused(name, _words_of(answer) or "it gives no reason")


def _is_refusal(answer: SessionInfo) -> bool:
    if answer.get("engineId") or answer.get("k8sMessage"):
        return True
    words = str(answer.get("message") or "")
    return bool(_REFUSAL.search(words)) and not _NO_REFUSAL.search(words)


def check_stopped(ids: Collection[str], answer: Any) -> None:
    """Check what ``stop_workers`` tells.

    Raises
    ------
    WrongAnswer
        If it does not say of as many sessions that they are stopped.
    """
    if not isinstance(answer, list):
        raise _wrong(answer)
    # 404: the session is gone already. Nothing promises that answers come in the order of the ids.
    codes = [getattr(response, "status_code", None) for response in answer]
    bad = sorted({code for code in codes if isinstance(code, int) and code >= 400 and code != 404})
    if bad:
        raise WrongAnswer(f"CML answered {', '.join(map(str, bad))}", max(bad))
    if len(codes) < len(ids) or None in codes:
        raise _wrong(next((each for each in answer if not hasattr(each, "status_code")), None))


def _wrong(answer: Any) -> WrongAnswer:
    words = _words_of(answer) if isinstance(answer, Mapping) else ""
    return WrongAnswer(words or f"CML answered with no session, but with a {type(answer).__name__}")


def _words_of(answer: SessionInfo) -> str:
    words = (str(answer.get(key) or "") for key in ("message", "k8sMessage"))
    return ". ".join(each for each in words if each)
