"""What the managers of one cluster have in common, kept by its scheduler.

Dask's scheduler tells changes of its workers to one manager only, and nobody tells a manager what another
one wants. So one of them leads: it alone launches and stops sessions, towards the number that was asked for
last, by whomever. The others follow and show what there is. Who scales, leads from then on; when the leader
goes, the next that is heard of takes over where it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import Scheduler


@dataclass
class SharedState:
    """The state of one cluster as its managers share it.

    Parameters
    ----------
    silence : float
        Seconds after which a manager that was not heard of is taken to be gone.
    """

    silence: float = 30.0
    leader: str | None = None
    wanted: int = 0
    sessions: dict[str, str] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)

    def sync(
        self,
        manager: str,
        wanted: int | None = None,
        launched: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Take in what a manager tells, and return what it should know.

        Parameters
        ----------
        manager : str
            Who tells it.
        wanted : int, optional
            It was asked for so many worker sessions, and leads from now on.
        launched : mapping of str to str, optional
            Worker sessions that it launched: session id by worker name.
        gone : sequence of str
            Names of workers whose sessions it has stopped.

        Returns
        -------
        dict
            ``leader``, ``wanted`` and ``sessions``, as they are now.
        """
        self.heard[manager] = time.monotonic()
        self.sessions.update(launched or {})
        for name in gone:
            self.sessions.pop(name, None)
        if wanted is not None:
            self.leader, self.wanted = manager, wanted
        elif self.leader not in self.managers:
            self.leader = manager
        return {"leader": self.leader, "wanted": self.wanted, "sessions": dict(self.sessions)}

    def leave(self, manager: str) -> None:
        """Forget a manager that goes."""
        self.heard.pop(manager, None)
        if self.leader == manager:
            self.leader = None

    @property
    def managers(self) -> list[str]:
        """The managers that were heard of lately."""
        now = time.monotonic()
        self.heard = {m: when for m, when in self.heard.items() if now - when < self.silence}
        return [*self.heard]


class SharedStatePlugin(SchedulerPlugin):
    """Have the scheduler keep a :class:`SharedState`, and answer the managers that ask for it."""

    name = "cml-shared-state"
    idempotent = True

    def __init__(self) -> None:
        self.state = SharedState()

    async def start(self, scheduler: Scheduler) -> None:
        """Answer ``cml_sync`` and ``cml_leave``."""
        scheduler.handlers["cml_sync"] = self.state.sync
        scheduler.handlers["cml_leave"] = self.state.leave
