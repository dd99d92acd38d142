"""What the managers of one cluster have in common, kept by its scheduler.

Dask's scheduler tells changes of its workers to one manager only, and nobody tells a manager what another
one wants. So one of them leads: it alone launches and stops sessions. For each worker group, it goes by the
number that was asked for last, whichever manager was asked. The others follow and show what there is. A
manager that is asked to scale leads from then on; when the leader goes, the next that is heard of takes over.
The limits of adaptive scaling are kept beyond the manager that scales, for another one to go on.
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
    asked: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    adapts: dict[str, Mapping[str, float]] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def sync(
        self,
        manager: str,
        wanted: Mapping[str, int | None] | None = None,
        launched: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
        owners: Mapping[str, str] | None = None,
        adapts: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Take in what a manager tells, and return what it should know.

        Parameters
        ----------
        manager : str
            Who tells it.
        wanted : mapping of str to int, optional
            It was asked for so many sessions of these worker groups, and leads from now on. None: the group
            has gone.
        launched : mapping of str to str, optional
            Worker sessions that it launched: session id by worker name.
        gone : sequence of str
            Names of workers whose sessions it has stopped.
        owners : mapping of str to str, optional
            The owners of sessions that it launched, by worker name.
        adapts : mapping of str to mapping, optional
            The ``minimum`` and ``maximum`` of the groups in `wanted` that it scales adaptively.

        Returns
        -------
        dict
            ``leader``, ``wanted``, ``sessions`` and ``owners``, as they are now. ``asked`` has the manager
            that was asked to scale each group last; the leader may be another one since then. ``adapts`` has
            the limits of each group that adapts, with ``attended``: whether the manager is there that scales
            it.

        Raises
        ------
        ValueError
            If this is not what a manager sends, or not from one that is here. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_launched(launched or {})
        messages.check_owners(owners or {})
        messages.check_names("gone", gone)
        messages.check_wanted(wanted or {})
        messages.check_adapts(adapts or {})
        if not self.is_here(manager):
            raise ValueError(f"invalid manager={manager!r}: expected one that sends heartbeats")
        self.sessions.update(launched or {})
        self.owners.update(owners or {})
        for name in gone:
            self.sessions.pop(name, None)
            self.owners.pop(name, None)
        if wanted:
            self.leader = manager
            for group, n in wanted.items():
                self.adapts.pop(group, None)
                if n is None:
                    self.wanted.pop(group, None)
                    self.asked.pop(group, None)
                else:
                    self.wanted[group], self.asked[group] = n, manager
                    if limits := (adapts or {}).get(group):
                        self.adapts[group] = limits
        elif self.leader is None or not self.is_here(self.leader):
            self.leader = manager
        return {
            "leader": self.leader,
            "asked": dict(self.asked),
            "wanted": dict(self.wanted),
            "sessions": dict(self.sessions),
            "owners": dict(self.owners),
            "adapts": {
                group: {**limits, "attended": self.is_here(self.asked[group])}
                for group, limits in self.adapts.items()
            },
        }
