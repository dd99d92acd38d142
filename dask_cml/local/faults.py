"""Faults of the platform, which tests and users can inject."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dask_cml import checks
from dask_cml.local import state
from dask_cml.local.responses import HTTPError, JSONDecodeError, Response

#: Faults that replace the run of a session's code.
FATES = ("refused", "fails", "succeeds", "hangs", "stuck")
#: Faults that hide something of a session from list_workers for some seconds.
_HIDDEN = ("invisible", "unknown_ip", "unknown_status", "stopping")
#: All faults of a session that is launched.
LAUNCHES = (*FATES, *_HIDDEN, "oom")
#: Faults that replace the answer to an HTTP request.
ENDS = ("error", "answer", "page", "hang")
#: All faults of an HTTP request.
CALLS = (*ENDS, "slow", "unanswered")
#: The kinds of faults that can have an option, and those that must.
_ALLOWED = {"seconds": (*_HIDDEN, "oom", *CALLS), "status": ("error", "answer"), "message": ("answer",)}
_REQUIRED = {"seconds": (*_HIDDEN, "slow"), "status": ("answer",)}
_PAGE = "<html><body><h1>502 Bad Gateway</h1></body></html>"
_LOOK_INTERVAL = 0.02
FUNCTIONS = ("launch_workers", "list_workers", "await_workers", "stop_workers")

Fault = dict[str, Any]


def inject(
    kind: str,
    *,
    match: str | None = None,
    skip: int = 0,
    times: int = 1,
    seconds: float | None = None,
    status: int | None = None,
    message: str | None = None,
    function: str | None = None,
) -> None:
    """Inject a fault, for all processes that use the state directory.

    Several faults may be injected. Of those that match, the first one applies, and the others wait.

    Parameters
    ----------
    kind : str
        The fault of a session that is launched:

        - ``"refused"``: the answer is the dict of an exceeded quota. Its ``engineId`` is the id of an engine
          that stays in status ``scheduling`` until it is stopped.
        - ``"fails"``: the session runs for a moment, without its code, and ends as ``failed``.
        - ``"succeeds"``: the same, but it ends as ``succeeded``, as CML reports for a missing command.
        - ``"hangs"``: it runs until it is stopped, without its code.
        - ``"stuck"``: its status stays ``scheduling`` until it is stopped.
        - ``"invisible"``: ``list_workers`` omits it for `seconds` after its launch.
        - ``"unknown_ip"``: its ``ip_address`` is ``"unknown"`` for `seconds` after it started to run.
        - ``"unknown_status"``: its status is ``"UNKNOWN"`` for `seconds` after it started to run.
        - ``"stopping"``: while it stops, its status is ``"STOPPING"``, until `seconds` after its processes
          have ended.
        - ``"oom"``: the kernel kills all its processes at once, as if it exceeded its memory, `seconds` (or
          0) after it started to run. It ends as ``failed``.

        Or the fault of an HTTP request (each launch of one session, each listing, each stop of one):

        - ``"error"``: the request raises an :class:`HTTPError` with a `status`, or else a
          :class:`ConnectionError`, and has no effect.
        - ``"answer"``: the answer has that `status`, and the request has no effect. As on CML, the functions
          ignore the status: ``list_workers`` returns the dict of the `message`, the list from
          ``launch_workers`` contains it, and ``stop_workers`` returns the response.
        - ``"page"``: a gateway answers with its HTML page, and the request has no effect. ``launch_workers``
          and ``list_workers`` raise a :class:`JSONDecodeError`.
        - ``"hang"``: no answer comes, and the request has no effect. At the end, its connection breaks.
        - ``"unanswered"``: the request takes effect at once, but its answer comes at the end.
        - ``"slow"``: the request takes effect `seconds` later.

        ``"hang"`` and ``"unanswered"`` end after `seconds`, or with :func:`clear_faults`.
    match : str, optional
        Text in the name or code of the sessions that the fault applies to. Default: all sessions.
    skip : int
        Number of sessions or requests to spare first.
    times : int
        Number of sessions or requests that the fault applies to.
    seconds : float, optional
        Duration of the fault, see `kind`. For faults of a request other than ``"slow"``, it replaces `times`:
        the fault applies to all requests that start within this time from now.
    status : int, optional
        The HTTP status of an ``"error"`` or ``"answer"``.
    message : str, optional
        The message of an ``"answer"``. Default: that of its status.
    function : str, optional
        The one function to whose requests the fault applies. ``await_workers`` lists, too. Default: all four.

    Raises
    ------
    ValueError
        If an argument is invalid, or does not fit `kind`.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.inject("refused", match="worker", skip=1, times=2)
    >>> local.inject("error", function="list_workers", status=503, seconds=2)
    >>> local.clear_faults()
    """
    given = dict(locals())
    checks.choice("kind", kind, (*LAUNCHES, *CALLS))
    if skip < 0 or times < 1:
        raise ValueError(f"invalid skip={skip!r}, times={times!r}: expected at least 0 and at least 1")
    if seconds is not None and seconds < 0:
        raise ValueError(f"invalid seconds={seconds!r}: expected a number of at least 0")
    for option, kinds in _ALLOWED.items():
        if given[option] is not None and kind not in kinds:
            raise ValueError(f"invalid {option}={given[option]!r}: expected None for {kind!r}")
    for option, kinds in _REQUIRED.items():
        if given[option] is None and kind in kinds:
            raise ValueError(f"invalid {option}=None: expected a number for {kind!r}")
    if function is not None and (kind not in CALLS or function not in FUNCTIONS):
        allowed = f"one of {', '.join(FUNCTIONS)}, with one of the kinds {', '.join(CALLS)}"
        raise ValueError(f"invalid function={function!r}: expected {allowed}")
    with state.locked() as path:
        faults = state.read_json(path / "faults.json") or []
        state.write_json(path / "faults.json", [*faults, {**given, "injected_at": time.time()}])


def clear_faults() -> None:
    """Clear all injected faults, and end requests that hang.

    Sessions keep the faults that were applied to them.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.clear_faults()
    """
    with state.locked() as path:
        (path / "faults.json").unlink(missing_ok=True)
        state.write_json(path / "cleared.json", time.time())


def take(
    kinds: Collection[str], name: str, code: str, functions: Collection[str | None] = ()
) -> dict[str, Fault]:
    """Return the faults of a launched session or an HTTP request by kind, and count them as applied.

    Parameters
    ----------
    kinds : collection of str
        The kinds of faults that can apply.
    name, code : str
        The session's.
    functions : collection of str
        The functions that send the request.
    """
    if not state.read_json(state.directory() / "faults.json"):
        return {}
    left: list[Fault] = []
    hit: dict[str, Fault] = {}
    with state.locked() as path:
        for fault in state.read_json(path / "faults.json") or []:
            kind, group = fault["kind"], _group(fault["kind"])
            lasting = group in ("end", "unanswered") and fault["seconds"] is not None
            if lasting and time.time() > fault["injected_at"] + fault["seconds"]:
                continue
            concerns = kind in kinds and fault["function"] in (None, *functions)
            text = fault["match"] or ""
            if concerns and (text in name or text in code) and group not in map(_group, hit):
                if fault["skip"]:
                    fault["skip"] -= 1
                else:
                    hit[kind] = {**fault, "hit_at": time.time()}
                    fault["times"] -= not lasting
            if fault["times"]:
                left.append(fault)
        state.write_json(path / "faults.json", left)
    return hit


def _group(kind: str) -> str:
    """Return the group of a fault. A session or a request can have one fault of each group."""
    if kind in FATES:
        return "fate"
    return "end" if kind in ENDS else kind


def end(fault: Fault, answers_json: bool) -> Response:
    """Apply a fault to a request: raise an error, or return the platform's answer.

    Parameters
    ----------
    fault : dict
        The fault. Its kind is one of `ENDS`.
    answers_json : bool
        Whether the caller decodes the answer.
    """
    kind, status = fault["kind"], fault["status"]
    if kind == "answer":
        words = fault["message"] or Response(status).reason
        return Response(status, json.dumps({"message": words}))
    if kind == "page":
        if answers_json:
            raise JSONDecodeError("Expecting value: line 1 column 1 (char 0)")
        return Response(502, _PAGE)
    if kind == "error" and status is not None:
        raise HTTPError(Response(status, "injected"))
    if kind == "hang":
        wait(fault)
    raise ConnectionError("connection to the platform lost (injected fault)")


def wait(fault: Fault) -> None:
    """Wait until a fault's time has passed, or all faults are cleared."""
    # Read the path once: after clear_faults(), the process may use another state directory.
    path = state.directory()
    end = fault["injected_at"] + fault["seconds"] if fault["seconds"] is not None else float("inf")
    while time.time() < end and not _cleared_since(path, fault["hit_at"]):
        time.sleep(_LOOK_INTERVAL)


def _cleared_since(path: Path, moment: float) -> bool:
    return not path.exists() or (state.read_json(path / "cleared.json") or 0.0) >= moment
