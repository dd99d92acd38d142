"""Faults of sessions and requests, and sessions that the platform shows late, incompletely or otherwise."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dask_cml.local import Response, state

#: Faults that decide what becomes of a launched session.
FATES = ("refused", "fails", "succeeds", "hangs", "stuck")
#: Faults that hide something of a launched session from list_workers for some seconds.
HIDDEN = ("invisible", "unknown_ip", "unknown_status", "stopping")
#: Faults that replace the answer to a request.
ENDS = ("key", "error", "answer", "page", "hang")
FUNCTIONS = ("launch_workers", "list_workers", "stop_workers")
_LOOK_INTERVAL = 0.02

Fault = dict[str, Any]


class HTTPError(OSError):
    """An error of the server, as other releases of the library may raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} {_words(status)}")
        self.response = Response(status)


class JSONDecodeError(OSError, ValueError):
    """An answer that is no JSON, as the `requests` package raises it."""


def inject(
    kind: str,
    *,
    function: str | None = None,
    match: str = "",
    skip: int = 0,
    times: int = 1,
    seconds: float | None = None,
    status: int | None = None,
    message: str | None = None,
) -> None:
    """Inject a fault, for all processes that use the state directory.

    Several faults may be injected. Of those that match, the first one applies, and the others wait.

    Parameters
    ----------
    kind : str
        Of a session that is launched:

        - ``"refused"``: the answer is the dict of an exceeded quota. Its ``engineId`` is the id of a session
          that stays ``scheduling`` until it is stopped.
        - ``"fails"``: the session runs for a moment, without its code, and ends as ``failed``.
        - ``"succeeds"``: the same, but it ends as ``succeeded``, as CML reports for a missing command.
        - ``"hangs"``: it runs until it is stopped, without its code.
        - ``"stuck"``: its status stays ``scheduling`` until it is stopped.

        Of a session that is launched, for `seconds`:

        - ``"invisible"``: ``list_workers`` omits it after its launch.
        - ``"unknown_ip"``, ``"unknown_status"``: its address or status is unknown after it started to run.
        - ``"stopping"``: while it stops, and after its processes have ended, its status is ``"STOPPING"``.

        Or of a request (each launch of one session, each listing, each stop of one):

        - ``"key"``: it raises a RuntimeError if ``CDSW_API_KEY`` is not set.
        - ``"error"``: it raises an :class:`HTTPError` with a `status`, or else a :class:`ConnectionError`.
        - ``"answer"``: the answer has that `status` and `message`. The functions ignore the status.
        - ``"page"``: a gateway answers with its HTML page.
        - ``"hang"``: no answer comes. At the end, its connection breaks.
        - ``"unanswered"``: it takes effect at once, but its answer comes at the end.
        - ``"slow"``: it takes effect `seconds` later.

        All but the last two have no effect.
    function : str, optional
        The one function to whose requests the fault applies.
    match : str
        Text in the name or code of the sessions that the fault applies to.
    skip, times : int
        Number of sessions or requests to spare first, and that the fault applies to.
    seconds : float, optional
        For faults of a request other than ``"slow"``, it replaces `times`: the fault applies to all requests
        that start within this time from now.
    """
    assert kind in (*FATES, *HIDDEN, *ENDS, "slow", "unanswered")
    assert function in (None, *FUNCTIONS)
    assert kind not in (*FATES, *HIDDEN) or function in (None, "launch_workers")
    fault = {
        "kind": kind,
        "function": function,
        "match": match,
        "skip": skip,
        "times": times,
        "seconds": seconds,
        "status": status,
        "message": message,
        "injected_at": time.time(),
    }
    with state.locked() as path:
        state.write_json(path / "faults.json", [*left(), fault])


def clear() -> None:
    """Clear all injected faults, and end requests that hang. Sessions keep their fates."""
    with state.locked() as path:
        (path / "faults.json").unlink(missing_ok=True)
        state.write_json(path / "cleared.json", time.time())


def expire() -> None:
    """Let the time be over for which faults last."""
    with state.locked() as path:
        state.write_json(path / "faults.json", [fault for fault in left() if fault["seconds"] is None])
        (path / "hidden.json").unlink(missing_ok=True)


def left() -> list[Fault]:
    """Return the faults that still apply."""
    faults: list[Fault] = state.read_json(state.directory() / "faults.json") or []
    return faults


def take_fate(name: str, code: str) -> str | None:
    """Return what is to become of a session that is launched. Call this while the state is locked."""
    return next(iter(_take(FATES, "launch_workers", name, code)), None)


def answer(do: Callable[[], Any], function: str, name: str, code: str) -> Any:
    """Answer a request, with the faults that apply to it."""
    kinds = [*ENDS, "slow", "unanswered", *(HIDDEN if function == "launch_workers" else ())]
    with state.locked():
        injected = _take(kinds, function, name, code)
    if "slow" in injected:
        time.sleep(injected["slow"]["seconds"])
    for kind in ENDS:
        if kind in injected:
            return _end(injected[kind], is_json=function != "stop_workers")
    result = do()
    if "unanswered" in injected:
        _wait(injected["unanswered"])
    if function == "launch_workers":
        _hide(result, {kind: injected[kind]["seconds"] for kind in HIDDEN if kind in injected})
    return _shown(result) if isinstance(result, list) else result


def _take(kinds: Sequence[str], function: str, name: str, code: str) -> dict[str, Fault]:
    """Return the faults of these kinds that a request has, and count them as applied.

    Of each group, the first applies. Call this while the state is locked.
    """
    faults = left()
    kept: list[Fault] = []
    hit: dict[str, Fault] = {}
    for fault in faults:
        kind, lasting = fault["kind"], fault["kind"] in (*ENDS, "unanswered") and fault["seconds"]
        if lasting and time.time() > fault["injected_at"] + fault["seconds"]:
            continue
        concerns = kind in kinds and fault["function"] in (None, function)
        concerns = concerns and (fault["match"] in name or fault["match"] in code)
        if concerns and _group(kind) not in map(_group, hit):
            if fault["skip"]:
                fault["skip"] -= 1
            elif kind != "key" or "CDSW_API_KEY" not in os.environ:
                hit[kind] = {**fault, "hit_at": time.time()}
                fault["times"] -= not lasting
        if fault["times"]:
            kept.append(fault)
    if faults:
        state.write_json(state.directory() / "faults.json", kept)
    return hit


def _group(kind: str) -> str:
    return "end" if kind in ENDS else "fate" if kind in FATES else kind


def _end(fault: Fault, is_json: bool) -> Any:
    """Answer a request, or raise an error. An answer that is no JSON is an HTTP status."""
    kind, status = fault["kind"], fault["status"]
    if kind == "key":
        raise RuntimeError("Environment variable CDSW_API_KEY is not set.")
    if kind == "answer":
        return {"message": fault["message"] or _words(status)} if is_json else status
    if kind == "page":
        if is_json:
            raise JSONDecodeError("Expecting value: line 1 column 1 (char 0)")
        return 502
    if kind == "error" and status is not None:
        raise HTTPError(status)
    if kind == "hang":
        _wait(fault)
    raise ConnectionError("connection to the platform lost (injected fault)")


def _words(status: int) -> str:
    return http.client.responses.get(status, "")


def _wait(fault: Fault) -> None:
    """Wait until a fault's time has passed, or all faults are cleared."""
    # Read the path once: after clear(), the process may use another state directory.
    path = state.directory()
    end = fault["injected_at"] + fault["seconds"] if fault["seconds"] is not None else float("inf")
    while time.time() < end and not _cleared_since(path, fault["hit_at"]):
        time.sleep(_LOOK_INTERVAL)


def _cleared_since(path: Path, moment: float) -> bool:
    return not path.exists() or (state.read_json(path / "cleared.json") or 0.0) >= moment


def _hide(session: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    if seconds and "id" in session:
        with state.locked() as path:
            hidden = state.read_json(path / "hidden.json") or {}
            state.write_json(path / "hidden.json", {**hidden, session["id"]: seconds})


def _shown(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sessions as the platform lists them."""
    hidden = state.read_json(state.directory() / "hidden.json") or {}
    shown = [_show(session, hidden.get(session["id"], {})) for session in sessions]
    return [session for session in shown if session]


def _show(session: dict[str, Any], hidden: Mapping[str, float]) -> dict[str, Any] | None:
    def since(event: str, fault: str) -> bool:
        """Return whether a session has the fault, and its time has not passed since an event."""
        if fault not in hidden or not session[event]:
            return False
        return (
            time.time() < datetime.fromisoformat(session[event][:-1] + "+00:00").timestamp() + hidden[fault]
        )

    if since("created_at", "invisible"):
        return None
    if since("running_at", "unknown_ip"):
        session = {**session, "ip_address": "unknown"}
    if session["status"] == "running" and since("running_at", "unknown_status"):
        session = {**session, "status": "UNKNOWN"}
    ends = not session["finished_at"] or since("finished_at", "stopping")
    if "stopping" in hidden and (state.folder_of(session["id"]) / "stop").exists() and ends:
        session = {**session, "status": "STOPPING", "finished_at": None, "duration": None}
    return session
