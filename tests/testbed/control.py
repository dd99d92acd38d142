"""What the platform's own pages and nodes do: list all sessions, show their output, evict them."""

import time
from typing import Any

from dask_cml.local import state


def sessions() -> list[dict[str, Any]]:
    """Return the sessions of all launchers as from ``list_workers``, the oldest first, with more entries."""
    return [
        {
            **state.public(session),
            "launcher": session["launcher"],
            "stop_requested": (state.folder_of(session["id"]) / "stop").exists(),
            "reason": session.get("reason"),
        }
        for session in state.read_sessions()
    ]


def log(session_id: str) -> str:
    """Return the output of a session so far, of both standard output and standard error."""
    path = state.folder_of(session_id) / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def evict(session_id: str, *, notice: bool = False) -> None:
    """Let a session fail, and return when all its processes have ended.

    With `notice`, the main process gets SIGTERM first, and ``stop_grace`` seconds, as when a node is drained.
    """
    session = state.read_session(session_id)
    if session is None:
        raise LookupError(f"no session {session_id!r}")
    if state.is_live(session):
        state.write_json(state.folder_of(session_id) / "evict.json", {"notice": notice})
    while state.is_live(session):
        time.sleep(0.01)
        session = state.read_session(session_id)
