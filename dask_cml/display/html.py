"""The HTML representation of a cluster, and texts about its sessions."""

from __future__ import annotations

import html
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dask.widgets.widgets import TEMPLATE_PATHS, get_template

from dask_cml.display.words import waiting
from dask_cml.sessions.session import Session

# Dask looks for the templates of HTML representations here.
TEMPLATE_PATHS.append(str(Path(__file__).parents[1] / "templates"))


def render(template: str, **values: Any) -> str:
    """Fill a template of dask-cml with values."""
    return get_template(template).render(**values)


def escaped(value: Any) -> Any:
    """Return a copy of a value in which all strings are escaped for HTML."""
    if isinstance(value, dict):
        return {escaped(key): escaped(each) for key, each in value.items()}
    return html.escape(value) if isinstance(value, str) else value


def status_of(session: Session, connected: Collection[str] = ()) -> str:
    """Return the status of a session, or "connected" if its name is one of these. A wait shows its time."""
    if session.name in connected:
        return "connected"
    return session.status if session.waits_for is None else waiting(session.waits_for)
