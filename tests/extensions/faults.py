"""Faults of HTTP requests, and sessions that the platform shows late, incompletely or with newer statuses."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask_cml.local import state

if TYPE_CHECKING:
    from dask_cml.local import Response

#: Faults that hide something of a launched session from list_workers for some seconds.
HIDDEN = ("invisible", "unknown_ip", "unknown_status", "stopping")
#: Faults that replace the answer to a request.
ENDS = ("key", "error", "answer", "page", "hang")
FUNCTIONS = ("launch_workers", "list_workers", "await_workers", "stop_workers")
_LOOK_INTERVAL = 0.02

Fault = dict[str, Any]


class HTTPError(OSError):
    """An error of the server, as other releases of the library may raise it."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"{response.status_code} {_words(response.status_code)}")
        self.response = response


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

    Parameters
    ----------
    kind : str
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
        The one function to whose requests the fault applies. ``await_workers`` lists, too.
    match : str
        Text in the name or code of the sessions that the fault applies to.
    skip, times : int
        Number of sessions or requests to spare first, and that the fault applies to.
    seconds : float, optional
        For faults of a request other than ``"slow"``, it replaces `times`: the fault applies to all requests
        that start within this time from now.
    """
    assert kind in (*HIDDEN, *ENDS, "slow", "unanswered")
    assert function in (None, *FUNCTIONS)
    fault = {**locals(), "injected_at": time.time()}
    with state.locked() as path:
        state.write_json(path / "requests.json", [*(state.read_json(path / "requests.json") or []), fault])


def clear() -> None:
    """Clear all injected faults of requests, and end those that hang."""
    with state.locked() as path:
        (path / "requests.json").unlink(missing_ok=True)
        state.write_json(path / "cleared.json", time.time())


def expire() -> None:
    """Let the time be over for which faults last."""
    with state.locked() as path:
        faults = state.read_json(path / "requests.json") or []
        state.write_json(path / "requests.json", [each for each in faults if each["seconds"] is None])
        (path / "hidden.json").unlink(missing_ok=True)


def left() -> list[Fault]:
    """Return the faults that still apply."""
    faults: list[Fault] = state.read_json(state.directory() / "requests.json") or []
    return faults


def request(do: Callable[[], Any], function: str, name: str, code: str) -> Any:
    """Answer a request, with the faults that apply to it."""
    injected = _take(function, name, code)
    if "slow" in injected:
        time.sleep(injected["slow"]["seconds"])
    for kind in ENDS:
        if kind in injected:
            return _end(injected[kind], answers_json=function != "stop_workers")
    result = do()
    if "unanswered" in injected:
        _wait(injected["unanswered"])
    if function == "launch_workers":
        _hide(result, {kind: injected[kind]["seconds"] for kind in HIDDEN if kind in injected})
    return _shown(result) if isinstance(result, list) else result


def _take(function: str, name: str, code: str) -> dict[str, Fault]:
    """Return the faults of a request by kind, and count them as applied. Of each group, the first applies."""
    if not left():
        return {}
    functions = (None, function, "list_workers" if function == "await_workers" else None)
    kept: list[Fault] = []
    hit: dict[str, Fault] = {}
    with state.locked() as path:
        for fault in left():
            kind, lasting = fault["kind"], fault["kind"] in (*ENDS, "unanswered") and fault["seconds"]
            if lasting and time.time() > fault["injected_at"] + fault["seconds"]:
                continue
            concerns = fault["function"] in functions and (kind not in HIDDEN or function == "launch_workers")
            concerns = concerns and (fault["match"] in name or fault["match"] in code)
            if concerns and _group(kind) not in map(_group, hit):
                if fault["skip"]:
                    fault["skip"] -= 1
                elif kind != "key" or "CDSW_API_KEY" not in os.environ:
                    hit[kind] = {**fault, "hit_at": time.time()}
                    fault["times"] -= not lasting
            if fault["times"]:
                kept.append(fault)
        state.write_json(path / "requests.json", kept)
    return hit


def _group(kind: str) -> str:
    return "end" if kind in ENDS else kind


def _end(fault: Fault, answers_json: bool) -> Any:
    """Answer a request, or raise an error."""
    from dask_cml.local.workers import Response  # supervisors load this file, too, and need to be fast

    kind, status = fault["kind"], fault["status"]
    if kind == "key":
        raise RuntimeError("Environment variable CDSW_API_KEY is not set.")
    if kind == "answer":
        return {"message": fault["message"] or _words(status)} if answers_json else Response(status)
    if kind == "page":
        if answers_json:
            raise JSONDecodeError("Expecting value: line 1 column 1 (char 0)")
        return Response(502)
    if kind == "error" and status is not None:
        raise HTTPError(Response(status))
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
    shown = [_show(each, hidden.get(each["id"], {})) for each in sessions]
    return [each for each in shown if each]


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
    if "stopping" in hidden and state.stop_requested(session["id"]) and ends:
        session = {**session, "status": "STOPPING", "finished_at": None, "duration": None}
    return session
