"""What a keeper reports of the sessions on the board, for all who watch the cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from dask_cml.core.view import View
from dask_cml.options import SessionSize
from dask_cml.scheduler.board import Letter, WantedGroup
from dask_cml.sessions.session import Session
from dask_cml.validation import validate


@dataclass(frozen=True)
class Report(View):
    """What a keeper reports: what is wanted, the sessions, and what the next keeper has to know.

    Parameters
    ----------
    taken : int
        The number of the last request that is carried out.
    groups : mapping of str to WantedGroup
        The worker groups.
    wanted : mapping of str to str
        The groups of the wanted workers by their names.
    sessions : sequence of mapping
        The sessions, the scheduler's first, see :attr:`Session.as_json`.
    failures : mapping of str to int
        The failures in a row of groups, after which the next keeper goes on.
    start_times : mapping of str to float
        How long sessions of groups take to start, in seconds.
    is_barred : bool
        Whether the platform has refused all launches of this process, and not because of a quota.
    app_url : str or None
        The URL of the scheduler's session, for processes to which the platform does not list it.
    """

    taken: int = 0
    groups: Mapping[str, WantedGroup] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)
    sessions: Sequence[Mapping[str, Any]] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    start_times: Mapping[str, float] = field(default_factory=dict)
    is_barred: bool = False
    app_url: str | None = None

    @classmethod
    def read(cls, content: Any) -> Report:
        """Return the report on a board.

        Raises
        ------
        ValueError
            If it is invalid.
        """
        return validate(content, cls, "report")

    def to_json(self) -> dict[str, Any]:
        """Return it for a message."""
        groups = {name: vars(group) for name, group in self.groups.items()}
        return {**vars(self), "groups": groups}  # asdict() copies all of thousands of sessions

    def since(self, mail: Sequence[Letter]) -> Report:
        """Return the report without what users have asked to change after it."""
        changed = {letter.request.group for letter in mail}
        gave_up = {group: why for group, why in self.gave_up.items() if group not in changed}
        shortages = {group: why for group, why in self.shortages.items() if group not in changed}
        return replace(self, gave_up=gave_up, shortages=shortages)

    def known_sessions(self) -> list[Session]:
        """Return the sessions, the scheduler's first."""
        return [_from_json(session) for session in self.sessions]


def _from_json(content: Mapping[str, Any]) -> Session:
    """Return the session that :attr:`Session.as_json` describes."""
    values = dict(content)
    waits, since = values.pop("waits"), values["since"]
    values |= {
        "since": datetime.fromtimestamp(since, timezone.utc),
        "size": SessionSize(**values["size"]),
        "waits_for": max(0.0, time.time() - since) if waits else None,
    }
    return Session(**values)
