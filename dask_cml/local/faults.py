"""Faults to inject: what goes wrong with the platform, at the user's wish."""

from __future__ import annotations

import http
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dask_cml.local import state
from dask_cml.local.responses import HTTPError, JSONDecodeError, Response

#: What becomes of a session instead of running its code.
FATES = ("refused", "fails", "succeeds", "hangs", "stuck")
#: What list_workers does not tell of a session for some seconds, and where its plan has them.
HIDDEN = {
    "invisible": "hide",
    "unknown_ip": "hide_ip",
    "unknown_status": "hide_status",
    "stopping": "stopping",
}
#: How an HTTP request ends instead of being done.
ENDS = ("error", "answer", "page", "hang")
#: What goes wrong with an HTTP request.
CALLS = (*ENDS, "slow", "unanswered")
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
    """Let something go wrong, in every process that uses the state directory.

    Several faults may be injected: of those that fit, the first one decides, and the others wait.

    Parameters
    ----------
    kind : str
        What becomes of a session that is launched:

        - ``"refused"``: the answer is the dict of an exceeded quota. Its ``engineId`` is the id of a
          half-made session, which stays in status ``scheduling`` until it is stopped.
        - ``"fails"``: it runs for a moment, without its code, and ends as ``failed``.
        - ``"succeeds"``: the same, but it ends as ``succeeded``, as after a command that is not there.
        - ``"hangs"``: it runs until it is stopped, without its code.
        - ``"stuck"``: its status stays ``scheduling`` until it is stopped.
        - ``"invisible"``: ``list_workers`` leaves it out for `seconds` after its launch.
        - ``"unknown_ip"``: its ``ip_address`` stays ``"unknown"`` for `seconds` after it began to run.
        - ``"unknown_status"``: its status is ``"UNKNOWN"`` for `seconds` after it began to run.
        - ``"stopping"``: once it is to be stopped its status is ``"STOPPING"``, until `seconds` after its
          processes have ended.

        Or what becomes of an HTTP request (each launch of one session, each listing, each stop of one):

        - ``"error"``: with a `status` an :class:`HTTPError`, else a :class:`ConnectionError` is raised,
          and nothing is done.
        - ``"answer"``: it is answered with that `status`, and nothing is done. As on CML nobody looks at
          the status: ``list_workers`` returns the dict of the `message`, ``launch_workers`` has it in its
          list, and ``stop_workers`` returns the response.
        - ``"page"``: a gateway answers with its HTML page, and nothing is done. ``launch_workers`` and
          ``list_workers`` raise a :class:`JSONDecodeError`.
        - ``"hang"``: it is not answered, and nothing is done; in the end its connection is lost.
        - ``"unanswered"``: it is done at once, and its answer comes in the end.
        - ``"slow"``: it takes `seconds` more, and is done after them.

        ``"hang"`` and ``"unanswered"`` end with `seconds`, or with :func:`clear_faults`.
    match : str, optional
        Only for sessions whose name or code contains this.
    skip : int
        So many sessions or requests are spared first.
    times : int
        So many sessions or requests are hit.
    seconds : float, optional
        See `kind`. For what goes wrong with a request, but for ``"slow"``, it stands in place of `times`: all
        requests are hit that begin within so many seconds from now.
    status : int, optional
        The HTTP status of an ``"error"`` or ``"answer"``.
    message : str, optional
        The words of an ``"answer"``. Default: those of its status.
    function : str, optional
        Only requests of this one of the four functions are hit. ``await_workers`` lists, too.

    Raises
    ------
    ValueError
        If the arguments do not go together.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.inject("refused", match="worker", skip=1, times=2)
    >>> local.inject("error", function="list_workers", status=503, seconds=2)
    >>> local.clear_faults()
    """
    kinds = (*FATES, *HIDDEN, *CALLS)
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, not {kind!r}")
    if skip < 0 or times < 1:
        raise ValueError(f"skip must be at least 0 and times at least 1, not {skip!r} and {times!r}")
    if seconds is not None and seconds < 0:
        raise ValueError(f"seconds must not be negative, not {seconds!r}")
    if seconds is None and kind in (*HIDDEN, "slow"):
        raise ValueError(f"{kind!r} needs seconds")
    if seconds is not None and kind in FATES:
        raise ValueError(f"{kind!r} takes no seconds")
    if status is not None and kind not in ("error", "answer"):
        raise ValueError(f"{kind!r} takes no status")
    if message is not None and kind != "answer":
        raise ValueError(f"{kind!r} takes no message")
    if function is not None and (kind not in CALLS or function not in FUNCTIONS):
        raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, and only for {CALLS}")
    if kind == "answer" and status is None:
        raise ValueError('"answer" needs a status')
    fault = {
        "kind": kind,
        "match": match,
        "skip": skip,
        "times": times,
        "seconds": seconds,
        "status": status,
        "message": message,
        "function": function,
        "injected_at": time.time(),
    }
    with state.locked() as path:
        faults = state.read_json(path / "faults.json") or []
        state.write_json(path / "faults.json", [*faults, fault])


def clear_faults() -> None:
    """Take back all injected faults, and end the waiting of hanging requests.

    Sessions that are hit already stay so.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.clear_faults()
    """
    with state.locked() as path:
        (path / "faults.json").unlink(missing_ok=True)
        state.write_json(path / "cleared.json", time.time())


def of_launch(name: str, code: str) -> list[Fault]:
    """Use up and return the faults for a session that is being launched."""

    def fits(fault: Fault) -> bool:
        return fault["kind"] in (*FATES, *HIDDEN) and _matches(fault, name, code)

    return _use_up(fits)


def of_request(functions: tuple[str, ...], name: str, code: str) -> list[Fault]:
    """Use up and return the faults for an HTTP request that one of the functions makes."""

    def fits(fault: Fault) -> bool:
        wanted = fault["function"]
        return (
            fault["kind"] in CALLS and (wanted is None or wanted in functions) and _matches(fault, name, code)
        )

    return _use_up(fits)


def end(fault: Fault, answers_json: bool) -> Response:
    """Do to a request what its fault says: raise an error, or return the platform's answer.

    Parameters
    ----------
    fault : dict
        Its kind is one of `ENDS`.
    answers_json : bool
        Whether the caller decodes the answer.
    """
    kind, status = fault["kind"], fault["status"]
    if kind == "answer":
        words = fault["message"] or http.HTTPStatus(status).phrase
        return Response(status, json.dumps({"message": words}))
    if kind == "page":
        if answers_json:
            raise JSONDecodeError("Expecting value: line 1 column 1 (char 0)")
        return Response(502, _PAGE)
    if kind == "error" and status is not None:
        raise HTTPError(Response(status, "injected"))
    if kind == "hang":
        wait(fault)
    raise ConnectionError("the connection to the platform was lost, as injected")


def wait(fault: Fault) -> None:
    """Wait until a fault's time is over or all faults are cleared."""
    # The path is asked for once: who clears the faults may take another state directory then.
    path = state.directory()
    end = fault["injected_at"] + fault["seconds"] if fault["seconds"] is not None else float("inf")
    while time.time() < end and not _cleared_since(path, fault["hit_at"]):
        time.sleep(_LOOK_INTERVAL)


def _cleared_since(path: Path, moment: float) -> bool:
    return not path.exists() or (state.read_json(path / "cleared.json") or 0.0) >= moment


def _matches(fault: Fault, name: str, code: str) -> bool:
    text = fault["match"]
    return text is None or text in name or text in code


def _group(kind: str) -> str:
    """One session has one fate, and one request one end, but both may have other faults as well."""
    if kind in FATES:
        return "fate"
    return "end" if kind in ENDS else kind


def _use_up(fits: Callable[[Fault], bool]) -> list[Fault]:
    if not (state.directory() / "faults.json").exists():
        return []
    with state.locked() as path:
        before: list[Fault] = state.read_json(path / "faults.json") or []
        left, hit = [], {}
        for fault in before:
            group = _group(fault["kind"])
            lasting = group in ("end", "unanswered") and fault["seconds"] is not None
            if lasting and time.time() > fault["injected_at"] + fault["seconds"]:
                continue
            if group not in hit and fits(fault):
                if fault["skip"]:
                    fault["skip"] -= 1
                else:
                    hit[group] = {**fault, "hit_at": time.time()}
                    fault["times"] -= not lasting
            if fault["times"]:
                left.append(fault)
        if left:
            state.write_json(path / "faults.json", left)
        else:
            (path / "faults.json").unlink(missing_ok=True)
    return list(hit.values())
