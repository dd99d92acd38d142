"""Faults of sessions and of requests."""

import http.client
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from dask_cml.local import Response, state

#: Faults that decide what becomes of a launched session.
FATES = ("refused", "fails", "succeeds", "hangs", "stuck")
#: Faults that replace the answer to a request.
ENDS = ("key", "error", "answer")
FUNCTIONS = ("launch_workers", "list_workers", "stop_workers")

Fault = dict[str, Any]


class HTTPError(OSError):
    """An error of the server, as other releases of the library may raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} {_words(status)}")
        self.response = Response(status)


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
    """Inject a fault, for all processes of the state directory. Of several that match, the first applies.

    Of a session that is launched, its kind is:

    - ``"refused"``: the answer is the dict of an exceeded quota. Its ``engineId`` is the id of a session
      that stays ``scheduling`` until it is stopped.
    - ``"fails"``: the session runs for a moment, without its code, and ends as ``failed``.
    - ``"succeeds"``: the same, but it ends as ``succeeded``, as CML reports for a missing command.
    - ``"hangs"``: it runs until it is stopped, without its code.
    - ``"stuck"``: its status stays ``scheduling`` until it is stopped.

    Or of a request (each launch of one session, each listing, each stop of one):

    - ``"key"``: it raises a RuntimeError if ``CDSW_API_KEY`` is not set.
    - ``"error"``: it raises an :class:`HTTPError` with a `status`, or else a :class:`ConnectionError`.
    - ``"answer"``: the answer has that `status` and `message`. The functions ignore the status.

    It spares the first `skip` sessions or requests, and then applies to `times`, or to all for `seconds`.
    """
    assert kind in (*FATES, *ENDS)
    assert function in (None, *FUNCTIONS)
    assert kind not in FATES or function in (None, "launch_workers")
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
    """Clear all injected faults. Sessions keep their fates."""
    with state.locked() as path:
        (path / "faults.json").unlink(missing_ok=True)


def left() -> list[Fault]:
    faults: list[Fault] = state.read_json(state.directory() / "faults.json") or []
    return faults


def take_fate(name: str, code: str) -> str | None:
    """Return what is to become of a session that is launched. Call this while the state is locked."""
    fault = _take(FATES, "launch_workers", name, code)
    return fault and str(fault["kind"])


def answer(do: Callable[[], Any], function: str, name: str, code: str) -> Any:
    """Answer a request, with the fault that applies to it."""
    with state.locked():
        fault = _take(ENDS, function, name, code)
    return _end(fault, is_json=function != "stop_workers") if fault else do()


def _take(kinds: Sequence[str], function: str, name: str, code: str) -> Fault | None:
    """Return the first fault of these kinds that a request has, and count it. The state must be locked."""
    faults = left()
    kept: list[Fault] = []
    hit = None
    for fault in faults:
        kind, lasting = fault["kind"], fault["seconds"]
        if lasting and time.time() > fault["injected_at"] + lasting:
            continue
        concerns = kind in kinds and fault["function"] in (None, function)
        if not hit and concerns and (fault["match"] in name or fault["match"] in code):
            if fault["skip"]:
                fault["skip"] -= 1
            elif kind != "key" or "CDSW_API_KEY" not in os.environ:
                hit = fault
                fault["times"] -= not lasting
        if fault["times"]:
            kept.append(fault)
    if faults:
        state.write_json(state.directory() / "faults.json", kept)
    return hit


def _end(fault: Fault, is_json: bool) -> Any:
    """Answer a request, or raise an error. An answer that is no JSON is an HTTP status."""
    kind, status = fault["kind"], fault["status"]
    if kind == "key":
        raise RuntimeError("Environment variable CDSW_API_KEY is not set.")
    if kind == "answer":
        return {"message": fault["message"] or _words(status)} if is_json else status
    if kind == "error" and status is not None:
        raise HTTPError(status)
    raise ConnectionError("connection to the platform lost (injected fault)")


def _words(status: int) -> str:
    return http.client.responses.get(status, "")
