"""What the managers of one cluster have in common, kept by its scheduler.

Dask's scheduler tells changes of its workers to one manager only, and nobody tells a manager what another
one wants. So one of them leads: it alone launches and stops sessions, towards the number that was asked for
last, by whomever. The others follow and show what there is. Who scales, leads from then on; when the leader
goes, the next that is heard of takes over where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_cml.scheduler import messages


@dataclass
class SharedState:
    """The state of one cluster as its managers share it.

    Parameters
    ----------
    is_here : callable
        Says of a manager, by its id, whether it is there.
    """

    is_here: Callable[[str], bool]
    leader: str | None = None
    asked: str | None = None
    wanted: int = 0
    sessions: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def sync(
        self,
        manager: str,
        wanted: int | None = None,
        launched: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
        owners: Mapping[str, str] | None = None,
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
        owners : mapping of str to str, optional
            The owners of sessions that it launched, by worker name.

        Returns
        -------
        dict
            ``leader``, ``wanted``, ``sessions`` and ``owners``, as they are now, and ``asked``, the manager
            that was asked to scale last; the leader may be another one since then.

        Raises
        ------
        ValueError
            If this is not what a manager sends, or not from one that is here. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_launched(launched or {})
        messages.check_owners(owners or {})
        messages.check_names("gone", gone)
        if wanted is not None:
            messages.check_wanted(wanted)
        if not self.is_here(manager):
            raise ValueError(f"invalid manager={manager!r}: expected one that sends heartbeats")
        self.sessions.update(launched or {})
        self.owners.update(owners or {})
        for name in gone:
            self.sessions.pop(name, None)
            self.owners.pop(name, None)
        if wanted is not None:
            self.leader, self.asked, self.wanted = manager, manager, wanted
        elif self.leader is None or not self.is_here(self.leader):
            self.leader = manager
        return {
            "leader": self.leader,
            "asked": self.asked,
            "wanted": self.wanted,
            "sessions": dict(self.sessions),
            "owners": dict(self.owners),
        }
