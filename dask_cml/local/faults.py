"""Faults of sessions, which tests and users can inject."""

from __future__ import annotations

from dask_cml import checks
from dask_cml.local import state

KINDS = ("refused", "fails", "succeeds", "hangs", "stuck")


def inject(kind: str, *, match: str = "", skip: int = 0, times: int = 1) -> None:
    """Let sessions fail that are launched from now on, by all processes that use the state directory.

    Several faults may be injected. Of those that match, the first one applies, and the others wait.

    Parameters
    ----------
    kind : {"refused", "fails", "succeeds", "hangs", "stuck"}
        - ``"refused"``: the answer is the dict of an exceeded quota. Its ``engineId`` is the id of an engine
          that stays in status ``scheduling`` until it is stopped.
        - ``"fails"``: the session runs for a moment, without its code, and ends as ``failed``.
        - ``"succeeds"``: the same, but it ends as ``succeeded``, as CML reports for a missing command.
        - ``"hangs"``: it runs until it is stopped, without its code.
        - ``"stuck"``: its status stays ``scheduling`` until it is stopped.
    match : str
        Text in the name or code of the sessions that the fault applies to. Default: all sessions.
    skip : int
        Number of sessions to spare first.
    times : int
        Number of sessions that the fault applies to.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.inject("refused", match="worker", skip=1, times=2)
    >>> local.clear_faults()
    """
    checks.choice("kind", kind, KINDS)
    checks.integer("skip", skip, 0)
    checks.integer("times", times, 1)
    with state.locked() as path:
        faults = state.read_json(path / "faults.json") or []
        faults.append({"kind": kind, "match": match, "skip": skip, "times": times})
        state.write_json(path / "faults.json", faults)


def clear_faults() -> None:
    """Clear all injected faults. Sessions keep the faults that were applied to them.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.clear_faults()
    """
    with state.locked() as path:
        (path / "faults.json").unlink(missing_ok=True)


def take(name: str, code: str) -> str | None:
    """Return the kind of fault that a launched session has, and count it as applied.

    Call this while the state is locked.
    """
    path = state.directory() / "faults.json"
    faults = state.read_json(path) or []
    for fault in faults:
        if fault["match"] in name or fault["match"] in code:
            if not fault["skip"]:
                fault["times"] -= 1
                state.write_json(path, [each for each in faults if each["times"]])
                return str(fault["kind"])
            fault["skip"] -= 1
    state.write_json(path, faults)
    return None
